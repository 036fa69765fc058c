"""Log-probabilities from hidden states. M trained rows, V vocab, H hidden."""

from __future__ import annotations

from typing import Any

import torch

from skyrl_fast.ops import _backend
from skyrl_fast.ops.logprob import autograd as logprob_op
from skyrl_fast.ops.logprob import reference
from skyrl_fast.ops.logprob.kept import KeptSets, check_kept, kept_sets, slice_sets
from skyrl_fast.ops.logprob.selected import (
    KERNEL_DTYPES,
    ON_GPU,
    as_uint8,
    check_selection,
    check_targets,
)

OP = "linear_logprob"
CHUNK_BYTES = 128 << 20  # of logits: large enough for the matrix products to run at full speed
GPU_CHUNK_BYTES = 512 << 20  # the same on a GPU: 1,766 rows of 151,936 bfloat16 logits
GPU_ROW_MULTIPLE = 128  # rows per tile of a GPU's matrix products
COLUMN_MULTIPLE = 8  # of vocabulary parts: every row of 16-bit logits is 16-byte aligned
MIN_CHUNK_ROWS = 64
COPIED_COLUMNS = 8192  # of operands converted to float32 for a product: large enough for full speed
# A row of the head that is gathered, and whose gradient is scattered, costs as much as a logit and
# its gradients in this many rows: by bytes per element, measured on a CPU with 16-bit matrix units.
ROWS_PER_GATHERED = {4: 100, 2: 800}
MIN_VOCAB_PER_ID = 16  # a larger set is a product with the full head
HAS_MIXED_PRODUCT = hasattr(torch.ops.aten.addmm, "dtype_out")  # torch 2.8 and newer


