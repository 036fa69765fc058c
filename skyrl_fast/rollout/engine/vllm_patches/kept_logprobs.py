"""Less work per sampled token where vLLM returns log-probabilities.

vLLM decodes each token for the text of its log-probability, and makes an object for it: more than
half of this process's work during generation, and next to the engine's on the same cores. Here only
ids and values are stored. A request for the log-probabilities of kept tokens asks for as many as
sampling may keep, but most tokens are sampled from a few: the engine's process returns no more
columns than some token of the batch has kept, and this process stores only the kept ones. On its
way, vLLM's encoder calls Python for each array of each request; on a CPU the arrays are bytes
already.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from skyrl_fast.rollout.engine.protocol import EXCLUDED_LOGPROB

NONES = itertools.repeat(None)


class EncodedLogprobs:
    """A step's log-probabilities; those of a request as vLLM's encoder writes arrays.

    The encoder runs in a thread of the engine's process, and holds Python's lock. 128 requests take
    0.03 ms so, in place of 0.6.

    Args:
        arrays: ids, values and ranks, a row for each request.
    """

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self._arrays = [
            (a.dtype.str, a.shape[1:], a.nbytes // max(len(a), 1), a.tobytes()) for a in arrays
        ]

    def slice_request(self, req_idx: int, num_positions: int) -> tuple[Any, ...]:
        """Return what `LogprobsLists.slice_request` returns, encoded."""
        raw = _raw_view()
        end = req_idx + num_positions
        encoded = []
        for dtype, shape, size, data in self._arrays:
            encoded.append((dtype, (num_positions, *shape), raw(data[req_idx * size : end * size])))
        return (*encoded, None)


@cache
def _raw_view() -> Callable[[bytes], Any]:
    from msgspec.msgpack import Ext
    from vllm.v1.serial_utils import CUSTOM_TYPE_RAW_VIEW

    return partial(Ext, CUSTOM_TYPE_RAW_VIEW)


@cache
def _encoding() -> Any:
    """Return vLLM's tensors of a step, whose lists are encoded."""
    from vllm.v1.outputs import LogprobsTensors

    class EncodingTensors(LogprobsTensors):
        def tolists(self, cu_num_generated_tokens: list[int] | None = None) -> Any:
            lists = super().tolists(cu_num_generated_tokens)
            by_request = lists.cu_num_generated_tokens is None
            if by_request:
                return EncodedLogprobs(lists[:3])
            return lists

    return EncodingTensors


def return_kept_only(sampler: Any) -> bool:
    """Make vLLM's sampler return no more log-probabilities than a token of the batch has kept.

    Returns whether it does. The sampler of vLLM's model runner V2, the default on GPUs, has no such
    method: there each token returns as many columns as the request asks for. vLLM's
    `return_sampling_mask` (runner V2) gives the ids of what sampling keeps, but not their
    log-probabilities, so that it replaces a part of this: fewer columns, one more output.

    On a CPU they leave the engine's process as `EncodedLogprobs`, and the ranks of sampled tokens
    alone are computed here: vLLM's compiled function takes 0.4 ms for each step, whatever it
    computes.

    Args:
        sampler: vLLM's `Sampler`, whose `gather_logprobs` is replaced; others are unchanged.
    """
    gather = getattr(sampler, "gather_logprobs", None)
    if gather is None:
        return False

    def gather_kept(logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor) -> Any:
        is_encoded = logprobs.device.type == "cpu"
        if is_encoded and num_logprobs == 0:
            sampled = token_ids.unsqueeze(-1)
            values = logprobs.gather(-1, sampled)
            return _encoding()(sampled.int(), values, (logprobs >= values).sum(dim=-1))
        if num_logprobs > 1:
            most = int((logprobs > EXCLUDED_LOGPROB).sum(dim=-1).max())
            num_logprobs = min(num_logprobs, max(most, 1))
        tensors = gather(logprobs, num_logprobs, token_ids=token_ids)
        if is_encoded:
            return _encoding()(*tensors)
        return tensors

    sampler.gather_logprobs = gather_kept
    return True


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
                self.cumulative_logprob += float(values[0])  # log-probability of the sampled token
                if len(values) > 1:
                    kept = values > EXCLUDED_LOGPROB
                    ids = ids[kept]
                    values = values[kept]
                self.logprobs.append_fast(ids.tolist(), values.tolist(), NONES, NONES)

    output_processor.LogprobsProcessor = FlatLogprobsProcessor
