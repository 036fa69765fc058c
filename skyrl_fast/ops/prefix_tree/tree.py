"""Prefix trees: rows with common prefixes as trees of their distinct tokens.

N rows, S tokens of all rows, G groups, T nodes of all trees, E label cells.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from skyrl_fast import _C
from skyrl_fast.ops import _backend
from skyrl_fast.ops._offsets import check_offsets, integer_vector
from skyrl_fast.ops._rows import check_row_ids
from skyrl_fast.ops.prefix_tree import reference

OP = "build_prefix_tree"
MAX_ID = 2**31 - 1


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """One tree per group: a node for each distinct prefix of the group's rows.

    Nodes are numbered depth first over all trees, children in the order of the first row through
    them, trees in the order in which groups first appear. So node `a` is `b` or above it exactly
    where `a <= b < ends[a]`: a node's number is its entry time.

    Args:
        tokens: (T,) int32 token ids.
        parents: (T,) int32, -1 at a root.
        positions: (T,) int32 depth, from 0: the position of the token in its rows.
        ends: (T,) int32, one past the last node below.
        sources: (T,) int64, the index of the node's token in the rows' tokens.
        row_nodes: int32, the node of each inserted token, row after row.
        row_starts: (N + 1,) int64 offsets of the rows in `row_nodes`.
        group_starts: (G + 1,) int32, first node of each group's tree.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    positions: torch.Tensor
    ends: torch.Tensor
    sources: torch.Tensor
    row_nodes: torch.Tensor
    row_starts: torch.Tensor
    group_starts: torch.Tensor

    @property
    def num_nodes(self) -> int:
        """T, the number of nodes."""
        return self.tokens.shape[0]

    def nodes_of(self, row: int) -> torch.Tensor:
        """Return the nodes of a row's tokens."""
        return self.row_nodes[int(self.row_starts[row]) : int(self.row_starts[row + 1])]


def ancestor_mask(ends: torch.Tensor, *, first: int = 0) -> torch.Tensor:
    """Return (T, T) bool, True where the column's node is the row's or above it.

    Args:
        ends: (T,) integers, as in `PrefixTree`.
        first: node of the first row, if those before it are left out.
    """
    numbers = torch.arange(ends.shape[0], device=ends.device)
    rows = numbers[first:, None]
    return (numbers[None] <= rows) & (rows < ends[None])


def build_prefix_tree(
    tokens: torch.Tensor,
    cu_seqlens: torch.Tensor,
    group_ids: Sequence[str] | Sequence[int] | torch.Tensor | None = None,
    *,
    lengths: torch.Tensor | np.ndarray | Sequence[int] | None = None,
    labels: torch.Tensor | None = None,
    cu_labels: torch.Tensor | None = None,
    backend: str | None = None,
) -> PrefixTree:
    """Return the prefix trees of the groups' rows: every distinct prefix of a row is one node.

    The time is linear in the tokens: each is compared once along its row's path, in blocks, and
    written once. Groups are distributed over the threads.

    Args:
        tokens: (S,) int32 or int64 ids below 2^31; row i is
            `tokens[cu_seqlens[i] : cu_seqlens[i + 1]]`.
        cu_seqlens: (N + 1,) int32 or int64.
        group_ids: N strings or ints; rows of a group need not be adjacent. None: one group.
        lengths: (N,) how many tokens of each row to insert; None: all. 0 leaves a row out.
        labels: (E, ...) any dtype, such as routes of experts: two tokens are the same only if
            their labels are equal too, byte for byte.
        cu_labels: (N + 1,) int32 or int64 offsets into the labels. Label j belongs to token j of
            its row; a token without a label equals only others without.
        backend: "native", "torch", or None to choose.

    Raises:
        ValueError: arguments that do not match each other, tokens of more than 32 bits or not on
            the CPU.

    Example:
        >>> tree = build_prefix_tree(torch.tensor([1, 2, 3, 1, 2, 4]), torch.tensor([0, 3, 6]))
        >>> tree.tokens.tolist(), tree.parents.tolist(), tree.row_nodes.tolist()
        ([1, 2, 3, 4], [-1, 0, 1, 1], [0, 1, 2, 0, 1, 3])
    """
    use_torch = _backend.select(OP, backend=backend) == "torch"
    rows, label_rows = _check_arguments(tokens, cu_seqlens, group_ids, lengths, labels, cu_labels)
    inserted = rows[1]
    row_starts = _offsets(inserted)
    if use_torch:
        return _by_reference(tokens, rows, row_starts, label_rows)
    threads = _backend.num_threads()
    # In two calls: how many nodes there are is known only once the trees are built.
    tree = _C.PrefixTree(tokens.to(torch.int32).contiguous(), rows, label_rows, threads)
    columns = []
    for _ in range(4):
        columns.append(_backend.empty((tree.num_nodes,), torch.int32))
    sources = _backend.empty((tree.num_nodes,), torch.int64)
    row_nodes = _backend.empty((int(row_starts[-1]),), torch.int32)
    group_starts = torch.empty(tree.num_groups + 1, dtype=torch.int32, device="cpu")
    tree.write((*columns, sources), group_starts, row_nodes, row_starts[:-1], threads)
    node_tokens, parents, positions, ends = columns
    return PrefixTree(
        node_tokens,
        parents,
        positions,
        ends,
        sources,
        row_nodes,
        torch.from_numpy(row_starts),
        group_starts,
    )


