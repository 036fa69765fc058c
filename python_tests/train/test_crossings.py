"""Features that read the same record: policies, agents, anchor states, merged rows, failures."""

from typing import Any

import pytest
import torch
from _gateway import played
from _settings import NEEDED
from fake_envs import FakePrompt

from skyrl_fast.batch import StepBatch, batch_from_trajectories
from skyrl_fast.config import Config, load_config, sums_rewards
from skyrl_fast.ops.advantage.estimators import ADVANTAGE_ESTIMATORS
from skyrl_fast.rollout.trajectory import Step, Trajectory, recorded_steps
from skyrl_fast.train.algorithm.anchor_states import anchor_ids
from skyrl_fast.train.algorithm.policies import split_by_policy
from skyrl_fast.train.metrics.rewards import eval_metrics
from skyrl_fast.train.prepare_batch import (
    judge_groups,
    rollout_metrics,
    training_batch,
    with_advantages,
)
from skyrl_fast.trajectory_store.trained import collect_trained_steps

NAMES = ("planner", "worker")
LORA = "trainer.policy.model.lora"
POLICIES = [f"{LORA}.rank=4", f"{LORA}.policies=[planner,worker]"]
ESTIMATOR = "trainer.algorithm.advantage_estimator"


def config(*settings: str) -> Config:
    return load_config(None, [*NEEDED, *settings])


def step(prompt: list[int], response: list[int], reward: float = 0.0, **more: Any) -> Step:
    ones = [1] * len(response)
    logprobs = [-1.0] * len(response)
    seen = more.pop("observation", "")
    return Step(prompt, response, ones, logprobs, reward, "stop", 0, "", seen, 0.0, 0.0, **more)


def advantages(trajectories: list[Trajectory], settings: Config) -> StepBatch:
    batch, units, _ = training_batch(trajectories, settings)
    batch, _, _ = with_advantages(
        batch, units, settings.trainer.algorithm, policy=None, reference=None, critic=None,
        kl_coef=0.0,
    )  # fmt: skip
    return batch


@pytest.mark.spec("advantage.gigpo-anchor")
def test_a_policys_states_are_what_the_environment_showed_before_its_steps() -> None:
    def saw(number: int, seen: str, reward: float) -> Trajectory:
        first = step([1, 5], [6], observation=seen, policy="planner")
        second = step([1, 5, 6, 7], [9], reward, policy="worker")
        return Trajectory("a", number, [first, second])

    group = [saw(0, "left", 1.0), saw(1, "left", 0.0), saw(2, "right", 10.0), saw(3, "right", 10.0)]
    settings = config(*POLICIES, f"{ESTIMATOR}=gigpo", "trainer.algorithm.grpo_norm_by_std=false")
    worker = split_by_policy(group, NAMES)["worker"]
    # The episode's mean is 5.25; of the states, left has the mean 0.5 and right 10.
    assert advantages(worker, settings).advantages.tolist() == [-3.75, -5.75, 4.75, 4.75]


@pytest.mark.spec("advantage.gigpo-anchor")
def test_an_agents_states_are_the_messages_since_the_last_answer(tiny_tokenizer: Any) -> None:
    sides = iter(["left", "right", "left", "right"])

    async def agent(task: Any) -> float:
        async with task.async_openai as c:
            asked = [{"role": "user", "content": "go"}]
            first = await c.chat.completions.create(model=task.model, messages=asked)
            said = {"role": "assistant", "content": first.choices[0].message.content}
            seen = {"role": "user", "content": next(sides)}
            await c.chat.completions.create(model=task.model, messages=[*asked, said, seen])
        return 1.0

    prompts = [FakePrompt(f"p{n}", [{"role": "user", "content": "go"}]) for n in range(4)]
    out = played(agent, tiny_tokenizer, prompts=prompts)
    states = [[s.state for s in t.steps] for t in out.trajectories]
    assert sorted(states) == [["go", "left"]] * 2 + [["go", "right"]] * 2
    assert all([s.parent for s in t.steps] == [None, 0] for t in out.trajectories)
    ids = anchor_ids(out.trajectories).tolist()
    by_text: dict[str | None, set[int]] = {}
    for text, number in zip([s for pair in states for s in pair], ids, strict=True):
        by_text.setdefault(text, set()).add(number)
    assert len(by_text) == 3 and all(len(numbers) == 1 for numbers in by_text.values())


