"""Plain-torch reference of selected log-probabilities. Shapes: M rows, V vocab, H hidden."""

from __future__ import annotations

import torch


def selected_logprob(
    logits: torch.Tensor,
    target_ids: torch.Tensor,
    mask: torch.Tensor | None = None,
    temperature: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (M,) log-probabilities of the targets and (M,) entropies in nats.

    Computed in float32, or in float64 for float64 logits. Logits of -inf have probability 0 and
    add nothing to the entropy. A row that holds NaN or +inf, or only -inf, gives NaN.

    Args:
        logits: (M, V).
        target_ids: (M,) int64, in [0, V) where the mask is not 0.
        mask: (M,), or None: all ones. Rows of mask 0 give 0 and no gradient.
        temperature: divides the logits.
    """
    keep = torch.ones_like(target_ids, dtype=torch.bool) if mask is None else mask != 0
    rows = keep.nonzero().squeeze(1)
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    scaled = logits[rows].to(dtype) / temperature
    logprobs = torch.log_softmax(scaled, dim=-1)
    chosen = logprobs.gather(1, target_ids[rows, None]).squeeze(1)
    # A finite value in place of -inf, so that p * log p is 0 and not NaN, in the gradient too.
    finite = logprobs.masked_fill(logprobs == -torch.inf, 0.0)
    entropy = -(logprobs.exp() * finite).sum(-1)
    zeros = torch.zeros(target_ids.shape, dtype=dtype, device=logits.device)
    return zeros.index_put((rows,), chosen), zeros.index_put((rows,), entropy)


def linear_logprob(
    hidden: torch.Tensor,
    lm_head_weight: torch.Tensor,
    target_ids: torch.Tensor,
    mask: torch.Tensor | None = None,
    temperature: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (M,) log-probabilities and entropies under logits = hidden @ lm_head_weight.T.

    Args:
        hidden: (M, H).
        lm_head_weight: (V, H).
        target_ids: (M,) int64.
        mask: (M,), or None.
        temperature: divides the logits.
    """
    return selected_logprob(hidden @ lm_head_weight.T, target_ids, mask, temperature)