def linear_logprob(
    hidden: torch.Tensor,
    lm_head_weight: torch.Tensor,
    target_ids: torch.Tensor,
    *,
    loss_mask: torch.Tensor | None = None,
    temperature: float = 1.0,
    kept_ids: torch.Tensor | None = None,
    cu_kept: torch.Tensor | None = None,
    return_entropy: bool = False,
    chunk_rows: int | None = None,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probability of one token per row under logits = hidden @ lm_head_weight.T.

    Rows of mask 0 are dropped before the product. The others are processed in chunks, so that at
    most one chunk of logits is in memory: chunks of rows in the forward; in the backward, where the
    log-sum-exps are known, of all rows and a part of the vocabulary, so that only hidden's gradient
    is a sum over chunks, in float32. The backward recomputes the logits, unless there was only one
    chunk, and turns them into their gradient in place. Rows of small kept sets (top_p, say) are
    multiplied with the rows of the head that any of them kept, where that is less work; on a GPU
    their sizes are read, which synchronizes.

    Args:
        hidden: (..., H) float32, bfloat16, float16 or float64.
        lm_head_weight: (V, H) of the same dtype.
        target_ids: (...) integers; in [0, V) where the mask is 1.
        loss_mask: (...) bool or number, or None: all ones.
        temperature: divides the logits; from 1e-6 to 1e30.
        kept_ids, cu_kept: as in `selected_logprob`.
        return_entropy: also return the entropy of softmax(logits / temperature), in nats.
        chunk_rows: rows per chunk; the backward's chunks have the same size. None: 128 MB of logits
            (512 MB on a GPU), at least 64 rows.
        backend: "native", "torch" (which holds the logits of all rows of mask 1), or None.

    Returns:
        (...) float32 (float64 for float64), 0 where the mask is 0; with `return_entropy` a pair.

    Raises:
        ValueError: shapes or dtypes that do not match, a target out of range where the mask is 1,
            temperature or chunk_rows not positive, kept sets as in `selected_logprob`.
        RuntimeError: a forward-mode derivative, which only backend="torch" has.

    Example:
        >>> linear_logprob(torch.zeros(1, 2), torch.zeros(4, 2), torch.tensor([3]))
        tensor([-1.3863])
    """
    _backend.break_graph(OP, "which rows are computed")
    _check_linear(hidden, lm_head_weight, target_ids, loss_mask, temperature, chunk_rows)
    kept = kept_sets(OP, kept_ids, cu_kept, target_ids)
    inputs = (hidden, lm_head_weight, target_ids)
    chosen = _backend.select(OP, *inputs, kept_ids, backend=backend, available_on_gpu=ON_GPU)
    if loss_mask is not None and _backend.device_kind(loss_mask.device) != "cpu":
        _backend.check_device(OP, *inputs, loss_mask)  # a mask on the CPU saves a synchronization
    shape = target_ids.shape
    hidden = hidden.reshape(-1, hidden.shape[-1])
    targets = target_ids.reshape(-1).to(torch.int64)
    if chosen == "torch" or not _backend.on_gpu(hidden):
        keep = as_uint8(loss_mask)
        check_targets(OP, targets, keep, lm_head_weight.shape[0])
        check_kept(OP, kept, targets, keep, lm_head_weight.shape[0])
    rows = None
    if loss_mask is not None:
        rows = (loss_mask.reshape(-1) != 0).nonzero().squeeze(1)
        if rows.device != hidden.device:
            rows = rows.to(hidden.device, non_blocking=True)
        hidden, targets = hidden[rows], targets[rows]
        kept = None if kept is None else kept.of_rows(rows)
    if chosen != "torch" and hidden.dtype in KERNEL_DTYPES:
        on_gpu = _backend.on_gpu(hidden)
        chunk = chunk_rows or default_chunk_rows(lm_head_weight, on_gpu=on_gpu)
        options = (temperature, return_entropy, chunk, chosen == "triton")
        inputs = (hidden, lm_head_weight, targets)
        if kept is None:
            logprob, entropy = _LinearLogprob.apply(*inputs, None, *options)
        else:
            logprob, entropy = _with_sets(*inputs, kept, options)
    else:
        logprob, entropy = reference.linear_logprob(
            hidden, lm_head_weight, targets, None, temperature, kept
        )
    logprob = _spread(logprob, rows, shape)
    return (logprob, _spread(entropy, rows, shape)) if return_entropy else logprob


def _with_sets(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    kept: KeptSets,
    options: tuple[float, bool, int, bool],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities and entropies; rows of small sets read only their part of the head.

    Args:
        options: temperature, return_entropy, chunk_rows, use_triton.
    """
    sizes = kept.sizes
    is_small = (sizes > 0) & (sizes * MIN_VOCAB_PER_ID <= weight.shape[0])
    small = is_small.nonzero().squeeze(1)
    part = kept.of_rows(small)
    ids = part.ids[part.pairs()[1]].clamp(0, weight.shape[0] - 1).unique()
    gathered = ids.numel() * ROWS_PER_GATHERED[weight.element_size()]
    if gathered >= small.numel() * (weight.shape[0] - ids.numel()):
        return _LinearLogprob.apply(hidden, weight, targets, kept, *options)
    found = _over_ids(hidden[small], weight, targets[small], part, ids, options)
    large = (~is_small).nonzero().squeeze(1)
    if large.numel() == 0:
        return found
    others = _LinearLogprob.apply(
        hidden[large], weight, targets[large], kept.of_rows(large), *options
    )
    order = torch.cat([small, large]).argsort()
    logprob, entropy = (torch.cat(pair) for pair in zip(found, others, strict=True))
    return logprob[order], entropy[order] if options[1] else entropy


def _over_ids(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    kept: KeptSets,
    ids: torch.Tensor,
    options: tuple[float, bool, int, bool],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same for a head of the rows `ids`, (U,) ascending, which hold all sets."""

    def place_of(values: torch.Tensor) -> torch.Tensor:
        """Return places in `ids`; -1 where a value is not there (on a GPU: not checked before)."""
        place = torch.searchsorted(ids, values).clamp(max=ids.numel() - 1)
        return torch.where(ids[place] == values, place, -1)

    sizes = kept.sizes
    end = sizes.cumsum(0)
    local = place_of(kept.ids[kept.pairs()[1]]).int()
    sets = KeptSets(local, torch.stack([end - sizes, end], 1))
    temperature, return_entropy, chunk_rows, use_triton = options
    rows = max(chunk_rows * weight.shape[0] // ids.numel(), 1)  # a chunk of the same size
    part = weight.index_select(0, ids)
    arguments = (temperature, return_entropy, rows, use_triton)
    return _LinearLogprob.apply(hidden, part, place_of(targets.int()), sets, *arguments)


def default_chunk_rows(weight: torch.Tensor, *, on_gpu: bool) -> int:
    """Return the rows of a chunk of logits; on a GPU full tiles of the product."""
    row_bytes = weight.shape[0] * weight.element_size()
    if not on_gpu:
        return max(CHUNK_BYTES // row_bytes, MIN_CHUNK_ROWS)
    tiles = GPU_CHUNK_BYTES // row_bytes // GPU_ROW_MULTIPLE
    return max(tiles, 1) * GPU_ROW_MULTIPLE


def _check_linear(
    hidden: torch.Tensor,
    lm_head_weight: torch.Tensor,
    target_ids: torch.Tensor,
    loss_mask: torch.Tensor | None,
    temperature: float,
    chunk_rows: int | None,
) -> None:
    for name, tensor in (("hidden", hidden), ("lm_head_weight", lm_head_weight)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{OP}: {name} must be a torch tensor, got {type(tensor).__name__}")
    if hidden.dim() < 1 or lm_head_weight.dim() != 2 or lm_head_weight.shape[0] < 1:
        raise ValueError(
            f"{OP}: hidden must be (..., H) and lm_head_weight (V, H) with V >= 1, got "
            f"{tuple(hidden.shape)} and {tuple(lm_head_weight.shape)}"
        )
    if hidden.shape[-1] != lm_head_weight.shape[1] or hidden.dtype != lm_head_weight.dtype:
        raise ValueError(
            f"{OP}: lm_head_weight must be (V, {hidden.shape[-1]}) {hidden.dtype} like "
            f"hidden, got {tuple(lm_head_weight.shape)} {lm_head_weight.dtype}"
        )
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"{OP}: chunk_rows must be positive, got {chunk_rows}")
    check_selection(OP, hidden, "hidden", target_ids, loss_mask, temperature)


def _spread(values: torch.Tensor, rows: torch.Tensor | None, shape: torch.Size) -> torch.Tensor:
    """Return `shape` zeros with the values at their rows."""
    if rows is None:
        return values.view(shape)
    zeros = values.new_zeros(shape.numel())
    return zeros.index_put((rows,), values).view(shape)


class _LinearLogprob(torch.autograd.Function):
    """linear_logprob of trained rows only: hidden (M, H), targets (M,)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        kept: KeptSets | None,
        temperature: float,
        return_entropy: bool,
        chunk_rows: int,
        use_triton: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_rows = hidden.shape[0]
        shape = (min(chunk_rows, num_rows), weight.shape[0])
        logits = _backend.empty(shape, hidden.dtype, hidden.device)
        parts = []
        for start in range(0, num_rows, chunk_rows):
            chunk = logits[: min(chunk_rows, num_rows - start)]
            torch.mm(hidden[start : start + chunk_rows], weight.T, out=chunk)
            chunk_targets = targets[start : start + chunk_rows]
            options = (None, temperature, return_entropy, use_triton)
            sets = () if kept is None else kept.of_rows(slice(start, start + chunk_rows))
            parts.append(logprob_op.forward(chunk, chunk_targets, *options, *sets))
        if not parts:
            options = (None, temperature, return_entropy, use_triton)
            parts.append(logprob_op.forward(logits, targets, *options))
        logprob, entropy, lse = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, targets, entropy, lse)
        ctx.kept = kept
        ctx.options = (temperature, return_entropy, chunk_rows, use_triton)
        ctx.only_chunk = logits if num_rows <= chunk_rows and any(ctx.needs_input_grad) else None
        return logprob, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_logprob: torch.Tensor, grad_entropy: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, targets, entropy, lse = ctx.saved_tensors
        temperature, return_entropy, chunk_rows, use_triton = ctx.options
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        num_rows, vocab = hidden.shape[0], weight.shape[0]
        logits, ctx.only_chunk = ctx.only_chunk, None  # a second backward recomputes it
        known = logits is not None
        columns = vocab if known else min(vocab, _chunk_columns(chunk_rows, num_rows, vocab))
        if logits is None:
            logits = _backend.empty((num_rows * columns,), hidden.dtype, hidden.device)
        d_weight = None
        if wants_weight:
            d_weight = _backend.empty(weight.shape, weight.dtype, weight.device)
        # The only sum over chunks, in float32 unless it is a single product.
        sums = torch.float32 if columns < vocab else hidden.dtype
        d_hidden = torch.empty_like(hidden, dtype=sums) if wants_hidden else None
        for start in range(0, vocab, columns):
            part = weight[start : start + columns]
            chunk = logits.view(-1)[: num_rows * len(part)].view(num_rows, len(part))
            if not known:
                torch.mm(hidden, part.T, out=chunk)
            part_targets, kept = targets, ctx.kept
            if len(part) < vocab:
                part_targets = _slice_targets(targets, start, len(part))
                kept = None if kept is None else slice_sets(kept, start, len(part))
            logprob_op.write_gradient(
                chunk,
                part_targets,
                None,
                temperature,
                lse,
                entropy,
                grad_logprob,
                grad_entropy if return_entropy else None,
                chunk,
                use_triton,
                *(kept or ()),
            )
            if d_hidden is not None and columns == vocab:
                torch.mm(chunk, part, out=d_hidden)
            elif d_hidden is not None:
                _add_product(d_hidden, chunk, part, is_first=start == 0)
            if d_weight is not None:
                torch.mm(chunk.T, hidden, out=d_weight[start : start + columns])
        if d_hidden is not None:
            d_hidden = d_hidden.to(hidden.dtype)
        return d_hidden, d_weight, *(None,) * 6


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
            beta = 0 if is_first and start == 0 else 1
            total.addmm_(a[:, columns].float(), b[columns].float(), beta=beta)