@pytest.mark.spec("terms.observations")
def test_another_policys_answers_are_no_observations() -> None:
    seen, plan, work = 3, 6, 9
    steps = [
        step([1, 5], [plan, plan], policy="planner"),
        step([1, 5, plan, plan, seen], [work, work], policy="worker"),
        step([1, 5, plan, plan, seen, work, work, seen], [plan], 1.0, policy="planner"),
    ]
    settings = config(
        *POLICIES, "trainer.rows=merged", "trainer.algorithm.observation_loss_coef=0.1"
    )
    group = [Trajectory("a", number, list(steps)) for number in range(2)]
    batch, _, _ = training_batch(split_by_policy(group, NAMES)["planner"], settings)
    assert batch.cross_entropy_weights.tolist() == [0, 0, 1, 0, 0, 1, 0] * 2


def test_answers_written_again_in_other_tokens_are_no_observations() -> None:
    steps = [step([1], [5, 6]), step([1, 5, 8, 3], [7], 1.0)]
    settings = config(
        *("trainer.rows=merged", "generator.merge_drift=realign"),
        "trainer.algorithm.observation_loss_coef=0.1",
    )
    group = [Trajectory("a", number, list(steps)) for number in range(2)]
    batch, _, _ = training_batch(group, settings)
    assert batch.loss_mask.tolist() == [1, 0, 0, 1] * 2
    assert batch.cross_entropy_weights.tolist() == [0, 0, 1, 0] * 2


@pytest.mark.spec("merge.drift-dropped-tokens", "store.trained-values")
@pytest.mark.parametrize("recorded", [False, True])
def test_a_dropped_token_that_is_sampled_again_is_stored_untrained(recorded: bool) -> None:
    both = Trajectory("a", 0, [step([1], [5, 6]), step([1, 5], [6, 7], 1.0)])
    if recorded:
        settings = config("trainer.rows=merged", "generator.merge_drift=realign")
        rows, _, _ = training_batch([both], settings)
    else:
        rows = batch_from_trajectories([both]).merged(drift="realign", max_drift_tokens=8)
    rows = rows.with_(advantages=torch.ones_like(rows.rewards))
    (steps,) = collect_trained_steps([both], rows)
    assert [one.loss_mask.tolist() for one in steps] == [[1, 0], [1, 1]]


@pytest.mark.parametrize("filtered", ["zero_reward_on_non_stop", "apply_overlong_filtering"])
def test_a_cut_trajectory_is_cut_for_each_of_its_policies(filtered: str) -> None:
    def sample(number: int, stop: str) -> Trajectory:
        steps = [step([1, 4], [5], policy="planner"), step([1], [6], 1.0, policy="worker")]
        return Trajectory("a", number, steps, stop)

    group = [sample(number, stop) for number, stop in enumerate(("stop", "length", "stop"))]
    settings = config(*POLICIES, f"generator.{filtered}=true", "generator.max_turns=2")
    for name, part in split_by_policy(group, NAMES).items():
        batch, _, _ = training_batch(part, settings)
        zeroed = filtered == "zero_reward_on_non_stop"
        got = batch.row_rewards.tolist() if zeroed else batch.loss_mask.tolist()
        assert got == [1, 0, 1], name


@pytest.mark.spec("merge.outcome")
def test_one_row_per_trajectory_has_one_outcome_everywhere() -> None:
    steps = [step([1], [5], 0.5), step([1, 5, 3], [6], 0.25)]
    group = [Trajectory("a", number, list(steps)) for number in range(2)]
    settings = config("generator.step_wise_trajectories=false", "generator.max_turns=2")
    assert sums_rewards(settings)
    _, units, metrics = training_batch(group, settings)
    assert units.scores.tolist() == [0.75, 0.75]
    assert metrics["reward/avg_raw_reward"] == 0.75
    assert eval_metrics(group, sums_rewards=True)["eval/all/avg_score"] == 0.75
    assert not sums_rewards(config())
    assert eval_metrics(group)["eval/all/avg_score"] == 0.25


