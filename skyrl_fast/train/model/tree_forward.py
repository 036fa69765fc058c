"""Forward pass on prefix trees: positions are depths, each node attends to its ancestors.

The model's code is unchanged. Its attention function is replaced by one that calls `tree_attention`
if a tree is given, and torch's usual attention otherwise. T nodes, H hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from skyrl_fast.ops import _backend
from skyrl_fast.ops.prefix_tree.attention import (
    TreeAttention,
    autocast,
    dense_attention,
    kind_for,
    pad_trees,
    padded_size,
    plan_tree_attention,
    seen_nodes,
    tree_attention,
)
from skyrl_fast.ops.prefix_tree.tree import build_prefix_tree
from skyrl_fast.train.model.depth_first import TreeUnit, depth_first_states, tree_units
from skyrl_fast.train.model.forward_pass import MicroBatch, NodeTree
from skyrl_fast.train.model.lm_head import in_float32
from skyrl_fast.train.model.packed_rows import (
    SHORT_REACH,
    pack_rows,
    scales_by_place,
    short_reach,
)
from skyrl_fast.train.model.rope_limits import rope_limits
from skyrl_fast.train.model.sequence_part import padded, part_of
from skyrl_fast.train.model.tree_path import PATH, LayerPath
from skyrl_fast.train.model.tree_states import SEGMENTS, TreeSegments, replace_state_functions
from skyrl_fast.train.parallel.sequence_ranks import SINGLE, SequenceRanks

ATTENTION = "skyrl_fast_tree"  # its name among transformers' attention functions
# Layer types of transformers.
CHUNKED_ATTENTION = "chunked_attention"
LAYER_TYPES = frozenset({"full_attention", "sliding_attention", CHUNKED_ATTENTION})
# Those of models whose states `tree_states` forks.
STATE_TYPES = frozenset(
    {"linear_attention", "conv", "mamba", "mamba2", "hybrid", "attention", "mlp", "moe"}
)
PLAN = "skyrl_fast_plan"  # keyword argument of its plan
RANKS = "skyrl_fast_ranks"  # keyword argument of the ranks that share the tokens
PROBE_ROWS = ((1, 2, 3, 4, 5), (1, 2, 6, 7), (1, 2, 3, 5, 5, 2), (1, 2))
PROBE_TOLERANCE = 1e-3  # rounding is below 1e-5; other attention differs by more
PROBE_LIMIT = 512  # most tokens of a probe row, which exceeds every window of the model's config
PROBE_EXCESS = 8  # tokens of that row beyond the largest window
# Integers of a config with one of these in their name may limit the keys that a token attends to.
WINDOW_WORDS = ("window", "chunk", "index_topk", "local_attention")
NO_WINDOWS = ("max_window_layers",)  # a number of layers
# Keyword arguments of attention functions that change nothing in a causal pass without a cache.
HARMLESS_OPTIONS = frozenset({"is_causal", "position_ids", "cache_position"})


def prepare_for_trees(backbone: Any, *, shares_tokens: bool = False) -> None:
    """Make a transformers backbone accept trees; its results without trees are unchanged."""
    refusal = f"trainer.row_layout: {_name(backbone)} cannot be trained as trees: "
    has_states = replace_state_functions(backbone)
    if has_states and shares_tokens:
        raise ValueError(f"{refusal}ranks cannot share the tokens of layers with a state")
    reason = _reason_against(backbone.config, has_states=has_states)
    if reason is not None:
        raise ValueError(refusal + reason)
    try:
        with in_float32(backbone):
            short = _settings_read_in_passes(backbone, refusal)
        window = _largest_window(backbone.config, short)
        _check_testable(backbone.config, window, refusal)
        rows = _probe_rows(backbone, window)
    except NotImplementedError as error:
        raise ValueError(f"{refusal}its input embeddings are unknown") from error
    with in_float32(backbone), short_reach(backbone, short):
        # By the model's own attention, which is replaced next.
        expected = [_hidden_of_row(backbone, row, refusal) for row in rows]
    _register()
    before = backbone.config._attn_implementation
    backbone.set_attn_implementation(ATTENTION)
    try:
        if backbone.config._attn_implementation != ATTENTION:
            raise ValueError("its attention function cannot be replaced")
        with in_float32(backbone), short_reach(backbone, short):
            difference = _probe(backbone, rows, expected)
        if difference is not None:
            raise ValueError(
                "its hidden states on a small tree are not those of the rows "
                f"(largest difference {difference:.3g})"
            )
    except ValueError as error:
        backbone.set_attn_implementation(before)
        raise ValueError(f"{refusal}{error}") from error


def last_hidden_states(
    backbone: Any, micro: MicroBatch, device: torch.device, *, most_nodes: int | None = None
) -> Tensor:
    """Return (n * L, H) last hidden states of sequences, or (T', H) of trees, T' at least T.

    Args:
        backbone: after `prepare_for_trees`, if the micro-batch is of trees or a part.
        most_nodes: of trees whose activations are in memory at once, where one path of them is
            not longer; None: all. More are computed path by path.
    """
    there = partial(_backend.to_device, device=device)
    ids = there(micro.input_ids)
    if micro.tree is None and micro.part is None:
        packed = pack_rows(backbone, micro)
        if packed is None:
            hidden: Tensor = backbone(input_ids=ids, use_cache=False).last_hidden_state
            return hidden.flatten(0, 1)
        hidden = backbone(
            input_ids=there(packed.input_ids),
            position_ids=there(packed.positions),
            use_cache=False,
        ).last_hidden_state
        return hidden.flatten(0, 1).index_select(0, there(packed.places))
    units = _units_beyond(micro, most_nodes)
    if len(units) > 1:
        return depth_first_states(backbone, micro, units, device)
    if micro.part is None:
        ranks = SINGLE
    else:
        ranks = micro.part.ranks
    if micro.part is None:
        first = 0
    else:
        first = micro.part.first
    here = torch.arange(first, first + ids.shape[1])
    if micro.tree is None:
        plan = None
        positions = here.expand(ids.shape)
    else:
        plan = plan_tree_attention(micro.tree.parents, micro.tree.ends, device=device)
        positions = micro.tree.positions[:, here]
    return _with_attention(backbone, ids, there(positions), plan, ranks).flatten(0, 1)


def _units_beyond(micro: MicroBatch, most_nodes: int | None) -> Sequence[TreeUnit]:
    """Return the units of a tree that has more nodes, where there will be a backward pass."""
    if micro.tree is None or most_nodes is None or not torch.is_grad_enabled():
        return ()
    if micro.input_ids.shape[1] <= most_nodes:
        return ()
    return tree_units(micro.tree.ends.tolist(), micro.tree.positions[0].tolist(), most_nodes)


def padded_trees(
    micro: MicroBatch, device: torch.device, ranks: SequenceRanks = SINGLE
) -> MicroBatch:
    """Return this rank's part of a micro-batch, padded as its attention requires."""
    if micro.tree is None:
        return part_of(micro, ranks)
    num_nodes = micro.input_ids.shape[1]
    kind = kind_for(num_nodes, device)
    size = padded_size(num_nodes, kind)
    while size % ranks.size:
        size = padded_size(size + 1, kind)
    extra = size - num_nodes
    if extra == 0:
        return part_of(micro, ranks)
    # Each is a tree of its own: it attends only to itself, and no node attends to it.
    parents, ends = pad_trees(micro.tree.parents, micro.tree.ends, num_nodes + extra)
    positions = torch.nn.functional.pad(micro.tree.positions, (0, extra))
    tree = NodeTree(parents, ends, positions)
    return part_of(replace(padded(micro, extra), tree=tree), ranks)


def _with_attention(
    backbone: Any,
    ids: Tensor,
    positions: Tensor,
    plan: TreeAttention | None,
    ranks: SequenceRanks = SINGLE,
) -> Tensor:
    """Return (n, L, H) last hidden states of (n, L) tokens or nodes at (n, L) positions."""
    if plan is None:
        segments = None
    else:
        segments = TreeSegments(plan.parents, ids.device)
    # A mask of four dimensions keeps transformers from building its own.
    no_mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=ids.device)
    result: Tensor = backbone(
        input_ids=ids,
        position_ids=positions,
        attention_mask=no_mask,
        use_cache=False,
        **{PLAN: plan, RANKS: ranks, SEGMENTS: segments},
    ).last_hidden_state
    return result


