"""GDPO in the trainer: named parts of rewards, from what trajectories report to advantages."""

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from _gateway import USER, played
from _settings import NEEDED
from _training import Recorder, settings, train
from _training import folder as folder
from fake_envs import FakePrompt, ScriptedEngine, loop_config, says

from skyrl_fast.batch import StepBatch
from skyrl_fast.batch.concatenation import concatenate
from skyrl_fast.config import Config, ConfigError, EnvironmentConfig, load_config
from skyrl_fast.rollout.engine.weights.gate import WeightGate
from skyrl_fast.rollout.env.factory import EnvFactory
from skyrl_fast.rollout.env.protocol import Action, Env, EnvStep
from skyrl_fast.rollout.env.reward_functions import GroupRewards, RewardFunctions
from skyrl_fast.rollout.groups import environment_runner, run_groups
from skyrl_fast.rollout.policy_calls import PolicyCalls
from skyrl_fast.rollout.trajectory import Step, Trajectory
from skyrl_fast.train.algorithm.advantages import compute_advantages
from skyrl_fast.train.algorithm.batch_warnings import all_rewards_equal, unread_rewards
from skyrl_fast.train.algorithm.policies import split_by_policy
from skyrl_fast.train.algorithm.reward_parts import RewardParts
from skyrl_fast.train.output.loggers import read_metrics
from skyrl_fast.train.prepare_batch import training_batch, with_advantages

ALGORITHM = "trainer.algorithm"
GDPO = f"{ALGORITHM}.advantage_estimator=gdpo"
BOTH = f"{ALGORITHM}.gdpo_weights={{correct: 1.0, format: 1.0}}"
LORA = "trainer.policy.model.lora"
POLICIES = [f"{LORA}.rank=4", f"{LORA}.policies=[planner,worker]"]


def config(*overrides: str) -> Config:
    return load_config(None, [*NEEDED, "generator.n_samples_per_prompt=2", GDPO, *overrides])


def step(prompt: list[int], response: list[int], reward: float = 0.0, **more: Any) -> Step:
    ones = [1] * len(response)
    logprobs = [-1.0] * len(response)
    stop = more.pop("stop_reason", "stop")
    return Step(prompt, response, ones, logprobs, reward, stop, 0, "", "", 0.0, 0.0, **more)


def sample(uid: str, number: int, reported: dict[str, Any], *, turns: int = 1) -> Trajectory:
    """Return a trajectory whose context only grows; its outcome is the sum of what it reports."""
    numbers = [value for value in reported.values() if isinstance(value, float)]
    steps = []
    context = [1]
    for turn in range(turns):
        steps.append(step(list(context), [5], sum(numbers) * (turn == turns - 1)))
        context += [5, 3]
    return Trajectory(uid, number, steps, env_metrics=reported)


def worked(**more: Any) -> list[Trajectory]:
    """Return the worked example of the specification."""
    reports = [
        ("a", {"correct": 0.0, "format": 0.0}),
        ("a", {"correct": 1.0, "format": 0.0}),
        ("b", {"correct": 0.0, "format": 0.0}),
        ("b", {"correct": 1.0, "format": 1.0}),
    ]
    return [sample(uid, n % 2, dict(report), **more) for n, (uid, report) in enumerate(reports)]


def advantages(trajectories: list[Trajectory], chosen: Config) -> StepBatch:
    batch, units, _ = training_batch(trajectories, chosen)
    batch, _, _ = with_advantages(
        batch, units, chosen.trainer.algorithm, policy=None, reference=None, critic=None,
        kl_coef=0.0,
    )  # fmt: skip
    return batch


def of_trajectories(batch: StepBatch) -> list[float]:
    """Return the advantage of each trajectory, which all its trained tokens have."""
    lengths = batch.response_lengths
    of_token = torch.repeat_interleave(batch.trajectory_ids, lengths)
    found = []
    for number in range(batch.num_trajectories):
        is_own = (of_token == number) & (batch.loss_mask != 0)
        values = set(batch.advantages[is_own].tolist())
        found.append(values.pop() if values else math.nan)
        assert not values
    return found


A = 0.54772  # of the worked example
B = 1.09545


@pytest.mark.spec("advantage.gdpo-worked-example")
@pytest.mark.parametrize("rows", ["step", "merged", "trajectory"])
@pytest.mark.parametrize("turns", [1, 3])
def test_parts_are_compared_one_by_one_whatever_the_rows(rows: str, turns: int) -> None:
    group = worked(turns=turns)
    batch = advantages(group, config(BOTH, f"trainer.rows={rows}"))
    assert batch.num_rows == (4 * turns if rows == "step" else 4)
    assert of_trajectories(batch) == pytest.approx([-A, A, -B, B], abs=1e-5)


