"""Layout of rows in forward passes: as sequences, or as prefix trees where the model allows it.

A tree never has more tokens than its rows, nor more pairs that attend. So trees are never slower
where both layouts take the same time for a token and for a pair, as they do on a CPU in float32.
Elsewhere the attention kernels differ, so that both times are measured once, and each group is laid
out the way that takes less. So they are for models with states, where each segment of a tree costs
something, too: the padding of recurrences, and their calls.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from skyrl_fast.ops.prefix_tree.attention import node_pairs
from skyrl_fast.ops.prefix_tree.tree import PrefixTree, build_prefix_tree
from skyrl_fast.train.model.forward_pass import MicroBatch, NodeTree
from skyrl_fast.train.model.packed_rows import find_packed_support
from skyrl_fast.train.model.tree_forward import last_hidden_states, padded_trees, prepare_for_trees
from skyrl_fast.train.model.tree_states import TreeSegments, has_states
from skyrl_fast.train.parallel.ranks import Ranks
from skyrl_fast.train.parallel.sequence_ranks import SETTING, SINGLE, SequenceRanks, check_heads

log = logging.getLogger(__name__)

Autocast = Callable[[], contextlib.AbstractContextManager[Any]]
Gathered = Callable[[Callable[[], torch.Tensor]], torch.Tensor]

MEASURED_TOKENS = {"cpu": 1024, "cuda": 4096}
SHORT_SEQUENCE = 128  # tokens
SHORT_SEGMENT, FORKED_SAMPLES = 16, 4  # nodes, and trees, of the shape with forks
REPEATS = 3


@dataclass(frozen=True, slots=True)
class LayoutCosts:
    """Seconds of a pass through the layers, forward and backward where it is trained, by layout.

    Args:
        sequence_pair, tree_pair: per pair of tokens of which one attends to the other.
        tree_segment: per chain of nodes that ends at a fork or a leaf.
    """

    sequence_token: float
    sequence_pair: float
    tree_token: float
    tree_pair: float
    tree_segment: float = 0.0

    def metrics(self) -> dict[str, float]:
        result: dict[str, float] = {}
        for name, cost in asdict(self).items():
            result[f"policy/{name}_ns"] = 1e9 * cost
        return result


def uses_trees(layout: str) -> bool | None:
    """Return the setting `trainer.row_layout` as the argument `tree` of a policy or critic."""
    return {"tree": True, "auto": None, "sequence": False}[layout]


def supports_trees(backbone: Any, tree: bool | None, sequence: SequenceRanks = SINGLE) -> bool:
    """Prepare a backbone for trees; return whether rows may be laid out as trees.

    Where not, find out whether sequences can share rows.

    Args:
        tree: True: they must be; False: not; None: if the model supports it.
        sequence: ranks that share the tokens of a pass; several need what trees need.
    """
    if tree is False and sequence.size == 1:
        _log_sequences(backbone)
        return False
    check_heads(backbone.config, sequence.size)
    try:
        prepare_for_trees(backbone, shares_tokens=sequence.size > 1)
    except ValueError as error:
        if sequence.size > 1:
            raise ValueError(f"{SETTING}: wanted 1 for this model: {error}") from error
        if tree:
            raise
        log.info("rows are computed as sequences: %s", error)
        _log_sequences(backbone)
        return False
    return tree is not False


def _log_sequences(backbone: Any) -> None:
    form = "packed where that costs less" if find_packed_support(backbone) else "padded"
    log.info("sequences of a pass are %s", form)


def cheapest_layout(
    backbone: Any,
    device: torch.device,
    ranks: Ranks,
    *,
    dtype: torch.dtype,
    most_tokens: int,
    autocast: Autocast,
    gathered: Gathered,
    measure: Callable[..., LayoutCosts] | None = None,
) -> tuple[bool, LayoutCosts | None]:
    """Return whether rows may be laid out as trees, and the costs that decide for each group.

    Without costs all groups are trees. All ranks call this together.

    Args:
        dtype: dtype of the forward passes.
        most_tokens, autocast, gathered: see `measured_costs`.
        measure: in place of `measured_costs`.
    """
    same_kernels = device.type == "cpu" and dtype == torch.float32
    if same_kernels and not has_states(backbone):
        return True, None
    costs = None
    trained = any(weight.requires_grad for weight in backbone.parameters())
    try:
        with torch.set_grad_enabled(trained):
            costs = (measure or measured_costs)(
                backbone,
                device,
                most_tokens=most_tokens,
                autocast=autocast,
                same_kernels=same_kernels,
                gathered=gathered,
            )
    except RuntimeError as error:  # raised by a compiler or a kernel
        log.warning("rows are computed as sequences: trees failed on %s: %s", device, error)
    # Ranks measure different times, and must plan the same passes.
    costs = ranks.agree(costs)
    log.info("seconds of the layouts of rows: %s", costs)
    return costs is not None, costs


def measured_costs(
    backbone: Any,
    device: torch.device,
    *,
    most_tokens: int,
    autocast: Autocast,
    same_kernels: bool = False,
    gathered: Gathered = lambda compute: compute(),
    clock: Callable[[], float] | None = None,
) -> LayoutCosts | None:
    """Return the costs of both layouts on this device; None if trees cannot be computed there.

    Each layout computes many short rows and one long one of as many tokens, which share nothing;
    with states also a tree of short segments. Backwards, too, if gradients are enabled.

    Args:
        backbone: after `prepare_for_trees`; its gradients are None afterwards.
        same_kernels: a token and a pair cost the same in both layouts, and are measured in one.
        gathered: computes a forward pass, with full weights.
        clock: seconds; None: on a CPU those of the processor, as other processes may be running.
    """
    if clock is None:
        if device.type == "cpu":
            clock = time.process_time
        else:
            clock = time.perf_counter
    positions = getattr(backbone.config, "max_position_embeddings", None) or most_tokens
    total = min(MEASURED_TOKENS.get(device.type, 1024), most_tokens, positions)
    short = min(SHORT_SEQUENCE, total // 2)
    if short < 1:
        return None
    vocabulary = backbone.get_input_embeddings().weight.shape[0]

    def compute(micro: MicroBatch) -> torch.Tensor:
        with autocast():
            return last_hidden_states(backbone, padded_trees(micro, device), device)

    def seconds(micro: MicroBatch) -> float:
        _synchronize(device)
        start = clock()
        hidden = gathered(partial(compute, micro))
        if hidden.requires_grad:
            hidden.float().square().mean().backward()
        _synchronize(device)
        taken = clock() - start
        backbone.zero_grad(set_to_none=True)
        return taken

    # As many tokens, but more pairs in one row: so the costs of both can be told apart.
    shapes = [(total // short, short), (1, total)]  # rows, tokens
    if same_kernels:
        makes = [_sequences]
    else:
        makes = [_sequences, _forest]
    micros = [make(*shape, vocabulary) for make in makes for shape in shapes]
    if has_states(backbone):
        forks = _forks(total, vocabulary)
    else:
        forks = None
    if forks is not None:
        micros.append(forks[0])
    # The first round compiles and allocates; other processes can only add to the later ones. Shapes
    # take turns: a machine that gets slower would make the last ones look dear, and what a segment
    # costs is a small difference.
    rounds = []
    for _ in range(1 + REPEATS):
        rounds.append([seconds(micro) for micro in micros])
    least = []
    for times in zip(*rounds[1:], strict=True):
        least.append(min(times))
    tokens = [float(rows * length) for rows, length in shapes]
    pairs = [rows * length * (length + 1) / 2 for rows, length in shapes]
    sequence = _per_token_and_pair(tokens, pairs, least[:2])
    if same_kernels:
        tree = sequence
    else:
        tree = _per_token_and_pair(tokens, pairs, least[2:4])
    costs = LayoutCosts(*sequence, *tree)
    if forks is None:
        return costs
    micro, segments = forks
    assert micro.tree is not None
    # The rest: padding and calls of recurrences.
    explained = costs.tree_token * micro.input_ids.numel()
    explained += costs.tree_pair * node_pairs(micro.tree.ends.numpy())
    return replace(costs, tree_segment=max(0.0, least[-1] - explained) / segments)


def _per_token_and_pair(
    tokens: Sequence[float], pairs: Sequence[float], seconds: Sequence[float]
) -> list[float]:
    """Return the costs that explain two measurements, neither negative."""
    (a, b), (c, d) = zip(tokens, pairs, strict=True)
    pair = (seconds[1] * a - seconds[0] * c) / (d * a - b * c)
    pair = min(max(pair, 0.0), seconds[1] / d)
    return [max(0.0, (seconds[1] - pair * d) / c), pair]


def _sequences(rows: int, length: int, vocabulary: int) -> MicroBatch:
    ids = torch.arange(rows * length).view(rows, length) % vocabulary
    nothing = torch.zeros(0, dtype=torch.int64)
    return MicroBatch(ids, nothing, nothing, nothing, nothing)


def _forest(rows: int, length: int, vocabulary: int) -> MicroBatch:
    """Return the same rows as trees that share nothing."""
    sequences = _sequences(rows, length, vocabulary)
    cu = torch.arange(rows + 1) * length
    return _as_tree(build_prefix_tree(sequences.input_ids.flatten(), cu, torch.arange(rows)))


def _as_tree(tree: PrefixTree) -> MicroBatch:
    nothing = torch.zeros(0, dtype=torch.int64)
    nodes = NodeTree(tree.parents, tree.ends, tree.positions.long()[None])
    return MicroBatch(tree.tokens.long()[None], nothing, nothing, nothing, nothing, tree=nodes)


def _forks(total: int, vocabulary: int) -> tuple[MicroBatch, int]:
    """Return a tree of about this many nodes in short segments, and the number of these."""
    turns = max(2, total // (2 * FORKED_SAMPLES * SHORT_SEGMENT))  # or nothing forks
    length = max(1, min(SHORT_SEGMENT, total // (2 * FORKED_SAMPLES * turns)))
    numbers = torch.arange(2 * FORKED_SAMPLES * turns * length) % vocabulary
    pieces = iter(numbers.split(length))
    rows = []
    # As of agents whose thoughts are stripped: each turn leaves a branch.
    for _ in range(FORKED_SAMPLES):
        context = numbers[:0]
        for _ in range(turns):
            context = torch.cat([context, next(pieces)])
            rows.append(torch.cat([context, next(pieces)]))
    cu = torch.tensor([0, *map(len, rows)]).cumsum(0)
    samples = torch.arange(len(rows)) // turns
    tree = build_prefix_tree(torch.cat(rows), cu, samples)
    return _as_tree(tree), TreeSegments(tree.parents, torch.device("cpu")).num_segments


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
