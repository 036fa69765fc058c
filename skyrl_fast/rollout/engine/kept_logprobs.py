"""Less work per sampled token where vLLM returns log-probabilities.

vLLM decodes each token for the text of its log-probability, and makes an object for it: more than
half of this process's work during generation, and next to the engine's on the same cores. Here only
ids and values are stored. A request for the log-probabilities of kept tokens asks for as many as
sampling may keep, but most tokens are sampled from a few: the engine's process returns no more
columns than some token of the batch has kept, and this process stores only the kept ones.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from skyrl_fast.rollout.engine.protocol import EXCLUDED_LOGPROB

NONES = itertools.repeat(None)


def return_kept_only(sampler: Any) -> None:
    """Make vLLM's sampler return no more log-probabilities than a token of the batch has kept.

    For sampled tokens alone, on a CPU, their ranks are computed here: vLLM's compiled function
    takes 0.4 ms for each step, whatever it computes.

    Args:
        sampler: vLLM's `Sampler`, whose `gather_logprobs` is replaced; other classes are unchanged.
    """
    gather = getattr(sampler, "gather_logprobs", None)
    if gather is None:
        return

    def gather_kept(logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor) -> Any:
        if num_logprobs == 0 and logprobs.device.type == "cpu":
            from vllm.v1.outputs import LogprobsTensors

            sampled = token_ids.unsqueeze(-1)
            values = logprobs.gather(-1, sampled)
            return LogprobsTensors(sampled.int(), values, (logprobs >= values).sum(dim=-1))
        if num_logprobs > 1:
            most = int((logprobs > EXCLUDED_LOGPROB).sum(dim=-1).max())
            num_logprobs = min(num_logprobs, max(most, 1))
        return gather(logprobs, num_logprobs, token_ids=token_ids)

    sampler.gather_logprobs = gather_kept


def store_ids_and_values() -> None:
    """Make vLLM's frontend in this process store flat log-probabilities without texts and ranks.

    Of several for a token, only the kept ones.
    """
    from vllm.v1.engine import output_processor
    from vllm.v1.engine.logprobs import LogprobsProcessor

    class FlatLogprobsProcessor(LogprobsProcessor):
        @classmethod
        def from_new_request(cls, tokenizer: Any, request: Any) -> Any:
            if not request.sampling_params.flat_logprobs:
                return LogprobsProcessor.from_new_request(tokenizer, request)
            return super().from_new_request(tokenizer, request)

        def _update_sample_logprobs(self, logprobs_lists: Any) -> None:
            token_ids, logprobs, *_ = logprobs_lists
            for ids, values in zip(token_ids, logprobs, strict=True):
                self.cumulative_logprob += float(values[0])  # of the sampled token
                if len(values) > 1:
                    kept = values > EXCLUDED_LOGPROB
                    ids, values = ids[kept], values[kept]
                self.logprobs.append_fast(ids.tolist(), values.tolist(), NONES, NONES)

    output_processor.LogprobsProcessor = FlatLogprobsProcessor
