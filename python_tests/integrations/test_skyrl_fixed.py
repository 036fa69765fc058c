"""Mode "fixed": each rule separately, on small inputs; SkyRL is not needed."""

import asyncio
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from skyrl_fast.integrations.skyrl import fixed, fixed_generation, fixed_sampling
from skyrl_fast.integrations.skyrl.replacement import ORIGINALS
from skyrl_fast.integrations.skyrl.rules import LOOP, NORMALIZE, RULES, UPDATE

EOS = 99
DOCS = Path(__file__).parents[2] / "docs/integrations/skyrl.md"


@dataclass
class TrajectoryID:
    instance_id: str
    repetition_id: int

    def to_string(self) -> str:
        return f"{self.instance_id}_{self.repetition_id}"


@dataclass
class TrajectoryOutput:
    response_ids: list[int]
    reward: Any
    stop_reason: str
    loss_mask: list[int]
    prompt_ids: list[int]
    rollout_logprobs: list[float] | None
    env_metrics: dict[str, Any]


@pytest.fixture(autouse=True)
def originals() -> Iterator[None]:
    """Reset the original functions after each test."""
    yield
    ORIGINALS.forget()


@pytest.mark.spec("dropin.fixed-mode")
def test_every_rule_exists_and_is_in_the_table() -> None:
    text = DOCS.read_text()
    assert len({rule.name for rule in RULES}) == len(RULES)
    for rule in RULES:
        home, _, name = rule.replacement.partition(".")
        assert callable(
            getattr(importlib.import_module(f"skyrl_fast.integrations.skyrl.{home}"), name)
        )
        row = f"| `{rule.name}` | {rule.today} | {rule.instead} | {rule.upstream or '-'} |"
        assert row in text, row


class Engine:
    """Answers each prompt with two tokens."""

    def __init__(self) -> None:
        self.prompts: list[int] = []

    async def generate(self, engine_input: dict, model: str | None = None) -> dict:
        self.prompts.append(len(engine_input["prompt_token_ids"][0]))
        return {
            "responses": ["x"], "response_ids": [[1, 2]], "stop_reasons": ["stop"],
            "response_logprobs": [[-0.5, -0.5]],
        }  # fmt: skip

    async def finish_session(self, session_id: str) -> None:
        return None


async def run_in_executor(function: Any, *args: Any) -> Any:
    return function(*args)


def generator(*, step_wise: bool = True) -> Any:
    return SimpleNamespace(
        generator_cfg=SimpleNamespace(step_wise_trajectories=step_wise),
        tokenizer=SimpleNamespace(eos_token_id=EOS),
        inference_engine_client=Engine(),
        use_conversation_multi_turn=step_wise,
        _run_in_executor_if_available=run_in_executor,
    )


async def step_wise_loop(self: Any, prompts: list[int], max_input_length: int) -> Any:
    """A loop like SkyRL's: a prompt per turn, the observation in the response, no length check."""
    steps: list[TrajectoryOutput] = []
    observations = iter([[7, 7, 7]] * len(prompts))

    def step(action: str) -> dict:
        stepped.append(action)
        return {"observations": next(observations), "reward": 1.0, "done": False}

    for length in prompts:
        tokens = {"prompt_token_ids": [[5] * length]}
        answer = await self.inference_engine_client.generate(tokens, model=None)
        ids, logprobs = answer["response_ids"][0], answer["response_logprobs"]
        after = await self._run_in_executor_if_available(step, answer["responses"][0])
        seen = after["observations"]
        steps.append(
            TrajectoryOutput(
                ids + seen, [0.0] * (len(ids) - 1) + [after["reward"]] + [0.0] * len(seen),
                answer["stop_reasons"][0], [1] * len(ids) + [0] * len(seen), [5] * length,
                logprobs and logprobs[0] + [0.0] * len(seen), {"done": after["done"]},
            )
        )  # fmt: skip
        if after["done"]:
            break
    return SimpleNamespace(step_outputs=steps)


stepped: list[str] = []


def loop(prompts: list[int], rules: set[str], limit: int = 10) -> tuple[Any, Any]:
    ORIGINALS.keep(LOOP.name, step_wise_loop, "main")
    ORIGINALS.rules = frozenset(rules)
    stepped.clear()
    mine = generator()
    output = asyncio.run(fixed_generation.agent_loop(mine, prompts, max_input_length=limit))
    return output.step_outputs, mine.inference_engine_client