def test_weights_by_name_and_their_order() -> None:
    first = config(f"{ALGORITHM}.gdpo_weights={{correct: 2.0, format: -1.0}}")
    second = config(f"{ALGORITHM}.gdpo_weights={{format: -1.0, correct: 2.0}}")
    # The sums of "b" are (2 - 1) * 0.707.
    for one in (first, second):
        assert of_trajectories(advantages(worked(), one)) == pytest.approx([-B, B, -A, A], abs=1e-5)


def test_the_outcome_is_a_part_of_the_name_reward() -> None:
    group = worked()
    for trajectory, reward in zip(group, [3.0, 3.0, 0.0, 1.0], strict=True):
        trajectory.steps[-1].reward = reward
    found = advantages(group, config(f"{ALGORITHM}.gdpo_weights={{reward: 1.0, format: 1.0}}"))
    # Nothing differs in "a"; both do in "b", whose sums are +-1.414: the deviation is sqrt(4 / 3).
    value = math.sqrt(2) / math.sqrt(4 / 3)
    assert of_trajectories(found) == pytest.approx([0.0, 0.0, -value, value], abs=1e-5)


@pytest.mark.parametrize("absent", [{"correct": 1.0}, {"correct": 1.0, "format": None}])
def test_a_part_that_is_not_reported_is_0(absent: dict[str, Any]) -> None:
    group = worked()
    group[1].env_metrics = dict(absent)
    assert of_trajectories(advantages(group, config(BOTH))) == pytest.approx(
        [-A, A, -B, B], abs=1e-5
    )


@pytest.mark.spec("advantage.gdpo-alone", "advantage.failed")
def test_failures_and_what_they_leave_alone_are_not_counted() -> None:
    failed = [sample("a", 2, {"correct": 9.0}), sample("c", 0, {"correct": 9.0})]
    for trajectory in failed:
        trajectory.failure = "gone"
    alone = sample("c", 1, {"correct": 7.0, "format": 7.0})
    a, b = worked()[:2], worked()[2:]
    batch = advantages([*a, failed[0], *b, failed[1], alone], config(BOTH))
    found = of_trajectories(batch)
    assert [found[n] for n in (0, 1, 3, 4)] == pytest.approx([-A, A, -B, B], abs=1e-5)
    assert math.isnan(found[2]) and math.isnan(found[5])  # without a trained token
    assert found[6] == 0.0


@pytest.mark.spec("advantage.gdpo-outcome")
def test_an_unfinished_trajectory_has_no_part() -> None:
    group = worked()
    group[3].steps[-1].stop_reason = "length"
    group[3].stop_reason = "length"
    chosen = config(BOTH, "generator.zero_reward_on_non_stop=true")
    # Nothing differs in "b": sums -0.707, 0.707, 0, 0, of the deviation sqrt(1 / 3).
    value = math.sqrt(0.5) / math.sqrt(1 / 3)
    found = of_trajectories(advantages(group, chosen))
    assert found == pytest.approx([-value, value, 0.0, 0.0], abs=1e-5)


@pytest.mark.spec("advantage.gdpo-outcome")
def test_filters_and_metrics_read_the_outcome() -> None:
    group = worked()
    group[0].env_metrics = {"correct": 0.0, "format": 1.0}
    group[0].steps[-1].reward = 1.0  # as of the other sample: the sums do not differ
    chosen = config(BOTH, f"{ALGORITHM}.zero_variance_filter=true")
    batch, _, metrics = training_batch(group, chosen)
    assert metrics["reward/avg_raw_reward"] == 1.0
    assert metrics["reward/zero_variance_share"] == 0.5
    assert batch.loss_mask.tolist() == [0, 0, 1, 1]
    assert all_rewards_equal(config(BOTH), group[:2]) is None  # the parts differ


def test_unread_rewards_are_those_of_the_outcome() -> None:
    trajectory = sample("a", 0, {"correct": 1.0})
    trajectory.steps = [step([1], [5], 0.5), step([1, 5], [5], 1.0)]
    assert unread_rewards(config(BOTH), [trajectory]) is None
    text = unread_rewards(config(f"{ALGORITHM}.gdpo_weights={{reward: 1.0}}"), [trajectory])
    assert text is not None and "advantage_estimator=gdpo reads the reward" in text


