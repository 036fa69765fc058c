"""Rows between flat and padded on a GPU, and its kernels emulated on the CPU: as on the CPU."""

from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from skyrl_fast import _C, padded_to_varlen, varlen_to_padded
from skyrl_fast.ops.pack.varlen import pattern_of

DTYPES = [torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64]
DTYPES += [torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.spec("batch.flat-round-trip", "batch.cu-seqlens", "batch.gpu-no-sync")
@given(
    lengths=st.lists(st.integers(0, 9), min_size=0, max_size=7),
    extra=st.integers(0, 3),
    cell=st.sampled_from([(), (1,), (3,), (8,), (2, 5)]),
    dtype=st.sampled_from(DTYPES),
    side=st.sampled_from(["left", "right", "both"]),
    order=st.integers(0, 3),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_round_trip(
    emulated_gpu: ModuleType,
    lengths: list[int],
    extra: int,
    cell: tuple[int, ...],
    dtype: torch.dtype,
    side: str,
    order: int,
) -> None:
    emulated_gpu.set_order(order)
    sizes = torch.tensor(lengths, dtype=torch.int64)
    width = max(lengths, default=0) + extra
    g = torch.Generator().manual_seed(sum(lengths))
    padded = torch.randint(0, 2, (len(lengths), width, *cell), generator=g).to(dtype)
    rows: dict[str, Any] = {"side": side}
    if side == "both":
        rows["starts"] = (torch.rand(len(lengths), generator=g) * (width - sizes + 1)).long()
    got = padded_to_varlen(padded, lengths=sizes, **rows)
    want = padded_to_varlen(padded, lengths=sizes, **rows, backend="torch")
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    options = {"width": width, **rows, "pad_value": 1}
    back = varlen_to_padded(got.values, got.cu_seqlens, **options)
    assert torch.equal(back, varlen_to_padded(*want[:2], **options, backend="torch"))


@pytest.mark.parametrize("width", [101, 104, 3000])  # the last: several parts of a row
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.float32, torch.int64])
def test_rows_of_every_length_and_alignment(gpu: str, dtype: torch.dtype, width: int) -> None:
    g = torch.Generator().manual_seed(0)
    lengths = torch.randperm(101, generator=g)
    if width > 101:
        lengths = torch.cat([lengths, torch.randint(width // 2, width, (20,), generator=g)])
    padded = torch.randint(0, 100, (len(lengths), width), generator=g).to(dtype)
    starts = (torch.rand(len(lengths), generator=g) * (width - lengths + 1)).long()
    rows: dict[str, Any] = {"side": "both", "starts": starts}
    got = padded_to_varlen(padded.to(gpu), lengths=lengths, **rows)
    want = padded_to_varlen(padded, lengths=lengths, **rows, backend="torch")
    assert all(torch.equal(a.cpu(), b) for a, b in zip(got[:3], want[:3], strict=True))
    options = {"width": width, **rows, "pad_value": 7}
    back = varlen_to_padded(got.values, want.cu_seqlens, **options)
    assert torch.equal(back.cpu(), varlen_to_padded(*want[:2], **options, backend="torch"))


@pytest.mark.parametrize("hidden", [1, 7, 4096])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_hidden_states_and_their_gradient(gpu: str, dtype: torch.dtype, hidden: int) -> None:
    padded = torch.randn(3, 6, hidden, generator=torch.Generator().manual_seed(0)).to(dtype)
    lengths = torch.tensor([4, 0, 6])
    leaf = padded.to(gpu).requires_grad_()
    flat = padded_to_varlen(leaf, lengths=lengths)
    out = varlen_to_padded(flat.values * 2, flat.cu_seqlens, width=7, side="right", pad_value=-1)
    assert torch.equal(out[0, :4].cpu(), padded[0, 2:] * 2) and bool((out[1] == -1).all())
    out.sum().backward()
    want = torch.zeros(3, 6, hidden)
    want[0, 2:] = want[2] = 2.0
    assert torch.equal(leaf.grad.cpu().float(), want)


@pytest.mark.parametrize("cell", [1, 16])
def test_row_larger_than_one_launch(gpu: str, cell: int) -> None:
    """17 MB of row and 17 MB of padding, 16-byte aligned and not."""
    width = (17 << 20) // cell + 1
    flat = torch.arange(width * cell, dtype=torch.int32).to(torch.uint8).view(width, cell)
    cu, lengths = torch.tensor([0, width]), torch.tensor([width])
    padded = varlen_to_padded(flat.to(gpu), cu, width=2 * width, pad_value=3)
    assert torch.equal(padded[0, width:].cpu(), flat) and bool((padded[0, :width] == 3).all())
    assert torch.equal(padded_to_varlen(padded, lengths=lengths).values.cpu(), flat)
    if gpu == "cpu":
        assert _C.last_launch()[1] == 1024  # blocks per row; a launch may have 65,535


def test_gradcheck(gpu: str) -> None:
    lengths = torch.tensor([2, 0, 3])
    padded = torch.randn(3, 4, 2, dtype=torch.float64, device=gpu, requires_grad=True)
    assert gradcheck(lambda x: padded_to_varlen(x, lengths=lengths).values, padded)
    cu = torch.tensor([0, 2, 2, 5])
    flat = torch.randn(5, 2, dtype=torch.float64, device=gpu, requires_grad=True)
    assert gradcheck(lambda x: varlen_to_padded(x, cu, width=4), flat)


@pytest.mark.parametrize(("side", "first"), [("left", 2), ("right", 0), ("both", 1)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_lengths_from_a_mask(gpu: str, dtype: torch.dtype, side: str, first: int) -> None:
    lengths, starts = torch.tensor([2, 0, 4]), torch.tensor([first, 0, 0])
    columns = torch.arange(4)
    mask = (columns >= starts[:, None]) & (columns < (starts + lengths)[:, None])
    padded = torch.arange(12).view(3, 4).to(gpu)
    got = padded_to_varlen(padded, mask.to(gpu, dtype), side=side)
    rows = {"starts": starts} if side == "both" else {}
    want = padded_to_varlen(padded, lengths=lengths, side=side, **rows)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(
    ("row", "side"),
    [
        *(([1, 0, 1, 1], "left"), ([1, 1, 0, 0], "left"), ([0, 2, 1, 1], "left")),
        *(([1, 0, 1, 1], "both"), ([0, 2, 2, 0], "both"), ([0, -1, 1, 0], "both")),
    ],
)
def test_mask_with_holes_is_refused(gpu: str, row: list[int], side: str) -> None:
    mask = torch.tensor([[0, 1, 1, 1], row]).to(gpu)
    with pytest.raises(ValueError, match="something else in row 1"):
        padded_to_varlen(torch.zeros(2, 4, device=gpu), mask, side=side)


def test_pattern() -> None:
    assert pattern_of(1, torch.int32) == bytes([1, 0, 0, 0]) * 4
    assert pattern_of(-1, torch.int8) == bytes([255]) * 16
    assert pattern_of(1.0, torch.bfloat16) == bytes([0x80, 0x3F]) * 8
    assert pattern_of(True, torch.bool) == bytes([1]) * 16


@pytest.mark.gpu
def test_offsets_beyond_32_bits_in_one_row() -> None:
    length = 2**28 + 1  # cells of 16 bytes
    flat = torch.arange(2 * length, device="cuda").view(length, 2)
    cu, lengths = torch.tensor([0, length]), torch.tensor([length])
    padded = varlen_to_padded(flat, cu, width=length + 1, pad_value=-1)
    assert torch.equal(padded[0, 1:], flat) and padded[0, 0].tolist() == [-1, -1]
    assert torch.equal(padded_to_varlen(padded, lengths=lengths).values, flat)


@pytest.mark.gpu
def test_no_device_synchronization() -> None:
    padded, lengths = torch.randn(3, 6, 8, device="cuda"), torch.tensor([4, 0, 6])
    cu = torch.tensor([0, 4, 4, 10])
    torch.cuda.set_sync_debug_mode("error")
    try:
        values = padded_to_varlen(padded, lengths=lengths).values
        varlen_to_padded(values, cu)
    finally:
        torch.cuda.set_sync_debug_mode("default")
