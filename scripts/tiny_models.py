"""Tiny random models of every type that transformers has a causal language model of.

A type's sizes are found by the names of its settings; layers of several kinds take turns, windows
and chunks are shorter than the rows that they are tried on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from itertools import cycle, islice
from typing import Any

import torch

from python_tests.helpers._vision_language import FAMILIES, vision_language_config
from skyrl_fast.batch import StepBatch

NUM_LAYERS = 4
BUDGET = 120  # tokens of a pass of `agent_rows`
DEVIATION = 0.2  # of the weights: the usual 0.02 would hide faults
# Settings of the same meaning. Heads are of the smallest size that vLLM has on a CPU.
SIZES: dict[int, str] = {
    320: "vocab_size decoder_vocab_size vocab_size_per_layer_input encoder_hash_byte_group_vocab "
    "ngram_vocab_size_base unpadded_vocab_size pronunciation_vocab_size shape_vocab_size",
    128: "hidden_size d_model n_embd embedding_size embedding_dim emb_dim word_embed_proj_dim "
    "attention_hidden_size lru_width input_embedding_size output_embedding_size mamba_d_ssm",
    64: "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim dff dim_ff d_inner n_inner "
    "ffn_hidden_size intermediate_size_mlp feed_forward_size dense_intermediate_size "
    "shared_intermediate_size moe_intermediate_size shared_expert_intermediate_size "
    "shared_experts_intermediate_size expert_ffn_hidden_size moe_shared_expert_intermediate_size "
    "mamba_expand_size ple_embed_dim",
    32: "head_dim swa_head_dim d_head dim_head kv_channels global_head_dim index_head_dim "
    "attention_head_size query_pre_attn_scalar linear_key_head_dim linear_value_head_dim "
    "linear_head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim kv_lora_rank q_lora_rank "
    "hidden_size_per_layer_input rotary_dim mamba_head_dim mamba_headdim mamba_d_head "
    "pronunciation_embed_dim shape_embed_dim",
    16: "ssm_state_size state_size mamba_d_state time_step_rank mamba_dt_rank hc_lowrank "
    "o_lora_rank gated_norm_rank laurel_rank loop_gate_rank adapter_rank d_rel rel_extent "
    "router_hidden_size index_n_heads",  # of few heads many scores are 0, and ties are arbitrary
    NUM_LAYERS: "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers "
    "num_encoder_layers num_decoder_layers num_blocks num_attention_heads n_head n_heads num_heads "
    "decoder_attention_heads encoder_attention_heads attention_heads num_encoder_attention_heads "
    "num_decoder_attention_heads swa_num_attention_heads linear_num_value_heads linear_num_heads "
    "mamba_n_heads mamba_num_heads n_mamba_heads num_experts n_routed_experts num_local_experts "
    "moe_num_experts num_query_groups",
    2: "num_key_value_heads num_kv_heads swa_num_key_value_heads linear_num_key_heads "
    "num_experts_per_tok num_experts_per_token moe_k moe_topk moe_top_k kv_n_heads zero_expert_num "
    "num_global_key_value_heads index_topk n_groups mamba_n_groups",
    1: "n_group topk_group num_expert_group n_shared_experts first_k_dense_replace o_groups "
    "num_dense_layers",
    5: "sliding_window sliding_window_size window_size attention_window_size local_attention "
    "attention_chunk_size keep_window_size floor_scale",
    8: "chunk_size mamba_chunk_size block_size index_block_size",
    512: "max_position_embeddings n_positions n_ctx max_seq_len model_max_length context_length "
    "max_target_positions",
}
# What the names do not tell.
_MROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [6, 5, 5]}
_MROPE |= {"partial_rotary_factor": 1.0}
_LATENT_HEADS = {"num_key_value_heads": 4}
_HEADS = {"head_dim": 32}
_MAMBA = {"mamba_expand": 1}
_UNSHARED = {"num_kv_shared_layers": 0}
_POSITIONS = {"rope_parameters": _MROPE, **_HEADS}
_SLIDING = ["sliding_attention", "full_attention"]
_INDEXER = {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 32}
_INDEXER |= {"indexer_budget": 8, "indexer_compress_ratio": 4}
SETTINGS: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"topk_group": 1, "layer_group_size": 2},
    "bamba": _MAMBA,
    "cohere_compass_text": {
        "layer_types": _SLIDING * 2,
        "rope_parameters": dict.fromkeys(_SLIDING, _MROPE),
    },
    "dbrx": {"attn_config": {"rope_theta": 10_000.0, "clip_qkv": 8.0}},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1},
    "dots3_note": _LATENT_HEADS,
    "dots3_note_text": _LATENT_HEADS,
    "gemma3n_text": _UNSHARED,
    "gemma4": _UNSHARED,
    "gemma4_assistant": {"hidden_size_per_layer_input": 0},
    "glm4v": _POSITIONS,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": _MAMBA,
    "hunyuan_v1_dense": _HEADS,
    "hunyuan_v1_moe": _HEADS,
    "internvl": {"layer_types": ["full_attention"] * NUM_LAYERS, **_HEADS},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"expand": 1},
    "ministral": _HEADS,
    "mistral3": _HEADS,
    "nemotron": {"num_key_value_heads": 2, **_HEADS},
    "qwen2_5_vl": _POSITIONS,
    "qwen3_vl": _POSITIONS,
    "qwen3_vl_moe": _POSITIONS,
    "qwen4_exp": {"text_config": _INDEXER},
    "qwen4_exp_text": _INDEXER,
    "zamba": {"attention_hidden_size": 256, "attention_head_dim": 64},
    "zamba2": {"attention_hidden_size": 256, "attention_head_dim": 64, "mamba_headdim": 64},
    "zaya": {"num_experts_per_tok": 1},
}
SIZE_OF = {name: size for size, names in SIZES.items() for name in names.split()}
NEEDED = ("num_experts_per_tok",)  # though it may be None
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def tiny_config(kind: str) -> Any:
    """Return a config of a type: of a causal language model, or of a vision-language one."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if kind in FAMILIES:
        sizes = _tiny_sizes(vision_language_config(kind).get_text_config())
        return vision_language_config(kind, **(sizes | SETTINGS.get(kind, {})))
    config_class = CONFIG_MAPPING[kind]
    own = SETTINGS.get(kind, {})
    settings = _tiny_settings(config_class)
    parts = {
        name: settings[name] | own[name]
        for name in settings.keys() & own.keys()
        if isinstance(settings[name], dict)
    }
    return config_class(**(settings | own | parts))


