"""What the agent loop needs of an inference engine: token ids in, token ids and logprobs out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from skyrl_fast.config import SamplingParams


class EngineError(RuntimeError):
    """The engine refused or failed one request; others may still succeed."""


class EngineDeadError(EngineError):
    """The engine died, or could not start: no request can succeed."""


def vllm_sampling_params(sampling: SamplingParams, *, seed: int | None) -> dict[str, Any]:
    """Return the arguments of vLLM's SamplingParams; `additional_kwargs` override them.

    Stop strings stay part of the response.
    """
    return {
        "max_tokens": sampling.max_generate_length,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "stop": list(sampling.stop or ()) or None,
        "include_stop_str_in_output": True,
        "seed": seed,
        "logprobs": 0,
    }


@dataclass(frozen=True, slots=True)
class Generation:
    """The result of one call of the language model.

    Args:
        token_ids: exactly the sampled tokens, including an end token if it was sampled.
        logprobs: one per token, under the distribution that was sampled from.
        stop_reason: "stop" (end of sequence, stop string or stop token), "length", or "interrupted"
            by a weight update, with more tokens to follow.
        stop_string: the stop string that ended it, or None.
        expert_indices: integers [tokens - 1 - start, layers, experts per token] of prompt and
            response from token `expert_indices_start` on (the last token is not run), or None.
        expert_indices_start: the token of its first row.
    """

    token_ids: list[int]
    logprobs: list[float]
    stop_reason: str
    stop_string: str | None = None
    expert_indices: np.ndarray | None = field(default=None, compare=False)
    expert_indices_start: int = 0


class Sampler(Protocol):
    """Answers the agent loop's requests: an engine, or several behind one `generate`."""

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        session_id: str,
        policy_version: int,
        seed: int | None = None,
        expert_indices_start: int = 0,
    ) -> Generation:
        """Return one response to one prompt.

        Args:
            prompt_token_ids: the full context.
            sampling: how to sample.
            session_id: one per trajectory, for routing and caching.
            policy_version: cached keys and values are shared only within one version.
            seed: of this request.
            expert_indices_start: number of leading prompt tokens whose routes are already known;
                an engine that is able to omits them from the answer.

        Raises:
            EngineError: this request failed. EngineDeadError: all will.
        """


class Engine(Sampler, Protocol):
    """An inference engine; `VllmEngine` runs in this process, `RemoteEngine` is a server."""

    async def start(self) -> None:
        """Load the model; return when requests can be served."""

    async def close(self) -> None:
        """Stop and free everything; closing twice is fine."""

    async def update_weights(
        self, weights: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
    ) -> float:
        """Load new weights, in Hugging Face names, into the running engine; return seconds."""

    async def prompt_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Return each token's logprob given those before it, at temperature 1, but the first's."""

    async def prompt_routes(self, token_ids: Sequence[int]) -> tuple[list[float], np.ndarray]:
        """Return the same, and the routes [tokens, layers, experts per token] that were taken.

        Raises:
            EngineError: the engine does not record routes.
        """

    async def reset_prefix_cache(self) -> None:
        """Drop cached keys and values."""
