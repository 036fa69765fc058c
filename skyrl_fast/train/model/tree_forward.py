"""Forward pass on prefix trees: positions are depths, each node attends to its ancestors.

The model's code is unchanged. Its attention function is replaced by one that calls `tree_attention`
if a tree is given, and torch's usual attention otherwise. T nodes, H hidden size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from skyrl_fast.ops.prefix_tree.attention import (
    TreeAttention,
    kind_for,
    pad_trees,
    padded_size,
    plan_tree_attention,
    tree_attention,
)
from skyrl_fast.ops.prefix_tree.tree import build_prefix_tree
from skyrl_fast.train.model.forward_pass import MicroBatch, NodeTree

ATTENTION = "skyrl_fast_tree"  # its name among transformers' attention functions
FULL_ATTENTION = "full_attention"  # a layer type of transformers
PLAN = "skyrl_fast_plan"  # keyword argument of its plan
PROBE_ROWS = ((1, 2, 3, 4, 5), (1, 2, 6, 7), (1, 2, 3, 5, 5, 2), (1, 2))
PROBE_TOLERANCE = 1e-3  # rounding is below 1e-5; other attention differs by more
# Their frequencies depend on the largest position of the pass, so rows would affect each other.
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def prepare_for_trees(backbone: Any) -> None:
    """Make a transformers backbone accept trees; its results without trees are unchanged.

    Raises:
        ValueError: the model does not support trees: layers with a window, an attention function
            that cannot be replaced, or other results on trees than on rows.
    """
    reason = _reason_against(backbone.config)
    if reason is not None:
        raise ValueError(f"trainer.rows: {_name(backbone)} cannot be trained as trees: {reason}")
    _register()
    backbone.set_attn_implementation(ATTENTION)
    if backbone.config._attn_implementation != ATTENTION:
        raise ValueError(
            f"trainer.rows: {_name(backbone)} cannot be trained as trees: its attention function "
            "cannot be replaced"
        )
    _probe(backbone)


def last_hidden_states(backbone: Any, micro: MicroBatch, device: torch.device) -> Tensor:
    """Return (n * L, H) last hidden states of sequences, or (T', H) of trees, T' at least T.

    Args:
        backbone: after `prepare_for_trees`, if the micro-batch is of trees.
        micro: from `padded_trees`.
        device: of the backbone.
    """
    ids = micro.input_ids.to(device)
    if micro.tree is None:
        hidden: Tensor = backbone(input_ids=ids, use_cache=False).last_hidden_state
    else:
        plan = plan_tree_attention(micro.tree.parents, micro.tree.ends, device=device)
        hidden = _on_trees(backbone, ids, micro.tree.positions.to(device), plan)
    return hidden.flatten(0, 1)


def padded_trees(micro: MicroBatch, device: torch.device) -> MicroBatch:
    """Return a micro-batch padded to the number of nodes that its attention requires.

    A padding node attends only to itself, and no node attends to it.
    """
    if micro.tree is None:
        return micro
    num_nodes = micro.input_ids.shape[1]
    extra = padded_size(num_nodes, kind_for(num_nodes, device)) - num_nodes
    if extra == 0:
        return micro
    parents, ends = pad_trees(micro.tree.parents, micro.tree.ends, num_nodes + extra)
    pad = torch.nn.functional.pad
    routes, mask = micro.expert_indices, micro.router_padding_mask
    return replace(
        micro,
        input_ids=pad(micro.input_ids, (0, extra)),
        tree=NodeTree(parents, ends, pad(micro.tree.positions, (0, extra))),
        expert_indices=None if routes is None else pad(routes, (0, 0, 0, 0, 0, extra)),
        router_padding_mask=None if mask is None else pad(mask, (0, extra), value=True),
    )


def _on_trees(backbone: Any, ids: Tensor, positions: Tensor, plan: TreeAttention) -> Tensor:
    """Return (1, T, H) last hidden states of (1, T) nodes at (1, T) positions."""
    # A mask of four dimensions keeps transformers from building its own.
    no_mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=ids.device)
    result: Tensor = backbone(
        input_ids=ids,
        position_ids=positions,
        attention_mask=no_mask,
        use_cache=False,
        **{PLAN: plan},
    ).last_hidden_state
    return result


def _name(backbone: Any) -> str:
    return type(backbone).__name__


def _reason_against(config: Any) -> str | None:
    others = {kind for kind in getattr(config, "layer_types", None) or () if kind != FULL_ATTENTION}
    if others:
        return (
            f"it has layers of {', '.join(sorted(others))}, which depend on positions in a sequence"
        )
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        return f"its attention has a window of {config.sliding_window} tokens"
    if getattr(config, "attention_chunk_size", None):
        return f"its attention works in chunks of {config.attention_chunk_size} tokens"
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = rope.get("rope_type", rope.get("type")) if isinstance(rope, dict) else None
    if kind in LENGTH_DEPENDENT_ROPE:
        return f"its rotary embedding ({kind}) depends on the longest row of a pass"
    if getattr(config, "alibi", False):
        return "its attention adds a term per distance (ALiBi)"
    return None


def _register() -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention function for transformers: (1, H, T, D) in, (1, T, H, D) out."""
    plan: TreeAttention | None = options.pop(PLAN, None)
    if plan is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        out, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **options
        )
        return out, None
    if dropout > 0:
        raise ValueError(f"trainer.rows: attention dropout must be 0 on trees, got {dropout}")
    return tree_attention(query, key, value, plan, scale=scaling).transpose(1, 2), None


@torch.no_grad()
def _probe(backbone: Any) -> None:
    """Compare a small tree with its rows, to detect what the model's config does not reveal."""
    vocabulary = backbone.get_input_embeddings().weight.shape[0]
    rows = [torch.tensor(row) % vocabulary for row in PROBE_ROWS]
    cu = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0)
    tree = build_prefix_tree(torch.cat(rows), cu)
    device = backbone.get_input_embeddings().weight.device
    plan = plan_tree_attention(tree.parents, tree.ends, device=device)
    ids, positions = (x.long()[None].to(device) for x in (tree.tokens, tree.positions))
    ours = _on_trees(backbone, ids, positions, plan)[0].float()
    for number, row in enumerate(rows):
        alone = backbone(input_ids=row[None].to(device), use_cache=False).last_hidden_state[0]
        error = (ours[tree.nodes_of(number).long()] - alone.float()).abs().max().item()
        if not error <= PROBE_TOLERANCE * max(1.0, alone.abs().max().item()):
            raise ValueError(
                f"trainer.rows: {_name(backbone)} cannot be trained as trees: its hidden states "
                f"on a small tree are not those of the rows (largest difference {error:.3g})"
            )