@pytest.mark.spec("advantage.gdpo-parts")
def test_each_policy_has_the_parts_and_its_own_outcome() -> None:
    group = worked()
    for trajectory, outcome in zip(group, [0.0, 1.0, 0.0, 0.0], strict=True):
        trajectory.steps = [
            step([1], [5], policy="planner"),
            step([1, 5], [6], 1.0, policy="worker"),
        ]
        trajectory.policy_rewards = {"planner": outcome}
    parts = split_by_policy(group, ("planner", "worker"))
    for own in parts.values():
        batch = advantages(own, config(BOTH, *POLICIES))
        assert of_trajectories(batch) == pytest.approx([-A, A, -B, B], abs=1e-5)
    chosen = config(f"{ALGORITHM}.gdpo_weights={{reward: 1.0}}", *POLICIES)
    # The planner's outcomes differ in "a" alone, the worker's nowhere.
    value = math.sqrt(0.5) / math.sqrt(1 / 3)
    planner = of_trajectories(advantages(parts["planner"], chosen))
    assert planner == pytest.approx([-value, value, 0.0, 0.0], abs=1e-5)
    assert of_trajectories(advantages(parts["worker"], chosen)) == [0.0] * 4


def test_parts_follow_their_rows(tmp_path: Path) -> None:
    batch, _, _ = training_batch(worked(turns=2), config(BOTH))
    assert batch.reward_parts.tolist() == [[0, 0]] * 2 + [[1, 0]] * 2 + [[0, 0]] * 2 + [[1, 1]] * 2
    assert batch.rows([3, 6]).reward_parts.tolist() == [[1, 0], [1, 1]]
    batch.save(tmp_path / "batch")
    assert torch.equal(StepBatch.load(tmp_path / "batch").reward_parts, batch.reward_parts)
    both = concatenate([batch, batch.with_(uids=("c", "d"))])
    assert torch.equal(both.reward_parts, torch.cat([batch.reward_parts] * 2))
    plain, _, _ = training_batch(worked(), load_config(None, list(NEEDED)))
    assert plain.reward_parts is None
    with pytest.raises(ValueError, match="advantages: gdpo needs the batch's reward_parts"):
        compute_advantages(plain, estimator="gdpo", weights={"correct": 1.0})


@pytest.mark.spec("advantage.gdpo-names")
@pytest.mark.parametrize("value", ["yes", math.nan, math.inf, 10**400, [1.0, 2.0]])
def test_a_part_that_is_no_number_is_named(value: Any) -> None:
    group = worked()
    group[3].env_metrics["format"] = value
    wanted = "gdpo_weights: format of sample 1 of prompt 'b': expected a finite float32 number, got"
    with pytest.raises(ValueError, match=wanted):
        training_batch(group, config(BOTH))


@pytest.mark.spec("advantage.gdpo-names")
def test_a_name_that_the_first_batch_does_not_report_is_refused() -> None:
    failed = sample("a", 0, {"formt": 1.0})
    failed.failure = "gone"
    watch = RewardParts(["reward", "correct", "formt"])
    watch.see_batch([failed])  # says nothing about names
    wanted = (
        "gdpo_weights: expected names that the trajectories of the first batch report as metrics, "
        "which report 'correct', 'format' .and 'reward', their outcome., got 'formt' "
        ".did you mean 'format'"
    )
    with pytest.raises(ConfigError, match=wanted):
        watch.see_batch([*worked(), failed])
    with pytest.raises(ConfigError, match=r"which report none .* got 'correct'"):
        RewardParts(["correct"]).see_batch([sample("a", 0, {})])
    # One that was reported once may be missing later.
    seen = RewardParts(["correct", "format"])
    seen.see_batch(worked())
    seen.see_batch([sample("a", 0, {})])
    RewardParts(["reward"]).see_batch([sample("a", 0, {})])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([GDPO], "gdpo_weights: expected a weight for each part with .*=gdpo, as it compares"),
        ([BOTH], "advantage_estimator: expected gdpo with .*, as no other estimator reads the"),
        ([GDPO, BOTH, f"{ALGORITHM}.use_kl_in_reward=true"], "no part of the reward has the pen"),
        (
            [GDPO, BOTH, f"{ALGORITHM}.advantage_batch_normalize=true"],
            "advantage_batch_normalize: expected false .* normalized over the batch's trajectories",
        ),
        (
            [GDPO, BOTH, "generator.n_samples_per_prompt=1"],
            "n_samples_per_prompt: expected at least 2 with .*, as its advantage is 0 in a group",
        ),
        (
            [GDPO, f"{ALGORITHM}.gdpo_weights={{correct: 0.0}}"],
            "gdpo_weights.correct: expected a finite number other than 0, got 0.0",
        ),
        (
            [GDPO, f"{ALGORITHM}.gdpo_weights={{correct: .inf}}"],
            "gdpo_weights.correct: expected a finite number other than 0, got inf",
        ),
        (
            [GDPO, f"{ALGORITHM}.gdpo_weights={{correct: much}}"],
            "gdpo_weights.correct: expected a finite number other than 0, got much",
        ),
    ],
)
def test_settings_that_mean_nothing_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, [*NEEDED, *overrides])


