"""Rotary embeddings whose frequencies depend on the longest row of a forward pass.

transformers chooses them per pass, so rows of one pass would change each other's logprobs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# "longrope": one set of frequencies for passes up to the limit, another for longer ones.
# "dynamic": beyond the limit, frequencies of the longest row so far.
LONGROPE = "longrope"
DYNAMIC = "dynamic"


@dataclass(frozen=True, slots=True)
class RopeLimit:
    """The longest pass with the original frequencies."""

    kind: str  # LONGROPE or DYNAMIC
    length: int  # in tokens


def rope_limits(config: Any) -> tuple[RopeLimit, ...]:
    """Return the limits of a transformers config; layer types may differ, most models have none.

    Example:
        >>> from transformers import LlamaConfig
        >>> scaling = {"rope_type": "dynamic", "factor": 2.0}
        >>> rope_limits(LlamaConfig(max_position_embeddings=64, rope_scaling=scaling))
        (RopeLimit(kind='dynamic', length=64),)
    """
    config = config.get_text_config()  # settings of the part that reads text
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
