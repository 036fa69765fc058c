"""Log-probabilities where each rank holds a slice of the vocabulary. M rows, V its slice."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from skyrl_fast.ops import _backend
from skyrl_fast.ops.logprob import autograd as logprob_op
from skyrl_fast.ops.logprob.kept import KeptSets, check_kept, kept_sets, slice_sets
from skyrl_fast.ops.logprob.selected import (
    KERNEL_DTYPES,
    ON_GPU,
    as_uint8,
    check_logits,
    check_no_overlap,
    check_selection,
    kernel_rows,
)

OP = "vocab_parallel_logprob"
MAX_VOCAB = 2**31  # a rank knows the width of its slice only; ids that no slice holds are left out
Tensor = torch.Tensor


def vocab_parallel_logprob(
    logits: Tensor,
    target_ids: Tensor,
    *,
    vocab_start: int,
    group: Any = None,
    loss_mask: Tensor | None = None,
    temperature: float = 1.0,
    kept_ids: Tensor | None = None,
    cu_kept: Tensor | None = None,
    return_entropy: bool = False,
    inplace_backward: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return `selected_logprob` of logits whose vocabulary is split over the ranks of a group.

    Each rank reads its slice once; one all-gather of four float64 numbers per row (log-sum-exp,
    entropy, the target's logit, whether the target is in the slice) combines the slices, summed in
    rank order, so that every rank has the same bits. The backward needs no communication: the
    result is the same on every rank, and so must be its incoming gradient.

    Args:
        logits: (..., V) this rank's slice: columns vocab_start to vocab_start + V of the full
            logits. Slices may differ in width; padding columns must hold -inf.
        target_ids: (...) integers of the whole vocabulary, the same on every rank. One that no
            rank holds gives NaN where the mask is 1.
        vocab_start: the first column of the slice.
        group: the process group; None: the default group, or a single rank without one.
        kept_ids, cu_kept: as in `selected_logprob`: ids of the full vocabulary, the same on every
            rank.
        loss_mask, temperature, return_entropy, inplace_backward, backend: as in `selected_logprob`.

    Returns:
        (...) float32; with `return_entropy` a pair of them.

    Raises:
        ValueError: as `selected_logprob`; also logits of float64, or a negative vocab_start.

    Example:
        >>> vocab_parallel_logprob(torch.zeros(1, 4), torch.tensor([7]), vocab_start=4)
        tensor([-1.3863])
    """
    check_logits(OP, logits)
    check_selection(OP, logits, "logits", target_ids, loss_mask, temperature)
    if vocab_start < 0:
        raise ValueError(f"{OP}: vocab_start must not be negative, got {vocab_start}")
    kept = kept_sets(OP, kept_ids, cu_kept, target_ids)
    chosen = _backend.select(
        *(OP, logits, target_ids, loss_mask, kept_ids),
        backend=backend,
        available=("native",),
        available_on_gpu=ON_GPU[:2],
    )
    if logits.dtype not in KERNEL_DTYPES:
        raise ValueError(f"{OP}: logits must be float32, bfloat16 or float16, got {logits.dtype}")
    keep = as_uint8(loss_mask)
    full_targets = target_ids.reshape(-1).to(torch.int64).contiguous()
    check_kept(OP, kept, full_targets, keep, MAX_VOCAB)
    rows = kernel_rows(OP, logits)
    if inplace_backward:
        check_no_overlap(OP, rows)
    if kept is not None:
        kept = slice_sets(kept, vocab_start, logits.shape[-1])
    options = (temperature, return_entropy, inplace_backward, chosen == "triton")
    logprob, entropy = _VocabParallel.apply(
        rows, full_targets - vocab_start, keep, kept, group, *options
    )
    if return_entropy:
        return logprob.view(target_ids.shape), entropy.view(target_ids.shape)
    return logprob.view(target_ids.shape)