def _name(backbone: Any) -> str:
    return type(backbone).__name__


def _reason_against(config: Any, *, has_states: bool) -> str | None:
    known = LAYER_TYPES | STATE_TYPES if has_states else LAYER_TYPES
    others = set(getattr(config, "layer_types", None) or ()) - known
    if others:
        return (
            f"it has layers of {', '.join(sorted(others))}, which depend on positions in a sequence"
        )
    if scales_by_place(config):
        return "its queries are scaled by their place in a pass (attn_temperature_tuning)"
    for limit in rope_limits(config):
        return f"its rotary embedding ({limit.kind}) depends on the longest row of a pass"
    if getattr(config, "alibi", False):
        return "its attention adds a term per distance (ALiBi)"
    return None


def _check_testable(config: Any, window: tuple[str, int] | None, refusal: str) -> None:
    """Raise ValueError for a setting that no row of the probe exceeds."""
    limit = min(PROBE_LIMIT, getattr(config, "max_position_embeddings", None) or PROBE_LIMIT)
    if window is not None and window[1] + PROBE_EXCESS > limit:
        raise ValueError(
            f"{refusal}its setting {window[0]}={window[1]} may limit the tokens that attention "
            "sees, and is too large to be tested"
        )


def _settings_read_in_passes(backbone: Any, refusal: str) -> dict[str, int]:
    """Return the settings of `SHORT_REACH` whose short values change the states of a row."""
    lengths = {
        name: length
        for name, length in SHORT_REACH.items()
        if type(getattr(backbone.config, name, None)) is int
    }
    if not lengths:
        return {}
    row = max(_probe_rows(backbone, None), key=len)
    before = _hidden_of_row(backbone, row, refusal)
    read = {}
    for name, length in lengths.items():
        with short_reach(backbone, {name: length}) as changed:
            # Settings that are as short already are exceeded by the row as it is.
            if changed and not torch.equal(_hidden_of_row(backbone, row, refusal), before):
                read[name] = length
    return read


