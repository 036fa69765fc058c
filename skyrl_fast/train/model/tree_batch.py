"""Micro-batches of prefix trees: each distinct token of a pass's rows is processed once.

N rows, S their tokens, A response tokens, T nodes, M trained tokens. Routes: D layers, K experts
per token.

A token's logprob is read at the node before it, so a row needs nodes up to the token before its
last trained one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from skyrl_fast.batch import StepBatch
from skyrl_fast.ops.prefix_tree.tree import PrefixTree, build_prefix_tree
from skyrl_fast.train.model.forward_pass import KeptTokens, MicroBatch, NodeTree, number_ranges
from skyrl_fast.train.model.tree_chunks import tree_chunks


def trained_tree(
    batch: StepBatch, visited: np.ndarray, *, router_replay: bool = False
) -> tuple[PrefixTree, TrainedTokens]:
    """Return the prefix tree of the visited rows up to their last trained tokens, and these.

    Groups share what they have in common, such as a system prompt.

    Args:
        visited: (N,) bool, rows that have a trained token and a prompt.
        router_replay: rows share a token only where their routes agree.
    """
    trained = _trained_tokens(batch, visited)
    lengths = np.zeros(batch.num_rows, dtype=np.int64)
    lengths[trained.rows] = trained.positions  # ascending: the last one of each row wins
    tree = build_prefix_tree(
        batch.tokens,
        batch.cu_seqlens,
        lengths=lengths,
        labels=batch.expert_indices if router_replay else None,
        cu_labels=batch.cu_experts if router_replay else None,
    )
    return tree, trained


def tree_micro_batches(
    batch: StepBatch,
    token_budget: int,
    tree: PrefixTree,
    trained: TrainedTokens,
    *,
    keep_trajectories: bool = False,
    router_replay: bool = False,
) -> list[MicroBatch]:
    """Return forward passes over prefix trees.

    Args:
        token_budget: most nodes of a micro-batch; a row with more is separate.
        tree: from `trained_tree`, or a part of it.
        trained: from `trained_tree`; only tokens of the tree's rows are used.
    """
    units = batch.trajectory_ids.numpy() if keep_trajectories else None
    chunks = tree_chunks(tree, batch.group_ids.numpy(), token_budget, trajectory_ids=units)
    micro_batches = []
    for rows in chunks:
        chunk = tree if len(chunks) == 1 else tree.part(rows)
        micro_batches.append(_micro_batch(batch, chunk, rows, trained, router_replay))
    return micro_batches


@dataclass(frozen=True, slots=True)
class TrainedTokens:
    """The trained tokens of the visited rows, in order; all (M,) int64 but `cu_rows`.

    Args:
        responses: in the batch's response tokens.
        cu_rows: (N + 1,) offsets of each row's trained tokens.
    """

    rows: np.ndarray
    positions: np.ndarray
    responses: np.ndarray
    cu_rows: np.ndarray


def _trained_tokens(batch: StepBatch, visited: np.ndarray) -> TrainedTokens:
    cu = batch.cu_seqlens.numpy().astype(np.int64)
    cu_responses = batch.cu_responses.numpy().astype(np.int64)
    row_of = np.repeat(np.arange(batch.num_rows), np.diff(cu_responses))
    responses = np.flatnonzero(batch.trained_mask.numpy() & visited[row_of])
    rows = row_of[responses]
    prompts = np.diff(cu) - np.diff(cu_responses)
    positions = prompts[rows] + responses - cu_responses[rows]
    counts = np.bincount(rows, minlength=batch.num_rows)
    return TrainedTokens(rows, positions, responses, np.concatenate([[0], np.cumsum(counts)]))


def _micro_batch(
    batch: StepBatch,
    tree: PrefixTree,
    rows: np.ndarray,
    trained: TrainedTokens,
    router_replay: bool,
) -> MicroBatch:
    """Return the forward pass over these rows; `tree` must hold no others."""
    chosen = number_ranges(trained.cu_rows[rows], trained.cu_rows[rows + 1])
    row_of, positions, responses = (
        trained.rows[chosen],
        trained.positions[chosen],
        trained.responses[chosen],
    )
    starts = tree.row_starts.numpy()
    hidden = tree.row_nodes.numpy()[starts[row_of] + positions - 1].astype(np.int64)
    cu = batch.cu_seqlens.numpy().astype(np.int64)
    targets = batch.tokens.numpy()[cu[row_of] + positions].astype(np.int64)
    cu_responses = batch.cu_responses.numpy().astype(np.int64)
    lengths = np.diff(cu_responses)[rows]
    shift = np.zeros(batch.num_rows, dtype=np.int64)  # from the batch's responses to these rows'
    shift[rows] = np.cumsum(lengths) - lengths - cu_responses[rows]
    kept = KeptTokens.of_batch(batch)
    sets = [] if kept is None else [kept.numbers(responses)]
    first, copies = _distinct(*sets, targets, hidden)
    routes, mask = _routes(batch, tree) if router_replay else (None, None)
    return MicroBatch(
        input_ids=tree.tokens.long()[None],
        hidden_index=torch.from_numpy(hidden[first]),
        target_ids=torch.from_numpy(targets[first]),
        response_index=torch.from_numpy(responses + shift[row_of]),
        rows=torch.from_numpy(rows),
        expert_indices=routes,
        router_padding_mask=mask,
        tree=NodeTree(tree.parents, tree.ends, tree.positions.long()[None]),
        copies=None if copies is None else torch.from_numpy(copies),
        **({} if kept is None else kept.micro_batch_fields(responses[first])),
    )


def _distinct(*keys: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Return an index of the distinct tuples of keys, and (M,) each one's place in the index.

    Args:
        keys: (M,) int64 each.

    Returns:
        (K,) and (M,) int64; all numbers and None if all tuples differ.
    """
    order = np.lexsort(keys)
    is_first = np.zeros(len(order), dtype=bool)
    is_first[:1] = True
    for key in keys:
        is_first[1:] |= key[order[1:]] != key[order[:-1]]
    if is_first.all():
        return np.arange(len(order)), None
    copies = np.empty(len(order), dtype=np.int64)
    copies[order] = np.cumsum(is_first) - 1
    return order[is_first], copies


def _routes(batch: StepBatch, tree: PrefixTree) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (1, T, D, K) routes and (1, T) bool, True where a node has none."""
    assert batch.expert_indices is not None and batch.cu_experts is not None
    cu = batch.cu_seqlens.numpy().astype(np.int64)
    experts = batch.cu_experts.numpy().astype(np.int64)
    sources = tree.sources.numpy()
    row_of = np.searchsorted(cu, sources, side="right") - 1
    places = experts[row_of] + sources - cu[row_of]
    recorded = places < experts[row_of + 1]
    routes = batch.expert_indices.new_zeros((len(sources), *batch.expert_indices.shape[1:]))
    routes[torch.from_numpy(recorded)] = batch.expert_indices[torch.from_numpy(places[recorded])]
    return routes[None], torch.from_numpy(~recorded)[None]
