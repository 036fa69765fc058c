"""An engine that samples with transformers in this process: the trainer without vLLM.

B requests of a batch, L the longest prompt, V vocabulary.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from skyrl_fast.config import SamplingParams
from skyrl_fast.rollout.engine.protocol import Generation
from skyrl_fast.rollout.engine.vllm_start import VllmSetup
from skyrl_fast.rollout.engine.weights.transfer import WorkerCall
from skyrl_fast.rollout.engine.weights.transports import TRANSPORTS

GATHER_SECONDS = 0.002  # for which a batch waits for more requests
MAX_BATCH = 256
STOP_TAIL = 24  # last tokens in which a stop string is looked for


@dataclass(slots=True)
class _Request:
    prompt: list[int]
    sampling: SamplingParams
    uniforms: torch.Tensor  # (max_generate_length,) float64 in [0, 1), one per token
    answer: asyncio.Future[Generation]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stopped: tuple[str, str | None] | None = None


class TorchEngine:
    """Samples with the model in a folder, in batches with a cache of keys and values.

    It has temperature, stop strings and the end token, and no other sampling parameter. Its tokens
    depend on a request's seed. On a GPU it computes in bfloat16.
    """

    name = "transformers"
    starts_with_model = True

    def __init__(self, setup: VllmSetup) -> None:
        self._setup = setup
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self.weights_dtype = torch.bfloat16 if self._device == "cuda" else torch.float32
        self.compute_dtype = self.weights_dtype
        self._waiting: list[_Request] = []
        self._lock = asyncio.Lock()  # of the model

    async def start(self) -> None:
        """Load the model and its tokenizer."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model: Any = AutoModelForCausalLM.from_pretrained(
            self._setup.model, dtype=self.weights_dtype
        )
        self._model = model.to(self._device).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(self._setup.model)

    async def close(self) -> None:
        """Do nothing: the model is freed with this object."""

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
        """Return one response; see `Engine.generate`."""
        random = torch.Generator().manual_seed(seed or 0)
        uniforms = torch.rand(sampling.max_generate_length, generator=random, dtype=torch.float64)
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(_Request(list(prompt_token_ids), sampling, uniforms, future))
        await asyncio.sleep(GATHER_SECONDS)
        async with self._lock:
            if not future.done():  # else part of the batch of an earlier request
                batch, self._waiting = self._waiting[:MAX_BATCH], self._waiting[MAX_BATCH:]
                await asyncio.to_thread(self._sample, batch)
                for request in batch:
                    if not request.answer.done():
                        request.answer.set_result(_generation(request))
        return await future

    async def prompt_logprobs(
        self, token_ids: Sequence[int], *, policy: str | None = None
    ) -> list[float]:
        """Return the logprobs of given tokens; see `Engine.prompt_logprobs`."""
        async with self._lock:
            return await asyncio.to_thread(self._prompt_logprobs, list(token_ids))

    async def load_weights(self, call: WorkerCall) -> None:
        """Load new weights by any transport that needs no group of workers."""
        async with self._lock:
            weights = dict(TRANSPORTS[call.transport].receive(self, *call.arguments))
            self._model.load_state_dict(weights, strict=False)  # tied ones once

    async def sleep(self) -> None:
        """Do nothing: the memory stays."""

    async def reset_prefix_cache(self) -> None:
        """Do nothing: no keys and values are kept between batches."""

    async def interrupt(self) -> None:
        """Do nothing: running batches are completed."""

    async def resume(self) -> None:
        """Do nothing."""

    def check_running(self) -> None:
        """Do nothing: it runs in this process."""

    async def comes_back(self) -> bool:
        """Return True."""
        return True

    async def restart(self) -> None:
        """Close and start."""
        await self.close()
        await self.start()

    @torch.no_grad()
    def _sample(self, batch: list[_Request]) -> None:
        """Sample until every request has stopped."""
        longest = max(len(request.prompt) for request in batch)
        padding = [longest - len(request.prompt) for request in batch]
        rows = [[0] * n + request.prompt for n, request in zip(padding, batch, strict=True)]
        tokens = torch.tensor(rows, device=self._device)
        columns = torch.arange(longest, device=self._device)
        mask = (columns >= torch.tensor(padding, device=self._device)[:, None]).long()
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        temperatures = torch.tensor([r.sampling.temperature for r in batch], device=self._device)
        cache = None
        for step in range(max(request.sampling.max_generate_length for request in batch)):
            out = self._model(
                input_ids=tokens,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
            )
            cache = out.past_key_values
            uniforms = [r.uniforms[min(step, len(r.uniforms) - 1)] for r in batch]
            drawn, logprobs = _draw(out.logits[:, -1], temperatures, torch.stack(uniforms))
            for request, token, logprob in zip(
                batch, drawn.tolist(), logprobs.tolist(), strict=True
            ):
                if request.stopped is None:
                    request.tokens.append(token)
                    request.logprobs.append(logprob)
                    request.stopped = self._stop(request)
            if all(request.stopped for request in batch):
                return
            tokens, positions = drawn[:, None], positions[:, -1:] + 1
            mask = torch.cat([mask, mask.new_ones(len(batch), 1)], 1)

    def _stop(self, request: _Request) -> tuple[str, str | None] | None:
        """Return the reason and the stop string if the request ends with its last token."""
        if request.tokens[-1] == self._tokenizer.eos_token_id:
            return "stop", None
        if request.sampling.stop:
            tail = self._tokenizer.decode(request.tokens[-STOP_TAIL:])
            for string in request.sampling.stop:
                if string in tail:
                    return "stop", string
        if len(request.tokens) >= request.sampling.max_generate_length:
            return "length", None
        return None

    @torch.no_grad()
    def _prompt_logprobs(self, token_ids: list[int]) -> list[float]:
        ids = torch.tensor([token_ids], device=self._device)
        logprobs = self._model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
        return [float(x) for x in logprobs.gather(1, ids[0, 1:, None])[:, 0]]


def _draw(
    logits: torch.Tensor, temperatures: torch.Tensor, uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (B,) sampled ids and their logprobs.

    Args:
        logits: (B, V).
        temperatures: (B,); 0: the most likely token.
        uniforms: (B,) float64 in [0, 1), to which the distribution function is inverted.
    """
    greedy = temperatures == 0
    logprobs = (logits.float() / temperatures.masked_fill(greedy, 1.0)[:, None]).log_softmax(-1)
    cumulative = logprobs.double().exp().cumsum(-1)
    points = uniforms.to(logits.device)[:, None] * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, points, right=True)[:, 0].clamp(max=logits.shape[1] - 1)
    drawn = torch.where(greedy, logits.argmax(-1), drawn)
    return drawn, logprobs.gather(1, drawn[:, None])[:, 0]


def _generation(request: _Request) -> Generation:
    assert request.stopped is not None
    reason, string = request.stopped
    return Generation(request.tokens, request.logprobs, reason, string)
