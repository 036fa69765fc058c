"""Group and trajectory of each row of a generator output. N rows, G groups, J trajectories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
import torch

from skyrl_fast.ops import _rows


@dataclass(frozen=True, slots=True)
class RowIndex:
    """Integer ids of groups and trajectories, numbered by first appearance.

    Args:
        uids: name of each of the G groups.
        group_ids: (N,) int32, 0 to G - 1.
        trajectory_ids: (N,) int32, 0 to J - 1.
        is_last_step: (N,) bool.
    """

    uids: tuple[str, ...]
    group_ids: np.ndarray
    trajectory_ids: np.ndarray
    is_last_step: np.ndarray


def is_step_wise(output: Mapping[str, Any]) -> bool:
    """Return whether `output` has `is_last_step`; a key set to None counts as missing."""
    return output.get("is_last_step") is not None


def row_index(
    op: str,
    output: Mapping[str, Any],
    uids: Sequence[str] | Sequence[int] | None = None,
    *,
    step_wise: bool | None = None,
) -> RowIndex:
    """Return the groups and trajectories of a valid generator output.

    Without steps every row is a trajectory.

    Args:
        uids: N prompt names, one per row; None: the instance ids of `trajectory_ids`.
        step_wise: whether trajectories can have several rows; None: `is_step_wise(output)`.

    Raises:
        ValueError: neither `uids` nor `trajectory_ids` is given, or not one per row.
    """
    num_rows = len(output["response_ids"])
    trajectory_ids = output.get("trajectory_ids")
    step_wise = is_step_wise(output) if step_wise is None else step_wise
    instances: Sequence[Any] | None = None
    if trajectory_ids is not None:
        instances, repetitions = split_trajectory_ids(op, trajectory_ids)
    labels = uids if uids is not None else instances
    if labels is None:
        raise ValueError(f"{op}: uids must name each row's prompt where trajectory_ids is missing")
    if len(labels) != num_rows:
        raise ValueError(f"{op}: uids must have one entry per row ({num_rows}), got {len(labels)}")
    group_ids = dense_ids(labels)
    first_rows = first_appearances(group_ids)
    names = tuple(str(labels[row]) for row in first_rows.tolist())
    if not step_wise or instances is None:
        every = np.arange(num_rows, dtype=np.int32)
        return RowIndex(names, group_ids.astype(np.int32), every, np.ones(num_rows, dtype=bool))
    starts = run_starts(trajectory_keys(instances, repetitions))
    trajectory = (np.cumsum(starts) - 1).astype(np.int32)
    last = bool_array(op, "is_last_step", output["is_last_step"])
    return RowIndex(names, group_ids.astype(np.int32), trajectory, last)


def split_trajectory_ids(op: str, trajectory_ids: Sequence[Any]) -> tuple[list[Any], np.ndarray]:
    """Return N instance ids and (N,) int64 repetition ids, of pairs or objects with both."""
    try:
        # By type, of which there are few: a check per row would take longer than reading the rows.
        if all(map(issubclass, set(map(type, trajectory_ids)), repeat((tuple, list)))):
            instances = list(map(itemgetter(0), trajectory_ids))
            repetitions = list(map(itemgetter(1), trajectory_ids))
        else:
            instances = list(map(attrgetter("instance_id"), trajectory_ids))
            repetitions = list(map(attrgetter("repetition_id"), trajectory_ids))
        if not all(map(issubclass, set(map(type, repetitions)), repeat((int, np.integer)))):
            raise TypeError("a repetition_id that is not an int")
        numbers = np.array(repetitions, dtype=np.int64)
        if not set(map(type, instances)) <= {str, int}:
            instances = list(map(str, instances))
        return instances, numbers
    except (AttributeError, IndexError, TypeError, ValueError, OverflowError) as error:
        row, entry = next((i, t) for i, t in enumerate(trajectory_ids) if not _is_trajectory_id(t))
        raise ValueError(
            f"{op}: trajectory_ids must be (instance_id, int repetition_id) pairs, but row {row} "
            f"is {entry!r}"
        ) from error


def _is_trajectory_id(entry: Any) -> bool:
    pair = isinstance(entry, (tuple, list)) and len(entry) == 2
    repetition = entry[1] if pair else getattr(entry, "repetition_id", None)
    return isinstance(repetition, (int, np.integer))


def trajectory_keys(instances: Sequence[Any], repetitions: np.ndarray) -> np.ndarray:
    """Return (N,) int64 keys, equal iff both ids are; the upper 32 bits number the instances."""
    # Both numbers in one key, so that rows are compared by one vector operation.
    return (dense_ids(instances) << 32) + dense_ids(repetitions)


def dense_ids(labels: Sequence[Any] | np.ndarray | torch.Tensor) -> np.ndarray:
    """Return (N,) int64, the labels numbered by first appearance; strings or ints."""
    return _rows.dense_ids("row_index", "ids", labels).numpy()


def first_appearances(ids: np.ndarray) -> np.ndarray:
    """Return (G,) the first row of each id, for ids numbered by first appearance."""
    seen = np.maximum.accumulate(np.concatenate(([-1], ids)))
    return np.flatnonzero(ids > seen[:-1])


def run_starts(ids: np.ndarray) -> np.ndarray:
    """Return (N,) bool, True where a row's id differs from that of the row before."""
    starts = np.ones(len(ids), dtype=bool)
    np.not_equal(ids[1:], ids[:-1], out=starts[1:])
    return starts


def first_return(ids: np.ndarray) -> int | None:
    """Return the first row that starts a second run of the same id, or None."""
    heads = np.flatnonzero(run_starts(ids))
    if dense_ids(ids[heads]).max() + 1 == len(heads):
        return None
    # Each id may have one run; the heads of all further ones return to it.
    first_of_id = np.unique(ids[heads], return_index=True)[1]
    returned = np.ones(len(heads), dtype=bool)
    returned[first_of_id] = False
    return int(heads[np.flatnonzero(returned)[0]])


def bool_array(op: str, field: str, values: Sequence[Any] | np.ndarray) -> np.ndarray:
    """Return (N,) bool from bools, NumPy bools or an array of them."""
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().numpy()
    if isinstance(values, np.ndarray) and values.dtype == np.bool_ and values.ndim == 1:
        return values
    if not set(map(type, values)) <= {bool, np.bool_}:
        row, entry = next(
            (i, v) for i, v in enumerate(values) if not isinstance(v, (bool, np.bool_))
        )
        raise ValueError(f"{op}: {field} must hold bools, but row {row} is {entry!r}")
    return np.fromiter(values, bool, len(values))


def row_lengths(op: str, field: str, rows: Sequence[Any]) -> np.ndarray:
    """Return (N,) int64, the length of each row's list or array; a row without one: ValueError."""
    try:
        return np.fromiter(map(len, rows), np.int64, len(rows))
    except TypeError:
        for row, entry in enumerate(rows):
            if not isinstance(entry, (list, tuple)) and getattr(entry, "ndim", 0) == 0:
                raise ValueError(
                    f"{op}: {field} must hold a list or array per row, but row {row} is "
                    f"{'None' if entry is None else type(entry).__name__}"
                ) from None
        raise
