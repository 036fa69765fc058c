"""Sampling parameters, and which of them the trainer's log-probabilities can account for."""
# ruff: noqa: RUF009 - setting() returns dataclass fields

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from skyrl_fast.setting import ConfigError, did_you_mean, setting

# vLLM parameters that mean the same to an engine of the run and to a server.
ADDITIONAL = (
    "allowed_token_ids",
    "bad_words",
    "frequency_penalty",
    "ignore_eos",
    "logit_bias",
    "min_tokens",
    "presence_penalty",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "stop_token_ids",
    "structured_outputs",
    "thinking_token_budget",
    "watermarking",
)
# vLLM parameters that the settings or the agent loop already set.
_RESERVED = frozenset(
    (
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "stop",
        "seed",
        "n",
        "logprobs",
        "include_stop_str_in_output",
        "detokenize",
        "output_kind",
        "flat_logprobs",
        "logprob_token_ids",
    )
)
# vLLM parameters that exclude tokens, as top_p does: those that remain are recorded.
_EXCLUDING = frozenset(
    ("allowed_token_ids", "bad_words", "min_tokens", "structured_outputs", "thinking_token_budget")
)
# vLLM parameters that change the logits of tokens that may be sampled.
_CHANGING = frozenset(("frequency_penalty", "presence_penalty", "logit_bias", "watermarking"))
# vLLM parameters that depend on all tokens of an answer, which the engine forgets between requests.
_OF_WHOLE_ANSWERS = frozenset(("frequency_penalty", "presence_penalty", "structured_outputs"))


@dataclass(slots=True)
class SamplingParams:
    """How tokens are sampled."""

    max_generate_length: int = setting(1024, "maximum tokens of a turn's response", at_least=1)
    temperature: float = setting(1.0, "sampling temperature; 0: greedy", at_least=0, finite=True)
    top_p: float = setting(1.0, "probability mass of nucleus sampling", above=0, at_most=1)
    top_k: int = setting(-1, "number of most likely tokens to sample from; -1: all", at_least=-1)
    min_p: float = setting(
        0.0, "minimum probability relative to the most likely token", at_least=0, at_most=1
    )
    repetition_penalty: float = setting(1.0, "repetition penalty; 1: none", above=0, finite=True)
    stop: list[str] | None = setting(None, "strings that end a turn")
    max_kept_tokens: int | None = setting(
        256,
        "in training, where sampling excludes tokens (top_p, top_k, min_p): the largest number of "
        "tokens to sample from, an upper limit of top_k. They are recorded, and the trainer's "
        "log-probabilities are normalized over them",
        at_least=1,
    )
    additional_kwargs: dict[str, Any] = setting(
        {}, f"additional vLLM sampling parameters, of {', '.join(ADDITIONAL)}"
    )

    @property
    def excludes_tokens(self) -> bool:
        """Whether tokens are sampled from a part of the vocabulary."""
        given = {name for name, value in self.additional_kwargs.items() if value}
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0 or bool(given & _EXCLUDING)

    @property
    def begins_again(self) -> bool:
        """Whether an answer that a weight update interrupts is sampled again from its start."""
        return any(self.additional_kwargs.get(name) for name in _OF_WHOLE_ANSWERS)

    @property
    def num_kept_tokens(self) -> int | None:
        """The limit of the recorded tokens per sample; None: none are recorded."""
        return self.max_kept_tokens if self.excludes_tokens else None


def check_sampling(key: str, sampling: SamplingParams, *, trained: bool) -> None:
    """Raise ConfigError for parameters that exclude each other.

    If samples are `trained`, also where the trainer cannot compute their log-probabilities.
    """
    given = {name for name, value in sampling.additional_kwargs.items() if value}
    for name in sorted(_RESERVED & set(sampling.additional_kwargs)):
        raise ConfigError(
            f"{key}.additional_kwargs: expected vLLM parameters that neither the settings nor the "
            f"agent loop set, got {name}"
        )
    for name in sorted(sampling.additional_kwargs.keys() - set(ADDITIONAL)):
        raise ConfigError(
            f"{key}.additional_kwargs: expected vLLM parameters of {', '.join(ADDITIONAL)}, "
            f"got {name}{did_you_mean(name, ADDITIONAL)}"
        )
    least = sampling.additional_kwargs.get("min_tokens") or 0
    if type(least) is not int or not 0 <= least <= sampling.max_generate_length:
        raise ConfigError(
            f"{key}.additional_kwargs.min_tokens: expected an integer from 0 to "
            f"max_generate_length={sampling.max_generate_length}, got {least!r}"
        )
    if not trained:
        return
    if sampling.temperature == 0:
        raise ConfigError(f"{key}.temperature: expected > 0 in training, got 0")
    reason = (
        "in training: the trainer's log-probabilities do not include it, so the ratio of policies "
        "would be wrong"
    )
    if sampling.repetition_penalty != 1:
        raise ConfigError(
            f"{key}.repetition_penalty: expected 1 {reason}, got {sampling.repetition_penalty:g}"
        )
    for name in sorted(_CHANGING & given):
        raise ConfigError(f"{key}.additional_kwargs: expected no {name} {reason}, got one")
    if not sampling.excludes_tokens:
        return
    if sampling.max_kept_tokens is None:
        raise ConfigError(f"{key}.max_kept_tokens: expected a number in training, got null")
    if sampling.top_k > sampling.max_kept_tokens:
        raise ConfigError(
            f"{key}.top_k: expected at most max_kept_tokens={sampling.max_kept_tokens}, the tokens "
            f"that are recorded per sample, got {sampling.top_k}"
        )
