"""Sampling from a base model and from frozen snapshots of adapters, by vLLM.

A snapshot is a folder of PEFT files with a name and a number of its own: vLLM loads it when a
request names it, and again from the folder after it was evicted. Log-probabilities are the model's
own, before temperature, top_k and top_p.

P tokens of a prompt, k most likely tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from skyrl_fast.rollout.engine.vllm_engine import VllmEngine
from skyrl_fast.rollout.stop_reason import STOP
from skyrl_fast.tinker.values import number, whole_number
from skyrl_fast.tinker.wire import EMPTY_TOPK, RefusedCallError, SampledTokens, Samples

MAX_TOPK = 1024
MAX_SAMPLES = 1024  # of one call
MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A frozen adapter that an engine loads from its folder.

    Args:
        number: another one for each snapshot, from 1.
    """

    name: str
    number: int
    folder: Path


@dataclass(frozen=True, slots=True)
class SampleCall:
    """A call of `sample`, checked.

    Args:
        stop_strings, stop_ids: end an answer, as the end token does.
        ignores_end: whether nothing but the limit ends an answer.
        topk_prompt, topk_sample: the number of most likely tokens to return; 0: none.
        last_n: of the prompt's tokens, how many have log-probabilities; None: all but the first.
    """

    prompt: list[int]
    num_samples: int
    max_tokens: int
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    seed: int | None = None
    stop_strings: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignores_end: bool = False
    prompt_logprobs: bool = False
    topk_prompt: int = 0
    topk_sample: int = 0
    last_n: int | None = None


class SnapshotSampler(Protocol):
    """Samples from the base model and from snapshots."""

    async def start(self) -> None:
        """Load the base model."""

    async def close(self) -> None:
        """Free everything."""

    async def sample(self, call: SampleCall, snapshot: Snapshot | None, space: str) -> Samples:
        """Return the answers to one prompt.

        Args:
            snapshot: None: the base model.
            space: requests of equal spaces share cached keys and values.

        Raises:
            RefusedRequestError: the call is invalid. EngineError: it failed.
        """


_UNSERVED = {
    "target_prompt_logprobs": "log-probabilities of other tokens of a prompt: use forward with "
    "targets of shape (N, K)",
    "prompt_alt_tokens_k": "draws at the positions of a prompt",
    "record_stability_info": "records for stable_reinforce, which is not served: sample without "
    "them, and train with loss_fn='importance_sampling'",
}


def read_sample_call(body: Mapping[str, Any], *, vocab_size: int, max_length: int) -> SampleCall:
    """Return the call in the JSON body of a request.

    Args:
        max_length: the most tokens of prompt and answer.

    Raises:
        RefusedCallError: a value that is wrong or not served.
    """
    for name, what in _UNSERVED.items():
        if body.get(name):
            raise RefusedCallError(f"{name}: not served: {what}")
    prompt = _read_prompt(body.get("prompt"), vocab_size)
    params = body.get("sampling_params")
    if not isinstance(params, Mapping):
        raise RefusedCallError(f"sampling_params: expected an object, got {params!r:.100}")
    room = max_length - len(prompt)
    if room < 1:
        raise RefusedCallError(
            f"prompt: expected at most {max_length - 1} tokens, got {len(prompt)}"
        )
    asked = params.get("max_tokens")
    max_tokens = whole_number("max_tokens", room if asked is None else asked, 1, None)
    last_n = body.get("prompt_logprobs_last_n")
    if last_n is not None:
        last_n = whole_number("prompt_logprobs_last_n", last_n, 1, max(1, len(prompt) - 1))
    seed = params.get("seed")
    return SampleCall(
        prompt=prompt,
        num_samples=whole_number("num_samples", body.get("num_samples", 1), 1, MAX_SAMPLES),
        max_tokens=min(max_tokens, room),
        temperature=number("temperature", params.get("temperature", 1.0), 0.0, None),
        top_k=whole_number("top_k", params.get("top_k", -1), -1, None),
        top_p=number("top_p", params.get("top_p", 1.0), 0.0, 1.0),
        seed=None if seed is None else whole_number("seed", seed, None, None) % MAX_SEED,
        **_read_stop(params.get("stop"), vocab_size),
        prompt_logprobs=bool(body.get("prompt_logprobs")),
        topk_prompt=whole_number(
            "topk_prompt_logprobs", body.get("topk_prompt_logprobs", 0), 0, MAX_TOPK
        ),
        topk_sample=whole_number(
            "topk_sample_logprobs", body.get("topk_sample_logprobs", 0), 0, MAX_TOPK
        ),
        last_n=last_n,
    )


def _read_prompt(prompt: Any, vocab_size: int) -> list[int]:
    chunks = prompt.get("chunks") if isinstance(prompt, Mapping) else None
    if not isinstance(chunks, list):
        raise RefusedCallError("prompt: expected chunks of tokens")
    tokens: list[int] = []
    for chunk in chunks:
        kind = chunk.get("type", "encoded_text") if isinstance(chunk, Mapping) else None
        if kind != "encoded_text" or not isinstance(chunk.get("tokens"), list):
            raise RefusedCallError(
                f"prompt: expected chunks of text, got {kind}: images and sounds are not served"
            )
        tokens += chunk["tokens"]
    if not tokens:
        raise RefusedCallError("prompt: expected at least one token, got none")
    for token in tokens:
        whole_number("prompt", token, 0, vocab_size - 1)
    return tokens


