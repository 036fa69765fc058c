"""How likely an engine's model finds the tokens of a sequence.

P tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

ROUNDING = 1e-3  # by which the log-probability of a certain token may exceed 0


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log-probabilities of a sequence's tokens, each given those before it, at temperature 1.

    Args:
        logprobs: (P - 1,) float32, of all tokens but the first.
        top_ids: (P - 1, K) int32, the most likely tokens in the place of each of them.
        top_logprobs: (P - 1, K) float32.
    """

    logprobs: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray


def read_prompt_scores(
    token_ids: Sequence[int], entries: Sequence[Mapping[int, float]], top_k: int = 0
) -> PromptScores:
    """Return the scores of a sequence.

    Args:
        token_ids: the P tokens.
        entries: P - 1, of all tokens but the first: log-probabilities by id, of the token there
            among others.
        top_k: K, of most likely tokens.

    Raises:
        ValueError, KeyError: a number of entries that does not fit, a token without one, fewer than
            `top_k`, or a log-probability that is no number up to 0.
    """
    logprobs = []
    top_ids = np.zeros((len(token_ids) - 1, top_k), np.int32)
    top_logprobs = np.zeros(top_ids.shape, np.float32)
    for place, (token, entry) in enumerate(zip(token_ids[1:], entries, strict=True)):
        logprobs.append(entry[token])
        # The token there is among the entries also where it is none of the most likely.
        ranked = sorted(entry, key=entry.__getitem__, reverse=True)[:top_k]
        top_ids[place] = ranked
        top_logprobs[place] = [entry[one] for one in ranked]
    return PromptScores(_checked(logprobs), top_ids, _checked(top_logprobs))


def _checked(values: Any) -> np.ndarray:
    logprobs = np.asarray(values, np.float32)
    wrong = ~(np.isfinite(logprobs) & (logprobs <= ROUNDING))
    if wrong.any():
        raise ValueError(f"expected log-probabilities up to 0, got {logprobs[wrong].flat[0]}")
    return logprobs
