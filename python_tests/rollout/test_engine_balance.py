"""The pool's choice of engines under long-tailed answers, on a simulated clock."""

import pytest

from bench.engine_balance import simulate


@pytest.mark.parametrize("count", [1, 4])
def test_no_assignment_beats_the_bound_and_the_pool_is_near_it(count: int) -> None:
    found = simulate(count, 32, seed=0)
    assert found == simulate(count, 32, seed=0)
    assert all(result["over"] >= 1 for result in found.values())
    assert found["the pool"]["over"] <= 1.2


def test_turns_of_a_trajectory_stay_with_their_cache() -> None:
    found = simulate(4, 32, seed=1)
    assert found["the pool"]["prefilled"] < 1.1 * found["by trajectory"]["prefilled"]
    assert found["by request"]["prefilled"] > 2 * found["by trajectory"]["prefilled"]