@pytest.mark.spec("rollout.prompt-limit")
def test_prompt_over_the_limit_is_not_sent_and_the_last_step_ends_with_length() -> None:
    steps, engine = loop([4, 9, 15, 4], {"length_check"})
    assert engine.prompts == [4, 9] and len(stepped) == 2
    assert [step.stop_reason for step in steps] == ["stop", "length"]
    assert steps[-1].env_metrics == {"done": True}
    steps, engine = loop([15], {"length_check"})
    assert engine.prompts == [] and len(steps) == 1
    assert (steps[0].loss_mask, steps[0].stop_reason, steps[0].reward) == ([0], "length", [0.0])
    steps, engine = loop([15], set())
    assert engine.prompts == [15] and steps[0].stop_reason == "stop"


@pytest.mark.spec("output.gen-only")
def test_rows_contain_only_sampled_tokens() -> None:
    steps, _ = loop([4, 9], {"gen_only_rows"})
    for step in steps:
        assert step.response_ids == [1, 2] and step.loss_mask == [1, 1]
        assert step.reward == [0.0, 1.0] and step.rollout_logprobs == [-0.5, -0.5]
    row = TrajectoryOutput([1, EOS, 7], [0.0, 1.0, 0.0], "stop", [1, 0, 0], [5], None, {})
    fixed_generation._without_observation(row, EOS)
    assert (row.response_ids, row.loss_mask, row.reward) == ([1, EOS], [1, 0], [0.0, 1.0])


@pytest.mark.spec("rollout.end-token")
def test_appended_end_token_is_not_trained() -> None:
    async def full(self: Any, sampled: list[int], max_input_length: int) -> Any:
        answer = await self.inference_engine_client.generate({"prompt_token_ids": [[1]]})
        ids = answer["response_ids"][0] + ([] if sampled[-1:] == [EOS] else [EOS])
        return SimpleNamespace(response_ids=ids, loss_mask=[1] * len(ids))

    ORIGINALS.keep(LOOP.name, full, "main")
    for rules, want in (({"appended_eos"}, [1, 1, 0]), (set(), [1, 1, 1])):
        ORIGINALS.rules = frozenset(rules)
        output = asyncio.run(
            fixed_generation.agent_loop(generator(step_wise=False), [1, 2], max_input_length=9)
        )
        assert output.loss_mask == want


@pytest.mark.spec("replay.append-new")
def test_routes_are_appended() -> None:
    def overwrite(self: Any, state: Any, turn: Any) -> Any:
        state.rollout_expert_indices = turn.rollout_expert_indices
        return state

    ORIGINALS.keep(UPDATE.name, overwrite, "main")
    old, new = np.zeros((2, 1, 1), np.uint8), np.ones((4, 1, 1), np.uint8)
    state = SimpleNamespace(rollout_expert_indices=old)
    turn = SimpleNamespace(rollout_expert_indices=new)
    after = fixed_generation.update_state(generator(step_wise=False), state, turn)
    assert after.rollout_expert_indices[:, 0, 0].tolist() == [0, 0, 1, 1]


def output_of(groups: dict[str, list[list[float]]], masks: dict[str, int] | None = None) -> Any:
    """Return a step-wise output and its uids; per group a list of trajectories' step rewards."""
    rows = [
        (uid, sample, reward, k + 1 == len(rewards))
        for uid, trajectories in groups.items()
        for sample, rewards in enumerate(trajectories)
        for k, reward in enumerate(rewards)
    ]
    output = {
        "prompt_token_ids": [[1]] * len(rows),
        "response_ids": [[2]] * len(rows),
        "loss_masks": [[(masks or {}).get(f"{uid}{sample}", 1)] for uid, sample, _, _ in rows],
        "rewards": [[reward] for _, _, reward, _ in rows],
        "trajectory_ids": [TrajectoryID(uid, sample) for uid, sample, _, _ in rows],
        "is_last_step": [last for _, _, _, last in rows],
        "trajectory_time_splits": {"llm": [float(i) for i in range(len(rows))]},
        "rollout_metrics": {"a": 1},
    }
    return output, [uid for uid, _, _, _ in rows]


EQUAL, DIFFERENT = [[0.0, 1.0], [0.0, 1.0]], [[0.0, 1.0], [0.0]]


