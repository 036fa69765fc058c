"""Rewards before the last step that the estimator does not read."""

import logging

import pytest

from skyrl_fast.config import Config
from skyrl_fast.rollout.trajectory import Step, Trajectory
from skyrl_fast.train.algorithm.unread_rewards import UnreadRewardsWatch, unread_rewards


def trajectory(*rewards: float, failure: str | None = None) -> Trajectory:
    steps = [Step([1], [2], [1], [0.0], reward, "stop", 0, "", "", 0.0, 0.0) for reward in rewards]
    return Trajectory("7", 2, steps, "stop", "fake", {}, 0.0, failure)


def config(estimator: str = "grpo", *, step_wise: bool = True) -> Config:
    result = Config()
    result.trainer.algorithm.advantage_estimator = estimator
    result.generator.step_wise_trajectories = step_wise
    return result


@pytest.mark.spec("advantage.unread-rewards")
@pytest.mark.parametrize("estimator", ["grpo", "rloo", "maxrl"])
def test_rewards_before_the_last_step_are_said_once(
    estimator: str, caplog: pytest.LogCaptureFixture
) -> None:
    watch = UnreadRewardsWatch(config(estimator))
    with caplog.at_level(logging.WARNING):
        watch.see([trajectory(0.0, 0.0, 1.0), trajectory(0.5)])
        assert caplog.records == []
        for _ in range(2):
            watch.see([trajectory(0.0, 1.0), trajectory(0.1, 0.2, 0.3)])
    (record,) = caplog.records
    message = record.getMessage()
    assert f"advantage_estimator={estimator} reads the reward of a trajectory's last" in message
    assert "sample 2 of prompt '7' has 0.1, 0.2, 0.3 and counts as 0.3" in message
    assert "turn_level_returns, turn_level_group, gigpo, gae, reinforce++" in message
    assert "generator.step_wise_trajectories=false" in message


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
