"""Existing formulations of selected log-probabilities, restated. logits (M, V), target_ids (M,)."""

from __future__ import annotations

import torch


def log_softmax_gather(logits: torch.Tensor, target_ids: torch.Tensor) -> torch.Tensor:
    """The textbook formulation."""
    return torch.log_softmax(logits, -1).gather(1, target_ids[:, None]).squeeze(1)


def log_softmax_gather_several(logits: torch.Tensor, target_ids: torch.Tensor) -> torch.Tensor:
    """The textbook formulation of target_ids (M, K)."""
    return torch.log_softmax(logits, -1).gather(1, target_ids)


def logsumexp_rows(logits: torch.Tensor, target_ids: torch.Tensor) -> torch.Tensor:
    """TRL's selective_log_softmax and SkyRL's and verl's logprobs_from_logits.

    float32: the chosen logit minus a log-sum-exp per row; 16 bits: a log-softmax per row.
    """
    if logits.dtype in (torch.float32, torch.float64):
        chosen = logits.gather(1, target_ids[:, None]).squeeze(1)
        return chosen - torch.stack([torch.logsumexp(row, -1) for row in logits])
    rows = zip(logits, target_ids, strict=True)
    return torch.stack([torch.log_softmax(row, -1)[target] for row, target in rows])


def logsumexp_whole(logits: torch.Tensor, target_ids: torch.Tensor) -> torch.Tensor:
    """The same without the loop over rows."""
    chosen = logits.gather(1, target_ids[:, None]).squeeze(1)
    return chosen - torch.logsumexp(logits, -1)


def cross_entropy(logits: torch.Tensor, target_ids: torch.Tensor) -> torch.Tensor:
    """torch's fused log-softmax and selection."""
    return -torch.nn.functional.cross_entropy(logits, target_ids, reduction="none")
