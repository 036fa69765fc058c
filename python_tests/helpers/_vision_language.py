"""Tiny vision-language models of public families, whose rows are text."""

from typing import Any

import torch

IMAGE, VIDEO = 28, 29  # token ids that stand for images and videos
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
SECTIONS = {**ROPE, "mrope_section": [1, 1, 2], "partial_rotary_factor": 1.0}
TEXT: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 512, "tie_word_embeddings": False,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 12, "num_experts_per_tok": 2}
PATCHES = {
    "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4,
    "out_hidden_size": 32,
}  # fmt: skip
DEEP = {**PATCHES, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
TOWER = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
GLM_ENDS = {f"{kind}_{end}_token_id": 30 for kind in ("image", "video") for end in ("start", "end")}
GEMMA4 = {
    "sliding_window": 5, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 32,
    "num_kv_shared_layers": 0, "global_head_dim": 8,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}  # fmt: skip
LINEAR = {
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
# name: prefix of the classes; settings of the language model, of the vision model, and of both;
# names of the parts that are frozen
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any], set[str]]] = {
    "qwen3_vl": ("Qwen3VL", {"rope_parameters": SECTIONS}, DEEP, {}, {"model.visual"}),
    "qwen3_vl_moe": (
        *("Qwen3VLMoe", {**EXPERTS, "num_experts": 4, "rope_parameters": SECTIONS}, DEEP),
        *({}, {"model.visual"}),
    ),
    "qwen2_5_vl": (
        *("Qwen2_5_VL", {"rope_parameters": SECTIONS}),
        *({**PATCHES, "fullatt_block_indexes": [1], "window_size": 8}, {}, {"model.visual"}),
    ),
    "qwen3_5": (
        *("Qwen3_5", {**LINEAR, "rope_parameters": SECTIONS}),
        *({**DEEP, "deepstack_visual_indexes": []}, {}, {"model.visual"}),
    ),
    "glm4v": (
        # vLLM reads whether there are biases, which transformers always has
        *("Glm4v", {"rope_parameters": SECTIONS, "attention_bias": True}),
        {**PATCHES, "image_size": 16},
        *(GLM_ENDS, {"model.visual"}),
    ),
    "gemma3": (
        *("Gemma3", {"sliding_window": 5, "query_pre_attn_scalar": 8}, TOWER),
        {"mm_tokens_per_image": 4, "boi_token_index": 30, "eoi_token_index": 30},
        {"model.vision_tower", "model.multi_modal_projector"},
    ),
    "gemma4": (
        *("Gemma4", GEMMA4),
        {**TOWER, "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16},
        *({"audio_config": None}, {"model.vision_tower", "model.embed_vision"}),
    ),
    "mistral3": (
        *("Mistral3", {"model_type": "mistral", "sliding_window": None}),
        *({**TOWER, "model_type": "pixtral", "head_dim": 8}, {}),
        {"model.vision_tower", "model.multi_modal_projector"},
    ),
    "internvl": (
        *("InternVL", {"model_type": "qwen2"}),
        *({**TOWER, "image_size": [28, 28], "patch_size": [14, 14]}, {}),
        {"model.vision_tower", "model.multi_modal_projector"},
    ),
    "llama4": (
        "Llama4",
        {"num_local_experts": 2, "intermediate_size_mlp": 48, "attention_chunk_size": 6},
        {
            **TOWER,
            **{f"{name}_dim": 16 for name in ("projector_input", "projector_output")},
            "vision_output_dim": 16,
        },
        *({}, {"vision_model", "multi_modal_projector"}),
    ),
}


def vision_language_config(family: str, **text: Any) -> Any:
    """Return the config of a checkpoint of a family; `text` changes that of its language model."""
    import transformers

    name, own, vision, both, _ = FAMILIES[family]
    tokens = {"image_token_id": IMAGE, "image_token_index": IMAGE, "video_token_id": VIDEO}
    config = getattr(transformers, f"{name}Config")(
        text_config={**TEXT, **own, **text}, vision_config=vision, **{**tokens, **both}
    )
    config.architectures = [f"{name}ForConditionalGeneration"]
    config.tie_word_embeddings = config.get_text_config().tie_word_embeddings
    # Larger than the default, so that small faults show.
    for part in (config, config.get_text_config()):
        part.initializer_range = 0.2
    return config


def vision_language_model(family: str, dtype: torch.dtype = torch.float32, **text: Any) -> Any:
    """Return a tiny model of random weights."""
    import transformers

    config = vision_language_config(family, **text)
    torch.manual_seed(0)
    model = getattr(transformers, config.architectures[0])(config)
    if "moe" in family or family == "llama4":
        model.set_experts_implementation("eager")  # grouped products have no float64
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return (model.double() if dtype == torch.float64 else model).eval()  # not complex buffers


def language_model_of(model: Any, family: str) -> Any:
    """Return what computes logits of text; of Llama 4 transformers' wrapper asks for images."""
    return model.language_model if family == "llama4" else model