def _read_stop(stop: Any, vocab_size: int) -> dict[str, Any]:
    if stop is None:
        return {}
    if isinstance(stop, str):
        stop = [stop]
    if not isinstance(stop, list):
        raise RefusedCallError(f"stop: expected texts or token ids, got {stop!r:.100}")
    if not stop:  # not even the end token
        return {"ignores_end": True}
    if all(isinstance(one, str) and one for one in stop):
        return {"stop_strings": tuple(stop)}
    return {"stop_ids": tuple(whole_number("stop", one, 0, vocab_size - 1) for one in stop)}


@dataclass(slots=True)
class VllmSampler:
    """Samples by an engine that takes an adapter with each request."""

    engine: VllmEngine
    _adapters: dict[str, Any] = field(default_factory=dict)

    async def start(self) -> None:
        await self.engine.start()

    async def close(self) -> None:
        await self.engine.close()

    async def sample(self, call: SampleCall, snapshot: Snapshot | None, space: str) -> Samples:
        output = await self.engine.answer(
            call.prompt,
            _vllm_arguments(call),
            session_id=space,
            cache_salt=space,
            adapter=None if snapshot is None else self._adapter(snapshot),
        )
        sequences = [_read_sequence(one, call.topk_sample) for one in output.outputs]
        prompt_logprobs = topk_prompt = None
        if call.prompt_logprobs or call.topk_prompt:
            entries = _entries_of_last(output.prompt_logprobs, call.last_n)
            if call.prompt_logprobs:
                prompt_logprobs = _chosen_logprobs(call.prompt, entries)
            if call.topk_prompt:
                topk_prompt = _topk(entries, call.topk_prompt)
        cached = getattr(output, "num_cached_tokens", None)
        return Samples(sequences, prompt_logprobs, topk_prompt, cached or 0)

    def _adapter(self, snapshot: Snapshot) -> Any:
        if snapshot.name not in self._adapters:
            from vllm.lora.request import LoRARequest

            self._adapters[snapshot.name] = LoRARequest(
                snapshot.name, snapshot.number, str(snapshot.folder)
            )
        return self._adapters[snapshot.name]


def _vllm_arguments(call: SampleCall) -> dict[str, Any]:
    wants_prompt = call.prompt_logprobs or call.topk_prompt > 0
    return {
        "n": call.num_samples,
        "max_tokens": call.max_tokens,
        "temperature": call.temperature,
        "top_k": max(0, call.top_k),  # 0: all
        "top_p": call.top_p,
        "seed": call.seed,
        "stop": list(call.stop_strings) or None,
        "stop_token_ids": list(call.stop_ids) or None,
        "ignore_eos": call.ignores_end,
        "logprobs": call.topk_sample,
        "prompt_logprobs": call.topk_prompt if wants_prompt else None,
        "flat_logprobs": not wants_prompt,  # of a prompt they would be flat, too
        "detokenize": bool(call.stop_strings),
        "include_stop_str_in_output": True,
    }


Entry = Mapping[int, float]  # log-probabilities of a position's tokens


def _read_sequence(output: Any, topk: int) -> SampledTokens:
    tokens = list(output.token_ids)
    entries = _read_entries(output.logprobs)
    return SampledTokens(
        tokens=tokens,
        logprobs=[entry[token] for token, entry in zip(tokens, entries, strict=True)],
        stopped=output.finish_reason == STOP,
        topk=_topk(entries, topk) if topk else None,
    )


def _read_entries(logprobs: Any) -> list[Entry]:
    """Return the log-probabilities of sampled tokens from either of vLLM's forms."""
    if not hasattr(logprobs, "start_indices"):
        return [_entry(one) for one in logprobs]
    ranges = zip(logprobs.start_indices, logprobs.end_indices, strict=True)
    return [
        dict(zip(logprobs.token_ids[start:end], logprobs.logprobs[start:end], strict=True))
        for start, end in ranges
    ]


def _entry(of_position: Mapping[int, Any]) -> Entry:
    return {token: value.logprob for token, value in of_position.items()}


def _entries_of_last(entries: Sequence[Any], last_n: int | None) -> list[Entry | None]:
    """Return the entries of a prompt's tokens, None for those without log-probabilities."""
    found: list[Entry | None] = [None, *map(_entry, entries[1:])]
    if last_n is not None:
        hidden = len(found) - last_n
        found[:hidden] = [None] * hidden
    return found


def _chosen_logprobs(prompt: Sequence[int], entries: Sequence[Entry | None]) -> np.ndarray:
    values = [
        np.nan if entry is None else entry[token]
        for token, entry in zip(prompt, entries, strict=True)
    ]
    return np.array(values, np.float32)


def _topk(entries: Sequence[Entry | None], k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (P, k) ids and log-probabilities of the most likely tokens, most likely first."""
    ids = np.zeros((len(entries), k), np.int32)
    logprobs = np.full((len(entries), k), EMPTY_TOPK, np.float32)
    for place, entry in enumerate(entries):
        if entry is None:
            continue
        ranked = sorted(entry.items(), key=lambda one: -one[1])[:k]
        for rank, (token, value) in enumerate(ranked):
            ids[place, rank] = token
            logprobs[place, rank] = value
    return ids, logprobs
