"""Routes over the turns of a trajectory: appended while the context grows, restarted after it."""

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from fake_envs import FakePrompt, loop_config, register_fakes

from skyrl_fast.adapters.generator_output import generator_output_from_trajectories
from skyrl_fast.batch import StepBatch
from skyrl_fast.config import EnvironmentConfig, SamplingParams
from skyrl_fast.rollout.engine.protocol import EngineError, Generation
from skyrl_fast.rollout.engine.route_record import find_recorded_routes, turn_routes
from skyrl_fast.rollout.env.factory import EnvFactory
from skyrl_fast.rollout.groups import rollout
from skyrl_fast.rollout.trajectory import Step, Trajectory

register_fakes()


def routes(*values: int) -> np.ndarray:
    return np.array(values, np.uint8)[:, None, None] + np.arange(2, dtype=np.uint8)


def step(prompt: list[int], response: list[int], record: np.ndarray | None) -> Step:
    return Step(
        prompt_token_ids=prompt,
        response_ids=response,
        loss_mask=[1] * len(response),
        rollout_logprobs=[-0.5] * len(response),
        reward=0.0,
        stop_reason="stop",
        policy_version=0,
        text="",
        observation="",
        llm_seconds=0.0,
        env_seconds=0.0,
        expert_indices=record,
    )


def turn(new: np.ndarray | None, start: int = 0, tokens: int = 2) -> Generation:
    return Generation([9] * tokens, [-0.5] * tokens, "stop", None, new, start)


@pytest.mark.spec("replay.worked-example")
def test_nine_tokens_of_two_turns() -> None:
    first = step([1, 2], [3, 4, 5], routes(10, 11, 20, 21))
    prompt = [1, 2, 3, 4, 5, 6, 7]
    whole = turn_routes([first], prompt, turn(routes(90, 91, 92, 93, 22, 30, 31, 40)))
    new_only = turn_routes([first], prompt, turn(routes(22, 30, 31, 40), start=4))
    for record in (whole, new_only):
        assert record[:, 0, 0].tolist() == [10, 11, 20, 21, 22, 30, 31, 40]


@pytest.mark.spec("replay.fork")
@pytest.mark.parametrize("prompt", [[1, 2, 3, 4, 6, 7], [1, 2, 3], [8, 2, 3, 4, 5, 6], []])
def test_fork_keeps_its_own_full_array(prompt: list[int]) -> None:
    first = step([1, 2], [3, 4, 5], routes(10, 11, 20, 21))
    assert find_recorded_routes([first], prompt) is None
    own = routes(*range(50, 50 + len(prompt) + 1))
    assert turn_routes([first], prompt, turn(own)) is own


@pytest.mark.spec("replay.no-routes")
def test_appended_end_token_gets_its_route_from_the_next_turn() -> None:
    first = step([1, 2], [3, 0], routes(10, 11))  # 0 was appended: neither 3 nor 0 was processed
    assert find_recorded_routes([first], [1, 2, 3, 0, 6]) is first.expert_indices
    assert find_recorded_routes([first], [1, 2, 3, 6]) is None  # not in the context: a fork
    record = turn_routes([first], [1, 2, 3, 0, 6], turn(routes(20, 5, 30, 40), start=2))
    assert record[:, 0, 0].tolist() == [10, 11, 20, 5, 30, 40]


def test_without_routes_there_is_no_record() -> None:
    assert turn_routes([], [1], turn(None)) is None
    assert find_recorded_routes([step([1], [2], None)], [1, 2]) is None
    first = step([1], [2], routes(10))
    assert turn_routes([first], [1, 2, 3], turn(None)) is first.expert_indices


def test_routes_that_do_not_continue_are_an_engine_error() -> None:
    with pytest.raises(EngineError, match=r"do not fit turn 2: .*rows are missing"):
        turn_routes([step([1], [2], routes(10))], [1, 2, 3], turn(routes(1), start=3))


# --- through the agent loop --------------------------------------------------------------------


