"""Sampling with a seed for each request, on a CPU, without noise for each word.

vLLM draws exponential noise for every word of the vocabulary, by the generator of each request:
64 requests and 49,152 words take 0.2 s, as long as a small model's pass. Inverting the cumulative
distribution takes one number for each token. In float64 its rounding is far below that of the
probabilities; as in vLLM, a request's tokens depend on its own seed and logits alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch

from skyrl_fast.rollout.engine.vllm_patches.normalized_logprobs import log_softmax

BLOCK = 64  # numbers that a generator draws at once: a call of torch takes as long as for one


def sample_by_inversion(sampler: Any) -> bool:
    """Let vLLM's sampler draw one number for each token where requests have seeds, on a CPU.

    Returns whether it does. Model runner V2, the default on GPUs, needs no such patch: one kernel
    (`gumbel_sample`) makes the noise of all rows from their seeds.

    Args:
        sampler: vLLM's `Sampler`, whose `topk_topp_sampler` gets another `forward`; other classes
            are unchanged.
    """
    draw = getattr(sampler, "topk_topp_sampler", None)
    if draw is None:
        return False
    usual = draw.forward
    numbers = Numbers()

    def forward(
        logits: torch.Tensor, generators: dict[int, torch.Generator], k: Any, p: Any
    ) -> Any:
        if not generators or logits.device.type != "cpu":
            return usual(logits, generators, k, p)
        from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

        logits = apply_top_k_top_p(logits, k, p)
        logprobs = log_softmax(logits)
        returned = {"processed_logits": logits, "processed_logprobs": logprobs}
        return draw_tokens(logprobs, generators, numbers), returned.get(draw.logprobs_mode)

    draw.forward = forward
    return True


class Numbers:
    """Uniform numbers of generators, in the order in which each draws them.

    They belong to the generator, whose request may wait between two of its steps.

    Args:
        draw: returns a block of numbers of a generator, as `torch.rand`.
    """

    def __init__(self, draw: Callable[..., torch.Tensor] = torch.rand) -> None:
        self._draw = draw
        self._drawn: WeakKeyDictionary[torch.Generator, list[float]] = WeakKeyDictionary()

    def __len__(self) -> int:
        """Return the number of generators that have drawn, of requests that have not ended."""
        return len(self._drawn)

    def next(self, generator: torch.Generator) -> float:
        drawn = self._drawn.get(generator)
        if not drawn:
            block = self._draw(BLOCK, generator=generator, dtype=torch.float64)
            drawn = self._drawn[generator] = block.tolist()[::-1]
        return drawn.pop()


def draw_tokens(
    logprobs: torch.Tensor, generators: dict[int, torch.Generator], numbers: Numbers
) -> torch.Tensor:
    """Return a token for each row: the first at which the cumulative probability exceeds a number.

    Args:
        logprobs: (N, V) float32; excluded words have -inf.
        generators: by row; other rows have torch's global one.
    """
    cumulative = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)
    drawn = torch.rand(len(logprobs), 1, dtype=torch.float64)
    seeded = list(map(numbers.next, generators.values()))
    drawn[list(generators), 0] = torch.tensor(seeded, dtype=torch.float64)
    total = cumulative[:, -1:]
    below = torch.nextafter(total, torch.zeros_like(total))  # a product may round to the total
    words = torch.searchsorted(cumulative, torch.minimum(drawn * total, below), right=True)
    return words.squeeze(-1).clamp_(max=logprobs.shape[-1] - 1)  # NaN: the logprob says so