@pytest.mark.spec("metrics.positive-reward")
@pytest.mark.parametrize("rows", ["step", "merged"])
def test_rewards_at_one_place_of_a_merged_row_are_one_positive_reward(rows: str) -> None:
    without_tokens = [step([1], [], 1.0), step([1, 3], [], -0.25)]
    of_one_token = [step([1], [5], 1.0), step([1, 5], [], -0.25)]
    settings = config(f"{ESTIMATOR}=reinforce++", f"trainer.rows={rows}")
    for steps in (without_tokens, of_one_token):
        _, _, metrics = training_batch([Trajectory("a", 0, steps)], settings)
        assert metrics["reward/avg_raw_reward"] == 0.75
        expected = 0.75 if rows == "merged" else 1.0
        assert metrics["reward/mean_positive_reward"] == expected


def test_policies_with_one_row_per_trajectory_are_judged_and_reported() -> None:
    contexts = {"planner": [1, 5], "worker": [2, 6]}
    steps = []
    for turn, name in enumerate(["planner", "worker", "planner", "worker"]):
        response = [7 + turn, 9]
        steps.append(step(list(contexts[name]), response, float(turn), policy=name))
        contexts[name] += [*response, 3]
    group = [Trajectory("a", number, list(steps)) for number in range(2)]
    settings = config(
        *POLICIES, "generator.step_wise_trajectories=false", "trainer.train_batch_size=1",
        "trainer.policy_mini_batch_size=1",
    )  # fmt: skip
    assert rollout_metrics(group, settings)["reward/avg_raw_reward"] == 6.0
    assert judge_groups(group, settings)[1] == set()  # equal outcomes
    for name, part in split_by_policy(group, NAMES, sums_rewards=True).items():
        batch, _, metrics = training_batch(part, settings)
        assert batch.num_rows == 2, name
        assert metrics["reward/avg_raw_reward"] == 6.0, name


# Of the rewards 2, 3 and 4 next to two failures: mean 3, deviation 1.
WITH_FAILURES = {
    "grpo": [-1, 0, 1],
    "dr_grpo": [-1, 0, 1],
    "rloo": [-1.5, 0, 1.5],  # to the mean of the others: 3.5, 3, 2.5
    "maxrl": [-1 / 3, 0, 1 / 3],  # divided by the mean
    "gdpo": [-1, 0, 1],  # as grpo, of the batch's deviation 1
    "turn_level_returns": [2, 3, 4],
    "turn_level_group": [-1.5, 0, 1.5],  # as rloo
    "context_level_group": [-1.5, 0, 1.5],  # of one context each
    "gigpo": [-2, 0, 2],  # of the trajectory, and of the turn
    "reinforce++": [-(1.5**0.5), 0, 1.5**0.5],  # the batch's variance is 2 / 3
}


OF_ESTIMATOR = {  # what one needs
    "gdpo": ["trainer.algorithm.gdpo_weights={reward: 1.0}"],
    "context_level_group": ["generator.context=compact"],
}


@pytest.mark.spec("advantage.failed")
def test_advantages_next_to_failures_by_hand() -> None:
    assert WITH_FAILURES.keys() == ADVANTAGE_ESTIMATORS.keys() - {"gae"}  # by a critic, of no group
    played = [Trajectory("a", n, [step([1], [5], r)]) for n, r in enumerate([2.0, 3.0, 4.0])]
    failed = [Trajectory("a", 3 + n, [step([1], [5], 1.0)], failure="gone") for n in range(2)]
    for estimator, wanted in WITH_FAILURES.items():
        needed = OF_ESTIMATOR.get(estimator, [])
        settings = config(f"{ESTIMATOR}={estimator}", "generator.n_samples_per_prompt=5", *needed)
        found = advantages([*played, *failed], settings).advantages.tolist()
        assert found == pytest.approx(wanted, abs=1e-5), estimator


GROUP_ESTIMATORS = WITH_FAILURES.keys() - {"turn_level_returns", "reinforce++"}