class RoutingEngine:
    """Answers one word per turn. A token's route encodes the call and position that computed it.

    Every call runs all tokens again, so that its routes differ from those of the calls before.
    """

    def __init__(self, tokenizer: Any, *, from_start: bool) -> None:
        self.tokenizer, self.from_start = tokenizer, from_start
        self.starts: list[int] = []

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        expert_indices_start: int,
        **_: Any,
    ) -> Generation:
        call = len(self.starts)
        self.starts.append(expert_indices_start)
        start = expert_indices_start if self.from_start else 0
        ids = [*self.tokenizer.encode("yes"), self.tokenizer.eos_token_id]
        places = np.arange(len(prompt_token_ids) + len(ids) - 1, dtype=np.uint16)
        cells = np.stack([places, np.full_like(places, 1000 + call)], -1)[:, None]
        return Generation(ids, [-0.5] * len(ids), "stop", None, cells[start:], start)


def run(tokenizer: Any, engine: RoutingEngine, context: str, turns: int = 3) -> Trajectory:
    async def go() -> list[Trajectory]:
        factory = EnvFactory(EnvironmentConfig())
        config = loop_config(max_turns=turns, max_input_length=500, context=context)
        try:
            return await rollout(
                [FakePrompt("p", env_extras={"turns": turns})],
                engine,  # type: ignore[arg-type]
                tokenizer,
                factory,
                config,
                phase="train",
                policy_version=0,
                seed=0,
            )
        finally:
            await factory.close()

    return asyncio.run(go())[0]


@pytest.mark.spec("replay.append-only", "replay.new-routes-only")
@pytest.mark.parametrize("from_start", [True, False])
def test_growing_contexts_keep_the_routes_of_the_sampling_turn(
    tiny_tokenizer: Any, from_start: bool
) -> None:
    engine = RoutingEngine(tiny_tokenizer, from_start=from_start)
    steps = run(tiny_tokenizer, engine, "append").steps
    records = [s.expert_indices for s in steps]
    lengths = [len(s.prompt_token_ids) + len(s.response_ids) for s in steps]
    assert [len(r) for r in records] == [n - 1 for n in lengths]
    assert engine.starts == [0, lengths[0] - 1, lengths[1] - 1]
    for before, after in pairwise(records):
        np.testing.assert_array_equal(after[: len(before)], before)
    calls = records[-1][:, 0, 1].tolist()
    assert calls == [
        *[1000] * (lengths[0] - 1),
        *[1001] * (lengths[1] - lengths[0]),
        *[1002] * (lengths[2] - lengths[1]),
    ]
    assert records[-1][:, 0, 0].tolist() == list(range(lengths[2] - 1))


@pytest.mark.spec("replay.fork")
def test_a_context_that_is_cut_back_has_complete_new_arrays(tiny_tokenizer: Any) -> None:
    """A single conversation drops the end token that was sampled: each turn forks."""
    engine = RoutingEngine(tiny_tokenizer, from_start=True)
    steps = run(tiny_tokenizer, engine, "single").steps
    assert engine.starts == [0, 0, 0]
    assert [set(s.expert_indices[:, 0, 1].tolist()) for s in steps] == [{1000}, {1001}, {1002}]


@pytest.mark.spec("replay.row-record", "replay.batch-operations")
def test_batch_contains_the_route_records(tiny_tokenizer: Any) -> None:
    trajectory = run(tiny_tokenizer, RoutingEngine(tiny_tokenizer, from_start=True), "append")
    failed = run(tiny_tokenizer, RoutingEngine(tiny_tokenizer, from_start=True), "append", turns=1)
    failed.uid, failed.failure = "q", "the engine went away"
    output = generator_output_from_trajectories([trajectory, failed])
    output["rollout_expert_indices"][-1] = None
    lengths = [len(s.expert_indices) for s in trajectory.steps]
    assert [len(r) for r in output["rollout_expert_indices"][:-1]] == lengths
    batch = StepBatch.from_generator_output(output, step_wise=True)
    assert batch.expert_indices.dtype.is_signed  # 1000 and more: int16
    part = batch.rows([1, 3])
    assert part.cu_experts.tolist() == [0, lengths[1], lengths[1]]
    padded = batch.padded(0, pad_size=1)
    captured = (~padded.router_padding_mask).sum(1).tolist()
    assert captured == [*lengths, 0, 0]
    for row, own in enumerate(trajectory.steps):
        kept = padded.rollout_expert_indices[row][~padded.router_padding_mask[row]]
        np.testing.assert_array_equal(kept.numpy(), own.expert_indices)
