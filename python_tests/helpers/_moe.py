"""Tiny mixtures of experts, and handwritten versions of their blocks."""

from typing import Any

import torch

NUM_EXPERTS, TOP_K, NUM_LAYERS = 4, 2, 2
COMMON = {
    "vocab_size": 16,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "num_experts_per_tok": TOP_K,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 2,
}


def tiny_moe(kind: str = "qwen3_moe", seed: int = 0, **changes: Any) -> Any:
    """A causal LM with 2 layers of 4 experts, 2 per token; larger weights than the default."""
    import transformers as t

    experts = {"num_experts": NUM_EXPERTS, "moe_intermediate_size": 12}
    local = {"num_local_experts": NUM_EXPERTS}
    makers: dict[str, tuple[str, dict[str, Any]]] = {
        "qwen3_moe": ("Qwen3Moe", {**experts, "norm_topk_prob": True, "mlp_only_layers": []}),
        "qwen2_moe": ("Qwen2Moe", {**experts, "shared_expert_intermediate_size": 12}),
        "olmoe": ("Olmoe", {"num_experts": NUM_EXPERTS}),
        "mixtral": ("Mixtral", local),
        "deepseek_v3": (
            "DeepseekV3",
            {
                "n_routed_experts": NUM_EXPERTS,
                "n_shared_experts": 1,
                "n_group": 2,
                "topk_group": 1,
                "first_k_dense_replace": 1,
                "moe_intermediate_size": 12,
                "q_lora_rank": 8,
                "kv_lora_rank": 8,
                "qk_rope_head_dim": 8,
                "v_head_dim": 8,
                "qk_nope_head_dim": 8,
                "num_key_value_heads": 2,
            },
        ),
        "gpt_oss": ("GptOss", {**local, "sliding_window": 16}),
    }
    name, own = makers[kind]
    torch.manual_seed(seed)
    config = getattr(t, f"{name}Config")(**{**COMMON, **own, **changes})
    model = getattr(t, f"{name}ForCausalLM")(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def own_routes(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """(n, T, routers, K): where the model's routers send each token."""
    chosen: list[torch.Tensor] = []
    hooks = [
        module.register_forward_hook(lambda _m, _a, output: chosen.append(output[2]))
        for name, module in model.named_modules()
        if name.endswith((".mlp.gate", ".mlp.router", ".block_sparse_moe.gate"))
        and "outer" in type(module).__name__
    ]
    with torch.no_grad():
        model(input_ids=ids)
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, 1).unflatten(0, ids.shape)


def block_by_hand(block: Any, hidden: torch.Tensor, routes: torch.Tensor) -> torch.Tensor:
    """A Qwen3-MoE block on (T, H), token by token, expert by expert, at the given (T, K) routes."""
    weight, experts = block.gate.weight, block.experts
    rows = []
    for x, route in zip(hidden, routes, strict=True):
        probabilities = torch.softmax(weight @ x, 0)
        total = probabilities[route].sum()
        row = torch.zeros_like(x)
        for expert in route.tolist():
            gate, up = (experts.gate_up_proj[expert] @ x).chunk(2)
            out = experts.down_proj[expert] @ (torch.nn.functional.silu(gate) * up)
            row = row + probabilities[expert] / total * out
        rows.append(row)
    return torch.stack(rows)