def _tiny_settings(config_class: Any) -> dict[str, Any]:
    with contextlib.suppress(Exception):  # some have no default
        default = config_class()
        parts = {
            name: _tiny_settings(type(part))
            for name in getattr(config_class, "sub_configs", {})
            if (part := getattr(default, name, None)) is not None
        }
        return _tiny_sizes(default) | parts
    return {"hidden_size": 128, **TOKENS}


def _tiny_sizes(config: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for name, value in config.to_dict().items():
        if name in SIZE_OF and (value is not None or name in NEEDED):
            settings[name] = SIZE_OF[name]
        elif isinstance(value, list) and len(value) > 2 and name.endswith(("types", "block_type")):
            settings[name] = list(islice(cycle(dict.fromkeys(value)), NUM_LAYERS))
    if "kv_lora_rank" in settings:  # latent attention has a key for each query head
        settings["num_key_value_heads"] = settings["num_attention_heads"]
    if getattr(config, "is_decoder", None) is False:
        settings["is_decoder"] = True
    return {**settings, "model_type": config.model_type, **TOKENS}


def tiny_model(kind: str, changes: Mapping[str, Any] | None = None) -> Any:
    """Return a float32 model, as it is loaded.

    Args:
        changes: of its language model's config.
    """
    from skyrl_fast.config.model_folder import find_auto_class

    config = tiny_config(kind)
    for name, value in (changes or {}).items():
        setattr(config.get_text_config(), name, value)
    torch.manual_seed(0)
    # grouped products of experts have no float64
    model = find_auto_class(config).from_config(config, experts_implementation="eager")
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=DEVIATION)
        else:  # so that a bias or a factor that is left out shows
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def agent_rows(seed: int = 0) -> StepBatch:
    """Return steps of two groups of agents: some contexts only grow, some lose their thoughts.

    Rows are longer than every window and chunk of the tiny models.
    """
    generator = torch.Generator().manual_seed(seed)

    def words(count: int) -> list[int]:  # not the ids of images, nor those that end a sequence
        return torch.randint(40, 240, (count,), generator=generator).tolist()

    output: dict[str, list[Any]] = {
        name: [] for name in ("prompt_token_ids", "response_ids", "trajectory_ids")
    }
    for group in range(2):
        prompt = words(7)
        for sample in range(2):
            history = prompt
            for turn in range(3):
                answer = words(4 + turn)
                output["prompt_token_ids"].append(history)
                output["response_ids"].append(answer)
                output["trajectory_ids"].append((f"p{group}", sample))
                history = history + (answer if sample else answer[2:]) + words(2)
    ids, answers = output["trajectory_ids"], output["response_ids"]
    output["loss_masks"] = [[1] * len(answer) for answer in answers]
    output["rollout_logprobs"] = [[-1.0] * len(answer) for answer in answers]
    output["rewards"] = [float(n % 2) for n in range(len(ids))]
    output["is_last_step"] = [a != b for a, b in zip(ids, [*ids[1:], None], strict=True)]
    batch = StepBatch.from_generator_output(output, step_wise=True)
    return batch.with_(advantages=torch.randn(batch.loss_mask.shape[0], generator=generator))
