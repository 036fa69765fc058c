"""Rewards of contexts: context_level_group, by hand (docs/spec.md section 9)."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from _settings import NEEDED

import skyrl_fast
from skyrl_fast.config import Config, ConfigError, load_config
from skyrl_fast.rollout.trajectory import Step, Trajectory
from skyrl_fast.train.algorithm.advantages import compute_advantages
from skyrl_fast.train.prepare_batch import training_batch, with_advantages

ESTIMATOR = "trainer.algorithm.advantage_estimator"
LORA = "trainer.policy.model.lora"

# Of each call: its context, kind and reward. A context's prompts begin with a token of its own.
Calls = Sequence[tuple[int, str, float]]
TWO: Calls = [
    (0, "act", 1.0), (0, "act", 0.0), (0, "summarise", 0.0), (1, "act", 2.0), (1, "act", 3.0),
]  # fmt: skip
ONE: Calls = [(0, "act", 1.0), (0, "act", 1.0)]


def sample(number: int, calls: Calls, *, is_recorded: bool = True) -> Trajectory:
    """Return a trajectory of these calls, each with a response of two tokens."""
    steps: list[Step] = []
    prompts: dict[int, list[int]] = {}
    parents: dict[int, int] = {}
    for place, (context, kind, reward) in enumerate(calls):
        prompt = prompts.get(context, [1, 30 + context])
        response = [10 + place, 20 + place]
        step = Step(prompt, response, [1, 1], [-1.0] * 2, reward, "stop", 0, "", "", 0.0, 0.0)
        step.kind = kind
        if is_recorded:
            step.number = place
            step.parent = parents.get(context)
        steps.append(step)
        prompts[context] = [*prompt, *response, 5]
        parents[context] = place
    return Trajectory("p", number, steps)


def config(*overrides: str) -> Config:
    needed = [*NEEDED, "generator.n_samples_per_prompt=2", "generator.context=compact"]
    return load_config(None, [*needed, f"{ESTIMATOR}=context_level_group", *overrides])


def advantages(trajectories: list[Trajectory], chosen: Config) -> list[list[float]]:
    """Return the advantages of the trained tokens of each trajectory, two of each call."""
    batch, units, _ = training_batch(trajectories, chosen)
    batch, _, _ = with_advantages(
        batch, units, chosen.trainer.algorithm, policy=None, reference=None, critic=None,
        kl_coef=0.0,
    )  # fmt: skip
    of_token = torch.repeat_interleave(batch.trajectory_ids, batch.response_lengths)
    is_trained = batch.loss_mask != 0
    found = []
    for number in range(batch.num_trajectories):
        values = batch.advantages[is_trained & (of_token == number)]
        assert torch.equal(values[::2], values[1::2])
        found.append(values[::2].tolist())
    return found


@pytest.mark.spec("advantage.contexts", "advantage.context-worked-example")
@pytest.mark.parametrize("is_recorded", [True, False])
@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        ([], [[4, 4, 4, 5, 5], [-4, -4]]),  # of the returns 6, 5 and 2
        (["trainer.algorithm.turn_level_baseline=episode"], [[4, 4, 4, 3, 3], [-4, -4]]),
        (["trainer.algorithm.gamma=0"], [[-1, -1, -1, 5, 5], [1, 1]]),  # 1, 5 and 2
        (["trainer.algorithm.gamma=0.5"], [[1.5, 1.5, 1.5, 5, 5], [-1.5, -1.5]]),  # 3.5, 5 and 2
    ],
)
def test_a_context_is_compared_with_that_of_other_samples(
    overrides: list[str], wanted: list[list[float]], is_recorded: bool
) -> None:
    group = [sample(n, calls, is_recorded=is_recorded) for n, calls in enumerate((TWO, ONE))]
    assert advantages(group, config(*overrides)) == wanted


@pytest.mark.spec("advantage.context-rows")
def test_merged_rows_have_the_same_advantages() -> None:
    group = [sample(0, TWO), sample(1, ONE)]
    merged = config("trainer.rows=merged")
    batch, _, _ = training_batch(group, merged)
    assert batch.num_rows == 3
    assert batch.context_numbers.tolist() == [0, 1, 0]
    assert advantages(group, merged) == advantages(group, config())


def test_a_reward_of_any_call_is_its_contexts() -> None:
    """Rewards at other calls of the same contexts, the summary among them, are the same."""
    other: Calls = [
        (0, "act", 0.0), (0, "act", 0.0), (0, "summarise", 1.0), (1, "act", 5.0), (1, "act", 0.0),
    ]  # fmt: skip
    moved = [sample(0, other), sample(1, ONE)]
    assert advantages(moved, config()) == [[4, 4, 4, 5, 5], [-4, -4]]


@pytest.mark.spec("advantage.contexts")
def test_a_context_within_another_has_what_comes_after_it() -> None:
    # A sub-agent between two calls of the agent, whose last call has the outcome.
    helped: Calls = [(0, "act", 0.5), (1, "act", 0.25), (0, "act", 2.0)]
    group = [sample(0, helped), sample(1, ONE)]
    # Returns 2.75 of the agent and 2.25 of the sub-agent, next to 2 and nothing.
    assert advantages(group, config()) == [[0.75, 2.25, 0.75], [-0.75, -0.75]]


@pytest.mark.spec("advantage.failed", "advantage.alone")
def test_failures_and_a_sample_alone() -> None:
    failed = sample(2, [(0, "act", 9.0)])
    failed.failure = "gone"
    found = advantages([sample(0, TWO), sample(1, ONE), failed], config())
    assert found == [[4, 4, 4, 5, 5], [-4, -4], []]
    assert advantages([sample(0, TWO), failed], config()) == [[0.0] * 5, []]


def test_a_custom_estimator_sees_contexts() -> None:
    @skyrl_fast.register_advantage_estimator("reward_of_context", level="context")
    def reward_of_context(inputs: Any) -> torch.Tensor:
        assert inputs.is_last_step.tolist() == [False, True, True]
        assert inputs.trajectory_ids.tolist() == [0, 0, 1]
        return inputs.rewards

    chosen = config(f"{ESTIMATOR}=reward_of_context")
    found = advantages([sample(0, TWO), sample(1, ONE)], chosen)
    assert found == [[1, 1, 1, 5, 5], [2, 2]]


def test_a_batch_without_contexts_is_refused() -> None:
    plain = load_config(None, [*NEEDED, "generator.n_samples_per_prompt=2"])
    batch, _, _ = training_batch([sample(0, TWO), sample(1, ONE)], plain)
    assert batch.context_numbers is None
    with pytest.raises(ValueError, match="context_level_group needs the batch's context_numbers"):
        compute_advantages(batch, estimator="context_level_group", gamma=1.0, baseline="turn")


@pytest.mark.spec("advantage.context-refused")
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["generator.context=append"], "context: expected compact .* no other run has several"),
        (["trainer.rows=trajectory"], "its contexts do not grow only"),
        (["trainer.policy.roles=[white,black]"], "a role's calls are parts of contexts"),
        (
            [f"{LORA}.rank=4", f"{LORA}.policies=[planner,worker]"],
            "a policy's calls are parts of contexts",
        ),
        (["generator.n_samples_per_prompt=1"], "its advantage is 0 in a group of one"),
    ],
)
def test_what_has_no_contexts_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(*overrides)
