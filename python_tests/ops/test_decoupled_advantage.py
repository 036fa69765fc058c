"""gdpo_advantage: docs/spec.md section 5."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skyrl_fast import gdpo_advantage, group_advantage

# float32 results, of which each part's advantage was float32 before.
CLOSE = {"atol": 1e-5, "rtol": 1e-5}

# Two prompts of two samples; the second sample of "b" is better in both parts.
PARTS = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 0.0], [1.0, 1.0]])
UIDS = ["a", "a", "b", "b"]
LOW = math.sqrt(0.5) / math.sqrt(5 / 3)  # of the sums -0.707, 0.707, -1.414, 1.414
WORKED = [-LOW, LOW, -2 * LOW, 2 * LOW]


@pytest.mark.spec("advantage.gdpo", "advantage.gdpo-worked-example")
def test_the_worked_example(backend: str) -> None:
    """0.707 for each part that differs, the sums, and these over their deviation."""
    got = gdpo_advantage(PARTS, UIDS, backend=backend)
    assert got.tolist() == pytest.approx(WORKED, abs=1e-5)
    assert got.tolist() == pytest.approx([-0.54772, 0.54772, -1.09545, 1.09545], abs=1e-5)
    of_sums = group_advantage(PARTS.sum(1), UIDS, backend=backend)
    assert of_sums.tolist() == pytest.approx([-0.70711, 0.70711, -0.70711, 0.70711], abs=1e-5)


def test_weights_are_those_of_the_parts_advantages(backend: str) -> None:
    """With weights: the sums of "b" are (2 - 1) * 0.707 with the second part as a cost of 1."""
    got = gdpo_advantage(PARTS, UIDS, weights=[2.0, -1.0], backend=backend)
    # Sums -1.414, 1.414, -0.707, 0.707.
    assert got.tolist() == pytest.approx([-2 * LOW, 2 * LOW, -LOW, LOW], abs=1e-5)
    # A weight of all parts, and a unit of one part, change nothing.
    scaled = gdpo_advantage(PARTS * 100, UIDS, weights=[3.0, 3.0], backend=backend)
    assert scaled.tolist() == pytest.approx(WORKED, abs=1e-5)


def test_one_part_is_grpo_normalized_over_the_batch(backend: str) -> None:
    rewards = torch.tensor([1.0, 2.0, 6.0, 0.0, 0.0, 3.0])
    uids = ["a", "a", "a", "b", "b", "b"]
    of_groups = group_advantage(rewards, uids, backend=backend)
    got = gdpo_advantage(rewards[:, None], uids, backend=backend)
    wanted = (of_groups - of_groups.mean()) / (of_groups.std() + 1e-6)
    torch.testing.assert_close(got, wanted, **CLOSE)


@pytest.mark.spec("advantage.gdpo-alone")
def test_a_trajectory_alone_is_0_and_not_counted(backend: str) -> None:
    parts = torch.cat([torch.tensor([[7.0, -7.0]]), PARTS])
    got = gdpo_advantage(parts, ["z", *UIDS], backend=backend)
    assert got.tolist() == pytest.approx([0.0, *WORKED], abs=1e-5)
    assert gdpo_advantage(parts[:2], ["y", "z"], backend=backend).tolist() == [0.0, 0.0]


@pytest.mark.spec("advantage.gdpo")
def test_a_trajectory_counts_once_by_its_last_row(backend: str) -> None:
    # The second sample of "a" has three rows; those that are not its last have other parts.
    rows = [0, 1, 1, 1, 2, 3]
    parts = PARTS[rows]
    parts[1:3] = torch.nan
    got = gdpo_advantage(
        parts,
        [UIDS[row] for row in rows],
        is_last_step=[True, False, False, True, True, True],
        backend=backend,
    )
    assert got.tolist() == pytest.approx([WORKED[row] for row in rows], abs=1e-5)


def test_equal_parts_have_no_advantage(backend: str) -> None:
    assert not gdpo_advantage(torch.full((4, 2), 0.5), UIDS, backend=backend).any()


def test_groups_need_not_be_adjacent(backend: str) -> None:
    order = [2, 0, 3, 1]
    got = gdpo_advantage(PARTS[order], [UIDS[row] for row in order], backend=backend)
    assert got.tolist() == pytest.approx([WORKED[row] for row in order], abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float32])
def test_rows_are_spread_by_their_own_mask(dtype: torch.dtype, backend: str) -> None:
    rows = gdpo_advantage(PARTS, UIDS, backend=backend)
    mask = (torch.arange(12).reshape(4, 3) % 3 > 0).to(dtype)
    padded = gdpo_advantage(PARTS, UIDS, response_mask=mask, backend=backend)
    assert torch.equal(padded, rows[:, None] * mask)
    cu = torch.tensor([0, 2, 2, 3, 8])
    ragged = gdpo_advantage(PARTS, UIDS, cu_seqlens=cu, backend=backend)
    assert torch.equal(ragged, torch.repeat_interleave(rows, cu.diff()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes_and_strided_parts(dtype: torch.dtype, backend: str) -> None:
    wanted = gdpo_advantage(PARTS, UIDS, backend=backend)
    strided = PARTS.to(dtype).T.contiguous().T
    got = gdpo_advantage(strided, UIDS, backend=backend)
    assert torch.equal(got, wanted)
    assert got.dtype == torch.float32


def test_empty_batch(backend: str) -> None:
    empty = torch.zeros(0, 2)
    assert gdpo_advantage(empty, [], backend=backend).shape == (0,)
    mask = torch.zeros(0, 4)
    assert gdpo_advantage(empty, [], response_mask=mask, backend=backend).shape == (0, 4)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"part_rewards": torch.ones(4)}, r"part_rewards: expected \(4, K\), K >= 1, got \(4,\)"),
    ({"part_rewards": torch.ones(4, 0)}, r"part_rewards: expected \(4, K\), K >= 1, got \(4, 0\)"),
    ({"part_rewards": torch.ones(3, 2)}, r"part_rewards: expected \(4, K\), K >= 1, got \(3, 2\)"),
    (
        {"part_rewards": torch.ones(4, 2, dtype=torch.int64)},
        "part_rewards: expected a floating-point tensor",
    ),
    ({"part_rewards": PARTS.masked_fill(PARTS > 0, torch.inf)}, "those of row 1 sum to inf"),
    ({"weights": [1.0]}, "weights: expected 2 finite numbers, one for each part, got"),
    ({"weights": [1.0, math.nan]}, "weights: expected 2 finite numbers, one for each part, got"),
    ({"is_last_step": [True, True, True, False]}, "is_last_step: expected True in the last row"),
    ({"is_last_step": [True, False, True, True]}, "group_ids: expected one id within a trajectory"),
    ({"response_mask": torch.ones(2, 5)}, "response_mask: expected"),
    ({"backend": "triton"}, "backend"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_bad_input_is_refused_by_name(change: dict[str, Any], message: str, backend: str) -> None:
    arguments = {"part_rewards": PARTS, "backend": backend} | change
    with pytest.raises(ValueError, match=f"gdpo_advantage: .*{message}"):
        gdpo_advantage(arguments.pop("part_rewards"), UIDS, **arguments)


def test_parts_that_are_no_tensor() -> None:
    with pytest.raises(TypeError, match="part_rewards: expected a torch tensor, got list"):
        gdpo_advantage([[1.0]], ["a"])  # type: ignore[arg-type]


@given(st.integers(0, 2**31), st.sampled_from([1, 2, 31, 32, 33, 1000]), st.integers(1, 4))
def test_native_equals_reference(seed: int, num_rows: int, num_parts: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    parts = torch.randint(-2, 3, (num_rows, num_parts), generator=generator) / 4
    last = torch.rand(num_rows, generator=generator) < 0.5
    last[-1] = True
    trajectories = last.cumsum(0) - last.long()
    groups = torch.randint(0, 1 + num_rows // 4, (num_rows,), generator=generator)[trajectories]
    weights = torch.randn(num_parts, generator=generator).tolist()
    native, plain = (
        gdpo_advantage(parts, groups, weights=weights, is_last_step=last, backend=backend)
        for backend in ("native", "torch")
    )
    torch.testing.assert_close(native, plain, **CLOSE)
