"""group_advantage: docs/spec.md section 5."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from skyrl_fast import _C, group_advantage
from skyrl_fast.ops import _backend
from skyrl_fast.ops.advantage import reference

F32 = 2e-6  # float32 results of float64 statistics: one rounding of values up to about 10
ESTIMATORS = ["grpo", "dr_grpo", "rloo", "maxrl"]
HALF_ROOT = 1 / math.sqrt(2)

# Two trajectories of one group: rows 0-1 with reward 1, rows 2-4 with reward 0.
WORKED = {
    "grpo": [HALF_ROOT, HALF_ROOT, -HALF_ROOT, -HALF_ROOT, -HALF_ROOT],
    "dr_grpo": [0.5, 0.5, -0.5, -0.5, -0.5],
    "rloo": [1.0, 1.0, -1.0, -1.0, -1.0],
    "maxrl": [1.0, 1.0, -1.0, -1.0, -1.0],
}


@pytest.mark.spec(
    "advantage.outcome",
    "advantage.grpo",
    "advantage.dr-grpo",
    "advantage.rloo",
    "advantage.maxrl",
    "advantage.worked-example",
)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_worked_example(estimator: str, backend: str) -> None:
    got = group_advantage(
        torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0]),
        ["a"] * 5,
        is_last_step=[False, True, False, False, True],
        estimator=estimator,
        backend=backend,
    )
    # the 1e-6 added to the deviation changes the fifth digit
    torch.testing.assert_close(got, torch.tensor(WORKED[estimator]), atol=5e-6, rtol=0)


@pytest.mark.spec("advantage.grpo", "advantage.dr-grpo", "advantage.rloo", "advantage.maxrl")
@pytest.mark.parametrize(
    ("estimator", "alone"), [("grpo", 3.0), ("dr_grpo", 3.0), ("rloo", 0.0), ("maxrl", 3.0)]
)
def test_group_of_one(estimator: str, alone: float, backend: str) -> None:
    got = group_advantage(torch.tensor([3.0]), ["a"], estimator=estimator, backend=backend)
    torch.testing.assert_close(got, torch.tensor([alone]), atol=5e-6, rtol=0)


@pytest.mark.spec("advantage.response-mask")
def test_each_row_uses_its_own_mask(backend: str) -> None:
    rewards = torch.tensor([[0.0, 9.0], [0.0, 1.0], [0.0, 0.0]])
    mask = torch.tensor([[1, 0], [0, 1], [1, 1]])
    got = group_advantage(
        rewards,
        ["a", "a", "a"],
        is_last_step=[False, True, True],
        response_mask=mask,
        estimator="rloo",
        backend=backend,
    )
    assert got.tolist() == [[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]]


@pytest.mark.spec("advantage.score")
def test_intermediate_rewards_are_ignored(backend: str) -> None:
    rewards = torch.tensor([float("nan"), 1.0, float("inf"), 0.0])
    last = [False, True, False, True]
    got = group_advantage(rewards, [7] * 4, is_last_step=last, estimator="rloo", backend=backend)
    assert got.tolist() == [1.0, 1.0, -1.0, -1.0]


@pytest.mark.spec("advantage.group-ids")
def test_groups_need_not_be_adjacent(backend: str) -> None:
    rewards = torch.tensor([1.0, 5.0, 0.0, 7.0])
    got = group_advantage(rewards, ["a", "b", "a", "b"], estimator="rloo", backend=backend)
    assert got.tolist() == [1.0, -2.0, -1.0, 2.0]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_equal_rewards_give_zero(estimator: str, backend: str) -> None:
    got = group_advantage(torch.full((4,), 0.1), ["a"] * 4, estimator=estimator, backend=backend)
    # float32 0.1 summed in float64 has a mean equal to itself
    assert got.abs().max() < 1e-6


@pytest.mark.spec("advantage.variance")
def test_low_variance_groups_keep_their_variance(backend: str) -> None:
    # E[x^2] - E[x]^2 loses all digits here, also in float64 for the larger offsets
    rewards = torch.tensor([4096.0, 4096.0005, 4096.001])
    got = group_advantage(rewards, ["a"] * 3, backend=backend)
    exact = reference.group_advantage(
        rewards.double(), torch.zeros(3, dtype=torch.int64), torch.ones(3, dtype=torch.bool), "grpo"
    )
    torch.testing.assert_close(got, exact.float(), atol=F32, rtol=0)
    assert got[2] > 0.9


@pytest.mark.spec("advantage.group-ids")
@pytest.mark.parametrize("ids", [["u", "v", "u"], [1, 2, 1], torch.tensor([5, -9, 5])])
def test_ids_are_strings_or_ints(ids: object, backend: str) -> None:
    got = group_advantage(torch.tensor([1.0, 4.0, 3.0]), ids, estimator="dr_grpo", backend=backend)
    assert got.tolist() == [-1.0, 4.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float32])
def test_mask_dtypes(dtype: torch.dtype, backend: str) -> None:
    mask = torch.tensor([[1, 1, 0], [0, 0, 1]]).to(dtype)
    got = group_advantage(
        torch.tensor([2.0, 0.0]), ["a", "a"], response_mask=mask, estimator="rloo", backend=backend
    )
    assert got.tolist() == [[2.0, 2.0, 0.0], [0.0, 0.0, -2.0]]
    assert got.dtype == torch.float32


def test_empty_batch(backend: str) -> None:
    got = group_advantage(torch.zeros(0, 4), [], response_mask=torch.zeros(0, 4), backend=backend)
    assert got.shape == (0, 4)


def test_ragged_rows_may_be_empty(backend: str) -> None:
    cu = torch.tensor([0, 2, 2, 4])
    got = group_advantage(
        torch.tensor([0.25, 0.75, 3.0, 1.0]),
        ["a", "a", "b"],
        cu_seqlens=cu,
        estimator="dr_grpo",
        backend=backend,
    )
    assert got.tolist() == [0.5, 0.5, 4.0, 4.0]


def test_as_many_rewards_as_rows_are_rewards_of_rows(backend: str) -> None:
    # Three rows of 0, 2 and 1 tokens: three rewards could be of tokens, too.
    got = group_advantage(
        torch.tensor([5.0, 1.0, 0.0]),
        ["a", "a", "a"],
        cu_seqlens=torch.tensor([0, 0, 2, 3]),
        estimator="dr_grpo",
        backend=backend,
    )
    assert got.tolist() == [-1.0, -1.0, -2.0]


def test_non_contiguous_rewards(backend: str) -> None:
    rewards = torch.tensor([[1.0, 9.0], [3.0, 9.0]])[:, 0]
    got = group_advantage(rewards, ["a", "a"], estimator="dr_grpo", backend=backend)
    assert got.tolist() == [-1.0, 1.0]


BAD = [
    ({"estimator": "gae"}, "temporal"),
    ({"estimator": "reinforce++"}, "temporal"),
    ({"estimator": "ppo"}, "estimator: expected one of"),
    ({"group_ids": ["a", "a"]}, "rewards: expected one row per group id"),
    ({"group_ids": ["a", "b", "b"], "is_last_step": [False, True, True]}, "row 0"),
    ({"is_last_step": [True, True, False]}, "is_last_step: expected True in the last row"),
    ({"is_last_step": [True, True]}, "is_last_step: expected shape"),
    ({"rewards": torch.tensor([1.0, float("nan"), 0.0])}, "row 1"),
    ({"rewards": torch.tensor([1.0, 0.0, float("-inf")])}, "row 2"),
    ({"rewards": torch.tensor([1, 0, 0])}, "rewards: expected a floating-point tensor"),
    ({"response_mask": torch.ones(2, 5)}, "response_mask: expected"),
    ({"backend": "cuda"}, "backend: expected one of"),
    ({"cu_seqlens": torch.tensor([0, 2, 1, 3])}, "cu_seqlens: expected"),
]


@pytest.mark.spec(
    "advantage.last-row-is-last", "advantage.one-group-per-trajectory", "advantage.non-finite-score"
)
@pytest.mark.parametrize(("change", "message"), BAD)
def test_invalid_input_error_names_the_argument(change: dict, message: str, backend: str) -> None:
    args = {"rewards": torch.tensor([1.0, 0.0, 2.0]), "group_ids": ["a"] * 3, "backend": backend}
    args |= change
    with pytest.raises(ValueError, match=message):
        group_advantage(args.pop("rewards"), args.pop("group_ids"), **args)


@pytest.mark.parametrize("bad", [[1.5, 2.0], [None, None], [("a",), ("b",)]])
def test_group_ids_of_other_types_are_refused(bad: list) -> None:
    with pytest.raises(TypeError, match="entry 0"):
        group_advantage(torch.ones(2), bad)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tensor_without_memory_is_refused() -> None:
    with FakeTensorMode(), pytest.raises((ValueError, RuntimeError), match=r"FakeTensor|memory"):
        group_advantage(torch.ones(2), ["a", "b"])


def test_unavailable_backend_is_an_error() -> None:
    with pytest.raises(ValueError, match="cannot run on cpu"):
        group_advantage(torch.ones(1), ["a"], backend="triton")


@st.composite
def batches(draw: st.DrawFn) -> dict:
    """Random trajectories of random groups, with ragged responses."""
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=40))  # rows per trajectory
    groups = draw(st.lists(st.integers(0, 6), min_size=len(lengths), max_size=len(lengths)))
    ids = [g for g, n in zip(groups, lengths, strict=True) for _ in range(n)]
    last = [k == n - 1 for n in lengths for k in range(n)]
    cells = draw(st.lists(st.integers(0, 33), min_size=len(ids), max_size=len(ids)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    return {"ids": ids, "last": torch.tensor(last), "cells": cells, "generator": generator}


@given(batches(), st.sampled_from(ESTIMATORS), st.booleans())
def test_native_equals_reference(batch: dict, estimator: str, per_token: bool) -> None:
    cu = torch.tensor([0, *batch["cells"]]).cumsum(0)
    total, num_rows = int(cu[-1]), len(batch["ids"])
    size = total if per_token else num_rows
    # positive scores: MaxRL divides by their mean
    rewards = torch.rand(size, generator=batch["generator"]) + 0.5
    mask = torch.rand(total, generator=batch["generator"]) > 0.3
    args = {"is_last_step": batch["last"], "cu_seqlens": cu, "estimator": estimator}
    if total == num_rows and not per_token:
        args["cu_seqlens"], mask = None, mask[:num_rows]
    native = group_advantage(rewards, batch["ids"], response_mask=mask, backend="native", **args)
    plain = group_advantage(rewards, batch["ids"], response_mask=mask, backend="torch", **args)
    # Dividing by a tiny deviation only magnifies the rounding of a float64 sum.
    torch.testing.assert_close(native, plain, atol=1e-5, rtol=1e-5)


def test_result_does_not_depend_on_the_number_of_threads() -> None:
    generator = torch.Generator().manual_seed(0)
    rewards = torch.rand(4096, 512, generator=generator)
    mask = torch.ones(4096, 512, dtype=torch.int64)
    ids = [i // 8 for i in range(4096)]
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 7):
            torch.set_num_threads(threads)
            assert _backend.num_threads() == threads
            results.append(group_advantage(rewards, ids, response_mask=mask))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0], r) for r in results[1:])


def test_numpy_ids_and_read_only_flags() -> None:
    import numpy as np

    got = group_advantage(
        torch.tensor([1.0, 3.0]), np.array([4, 4]), is_last_step=np.array([True, True])
    )
    assert got.shape == (2,)


class ShrinksTheList(int):
    """An id whose hash clears the list that contains it."""

    victim: list

    def __hash__(self) -> int:
        self.victim.clear()
        return 0


def test_list_changed_while_it_is_read() -> None:
    ids: list = [ShrinksTheList(1), 2, 3]
    ids[0].victim = ids
    with pytest.raises(ValueError, match="group_ids changed its length from 3 to 0"):
        group_advantage(torch.ones(3), ids)


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64, torch.float32, None])
@pytest.mark.parametrize("width", [1, 15, 16, 17, 61, 130, 4099])
def test_simd_levels_are_bit_identical(width: int, mask_dtype: torch.dtype | None) -> None:
    """Rows start anywhere in a cache line; at 4,099 the output uses non-temporal stores."""
    num_rows = 1100 if width > 4000 else 24
    generator = torch.Generator().manual_seed(width)
    rewards = torch.randint(0, 9, (num_rows, width), generator=generator).float()  # exact sums
    cells = torch.randint(0, 2, rewards.shape, generator=generator)
    mask = None if mask_dtype is None else cells.to(mask_dtype)
    best, results = _C.simd_level(), []
    for level in ["baseline", "avx2", "avx512"][: ["baseline", "avx2", "avx512"].index(best) + 1]:
        _C.set_simd_level(level)
        try:
            results.append(
                group_advantage(rewards, torch.arange(num_rows) // 4, response_mask=mask)
            )
        finally:
            _C.set_simd_level(best)
    assert all(torch.equal(results[0], other) for other in results[1:])
    per_row = group_advantage(rewards.sum(1), torch.arange(num_rows) // 4)
    wanted = per_row[:, None] * (torch.ones_like(rewards) if mask is None else mask.float())
    torch.testing.assert_close(results[0], wanted, atol=F32, rtol=1e-4)
