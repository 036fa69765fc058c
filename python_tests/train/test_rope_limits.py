"""Limits of rotary embeddings whose frequencies depend on the longest row."""

from __future__ import annotations

from typing import Any

import pytest

from skyrl_fast.train.model.rope_limits import RopeLimit, rope_limits

transformers = pytest.importorskip("transformers")

FACTORS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
PHI3 = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0}


def phi3(**rope: Any) -> Any:
    return transformers.Phi3Config(
        **PHI3, max_position_embeddings=64, original_max_position_embeddings=16, rope_scaling=rope
    )


@pytest.mark.spec("loss.rope-limits")
def test_limits_of_configs() -> None:
    assert rope_limits(transformers.LlamaConfig()) == ()
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8}
    assert rope_limits(transformers.LlamaConfig(rope_scaling=yarn)) == ()
    assert rope_limits(phi3(rope_type="longrope", **FACTORS)) == (RopeLimit("longrope", 16),)
    nested = transformers.LlamaConfig()
    nested.rope_parameters = {
        "full_attention": {
            "rope_type": "longrope", "original_max_position_embeddings": 32, **FACTORS
        },
        "sliding_attention": {"rope_type": "default"},
    }  # fmt: skip
    assert rope_limits(nested) == (RopeLimit("longrope", 32),)