def _largest_window(config: Any, others: Container[str]) -> tuple[str, int] | None:
    """Return name and value of the largest setting that may limit attention, but for `others`."""
    settings = {}
    for name, value in config.to_dict().items():
        if (
            type(value) is int
            and value > 0
            and any(word in name for word in WINDOW_WORDS)
            and not name.endswith(NO_WINDOWS)
            and name not in others
        ):
            settings[name] = value
    if getattr(config, "use_sliding_window", True) is False:
        settings.pop("sliding_window", None)
    if settings:
        return max(settings.items(), key=lambda item: item[1])
    return None


def _register() -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(ATTENTION, _attention)
    # Without a tree the function is torch's, which takes that mask.
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
    """Attention function for transformers: (n, H, L, D) in, (n, L, H, D) out."""
    plan: TreeAttention | None = options.pop(PLAN, None)
    ranks: SequenceRanks = options.pop(RANKS, SINGLE)
    path: LayerPath | None = options.pop(PATH, None)
    options.pop(SEGMENTS, None)
    softcap = options.pop("softcap", None)
    sinks = options.pop("s_aux", None)
    alone = plan is None and path is None and ranks.size == 1
    if alone and softcap is None and sinks is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        out, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **options
        )
        return out, None
    if dropout > 0:
        raise ValueError(f"tree attention: dropout: expected 0, got {dropout}")
    window = options.pop("sliding_window", None)
    chunk = _chunk_of(module)
    _check_supported(key, value, options)
    if scaling is None:
        scale = 1 / math.sqrt(query.shape[-1])
    else:
        scale = scaling
    if ranks.size > 1:
        if key.shape[1] % ranks.size:  # fewer heads than ranks: each rank's queries need a copy
            repeats = query.shape[1] // key.shape[1]
            key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
        query, key, value = map(ranks.heads_for_tokens, (query, key, value))
        if sinks is not None:
            sinks = sinks.chunk(ranks.size)[ranks.rank]
    if path is not None:
        key, value = path.extended(key, value)
        query, key, value = (autocast(x) for x in (query, key, value))
        seen = path.mask(window, chunk)
        out = dense_attention(query, key, value, seen, scale=scale, softcap=softcap, sinks=sinks)
    elif plan is not None:
        out = tree_attention(
            query,
            key,
            value,
            plan,
            scale=scale,
            window=window,
            chunk=chunk,
            softcap=softcap,
            sinks=sinks,
        )
    elif (window, chunk, softcap, sinks) == (None,) * 4:
        grouped = query.shape[1] != key.shape[1]
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=grouped
        )
    else:
        mask = attention_mask if alone else None
        if mask is None:  # a sequence is a tree without forks
            length = query.shape[2]
            ends = torch.full((length,), length, device=query.device)
            mask = seen_nodes(ends, window, chunk)
        query, key, value = (autocast(x) for x in (query, key, value))
        out = dense_attention(query, key, value, mask, scale=scale, softcap=softcap, sinks=sinks)
    if ranks.size > 1:
        out = ranks.tokens_for_heads(out)
    return out.transpose(1, 2).contiguous(), None  # transformers' are contiguous too


