"""Less work per sampled token where vLLM returns the log-probabilities of kept tokens.

A request for them asks for as many values as sampling may keep, but most tokens are sampled from a
few, and vLLM's Python code takes microseconds for each value. The engine's process returns no more
columns than some token of the batch has kept; this process stores only the kept ones, without
their text.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from skyrl_fast.rollout.engine.protocol import EXCLUDED_LOGPROB


def return_kept_only(sampler: Any) -> None:
    """Make vLLM's sampler return no more log-probabilities than a token of the batch has kept.

    Args:
        sampler: vLLM's `Sampler`, whose `gather_logprobs` is replaced; other classes are unchanged.
    """
    gather = getattr(sampler, "gather_logprobs", None)
    if gather is None:
        return

    def gather_kept(logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor) -> Any:
        if num_logprobs > 1:
            most = int((logprobs > EXCLUDED_LOGPROB).sum(dim=-1).max())
            num_logprobs = min(num_logprobs, max(most, 1))
        return gather(logprobs, num_logprobs, token_ids=token_ids)

    sampler.gather_logprobs = gather_kept


def store_kept_only() -> None:
    """Make vLLM's frontend in this process store only kept tokens in flat log-probabilities."""
    from vllm.v1.engine import output_processor
    from vllm.v1.engine.logprobs import LogprobsProcessor

    class KeptLogprobsProcessor(LogprobsProcessor):
        @classmethod
        def from_new_request(cls, tokenizer: Any, request: Any) -> Any:
            if not request.sampling_params.flat_logprobs:
                return LogprobsProcessor.from_new_request(tokenizer, request)
            return super().from_new_request(tokenizer, request)

        def _update_sample_logprobs(self, logprobs_lists: Any) -> None:
            token_ids, logprobs, *_ = logprobs_lists
            for ids, values in zip(token_ids, logprobs, strict=True):
                kept = values > EXCLUDED_LOGPROB
                self.cumulative_logprob += float(values[0])  # of the sampled token
                self.logprobs.append_fast(
                    ids[kept].tolist(),
                    values[kept].tolist(),
                    itertools.repeat(None),
                    itertools.repeat(None),
                )

    output_processor.LogprobsProcessor = KeptLogprobsProcessor
