"""Token ids in parts: they behave as the list that they stand for."""

from typing import Any

import numpy as np
import pytest
from fake_envs import ScriptedEngine, loop_config, prompt_with, register_fakes, run, says
from hypothesis import given
from hypothesis import strategies as st

from skyrl_fast.batch import batch_from_trajectories
from skyrl_fast.rollout.token_ids import TokenIds, count_shared, grown_ids, ids_array
from skyrl_fast.rollout.trajectory import Step, Trajectory

TURNS = 40
LISTS = st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=4), max_size=4)


@given(LISTS, st.integers(-20, 20), st.integers(-20, 20))
def test_they_are_the_list_of_their_parts(parts: list[list[int]], start: int, end: int) -> None:
    flat = [token for part in parts for token in part]
    ids = TokenIds(map(ids_array, parts))
    assert (len(ids), list(ids), ids.array().tolist()) == (len(flat), flat, flat)
    assert ids == flat and flat == ids and ids == TokenIds([ids_array(flat)])
    assert ids != [*flat, 1] and ids != "text"
    assert ids[start:end] == flat[start:end] and ids + flat == flat + flat
    assert [ids[i] for i in range(-len(flat), len(flat))] == flat + flat
    assert ids.prefix(max(0, start)) == flat[: max(0, start)]
    assert all(isinstance(token, int) for token in ids)


def test_representation_of_many_is_short() -> None:
    assert repr(TokenIds([ids_array([5, 6]), ids_array([7])])) == "TokenIds([5, 6, 7])"
    many = repr(TokenIds([ids_array(range(60))] * 100))
    assert many.endswith("38, 39] and 5,900 more)") and len(many) < 500


@given(LISTS)
def test_a_prompt_shares_the_parts_of_the_one_before(prompts: list[list[int]]) -> None:
    kept, before = TokenIds([]), []
    for prompt in prompts:
        grown = [*before, *prompt]
        for ids in (grown, prompt):
            found = grown_ids(ids, before, kept)
            assert found == ids
            if ids is grown:
                assert all(a is b for a, b in zip(found.parts, kept.parts, strict=False))
        kept, before = grown_ids(grown, before, kept), grown


def test_a_list_that_grows_is_not_compared_with_itself() -> None:
    class Uncompared(list[int]):
        __eq__ = __ne__ = None  # type: ignore[assignment]

    prompt = Uncompared([1, 2])
    kept = grown_ids(prompt, [], TokenIds([]))
    prompt += [3, 4]
    grown = grown_ids(prompt, prompt, kept)
    assert [part.tolist() for part in grown.parts] == [[1, 2], [3, 4]]
    assert len(grown) == 4


def test_ids_that_no_tensor_can_hold_are_refused() -> None:
    with pytest.raises(OverflowError):
        ids_array([2**31])


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [([], [], 0), ([1], [], 0), ([1, 2], [1, 2], 2), ([1, 2], [1, 2, 3], 2), ([1, 2], [1, 3], 1)],
)
def test_shared_length(one: list[int], other: list[int], shared: int) -> None:
    assert count_shared(ids_array(one), ids_array(other)) == shared


def memory(trajectory: Trajectory) -> int:
    """Return the tokens that the prompts of a trajectory keep."""
    parts = {
        id(part): len(part) for step in trajectory.steps for part in step.prompt_token_ids.parts
    }
    return sum(parts.values())


def in_lists(trajectory: Trajectory) -> Trajectory:
    """Return the trajectory with each prompt as a list."""
    steps = [
        Step(
            list(s.prompt_token_ids),
            s.response_ids,
            s.loss_mask,
            s.rollout_logprobs,
            *(s.reward, s.stop_reason, s.policy_version, s.text, s.observation),
            *(s.llm_seconds, s.env_seconds),
        )
        for s in trajectory.steps
    ]
    return Trajectory(trajectory.uid, 0, steps, "stop", "made", {}, 0.0)


def assert_linear(trajectory: Trajectory) -> None:
    """Assert that each token is kept about once, and that rows are those of complete lists."""
    longest = len(trajectory.steps[-1].prompt_token_ids)
    complete = sum(len(step.prompt_token_ids) for step in trajectory.steps)
    assert memory(trajectory) < 2 * longest < complete / 5
    rows, lists = (batch_from_trajectories([t]) for t in (trajectory, in_lists(trajectory)))
    for name in ("tokens", "cu_seqlens", "cu_responses", "loss_mask", "rollout_logprobs"):
        one, other = getattr(rows, name), getattr(lists, name)
        assert one.dtype == other.dtype and np.array_equal(one, other), name


@pytest.mark.spec("rollout.memory")
def test_memory_of_an_environments_trajectory_is_linear(tiny_tokenizer: Any) -> None:
    register_fakes()
    engine = ScriptedEngine(lambda call, n: says(tiny_tokenizer, f"a{n}"))
    config = loop_config(max_turns=TURNS, max_input_length=10_000)
    (trajectory,) = run(tiny_tokenizer, [prompt_with(turns=TURNS)], config, engine)
    assert len(trajectory.steps) == TURNS
    assert [s.prompt_token_ids for s in trajectory.steps] == [
        c.prompt_token_ids for c in engine.calls
    ]
    assert_linear(trajectory)


@pytest.mark.spec("rollout.memory")
@pytest.mark.parametrize("forks", [False, True])
def test_memory_of_an_agents_trajectory_is_linear(forks: bool, tiny_tokenizer: Any) -> None:
    pytest.importorskip("openai")
    from _gateway import chat, played

    async def agent(task: Any) -> float:
        messages = [{"role": "user", "content": "begin"}]
        for n in range(TURNS):
            answer = await chat(task, messages)
            text = answer.choices[0].message.content
            if forks:  # another turn than the one that was sampled
                text = f"it was {text}"
            messages += [
                {"role": "assistant", "content": text},
                {"role": "user", "content": f"turn {n} of many"},
            ]
        return 1.0

    out = played(agent, tiny_tokenizer, max_turns=TURNS, max_input_length=10_000)
    sent = [call.prompt_token_ids for call in out.engine.calls]
    assert [s.prompt_token_ids for s in out.only.steps] == sent
    metric = "forked_prompts" if forks else "continued_prompts"
    assert out.only.env_metrics["restarted_prompts" if forks else metric] == TURNS - 1
    assert_linear(out.only)