def _chunk_of(module: Any) -> int | None:
    """Return the chunk size of an attention module's layer, which its function does not get."""
    config = getattr(module, "config", None)
    number = getattr(module, "layer_idx", None)
    types = getattr(config, "layer_types", None)
    if config is None or not types or number is None or types[number] != CHUNKED_ATTENTION:
        return None
    return int(config.attention_chunk_size)


def _check_supported(key: Tensor, value: Tensor, options: dict[str, Any]) -> None:
    """Raise ValueError for what `tree_attention` would ignore or not compute."""
    if options.get("is_causal") is False:
        raise ValueError("tree attention: wanted causal attention, got is_causal=False")
    for name, option in options.items():
        if name not in HARMLESS_OPTIONS and option is not None and option is not False:
            raise ValueError(f"tree attention: the attention option {name} is not supported")
    if key.shape[-1] != value.shape[-1]:
        raise ValueError(
            "tree attention: wanted keys and values of one head size, got "
            f"{key.shape[-1]} and {value.shape[-1]}"
        )


def _probe_rows(backbone: Any, window: tuple[str, int] | None) -> list[Tensor]:
    """Return rows with common prefixes, one of them longer than the window."""
    embedding = backbone.get_input_embeddings().weight
    rows = [torch.tensor(row) for row in PROBE_ROWS]
    if window is not None:
        rows.append(torch.cat([rows[0], torch.arange(window[1] + PROBE_EXCESS - len(rows[0]))]))
    return [row.to(embedding.device) % embedding.shape[0] for row in rows]


@torch.no_grad()
def _hidden_of_row(backbone: Any, row: Tensor, refusal: str) -> Tensor:
    """Return (T, H) float32 last hidden states of a row of T tokens."""
    output = backbone(input_ids=row[None], use_cache=False)
    hidden = getattr(output, "last_hidden_state", None)
    if hidden is None:
        raise ValueError(f"{refusal}its output has no last_hidden_state")
    return hidden[0].float()


@torch.no_grad()
def _probe(backbone: Any, rows: list[Tensor], expected: list[Tensor]) -> float | None:
    """Return the largest difference of the first row that differs as a tree; None if all agree."""
    cu = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0)
    tree = build_prefix_tree(torch.cat(rows).cpu(), cu)
    device = rows[0].device
    plan = plan_tree_attention(tree.parents, tree.ends, device=device)
    ids, positions = (x.long()[None].to(device) for x in (tree.tokens, tree.positions))
    # It detects what the config does not reveal.
    ours = _with_attention(backbone, ids, positions, plan)[0].float()
    for number, wanted in enumerate(expected):
        error = (ours[tree.nodes_of(number).long()] - wanted).abs().max().item()
        if not error <= PROBE_TOLERANCE * max(1.0, wanted.abs().max().item()):
            return float(error)
    return None