def test_an_agents_metrics_are_parts(tiny_tokenizer: Any) -> None:
    async def agent(task: Any) -> dict[str, Any]:
        async with task.async_openai as client:
            await client.chat.completions.create(model=task.model, messages=[USER])
        return {"reward": 1.0, "format": 0.5}

    out = played(agent, tiny_tokenizer)
    names = f"{ALGORITHM}.gdpo_weights={{format: 1.0, reward: 1.0}}"
    batch, _, _ = training_batch(out.trajectories, config(names))
    assert batch.reward_parts.tolist() == [[0.5, 1.0]] * len(out.trajectories)


class Graded(Env):
    """Two turns, of which each reports a part; the last one another."""

    turns = 0

    def step(self, action: Action) -> EnvStep:
        self.turns += 1
        if self.turns == 1:
            return EnvStep({"reward": 0.0, "tools": 1.0}, done=False, observations="more")
        return EnvStep({"reward": 1.0, "tools": 0.5, "format": 0.25}, done=True)

    def metrics(self) -> dict[str, Any]:
        return {"bonus": 2}


def graded(completions: list[Any], **columns: Any) -> list[Any]:
    """Grade all answers of a group but the second one, which it does not apply to."""
    return [{"reward": 3.0, "format": 0.5}, None]


def in_environments(tokenizer: Any, make_env: Any, **options: Any) -> list[Trajectory]:
    engine = ScriptedEngine(lambda call, n: says(tokenizer, f"a{n}"))

    async def go() -> list[Trajectory]:
        factory = EnvFactory(EnvironmentConfig(), make_env=make_env, longest_text=1000)
        calls = PolicyCalls(engine, WeightGate(), tokenizer, 0)
        loop = loop_config(max_turns=9, n_samples_per_prompt=2)
        on_group = GroupRewards(factory) if options.get("of_groups") else None
        runner = environment_runner(calls, factory, loop, on_group=on_group)
        try:
            return await run_groups(runner, [FakePrompt("a")], phase="train", policy_version=0)
        finally:
            await factory.close()

    return asyncio.run(go())


@pytest.mark.spec("advantage.gdpo-parts")
def test_parts_of_environments_and_of_reward_functions(tiny_tokenizer: Any) -> None:
    names = "{tools: 1.0, format: 1.0, bonus: 1.0, reward: 1.0}"
    group = in_environments(tiny_tokenizer, lambda row: Graded())
    batch, _, _ = training_batch(group, config(f"{ALGORITHM}.gdpo_weights={names}"))
    # Parts are summed over the turns; the outcome is that of the last row.
    assert batch.reward_parts.tolist() == [[1.5, 0.25, 2, 0], [1.5, 0.25, 2, 1]] * 2
    names = "{reward_graded: 1.0, reward_graded/format: 1.0, reward: 1.0}"
    functions = RewardFunctions([graded], [0.5])
    group = in_environments(tiny_tokenizer, functions, of_groups=True)
    batch, _, _ = training_batch(group, config(f"{ALGORITHM}.gdpo_weights={names}"))
    # A part has the function's own unit, the outcome its weight.
    assert batch.reward_parts.tolist() == [[3.0, 0.5, 1.5], [0.0, 0.0, 0.0]]


# --- full runs ---------------------------------------------------------------------------------


def report(rollouts: Any, trajectories: list[Trajectory], phase: str) -> None:
    """Report whether the prompt's word was said, and how short the answers are."""
    for one in trajectories:
        word = one.steps[0].prompt_token_ids[1]
        said = any(word in turn.response_ids for turn in one.steps)
        length = sum(len(turn.response_ids) for turn in one.steps)
        one.env_metrics = {"said": float(said), "length": float(length)}


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_trains_on_its_parts(folder: Path, staleness: int) -> None:
    more = [
        f"trainer.fully_async.enabled={'true' if staleness else 'false'}",
        f"trainer.fully_async.max_staleness_steps={staleness}",
    ]
    weights = f"{ALGORITHM}.gdpo_weights={{said: 1.0, length: -0.3}}"
    common = ("trainer.epochs=1", "data.val_data=[]")
    outcome = train(settings(folder, "run", *common, GDPO, weights, *more), Recorder(None, report))
    rows = read_metrics(outcome.metrics)
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["policy/grad_norm"] > 0
        assert row["environment/length"] > 0


def test_a_run_with_a_misspelled_part_ends_before_it_trains(folder: Path) -> None:
    weights = f"{ALGORITHM}.gdpo_weights={{siad: 1.0}}"
    chosen = settings(folder, "run", "trainer.epochs=1", "data.val_data=[]", GDPO, weights)
    with pytest.raises(ConfigError, match=r"got 'siad' .did you mean 'said'"):
        train(chosen, Recorder(None, report))
