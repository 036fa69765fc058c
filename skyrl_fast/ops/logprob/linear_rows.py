"""Chunks of `linear_logprob`: forward and backward of trained rows. M rows, V vocab, H hidden.

Design: docs/design/004-logprob.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from skyrl_fast.ops import _backend
from skyrl_fast.ops.logprob import autograd as logprob_op
from skyrl_fast.ops.logprob.kept import KeptSets, slice_sets

OP = "linear_logprob"
# Of logits on a CPU. Up to here all are saved, which spares the backward a product and float32
# sums; otherwise chunks are just large enough for the products to run at full speed.
SAVED_BYTES = 1 << 30
CHUNK_BYTES = 128 << 20
GPU_CHUNK_BYTES = 512 << 20  # on a GPU: 1,766 rows of 151,936 bfloat16 logits
GPU_ROW_MULTIPLE = 128  # rows per tile of a GPU's matrix products
COLUMN_MULTIPLE = 8  # vocabulary parts are multiples: rows of 16-bit logits are 16-byte aligned
MIN_CHUNK_ROWS = 64
COPIED_COLUMNS = 8192  # columns converted to float32 at once: large enough for full speed
OnLogits = Callable[[int, torch.Tensor, float], None]
HAS_MIXED_PRODUCT = hasattr(torch.ops.aten.addmm, "dtype_out")  # torch 2.8 and newer


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the kernels, as in `linear_logprob`."""

    # The kernels see a chunk and divide it by `divisor`: the product itself, or its tanh.

    temperature: float
    logit_scale: float
    soft_cap: float | None
    return_entropy: bool
    chunk_rows: int
    use_triton: bool
    on_logits: OnLogits | None = None

    @property
    def divisor(self) -> float:
        return self.temperature / (self.soft_cap or self.logit_scale)

    def write_chunk(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        chunk: torch.Tensor,
    ) -> None:
        """Write the product of some rows, or some columns, of all."""
        if bias is None:
            torch.mm(hidden, weight.T, out=chunk)
        else:
            torch.addmm(bias, hidden, weight.T, out=chunk)
        if self.soft_cap is not None:
            # In place: a chunk is the largest tensor of a step.
            chunk.mul_(self.logit_scale / self.soft_cap).tanh_()

    def to_product(self, gradient: torch.Tensor, chunk: torch.Tensor) -> None:
        """Turn the gradient of a chunk, in place, into that of the product before the tanh."""
        if self.soft_cap is not None:
            # (1 - tanh^2) of the cap's input; the kernels have divided by the cap
            slope = chunk.square_().neg_().add_(1.0)
            gradient.mul_(slope).mul_(self.logit_scale / self.soft_cap)