@pytest.mark.spec("filter.informative-group", "filter.dynamic-filter")
def test_filter_keeps_complete_groups_by_their_outcomes() -> None:
    output, uids = output_of({"a": EQUAL, "b": DIFFERENT, "c": DIFFERENT})
    config = {"train_batch_size": 1, "n_samples_per_prompt": 2}
    kept, names, more, state = fixed_sampling.handle_filter_sampling(output, uids, config, {})
    assert names == ["b"] * 3 and not more and state is None
    assert kept["is_last_step"] == [False, True, True]
    assert kept["trajectory_time_splits"] == {"llm": [4.0, 5.0, 6.0]}
    config["train_batch_size"] = 3
    state = {}
    _, _, more, state = fixed_sampling.handle_filter_sampling(output, uids, config, state)
    assert more and state["num_prompts_in_batch"] == 2
    output, uids = output_of({"a": DIFFERENT}, {"a1": 0})  # a placeholder row is not an outcome
    _, _, more, state = fixed_sampling.handle_filter_sampling(output, uids, config, {})
    assert more and state["num_prompts_in_batch"] == 0


@pytest.mark.spec("filter.dynamic-replace")
def test_replaced_groups_have_new_uids() -> None:
    output, uids = output_of({"a": EQUAL, "b": DIFFERENT, "c": DIFFERENT})
    config = {"min_replace_ratio": 0.3, "n_samples_per_prompt": 2}
    got, names, more = fixed_sampling.handle_replace_sampling(output, uids, config)
    assert not more and len(set(names)) == 3 and {"b", "c"} < set(names)
    assert names[0] in ("b+1", "c+1") and len(names) == 9
    assert [tid.instance_id for tid in got["trajectory_ids"]] == names
    assert fixed_sampling.handle_replace_sampling(output, uids, {"min_replace_ratio": 0.9})[2]


@pytest.mark.spec("merge.times", "merge.routes")
def test_merge_includes_every_field() -> None:
    output, _ = output_of({"a": [[0.0, 1.0]]})
    output["prompt_token_ids"] = [[1], [1, 2, 3]]
    output["rollout_expert_indices"] = [np.zeros((2, 1, 1), np.uint8), np.ones((4, 1, 1), np.uint8)]
    merged = fixed.merge_stepwise_output(output)
    assert merged["response_ids"] == [[2, 3, 2]]
    assert merged["trajectory_time_splits"] == {"llm": [1.0]}
    assert merged["rollout_expert_indices"][0][:, 0, 0].tolist() == [0, 0, 1, 1]


@pytest.mark.spec("output.group-adjacent", "output.numpy-bool")
def test_validation_follows_the_specification() -> None:
    output, _ = output_of({"a": EQUAL, "b": DIFFERENT})
    output["is_last_step"] = [np.bool_(flag) for flag in output["is_last_step"]]
    fixed.validate_generator_output(4, output, step_wise=True)
    apart, _ = output_of({"a": [[1.0]], "b": [[1.0]]})
    apart["trajectory_ids"] = [TrajectoryID("a", 0), TrajectoryID("b", 0)]
    apart = {k: v * 2 if isinstance(v, list) else v for k, v in apart.items()}
    apart["trajectory_ids"] = [TrajectoryID(uid, i) for i, uid in enumerate("abab")]
    apart["trajectory_time_splits"] = None
    with pytest.raises(ValueError, match="group must be adjacent"):
        fixed.validate_generator_output(4, apart, step_wise=True)


@pytest.mark.spec("advantage.batch-normalize")
def test_normalization_counts_only_real_tokens() -> None:
    class Batch(dict):
        metadata: dict

    def original(self: Any, data: Any, boundaries: Any, prompts: Any) -> Any:
        assert not self.cfg.trainer.algorithm.advantage_batch_normalize
        return data

    ORIGINALS.keep(NORMALIZE.name, original, "main")
    algorithm = SimpleNamespace(advantage_batch_normalize=True)
    trainer = SimpleNamespace(cfg=SimpleNamespace(trainer=SimpleNamespace(algorithm=algorithm)))
    data = Batch(
        advantages=torch.tensor([[0.0, 1.0], [3.0, 3.0], [9.0, 9.0]]),
        response_mask=torch.tensor([[0, 1], [1, 1], [1, 1]]),
    )
    data.metadata = {"pad_size": 1}
    out = fixed.normalize(trainer, data, [], None)["advantages"]
    real = torch.tensor([1.0, 3.0, 3.0])
    want = (real - real.mean()) / real.std(unbiased=False)
    torch.testing.assert_close(torch.cat([out[0, 1:], out[1]]), want)
    assert out[2].tolist() == [0.0, 0.0] and algorithm.advantage_batch_normalize


@pytest.mark.spec("dropin.fixed-mode")
def test_logprobs_are_float32() -> None:
    logits, labels = torch.randn(1, 3, 50).bfloat16(), torch.tensor([[1, 2, 3]])
    out = fixed.logprobs_from_logits(logits, labels)
    want = logits.float().log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, want, rtol=0, atol=4e-6)
