"""Rotary embeddings whose frequencies depend on the longest row of a forward pass.

transformers chooses them per pass, so rows of one pass would change each other's logprobs. N rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# "longrope": one set of frequencies for passes up to the limit, another for longer ones.
# "dynamic": beyond the limit, frequencies of the longest row so far.
LONGROPE, DYNAMIC = "longrope", "dynamic"


@dataclass(frozen=True, slots=True)
class RopeLimit:
    """The longest pass with the original frequencies.

    Args:
        kind: "longrope" or "dynamic".
        length: in tokens.
    """

    kind: str
    length: int


def rope_limits(config: Any) -> tuple[RopeLimit, ...]:
    """Return the limits of a transformers config; layer types may differ, most models have none.

    Example:
        >>> from transformers import LlamaConfig
        >>> scaling = {"rope_type": "dynamic", "factor": 2.0}
        >>> rope_limits(LlamaConfig(max_position_embeddings=64, rope_scaling=scaling))
        (RopeLimit(kind='dynamic', length=64),)
    """
    config = config.get_text_config()  # of a model with several parts
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)]
    found = set()
    for parameters in nested or [rope]:
        kind = parameters.get("rope_type", parameters.get("type"))
        if kind == LONGROPE:
            name = "original_max_position_embeddings"
            length = parameters.get(name) or getattr(config, name, None)
            found.add(RopeLimit(kind, length or config.max_position_embeddings))
        elif kind == DYNAMIC:
            found.add(RopeLimit(kind, config.max_position_embeddings))
    return tuple(sorted(found, key=lambda limit: (limit.length, limit.kind)))


def exceeded_limits(
    lengths: np.ndarray, limits: Sequence[RopeLimit], visited: np.ndarray
) -> np.ndarray:
    """Return (N,) how many limits each row exceeds: rows of one pass must exceed equally many.

    Args:
        lengths: (N,) tokens of each row.
        visited: (N,) bool, rows to check.

    Example:
        >>> exceeded_limits(np.array([3, 9]), [RopeLimit("longrope", 4)], np.array([True, True]))
        array([0, 1])
    """
    count = np.zeros(len(lengths), dtype=np.int64)
    for limit in limits:
        longer = lengths > limit.length
        if limit.kind == DYNAMIC and bool(np.any(longer & visited)):
            row = int(np.flatnonzero(longer & visited)[0])
            raise ValueError(
                f"plan_micro_batches: row {row} has {int(lengths[row])} tokens, but the rotary "
                f"embedding ({limit.kind}) of this model depends on other rows beyond "
                f"max_position_embeddings={limit.length}"
            )
        count += longer
    return count