def combine_slices(parts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (M,) float64 log-probabilities, entropies and log-sum-exps of full rows.

    With l_r and h_r the log-sum-exp and entropy of slice r, and p_r = exp(l_r - l) its share: the
    row's l is the log-sum-exp of the l_r, and its entropy the sum of p_r (h_r + l - l_r).

    Args:
        parts: (ranks, M, 4) float64: l_r, h_r, the target's logit over the temperature, and 1
            where the slice holds it (else both 0).
    """
    slice_lse, slice_entropy, target, here = parts.unbind(-1)
    top = slice_lse.amax(0)
    lse = top + (slice_lse - top).exp().sum(0).log()
    share = (slice_lse - lse).exp()
    # An empty slice (only -inf) has share 0 and an entropy of NaN.
    entropy = torch.where(share == 0, 0.0, share * (slice_entropy + lse - slice_lse)).sum(0)
    logprob = torch.where(here.sum(0) == 1, target.sum(0) - lse, torch.nan)
    return logprob, entropy, lse


def _slice_part(
    rows: Tensor,
    local: Tensor,
    here: Tensor,
    mask: Tensor | None,
    kept: KeptSets | None,
    temperature: float,
    return_entropy: bool,
    use_triton: bool,
) -> Tensor:
    """Return (M, 4) float64, this rank's `parts` of `combine_slices`."""
    inside = torch.where(here, local, 0)
    if kept is not None and kept.ids.numel() > 0:
        # any id of the row's set where the target is in another slice
        first = kept.ids[kept.ranges[:, 0].clamp(0, kept.ids.numel() - 1)]
        inside = torch.where(here | (kept.sizes <= 0), inside, first)
    logprob, entropy, lse = logprob_op.forward(
        rows, inside, mask, temperature, return_entropy, use_triton, *(kept or ())
    )
    if not _backend.on_gpu(rows):
        lse = _empty_slices(rows, lse)
    target = torch.where(here, logprob.double() + lse, 0.0)
    target = torch.where(here & (lse == -torch.inf), -torch.inf, target)
    if not return_entropy:
        entropy = torch.zeros_like(logprob)
    return torch.stack([lse, entropy.double(), target, here.double()], dim=-1)


def _empty_slices(rows: Tensor, lse: Tensor) -> Tensor:
    """Return lse with -inf for rows of only -inf, for which the CPU kernel returns NaN."""
    unknown = lse.isnan().nonzero().squeeze(1)
    if unknown.numel() == 0:
        return lse
    flat = rows.reshape(-1, rows.shape[-1])
    empty = (flat[unknown] == -torch.inf).all(-1)
    return lse.index_put((unknown[empty],), lse.new_full((), -torch.inf))


def _gather(part: Tensor, group: Any) -> Tensor:
    """Return (ranks, M, 4), the parts of all ranks in their order."""
    if not dist.is_available() or not dist.is_initialized():
        return part.unsqueeze(0)
    parts = part.new_empty((dist.get_world_size(group), *part.shape))
    dist.all_gather_into_tensor(parts.view(-1), part.contiguous().view(-1), group=group)
    return parts


class _VocabParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        local: Tensor,
        mask: Tensor | None,
        kept: KeptSets | None,
        group: Any,
        temperature: float,
        return_entropy: bool,
        inplace: bool,
        use_triton: bool,
    ) -> tuple[Tensor, Tensor]:
        here = (local >= 0) & (local < rows.shape[-1])
        part = _slice_part(rows, local, here, mask, kept, temperature, return_entropy, use_triton)
        logprob, entropy, lse = combine_slices(_gather(part, group))
        if mask is not None:
            logprob, entropy, lse = (
                torch.where(mask != 0, x, 0.0) for x in (logprob, entropy, lse)
            )
        logprob, entropy = logprob.float(), entropy.float()
        ctx.save_for_backward(rows, torch.where(here, local, -1), mask, entropy, lse)
        ctx.kept = kept
        ctx.options = (temperature, return_entropy, inplace, use_triton)
        return logprob, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_logprob: Tensor, grad_entropy: Tensor) -> tuple[Any, ...]:
        rows, targets, mask, entropy, lse = ctx.saved_tensors
        temperature, return_entropy, inplace, use_triton = ctx.options
        grad = (
            rows.detach()
            if inplace
            else torch.empty_like(rows, memory_format=torch.contiguous_format)
        )
        incoming = (grad_logprob, grad_entropy if return_entropy else None)
        arguments = (rows, targets, mask, temperature, lse, entropy, *incoming, grad, use_triton)
        logprob_op.write_gradient(*arguments, *(ctx.kept or ()))
        if inplace:
            torch.autograd.graph.increment_version(rows)
        return grad, *(None,) * 8