def default_chunk_rows(
    weight: torch.Tensor, num_rows: int, *, on_gpu: bool, saved_logits_bytes: int | None = None
) -> int:
    """Return the rows of a chunk of logits; on a GPU full tiles of the product."""
    row_bytes = weight.shape[0] * weight.element_size()
    if saved_logits_bytes is None:
        saved_logits_bytes = 0 if on_gpu else SAVED_BYTES
    if num_rows * row_bytes <= saved_logits_bytes:
        # The step of a range, which must not be 0.
        return max(num_rows, 1)
    if not on_gpu:
        return max(CHUNK_BYTES // row_bytes, MIN_CHUNK_ROWS)
    tiles = GPU_CHUNK_BYTES // row_bytes // GPU_ROW_MULTIPLE
    return max(tiles, 1) * GPU_ROW_MULTIPLE


def spread(values: torch.Tensor, rows: torch.Tensor | None, shape: torch.Size) -> torch.Tensor:
    """Return `shape` zeros with the values at their rows."""
    if rows is None:
        return values.view(shape)
    # Differentiable: without a trained row, too, the result belongs to the graph.
    zeros = values.new_zeros(shape.numel())
    return zeros.index_put((rows,), values).view(shape)


def forward_rows(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    kept: KeptSets | None,
    options: Options,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (M,) log-probabilities, entropies, log-sum-exps, and the last chunk's logits."""
    num_rows = hidden.shape[0]
    chunk_rows = options.chunk_rows
    shape = (min(chunk_rows, num_rows), weight.shape[0])
    # One chunk, which all rows take turns in.
    logits = _backend.empty(shape, hidden.dtype, hidden.device)
    parts = []
    arguments = (None, options.divisor, options.return_entropy, options.use_triton)
    for start in range(0, num_rows, chunk_rows):
        chunk = logits[: min(chunk_rows, num_rows - start)]
        options.write_chunk(hidden[start : start + chunk_rows], weight, bias, chunk)
        if options.on_logits is not None:
            options.on_logits(start, chunk, options.divisor)
        chunk_targets = targets[start : start + chunk_rows]
        sets = () if kept is None else kept.of_rows(slice(start, start + chunk_rows))
        parts.append(logprob_op.forward(chunk, chunk_targets, *arguments, *sets))
    # Without rows the results have their dtypes all the same.
    if not parts:
        parts.append(logprob_op.forward(logits, targets, *arguments))
    logprob, entropy, lse = (torch.cat(column) for column in zip(*parts, strict=True))
    return logprob, entropy, lse, logits


def backward_rows(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    entropy: torch.Tensor,
    lse: torch.Tensor,
    kept: KeptSets | None,
    options: Options,
    logits: torch.Tensor | None,
    grad_logprob: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
    *,
    wanted: Sequence[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of hidden, weight and bias, those that are wanted.

    Args:
        logits: (M, V) of the forward, which are overwritten, or None: they are recomputed.
    """
    wants_hidden, wants_weight, wants_bias = wanted
    num_rows = hidden.shape[0]
    vocab = weight.shape[0]
    # Parts of the vocabulary, as the log-sum-exps are known: a part of the weight's gradient is one
    # product, and only hidden's, which is small, is a sum over parts (docs/design/004).
    columns = vocab
    if options.chunk_rows < num_rows:
        columns = min(vocab, _chunk_columns(options.chunk_rows, num_rows, vocab))
    # Saved by the forward, whose only chunk they were.
    known = logits is not None
    if logits is None:
        logits = _backend.empty((num_rows * columns,), hidden.dtype, hidden.device)
    # The slope of the cap is computed from the capped logits, which must outlive their gradient's
    # writing.
    if options.soft_cap is None:
        d_logits = logits
    else:
        d_logits = torch.empty_like(logits)
    d_weight = d_bias = None
    if wants_weight:
        d_weight = _backend.empty(weight.shape, weight.dtype, weight.device)
    if wants_bias:
        d_bias = torch.empty_like(weight[:, 0])
    # The only sum over chunks, in float32 unless it is a single product.
    if columns < vocab:
        sums = torch.float32
    else:
        sums = hidden.dtype
    if wants_hidden:
        d_hidden = torch.empty_like(hidden, dtype=sums)
    else:
        d_hidden = None
    for start in range(0, vocab, columns):
        part = weight[start : start + columns]
        # The last part is narrower; its rows are adjacent in the same memory.
        chunk, d_chunk = (
            x.view(-1)[: num_rows * len(part)].view(num_rows, len(part)) for x in (logits, d_logits)
        )
        if not known:
            if bias is None:
                part_bias = None
            else:
                part_bias = bias[start : start + columns]
            options.write_chunk(hidden, part, part_bias, chunk)
        part_targets = targets
        part_kept = kept
        if len(part) < vocab:
            part_targets = _slice_targets(targets, start, len(part))
            if kept is None:
                part_kept = None
            else:
                part_kept = slice_sets(kept, start, len(part))
        logprob_op.write_gradient(
            chunk,
            part_targets,
            None,
            options.divisor,
            lse,
            entropy,
            grad_logprob,
            grad_entropy,
            d_chunk,
            options.use_triton,
            *(part_kept or ()),
        )
        options.to_product(d_chunk, chunk)
        if d_hidden is not None and columns == vocab:
            torch.mm(d_chunk, part, out=d_hidden)
        elif d_hidden is not None:
            _add_product(d_hidden, d_chunk, part, is_first=start == 0)
        if d_weight is not None:
            torch.mm(d_chunk.T, hidden, out=d_weight[start : start + columns])
        if d_bias is not None:
            # In float32: it is a sum over all rows.
            d_bias[start : start + columns] = d_chunk.sum(0, dtype=torch.float32)
    if d_hidden is not None:
        d_hidden = d_hidden.to(hidden.dtype)
    return d_hidden, d_weight, d_bias


def _chunk_columns(chunk_rows: int, num_rows: int, vocab: int) -> int:
    """Return the columns of a chunk of all rows, of the size of `chunk_rows` complete rows."""
    tiles = chunk_rows * vocab // max(num_rows, 1) // COLUMN_MULTIPLE
    return max(tiles, 1) * COLUMN_MULTIPLE


def _slice_targets(targets: torch.Tensor, start: int, width: int) -> torch.Tensor:
    """Return the targets relative to a slice's first column; -1 outside the slice."""
    relative = targets - start
    return torch.where((relative >= 0) & (relative < width), relative, -1)


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, is_first: bool) -> None:
    """Add a @ b to float32 `total` in float32; `is_first`: overwrite instead."""
    if a.dtype == torch.float32:
        total.addmm_(a, b, beta=0 if is_first else 1)
    elif a.is_cuda and HAS_MIXED_PRODUCT:
        # 16-bit operands, float32 sums: the tensor cores do this without copies of the operands
        beta = 0 if is_first else 1
        torch.ops.aten.addmm.dtype_out(total, a, b, torch.float32, beta=beta, out=total)
    else:  # convert the operands, some columns at a time
        for start in range(0, len(b), COPIED_COLUMNS):
            columns = slice(start, start + COPIED_COLUMNS)
            if is_first and start == 0:
                beta = 0
            else:
                beta = 1
            total.addmm_(a[:, columns].float(), b[columns].float(), beta=beta)