@pytest.mark.spec("advantage.failed", "advantage.alone")
@pytest.mark.parametrize("estimator", sorted(GROUP_ESTIMATORS))
def test_failures_are_no_members_of_their_group(estimator: str) -> None:
    needed = OF_ESTIMATOR.get(estimator, [])
    settings = config(f"{ESTIMATOR}={estimator}", "generator.n_samples_per_prompt=4", *needed)

    def group(rewards: list[float], num_failed: int) -> list[Trajectory]:
        played = [Trajectory("a", n, [step([1], [5], r)]) for n, r in enumerate(rewards)]
        failed = [
            Trajectory("a", 9 + n, [step([1], [5], 1.0)], failure="gone") for n in range(num_failed)
        ]
        return [*played, *failed]

    assert not advantages(group([-1.0, -1.0, -1.0], 1), settings).advantages.any()
    alone = advantages(group([2.0, 3.0, 4.0], 0), settings).advantages
    with_failed = advantages(group([2.0, 3.0, 4.0], 2), settings).advantages
    assert torch.equal(with_failed, alone) and alone.any()
    # One that is left has nothing to be compared with.
    left = group([-1.0], 3)
    assert not advantages(left, settings).advantages.any()
    _, _, metrics = training_batch(left, settings)
    assert metrics["reward/num_groups_without_baseline"] == 1
    assert metrics["reward/avg_raw_reward"] == -1
    assert not advantages(group([], 4), settings).advantages.any()


@pytest.mark.spec("metrics.failed")
def test_an_evaluation_counts_failures_as_0_and_shows_their_share() -> None:
    group = [
        Trajectory("a", 0, [step([1], [5], 1.0)]),
        Trajectory("a", 1, [step([1], [5], 1.0)], failure="gone"),
    ]
    metrics = eval_metrics(group)
    assert metrics["eval/all/avg_score"] == 0.5
    assert metrics["eval/all/failed_share"] == 0.5


@pytest.mark.spec("advantage.alone")
@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "maxrl"])
def test_the_only_sample_that_calls_a_policy_has_no_advantage(estimator: str) -> None:
    def sample(number: int, reward: float, calls: bool) -> Trajectory:
        called = [step([1], [7], policy="worker")] if calls else []
        last = step([1], [8], reward, policy="planner")
        return Trajectory("a", number, [step([1], [6], policy="planner"), *called, last])

    group = [sample(n, reward, n < 1) for n, reward in enumerate((0.9, 1.0, 1.0, 1.0))]
    settings = config(*POLICIES, f"{ESTIMATOR}={estimator}", "generator.n_samples_per_prompt=4")
    worker = split_by_policy(group, NAMES)["worker"]
    assert advantages(worker, settings).advantages.tolist() == [0.0]


def test_steps_made_by_hand_are_one_conversation() -> None:
    made = [step([1], [5], observation="seen"), step([1, 5, 3], [6])]
    first, second = recorded_steps(Trajectory("a", 0, made))
    assert (first.number, first.parent, first.state, first.answers) == (0, None, None, ())
    assert (second.number, second.parent, second.state) == (1, 0, "seen")
    assert second.answers == ((1, 2),)


def test_tokens_by_reward_go_by_the_outcome() -> None:
    early = Trajectory("a", 0, [step([1], [5, 6], 1.0), step([1, 5, 6, 3], [7])])
    late = Trajectory("a", 1, [step([1], [5])])
    one_row = config("generator.step_wise_trajectories=false")
    metrics = rollout_metrics([early, late], one_row)
    assert metrics["generate/avg_tokens_non_zero_rewards"] == 3
    assert metrics["generate/avg_tokens_zero_rewards"] == 1
    metrics = rollout_metrics([early, late], config())  # the last step's reward
    assert metrics["generate/avg_tokens_non_zero_rewards"] == 0
    assert metrics["generate/avg_tokens_zero_rewards"] == 2


def test_normalizing_gives_no_advantage_to_the_only_sample_left() -> None:
    def sample(uid: str, number: int, reward: float, failure: str | None = None) -> Trajectory:
        return Trajectory(uid, number, [step([1], [6], reward)], failure=failure)

    group = [
        *(sample("a", number, reward) for number, reward in enumerate((0.0, 0.5, 1.0))),
        sample("b", 0, 1.0),
        sample("b", 1, 0.0, "broken"),
        sample("b", 2, 0.0, "broken"),
    ]
    settings = config(
        f"{ESTIMATOR}=maxrl",
        "trainer.algorithm.advantage_batch_normalize=true",
        "generator.n_samples_per_prompt=3",
    )
    values = advantages(group, settings).advantages
    assert values[3] == 0
    # Mean 0 and variance 1 of the three others, the middle one of which is at their mean.
    assert values[:3].tolist() == pytest.approx([-(1.5**0.5), 0.0, 1.5**0.5], abs=1e-5)
