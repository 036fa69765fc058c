"""What the agent loop needs of an inference engine: token ids in, token ids and logprobs out."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np

from skyrl_fast.config import SamplingParams
from skyrl_fast.errors import RunError
from skyrl_fast.rollout.engine.prompt_scores import PromptScores
from skyrl_fast.rollout.stop_reason import STOP

if TYPE_CHECKING:
    import torch

    from skyrl_fast.rollout.engine.weights.transfer import WorkerCall

# Tokens as likely as the least likely of the top_k, which vLLM keeps, too.
MAX_TIES = 16
MAX_TOKEN_ID = 2**31 - 1  # that tensors of ids can hold
EXCLUDED_LOGPROB = -9000.0  # vLLM's servers write -9999 for -inf
MASS_TOLERANCE = 1e-3  # tolerance of the sum of the kept tokens' probabilities


class EngineError(RunError):
    """The engine refused or failed one request; others may still succeed."""


class RefusedRequestError(EngineError):
    """The engine refuses one request as invalid; the same one would be refused again."""


class EngineDeadError(EngineError):
    """The engine died, or could not start: no request can succeed."""


class EngineStoppedError(EngineDeadError):
    """No engine is left of a run that is stopping, which starts none again."""


class NoRoomError(EngineDeadError):
    """The cluster has no room for the engine yet."""


def vllm_sampling_params(
    sampling: SamplingParams, *, seed: int | None, vocab_size: int | None = None
) -> dict[str, Any]:
    """Return the arguments of vLLM's SamplingParams; `additional_kwargs` override them.

    Stop strings stay part of the response. Where kept tokens are recorded, `top_k` is at most their
    limit, and that many log-probabilities are returned, up to the vocabulary (None: unknown).
    """
    limit = sampling.num_kept_tokens
    if limit is not None and sampling.top_k < 1:
        top_k = limit
    else:
        top_k = sampling.top_k
    return {
        "max_tokens": sampling.max_generate_length,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "stop": list(sampling.stop or ()) or None,
        "include_stop_str_in_output": True,
        "seed": seed,
        "logprobs": 0 if limit is None else min(top_k + MAX_TIES, vocab_size or sys.maxsize),
    }


def kept_tokens(token_id: int, candidates: np.ndarray, logprobs: np.ndarray) -> np.ndarray:
    """Return the ascending ids, int32, of the tokens that a token was sampled from.

    Args:
        candidates: ids of the most likely tokens, with or without the sampled one.
        logprobs: of the candidates, under the distribution that was sampled from; excluded tokens
            have -inf, or what vLLM writes for it.

    Raises:
        EngineError: the remaining tokens have less than all of the probability: some were not
            returned. Or one has an impossible id.
    """
    kept = logprobs > EXCLUDED_LOGPROB
    ids, first = np.unique(candidates[kept], return_index=True)
    mass = float(np.exp(logprobs[kept][first].astype(np.float64)).sum())
    if abs(mass - 1.0) > MASS_TOLERANCE or token_id not in ids:
        raise EngineError(
            f"expected all tokens that token {token_id} was sampled from, got {len(ids)} with "
            f"probability {mass:.6f}: the engine must return processed_logprobs, and sampling "
            "parameters must not change the logits"
        )
    if ids[0] < 0 or ids[-1] > MAX_TOKEN_ID:
        raise EngineError(
            f"expected ids from 0 to {MAX_TOKEN_ID} of kept tokens, got {ids[0]} to {ids[-1]}"
        )
    return ids.astype(np.int32)


@dataclass(frozen=True, slots=True)
class Generation:
    """The result of one call of the language model.

    Args:
        token_ids: exactly the sampled tokens, including an end token if it was sampled.
        logprobs: one per token, under the distribution that was sampled from.
        stop_reason: "stop" (end of sequence, stop string or stop token), "length", or "interrupted"
            by a weight update, with more tokens to follow.
        expert_indices: integers [tokens - 1 - start, layers, experts per token] of prompt and
            response from token `expert_indices_start` on (the last token is not run), or None.
        kept_ids: for each token the ascending ids, int32, of the tokens that it was sampled from;
            None: the vocabulary, or not recorded (`SamplingParams.max_kept_tokens`).
        num_cached_tokens: leading prompt tokens whose keys and values were in the engine's prefix
            cache; None: unknown.
        versions: the policy version of each token; None: the request's, as engines return it.
        seconds: time from the request to its answer, set by `PolicyCalls`.
    """

    token_ids: list[int]
    logprobs: list[float]
    stop_reason: str
    stop_string: str | None = None
    expert_indices: np.ndarray | None = field(default=None, compare=False)
    expert_indices_start: int = 0
    kept_ids: list[np.ndarray] | None = field(default=None, compare=False)
    num_cached_tokens: int | None = field(default=None, compare=False)
    versions: list[int] | None = field(default=None, compare=False)
    seconds: float = field(default=0.0, compare=False)

    @property
    def stopped_at_token(self) -> bool:
        """Whether the engine stopped because of the last token, such as an end of sequence."""
        return self.stop_reason == STOP and self.stop_string is None


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
        policy: str | None = None,
    ) -> Generation:
        """Return one response to one prompt.

        Args:
            prompt_token_ids: the full context. A list may be changed after the call.
            session_id: one per trajectory, for routing and caching.
            policy_version: cached keys and values are shared only within one version.
            expert_indices_start: number of leading prompt tokens whose routes are already known;
                an engine that is able to omits them from the answer.
            policy: name of the policy, or `REFERENCE`; None: the run has one policy.

        Raises:
            EngineError: this request failed. EngineDeadError: all will.
        """


class Engine(Sampler, Protocol):
    """An inference engine; `VllmEngine` runs in this process, `RemoteEngine` is a server.

    Args:
        starts_with_model: whether it has the weights of the model's folder after its start.
        compute_dtype: dtype in which it computes, as it said when it last loaded weights.
        weights_dtype: dtype of all its weights; None: unknown, or several.
    """

    name: str
    starts_with_model: bool
    compute_dtype: torch.dtype | None
    weights_dtype: torch.dtype | None

    async def start(self) -> None:
        """Load the model; return when requests can be served."""

    async def close(self) -> None:
        """Stop and free everything; closing twice is fine."""

    async def load_weights(self, call: WorkerCall) -> None:
        """Load weights that were handed over, and drop cached keys and values.

        This does not verify that they took effect; `WeightProbe` does.

        Raises:
            WeightSyncError: the engine could not load them, or loaded others; see
                `check_receipts`.
        """

    async def prompt_logprobs(
        self, token_ids: Sequence[int], *, policy: str | None = None
    ) -> list[float]:
        """Return each token's logprob given those before it, at temperature 1, but the first's."""

    async def score_prompt(self, token_ids: Sequence[int], *, top_k: int = 0) -> PromptScores:
        """Return how likely the model, without an adapter, finds a sequence.

        Args:
            top_k: of most likely tokens in the place of each.

        Raises:
            RefusedRequestError: it is longer than the engine's limit, or has an unknown token.
            EngineError: this request failed. EngineDeadError: all will.
        """

    async def prompt_routes(
        self, token_ids: Sequence[int], *, policy: str | None = None
    ) -> tuple[list[float], np.ndarray]:
        """Return the `prompt_logprobs`, and the routes that were taken.

        Routes are integers [tokens, layers, experts per token].

        Raises:
            EngineError: the engine does not record routes.
        """

    async def reset_prefix_cache(self) -> None:
        """Drop cached keys and values."""

    async def sleep(self) -> None:
        """Free GPU memory until the next weights."""

    async def interrupt(self) -> None:
        """End all requests; each returns its tokens so far. New ones wait until `resume`."""

    async def resume(self) -> None:
        """Serve requests again after `interrupt`; otherwise do nothing."""

    def check_running(self) -> None:
        """Raise EngineDeadError if it is known to have died; send nothing."""

    async def comes_back(self) -> bool:
        """Return whether `restart` may bring it up again."""

    async def restart(self) -> None:
        """Start it again after it died."""
        await self.close()
        await self.start()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()
