"""Counts, sums, quotients, products, copies of rows of cells; lists with common prefixes."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_fast import Concat, pack_steps
from skyrl_fast.ops.pack.cell_rows import (
    copy_cells,
    count_nonzeros,
    divide_rows,
    multiply_rows,
    sum_rows,
)

SHAPES = [(1, 1), (3, 0), (5, 17), (2100, 1031)]  # the last one uses two threads


@pytest.mark.parametrize("shape", SHAPES)
def test_count_nonzeros(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    cells = torch.from_numpy(rng.choice([0.0, 0.0, 1.0, -0.0, 2.5, np.nan], shape)).float()
    ids = torch.from_numpy(rng.permutation(shape[0])[: shape[0] // 2 + 1].copy())
    for row_ids in (None, ids):
        chosen = cells if row_ids is None else cells[row_ids]
        nonzeros, lasts, others = count_nonzeros(cells, row_ids)
        assert others == int(((chosen != 0) & (chosen != 1)).sum())
        assert torch.equal(nonzeros, (chosen != 0).sum(1))
        want = [next((v for v in row[::-1] if v != 0), 0.0) for row in chosen.tolist()]
        torch.testing.assert_close(lasts, torch.tensor(want), rtol=0, atol=0, equal_nan=True)


def test_count_nonzeros_of_missing_rows_is_refused() -> None:
    for row in (-1, 2):
        with pytest.raises(ValueError, match="rows of cells"):
            count_nonzeros(torch.ones(2, 3), torch.tensor([row]))


@pytest.mark.parametrize("num_rows", [0, 1, 5, 4001])  # the last one uses two threads
def test_sum_rows(num_rows: int) -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 1100, num_rows)
    lengths[::7] = 0
    cu = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    cells = torch.from_numpy(rng.standard_normal(int(cu[-1]) + 3)).float()
    rows = [cells[a:b].double().sum() for a, b in zip(cu.tolist(), cu.tolist()[1:], strict=False)]
    sums = sum_rows(cells, cu)
    torch.testing.assert_close(sums, torch.tensor(rows, dtype=torch.float64), rtol=0, atol=1e-11)


@pytest.mark.parametrize("offsets", [[-1, 2], [0, 2, 1], [0, 4], [1, 0]])
def test_sum_rows_with_invalid_offsets_is_refused(offsets: list[int]) -> None:
    with pytest.raises(ValueError, match="sum_rows: cu_seqlens: expected non-decreasing offsets"):
        sum_rows(torch.ones(3), torch.tensor(offsets, dtype=torch.int32))
    with pytest.raises(ValueError, match="cu_seqlens"):
        sum_rows(torch.ones(3), torch.zeros(0, dtype=torch.int32))


@pytest.mark.parametrize("shape", SHAPES)
def test_divide_and_multiply(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    cells, values = torch.randn(shape), torch.randn(shape[0])
    mask = torch.randint(0, 3, shape)
    out = torch.empty(shape)
    for divisors in (values, torch.tensor([3.0])):
        divide_rows(cells, divisors, out)
        assert torch.equal(out, cells / divisors[:, None])
    out, counts = multiply_rows(values, mask)
    assert torch.equal(out, values[:, None] * mask.float())
    assert torch.equal(counts, (mask != 0).sum(1))


@pytest.mark.parametrize("shape", [(0,), (1,), (7, 3), (3, 0, 2), (2100, 1031), (5100, 1031)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.int64, torch.complex64])
@pytest.mark.parametrize("skipped", [0, 1])
def test_copy(shape: tuple[int, ...], dtype: torch.dtype, skipped: int) -> None:
    torch.manual_seed(0)
    cells = torch.randint(0, 2**15, (shape[0] + skipped, *shape[1:])).to(dtype)[skipped:]
    full = torch.zeros(shape[0] + 2, *shape[1:], dtype=dtype)
    copy_cells(cells, full[1:-1])  # starts and ends within a cache line
    assert torch.equal(full[1:-1], cells)
    assert not full[0].any() and not full[-1].any()


def test_copy_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="as large as cells"):
        copy_cells(torch.ones(2, 3), torch.ones(7))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_lists_with_a_common_prefix(data: st.DataObject) -> None:
    """A context grows by the same objects; rows in between are new, or differ early."""
    numbers = st.sampled_from([0, 1, 70_000, 2**31 - 1])
    rows: list[list[int]] = [[]]
    for _ in range(data.draw(st.integers(1, 9))):
        kept = rows[-1][: data.draw(st.integers(0, len(rows[-1])))]
        more = data.draw(st.integers(0, 150))
        rows.append(kept + [data.draw(numbers) for _ in range(min(more, 3))] + [9] * (more - 3))
    tail = [[5]] * len(rows)
    packed = pack_steps({"tokens": Concat(rows, tail)})["tokens"]
    assert packed.values.tolist() == [v for row in rows for v in [*row, 5]]


@pytest.mark.parametrize("bad", ["x", None, 2**40, True])
def test_error_in_shared_elements_names_the_first_row(bad: object) -> None:
    rows = [[1, 2], [1, 2, bad, 3]]
    rows.append(rows[1] + [4])
    with pytest.raises((TypeError, ValueError), match="row 1, position 2"):
        pack_steps({"tokens": rows})
