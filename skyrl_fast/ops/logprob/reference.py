"""Plain-torch reference of selected log-probabilities. Shapes: M rows, V vocab, H hidden."""

from __future__ import annotations

import torch

from skyrl_fast.ops.logprob.kept import KeptSets


def selected_logprob(
    logits: torch.Tensor,
    target_ids: torch.Tensor,
    mask: torch.Tensor | None = None,
    temperature: float = 1.0,
    kept: KeptSets | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (M,) log-probabilities of the targets and (M,) entropies in nats.

    Computed in float32, or in float64 for float64 logits. Logits of -inf have probability 0 and
    add nothing to the entropy. A row that holds NaN or +inf, or only -inf, gives NaN.

    Args:
        logits: (M, V).
        target_ids: (M,) int64, in [0, V) where the mask is not 0.
        mask: (M,), or None: all ones. Rows of mask 0 give 0 and no gradient.
        kept: the sets that rows are normalised over; None: the full vocabulary. A set that is not
            strictly ascending in [0, V), or misses the target, gives NaN.
    """
    if mask is None:
        keep = torch.ones_like(target_ids, dtype=torch.bool)
    else:
        keep = mask != 0
    rows = keep.nonzero().squeeze(1)
    if logits.dtype == torch.float64:
        dtype = torch.float64
    else:
        dtype = torch.float32
    # Masked rows take no part: 0 times NaN is NaN, in the gradient too.
    scaled = logits[rows].to(dtype) / temperature
    wrong = None
    if kept is not None:
        allowed, wrong = _find_allowed(kept.of_rows(rows), scaled.shape[1])
        wrong = wrong | ~allowed.gather(1, target_ids[rows, None]).squeeze(1)
        scaled = scaled.masked_fill(~allowed, -torch.inf)
    logprobs = torch.log_softmax(scaled, dim=-1)
    chosen = logprobs.gather(1, target_ids[rows, None]).squeeze(1)
    # A finite value in place of -inf, so that p * log p is 0 and not NaN, in the gradient too.
    finite = logprobs.masked_fill(logprobs == -torch.inf, 0.0)
    entropy = -(logprobs.exp() * finite).sum(-1)
    if wrong is not None:
        chosen = chosen.masked_fill(wrong, torch.nan)
        entropy = entropy.masked_fill(wrong, torch.nan)
    zeros = torch.zeros(target_ids.shape, dtype=dtype, device=logits.device)
    return zeros.index_put((rows,), chosen), zeros.index_put((rows,), entropy)


def gathered_logprob(
    logits: torch.Tensor,
    target_ids: torch.Tensor,
    mask: torch.Tensor | None = None,
    temperature: float = 1.0,
) -> torch.Tensor:
    """Return (M, K) log-probabilities of the targets, in float32, or float64 for float64 logits.

    Args:
        logits: (M, V).
        target_ids: (M, K) int64, in [0, V) where the mask is not 0.
        mask: (M,), or None: all ones. Rows of mask 0 give 0 and no gradient.
    """
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    if mask is None:
        scaled = logits.to(dtype) / temperature
        return torch.log_softmax(scaled, dim=-1).gather(-1, target_ids)
    # Masked rows take no part: 0 times NaN is NaN, in the gradient too.
    rows = mask.nonzero().squeeze(1)
    chosen = gathered_logprob(logits[rows], target_ids[rows], None, temperature)
    zeros = torch.zeros(target_ids.shape, dtype=dtype, device=logits.device)
    return zeros.index_put((rows,), chosen)


def _find_allowed(kept: KeptSets, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (M, V) bool, the ids of each row, and (M,) bool, the rows whose set is not valid."""
    row, place = kept.pairs()
    ids = kept.ids[place].long()
    inside = (ids >= 0) & (ids < vocab)
    falls = torch.zeros_like(inside)
    falls[1:] = (ids[1:] <= ids[:-1]) & (row[1:] == row[:-1])
    bad_ids = torch.zeros(kept.ranges.shape[0], dtype=torch.int32, device=row.device)
    wrong = bad_ids.index_add(0, row, (falls | ~inside).int()) > 0
    allowed = (kept.ranges[:, :1] < 0).repeat(1, vocab)
    allowed[row[inside], ids[inside]] = True
    return allowed, wrong


def linear_logprob(
    hidden: torch.Tensor,
    lm_head_weight: torch.Tensor,
    target_ids: torch.Tensor,
    mask: torch.Tensor | None = None,
    temperature: float = 1.0,
    kept: KeptSets | None = None,
    bias: torch.Tensor | None = None,
    logit_scale: float = 1.0,
    soft_cap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (M,) log-probabilities and entropies of the head's logits.

    Args:
        hidden, lm_head_weight, bias: (M, H), (V, H) and (V,), or None.
        target_ids, mask, temperature, kept: as in `selected_logprob`.
        logit_scale: multiplies the product and the bias.
        soft_cap: cap of the scaled logits, by tanh.
    """
    logits = torch.nn.functional.linear(hidden, lm_head_weight, bias) * logit_scale
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    return selected_logprob(logits, target_ids, mask, temperature, kept)
