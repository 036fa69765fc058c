"""config.json of published models, for memory plans without a download."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_QWEN2 = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
_QWEN2_LARGE = {**_QWEN2, "vocab_size": 152064, "tie_word_embeddings": False}
_QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2.5-0.5B-Instruct": {
        **_QWEN2,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
    },
    "Qwen/Qwen2.5-1.5B-Instruct": {
        **_QWEN2,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
    },
    "Qwen/Qwen2.5-3B-Instruct": {
        **_QWEN2,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
    },
    "Qwen/Qwen3-4B": {
        **_QWEN2,
        "model_type": "qwen3",
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
    },
    "Qwen/Qwen2.5-Coder-7B-Instruct": {
        **_QWEN2_LARGE,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "meta-llama/Llama-3.1-8B-Instruct": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
    "allenai/OLMoE-1B-7B-0924-Instruct": {
        "model_type": "olmoe",
        "vocab_size": 50304,
        "hidden_size": 2048,
        "intermediate_size": 1024,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
    "Qwen/Qwen2.5-14B-Instruct": {
        **_QWEN2_LARGE,
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
    },
    "Qwen/Qwen2.5-32B-Instruct": {
        **_QWEN2_LARGE,
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
    },
    "Qwen/Qwen3-30B-A3B": {
        **_QWEN3_MOE,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
    },
    "Qwen/Qwen3-235B-A22B": {
        **_QWEN3_MOE,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
    },
}
BILLIONS = {  # parameters, as the models' cards say
    "Qwen/Qwen2.5-0.5B-Instruct": 0.494,
    "Qwen/Qwen2.5-1.5B-Instruct": 1.544,
    "Qwen/Qwen2.5-3B-Instruct": 3.086,
    "Qwen/Qwen3-4B": 4.022,
    "Qwen/Qwen2.5-Coder-7B-Instruct": 7.616,
    "allenai/OLMoE-1B-7B-0924-Instruct": 6.919,
    "meta-llama/Llama-3.1-8B-Instruct": 8.030,
    "Qwen/Qwen2.5-14B-Instruct": 14.77,
    "Qwen/Qwen3-30B-A3B": 30.53,
    "Qwen/Qwen2.5-32B-Instruct": 32.76,
    "Qwen/Qwen3-235B-A22B": 235.1,
}


def model_folder(folder: Path, name: str) -> Path:
    """Write the config.json of a model into a folder and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODELS[name]))
    return folder
