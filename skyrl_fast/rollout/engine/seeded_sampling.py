"""Sampling with a seed for each request, on a CPU, without noise for each word.

vLLM draws exponential noise for every word of the vocabulary, by the generator of each request:
64 requests and 49,152 words take 0.2 s, as long as a small model's pass. Inverting the cumulative
distribution takes one number for each token. In float64 its rounding is far below that of the
probabilities; as in vLLM, a request's tokens depend on its own seed and logits alone.
"""

from __future__ import annotations

from typing import Any

import torch


def sample_by_inversion(sampler: Any) -> None:
    """Let vLLM's sampler draw one number for each token where requests have seeds, on a CPU.

    Args:
        sampler: vLLM's `Sampler`, whose `topk_topp_sampler` gets another `forward`; other classes
            are unchanged.
    """
    chosen = getattr(sampler, "topk_topp_sampler", None)
    if chosen is None:
        return
    usual = chosen.forward

    def forward(
        logits: torch.Tensor, generators: dict[int, torch.Generator], k: Any, p: Any
    ) -> Any:
        if not generators or logits.device.type != "cpu":
            return usual(logits, generators, k, p)
        from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

        logits = apply_top_k_top_p(logits, k, p)
        logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
        returned = {"processed_logits": logits, "processed_logprobs": logprobs}
        return inverted(logprobs, generators), returned.get(chosen.logprobs_mode)

    chosen.forward = forward


def inverted(logprobs: torch.Tensor, generators: dict[int, torch.Generator]) -> torch.Tensor:
    """Return a token for each row: the first at which the cumulative probability exceeds a number.

    Args:
        logprobs: (N, V) float32; excluded words have -inf.
        generators: by row; each draws one number. Other rows have torch's global one.
    """
    cumulative = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)
    drawn = torch.rand(len(logprobs), 1, dtype=torch.float64)
    for row, generator in generators.items():
        drawn[row] = torch.rand(1, generator=generator, dtype=torch.float64)
    total = cumulative[:, -1:]
    below = torch.nextafter(total, torch.zeros_like(total))  # a product may round to the total
    found = torch.searchsorted(cumulative, torch.minimum(drawn * total, below), right=True)
    return found.squeeze(-1).clamp_(max=logprobs.shape[-1] - 1)  # NaN: the logprob says so
