"""A random Qwen3 mixture of experts of a fifth of a million parameters, and its tokenizer."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from examples.tiny_model.model import VOCABULARY_MULTIPLE, make_tokenizer

NUM_LAYERS, NUM_EXPERTS, TOP_K = 3, 8, 2
HIDDEN_SIZE, EXPERT_SIZE = 64, 64
# With the usual 0.02, random experts would hardly change the model's output.
INITIALIZER_RANGE = 0.15
WORDS = (
    "look at the next room and say what is in it door window table chair lamp book cup red green "
    "blue large small left right yes no there is a you see nothing else go on"
)


def make_model(folder: Path, *, seed: int = 0) -> None:
    """Write model and tokenizer to the folder, in Hugging Face format."""
    tokenizer = make_tokenizer([WORDS])
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=math.ceil(len(tokenizer) / VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=2 * HIDDEN_SIZE,
        moe_intermediate_size=EXPERT_SIZE,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=HIDDEN_SIZE // 2,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        max_position_embeddings=tokenizer.model_max_length,
        initializer_range=INITIALIZER_RANGE,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen3MoeForCausalLM(config).float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
