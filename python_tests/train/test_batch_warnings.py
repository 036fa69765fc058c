"""What is said once of a batch that shows a setting to be wrong."""

import logging
from typing import Any

import pytest

from skyrl_fast.config import Config
from skyrl_fast.rollout.trajectory import Step, Trajectory
from skyrl_fast.train.algorithm.batch_warnings import BatchWarnings, unread_rewards


def trajectory(*rewards: float, failure: str | None = None) -> Trajectory:
    steps = [Step([1], [2], [1], [0.0], reward, "stop", 0, "", "", 0.0, 0.0) for reward in rewards]
    return Trajectory("7", 2, steps, "stop", "fake", {}, 0.0, failure)


def config(estimator: str = "grpo", *, step_wise: bool = True) -> Config:
    result = Config()
    result.trainer.algorithm.advantage_estimator = estimator
    result.trainer.rows = "step" if step_wise else "trajectory"
    return result


@pytest.mark.spec("advantage.unread-rewards")
@pytest.mark.parametrize("estimator", ["grpo", "rloo", "maxrl"])
def test_rewards_before_the_last_step_are_said_once(
    estimator: str, caplog: pytest.LogCaptureFixture
) -> None:
    watch = BatchWarnings(config(estimator))
    with caplog.at_level(logging.WARNING):
        watch.see_policy([trajectory(0.0, 0.0, 1.0), trajectory(0.5)])
        assert caplog.records == []
        for _ in range(2):
            watch.see_policy([trajectory(0.0, 1.0), trajectory(0.1, 0.2, 0.3)])
    (record,) = caplog.records
    message = record.getMessage()
    assert f"advantage_estimator={estimator} reads the reward of a trajectory's last" in message
    assert "sample 2 of prompt '7' has 0.1, 0.2, 0.3 and counts as 0.3" in message
    assert "turn_level_returns, turn_level_group, gigpo, gae, reinforce++" in message
    assert "trainer.rows=trajectory" in message


@pytest.mark.spec("advantage.unread-rewards")
@pytest.mark.parametrize(
    ("settings", "seen"),
    [
        (config("turn_level_returns"), trajectory(0.1, 0.2)),
        (config("reinforce++"), trajectory(0.1, 0.2)),
        (config(step_wise=False), trajectory(0.1, 0.2)),
        (config(), trajectory(0.1, 0.2, failure="the environment raised")),
        (config(), trajectory()),
    ],
)
def test_nothing_is_said_where_rewards_are_read(settings: Config, seen: Trajectory) -> None:
    assert unread_rewards(settings, [seen]) is None


def test_long_trajectories_are_shortened() -> None:
    message = unread_rewards(config(), [trajectory(*range(1, 12))])
    assert "has ..., 4, 5, 6, 7, 8, 9, 10, 11 and counts as 11" in str(message)


def ended(reason: str, *, turns: int = 1, tokens: int = 1, reward: float = 0.0) -> Trajectory:
    steps = [
        Step([1], [2] * tokens, [1] * tokens, None, reward, reason, 0, "", "", 0.0, 0.0)
        for _ in range(turns)
    ]
    return Trajectory("7", 2, steps, reason, "fake", {}, 0.0)


def messages(
    caplog: pytest.LogCaptureFixture, trajectories: list[Trajectory], **generator: Any
) -> list[str]:
    """Return what is said of two such batches."""
    settings = config()
    for name, value in generator.items():
        setattr(settings.generator, name, value)
    settings.generator.sampling_params.max_generate_length = 4
    warnings = BatchWarnings(settings)
    caplog.clear()
    for _ in range(2):
        warnings.see_batch(trajectories)
    return [record.getMessage() for record in caplog.records]


@pytest.mark.spec("run.batch-warnings")
def test_a_batch_that_ends_at_max_turns_names_the_setting(caplog: pytest.LogCaptureFixture) -> None:
    limited = [ended("max_turns", reward=1.0), ended("max_turns", reward=2.0)]
    (message,) = messages(caplog, limited, max_turns=1)
    assert "all 2 trajectories of a batch ended at generator.max_turns=1" in message
    assert messages(caplog, [*limited, ended("stop")], max_turns=1) == []
    assert messages(caplog, limited[:1], max_turns=1) == []
    (message,) = messages(caplog, [*limited, ended("stop")])
    assert message.startswith("2 of 3 trajectories were not done after 64 turns, the limit where")


def test_a_batch_that_ends_by_lengths_names_the_one_that_was_reached(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cut = [ended("length", tokens=4, reward=1.0), ended("length", tokens=4)]
    prompts = [ended("length", tokens=2, reward=1.0), ended("length", turns=0)]
    (message,) = messages(caplog, cut)
    assert message.endswith("was cut at generator.sampling_params.max_generate_length=4")
    (message,) = messages(caplog, prompts)
    assert message.endswith("ended by a prompt over generator.max_input_length=512")
    (message,) = messages(caplog, [*cut, *prompts], max_input_length=9)
    assert "2 by an answer cut at" in message
    assert message.endswith("the others by a prompt over generator.max_input_length=9")


def test_equal_rewards_are_said_where_they_are_compared(caplog: pytest.LogCaptureFixture) -> None:
    equal = [ended("stop", reward=0.5) for _ in range(3)]
    (message,) = messages(caplog, equal)
    assert "all 3 trajectories of a batch have the reward 0.5" in message
    assert messages(caplog, [*equal, ended("stop", reward=1.0)]) == []
    assert messages(caplog, equal, n_samples_per_prompt=1) == []
    assert messages(caplog, [trajectory(0.1, 0.5), trajectory(0.2, 0.5)]) == []
