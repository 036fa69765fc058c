"""Plan of micro-batches: rows as sequences or as prefix trees.

N rows of a batch, A their response tokens, n sequences padded on the right to length L, M trained
tokens. Routes: D layers, K experts per token.

Where a step's prompt exactly extends the step before (contexts that only grow), both rows share one
sequence, the longest: a causal model computes the same hidden states for the shared prefix, so loss
and gradient are those of separate rows, for about half the tokens. Where a rotary embedding depends
on the longest row, rows on different sides of its limit share neither a sequence nor a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch

from skyrl_fast.batch import StepBatch
from skyrl_fast.train.model.forward_pass import KeptTokens
from skyrl_fast.train.model.forward_pass import MicroBatch as MicroBatch
from skyrl_fast.train.model.forward_pass import response_positions as response_positions
from skyrl_fast.train.model.rope_limits import RopeLimit, exceeded_limits
from skyrl_fast.train.model.row_layout import LayoutCosts, rows_as_trees
from skyrl_fast.train.model.tree_batch import trained_tree, tree_micro_batches

# Of the budget: a pass costs as much as so many tokens, whatever it holds. Not measured per device,
# as the padding that it saves is a multiple of it where it matters.
PASS_SHARE = 1 / 32


def plan_micro_batches(
    batch: StepBatch,
    token_budget: int,
    *,
    rows: np.ndarray | None = None,
    keep_trajectories: bool = False,
    router_replay: bool = False,
    tree: bool = False,
    costs: LayoutCosts | None = None,
    limits: Sequence[RopeLimit] = (),
) -> list[MicroBatch]:
    """Return the forward passes that compute the logprob of every trained token of the rows.

    Args:
        token_budget: most padded tokens (n * L) of a micro-batch; a longer one is separate.
        rows: (N,) bool, rows to visit; None: all with a trained token.
        keep_trajectories: a trajectory's rows stay together (losses that look at all of them).
        router_replay: add the recorded routes. Rows share a token only where their records agree,
            as they do in contexts that only grow.
        tree: lay out the rows of a pass as a prefix tree: the budget counts its nodes. Else as
            sequences, which rows of a trajectory share where contexts only grew.
        costs: with `tree`, groups that take less time as sequences are laid out as these; None: all
            are trees.
        limits: of the model's rotary embedding; models that trees support have none.

    Raises:
        ValueError: a trained row has an empty prompt, so nothing predicts its first token; router
            replay of a batch without routes; or rows that a limit does not allow.
    """
    visited = _trained_rows(batch) if rows is None else rows & _trained_rows(batch)
    if not visited.any():  # e.g. placeholder rows only, which have no routes
        return []
    if router_replay and batch.expert_indices is None:
        raise ValueError(
            "plan_micro_batches: the batch has no routes to replay: set "
            "generator.inference_engine.enable_return_routed_experts=true"
        )
    cu = batch.cu_seqlens.numpy().astype(np.int64)
    prompts = np.diff(cu) - np.diff(batch.cu_responses.numpy().astype(np.int64))
    if bool(np.any(prompts[visited] < 1)):
        row = int(np.flatnonzero(visited & (prompts < 1))[0])
        raise ValueError(f"plan_micro_batches: row {row} is trained but has an empty prompt")
    lengths = np.diff(cu)
    trees: list[MicroBatch] = []
    if tree:
        nodes, trained = trained_tree(batch, visited, router_replay=router_replay)
        as_trees = visited
        if costs is not None:
            hosts = sequence_hosts(batch, visited, router_replay=router_replay)
            groups = batch.group_ids.numpy()
            as_trees = rows_as_trees(nodes, groups, hosts, lengths, visited, costs)
        if as_trees.any():
            trees = tree_micro_batches(
                batch,
                token_budget,
                nodes if as_trees is visited else nodes.part(np.flatnonzero(as_trees)),
                trained,
                keep_trajectories=keep_trajectories,
                router_replay=router_replay,
            )
        visited = visited & ~as_trees
        if not visited.any():
            return trees
    exceeded = exceeded_limits(lengths, limits, visited)
    hosts = sequence_hosts(batch, visited, router_replay=router_replay, exceeded=exceeded)
    members: dict[int, list[int]] = {}
    for row in np.flatnonzero(visited).tolist():
        members.setdefault(int(hosts[row]), []).append(row)
    chunks = _fill(members, lengths, exceeded, token_budget, batch, keep_trajectories)
    micro_batches = [_micro_batch(batch, chunk, members, prompts) for chunk in chunks]
    if router_replay:
        micro_batches = [
            _with_routes(batch, micro, chunk)
            for micro, chunk in zip(micro_batches, chunks, strict=True)
        ]
    return trees + micro_batches


def sequence_hosts(
    batch: StepBatch,
    visited: np.ndarray,
    *,
    router_replay: bool = False,
    exceeded: np.ndarray | None = None,
) -> np.ndarray:
    """Return (N,) for each visited row the later row of its trajectory that it is a prefix of.

    A row that is a prefix of no later one is its own host.

    Args:
        visited: (N,) bool; other rows host nothing.
        router_replay: a host must also have the row's routes, up to its last trained token.
        exceeded: (N,), see `exceeded_limits`: a host has the row's number; None: no limits.
    """
    tokens = batch.tokens.numpy()
    cu = batch.cu_seqlens.tolist()
    trajectories = batch.trajectory_ids.tolist()
    hosts = np.arange(batch.num_rows)
    order = np.flatnonzero(visited).tolist()
    for row, following in reversed(list(pairwise(order))):
        if trajectories[row] != trajectories[following]:
            continue
        if exceeded is not None and exceeded[row] != exceeded[following]:
            continue
        prefix = tokens[cu[row] : cu[row + 1]]
        start = cu[following]
        if not np.array_equal(prefix, tokens[start : min(start + len(prefix), cu[following + 1])]):
            continue
        if not router_replay or _same_routes(batch, row, following):
            hosts[row] = hosts[following]
    return hosts


def _same_routes(batch: StepBatch, row: int, host: int) -> bool:
    """Return whether both rows' routes agree on all tokens before `row`'s last trained one."""
    assert batch.expert_indices is not None and batch.cu_experts is not None
    start, end = batch.cu_responses[row : row + 2].tolist()
    trained = np.flatnonzero(batch.trained_mask[start:end].numpy())
    prompt = int(batch.cu_seqlens[row + 1] - batch.cu_seqlens[row]) - (end - start)
    needed = prompt + int(trained[-1]) if len(trained) else 0
    records = []
    for index in (row, host):
        first, last = batch.cu_experts[index : index + 2].tolist()
        records.append(batch.expert_indices[first : min(last, first + needed)])
    return torch.equal(*records)


def _trained_rows(batch: StepBatch) -> np.ndarray:
    sums = np.concatenate([[0], np.cumsum(batch.trained_mask.numpy(), dtype=np.int64)])
    return np.diff(sums[batch.cu_responses.numpy()]) > 0


def _fill(
    members: dict[int, list[int]],
    lengths: np.ndarray,
    exceeded: np.ndarray,
    token_budget: int,
    batch: StepBatch,
    keep_trajectories: bool,
) -> list[list[int]]:
    """Return chunks of sequences (by host row) within the budget, with little padding."""
    units: dict[int, list[int]] = {}
    for host in members:
        unit = int(batch.trajectory_ids[host]) if keep_trajectories else host
        units.setdefault(unit, []).append(host)
    for unit, hosts in units.items():
        if len(set(exceeded[hosts].tolist())) > 1:
            raise ValueError(
                f"plan_micro_batches: trajectory {unit} has rows of {lengths[hosts].min()} and "
                f"{lengths[hosts].max()} tokens, which this loss needs in one pass, but the rotary "
                "embedding of this model depends on the longest row of a pass"
            )
    order = sorted(units, key=lambda unit: (-lengths[units[unit]].max(), unit))
    runs = cheapest_runs(
        np.array([lengths[units[unit]].max() for unit in order]),
        np.array([len(units[unit]) for unit in order]),
        np.array([exceeded[units[unit][0]] for unit in order]),
        token_budget,
    )
    return [[host for unit in order[start:stop] for host in units[unit]] for start, stop in runs]


def cheapest_runs(
    widths: np.ndarray, numbers: np.ndarray, kinds: np.ndarray, token_budget: int
) -> list[tuple[int, int]]:
    """Return ranges of units that share a pass, so that padding and passes cost least together.

    A pass costs the tokens that it pads its rows to, and as much as `PASS_SHARE` of the budget.

    Args:
        widths: (n,) longest row of each unit, descending.
        numbers: (n,) rows of each unit.
        kinds: (n,) units of different kinds share no pass.
        token_budget: most padded tokens of a pass with more than one unit.

    Example:
        >>> cheapest_runs(np.array([90, 80, 10]), np.ones(3, int), np.zeros(3, int), 640)
        [(0, 2), (2, 3)]
    """
    rows = np.concatenate([[0], np.cumsum(numbers)])
    cost = np.zeros(len(widths) + 1)
    begin = np.zeros(len(widths) + 1, dtype=np.int64)
    first = 0  # of the possible beginnings
    for stop in range(1, len(widths) + 1):
        while first < stop - 1 and (
            (rows[stop] - rows[first]) * widths[first] > token_budget
            or kinds[first] != kinds[stop - 1]
        ):
            first += 1
        padded = (rows[stop] - rows[first:stop]) * widths[first:stop]
        costs = cost[first:stop] + padded
        begin[stop] = first + int(np.argmin(costs))
        cost[stop] = costs.min() + PASS_SHARE * token_budget
    runs = []
    stop = len(widths)
    while stop:
        runs.append((int(begin[stop]), stop))
        stop = int(begin[stop])
    return runs[::-1]


def _micro_batch(
    batch: StepBatch, hosts: Sequence[int], members: dict[int, list[int]], prompts: np.ndarray
) -> MicroBatch:
    tokens = batch.tokens.numpy()
    cu = batch.cu_seqlens.tolist()
    cu_responses = batch.cu_responses.tolist()
    mask = batch.trained_mask.numpy()
    width = max(cu[host + 1] - cu[host] for host in hosts)
    input_ids = np.zeros((len(hosts), width), dtype=np.int64)
    place = {}
    for sequence, host in enumerate(hosts):
        input_ids[sequence, : cu[host + 1] - cu[host]] = tokens[cu[host] : cu[host + 1]]
        place.update(dict.fromkeys(members[host], sequence))
    rows = sorted(place)
    hidden, targets, responses, trained_tokens, offset = [], [], [], [], 0
    for row in rows:
        start, end = cu_responses[row], cu_responses[row + 1]
        trained = np.flatnonzero(mask[start:end])
        positions = int(prompts[row]) + trained
        hidden.append(place[row] * width + positions - 1)
        targets.append(tokens[cu[row] + positions])
        responses.append(offset + trained)
        trained_tokens.append(start + trained)
        offset += end - start
    kept = KeptTokens.of_batch(batch)
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids),
        hidden_index=torch.from_numpy(np.concatenate(hidden)),
        target_ids=torch.from_numpy(np.concatenate(targets).astype(np.int64)),
        response_index=torch.from_numpy(np.concatenate(responses)),
        rows=torch.tensor(rows),
        **({} if kept is None else kept.micro_batch_fields(np.concatenate(trained_tokens))),
    )


def _with_routes(batch: StepBatch, micro: MicroBatch, hosts: Sequence[int]) -> MicroBatch:
    assert batch.expert_indices is not None and batch.cu_experts is not None
    shape = (*micro.input_ids.shape, *batch.expert_indices.shape[1:])
    routes = batch.expert_indices.new_zeros(shape)
    mask = torch.ones(micro.input_ids.shape, dtype=torch.bool)
    for sequence, host in enumerate(hosts):
        first, last = batch.cu_experts[host : host + 2].tolist()
        routes[sequence, : last - first] = batch.expert_indices[first:last]
        mask[sequence, : last - first] = False
    return replace(micro, expert_indices=routes, router_padding_mask=mask)