def prefix_tree_size(
    tokens: torch.Tensor,
    cu_seqlens: torch.Tensor,
    group_ids: Sequence[str] | Sequence[int] | torch.Tensor | None = None,
) -> int:
    """Return T, the number of nodes of `build_prefix_tree`; arguments as there.

    Example:
        >>> prefix_tree_size(torch.tensor([1, 2, 3, 1, 2, 4]), torch.tensor([0, 3, 6]))
        4
    """
    rows, _ = _check_arguments(tokens, cu_seqlens, group_ids, None, None, None)
    tokens = tokens.to(torch.int32).contiguous()
    return int(_C.PrefixTree(tokens, rows, None, _backend.num_threads()).num_nodes)


_RowArrays = tuple[np.ndarray, np.ndarray, np.ndarray]
_LabelArrays = tuple[torch.Tensor, np.ndarray, np.ndarray]


def _check_arguments(
    tokens: torch.Tensor,
    cu_seqlens: torch.Tensor,
    group_ids: Sequence[str] | Sequence[int] | torch.Tensor | None,
    lengths: torch.Tensor | np.ndarray | Sequence[int] | None,
    labels: torch.Tensor | None,
    cu_labels: torch.Tensor | None,
) -> tuple[_RowArrays, _LabelArrays | None]:
    """Return the rows' starts, lengths and groups, and the labels with starts and counts."""
    if tokens.dim() != 1 or tokens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"{OP}: tokens: expected (S,) int32 or int64, got {tokens.dtype} of shape "
            f"{tuple(tokens.shape)}"
        )
    if tokens.device.type != "cpu":
        raise ValueError(f"{OP}: tokens: expected a tensor on the CPU, got {tokens.device}")
    # Nodes hold 32 bits.
    if tokens.dtype == torch.int64 and len(tokens):
        least, most = (int(bound) for bound in tokens.aminmax())
        if least < -MAX_ID - 1 or most > MAX_ID:
            if most > MAX_ID:
                wrong = most
            else:
                wrong = least
            raise ValueError(f"{OP}: tokens: expected ids of 32 bits, got {wrong}")
    starts, full = _spans("cu_seqlens", cu_seqlens, tokens.shape[0])
    num_rows = len(full)
    groups = torch.zeros(num_rows, dtype=torch.int64, device="cpu")
    if group_ids is not None:
        groups = check_row_ids(OP, "group_ids", group_ids)
    if groups.shape[0] != num_rows:
        raise ValueError(
            f"{OP}: group_ids: expected {num_rows}, one per row, got {groups.shape[0]}"
        )
    inserted = full
    if lengths is not None:
        inserted = integer_vector(OP, "lengths", lengths).to(torch.int64).contiguous().numpy()
        if inserted.shape != full.shape or np.any((inserted < 0) | (inserted > full)):
            raise ValueError(
                f"{OP}: lengths: expected {num_rows} numbers from 0 to the rows' lengths, got "
                f"{inserted.tolist()[:8]} ..."
            )
    rows = (starts, inserted, groups.numpy())
    if labels is None or cu_labels is None:
        if (labels is None) != (cu_labels is None):
            raise ValueError(f"{OP}: expected labels and cu_labels together")
        return rows, None
    if labels.dim() < 1 or math.prod(labels.shape[1:]) == 0:
        raise ValueError(f"{OP}: labels: expected (E, ...) of cells, got {tuple(labels.shape)}")
    label_starts, counts = _spans("cu_labels", cu_labels, labels.shape[0])
    if len(counts) != num_rows:
        raise ValueError(f"{OP}: cu_labels: expected those of {num_rows} rows, got {len(counts)}")
    return rows, (labels.contiguous(), label_starts, counts)


def _spans(name: str, offsets: torch.Tensor, total: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (N,) int64 starts and lengths of checked offsets."""
    cu = check_offsets(OP, name, offsets, total=total, dtype=torch.int64, to_cpu=True).numpy()
    return cu[:-1], np.diff(cu)


def _offsets(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def _by_reference(
    tokens: torch.Tensor, rows: _RowArrays, row_starts: np.ndarray, labels: _LabelArrays | None
) -> PrefixTree:
    starts, lengths, groups = (column.tolist() for column in rows)
    ids = tokens.tolist()
    keys: list[list[tuple[int, bytes | None]]] = []
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        # None equals None alone: a token without a label is like no token with one.
        marks: list[bytes | None] = [None] * length
        if labels is not None:
            cells = labels[0]
            first = int(labels[1][row])
            counts = int(labels[2][row])
            used = cells[first : first + min(counts, length)]
            marks[: len(used)] = [cell.tobytes() for cell in used.numpy()]
        keys.append(list(zip(ids[start : start + length], marks, strict=True)))
    trees = reference.prefix_tree(keys, groups)
    sources = [starts[row] + position for row, position in trees.sources]
    flat = [node for nodes in trees.row_nodes for node in nodes]

    def column(values: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device="cpu")

    return PrefixTree(
        tokens=column([ids[source] for source in sources]),
        parents=column(trees.parents),
        positions=column(trees.positions),
        ends=column(trees.ends),
        sources=column(sources, torch.int64),
        row_nodes=column(flat),
        row_starts=torch.from_numpy(row_starts),
        group_starts=column(trees.group_starts),
    )
