"""The bench of generation refuses to measure what failed."""

from __future__ import annotations

import pytest

from bench.generation import refuse_failures
from skyrl_fast.rollout.trajectory import Trajectory


def trajectory(failure: str | None) -> Trajectory:
    return Trajectory("a", 0, [], "stop", "text2sql", {}, 0.0, failure=failure)


def test_a_failed_trajectory_ends_the_bench_with_its_reason() -> None:
    refuse_failures([trajectory(None)])
    with pytest.raises(SystemExit, match=r"1 of 2 trajectories failed: no database"):
        refuse_failures([trajectory(None), trajectory("no database")])
