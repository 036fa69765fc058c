"""Group and trajectory of each row of a generator output. N rows, G groups, J trajectories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
    if step_wise is None:
        step_wise = is_step_wise(output)
    instances: Sequence[Any] | None = None
    if trajectory_ids is not None:
        instances, repetitions = split_trajectory_ids(op, trajectory_ids)
    labels: Sequence[Any] | None = instances
    if uids is not None:
        labels = uids
    if labels is None:
        raise ValueError(
            f"{op}: uids: expected a name for each row's prompt, as trajectory_ids is missing, got "
            "none"
        )
    if len(labels) != num_rows:
        raise ValueError(f"{op}: uids: expected one for each of {num_rows} rows, got {len(labels)}")
    numbers = dense_ids(labels)
    group_ids = numbers.astype(np.int32)
    names = []
    for row in first_appearances(numbers).tolist():
        names.append(str(labels[row]))
    if step_wise and instances is not None:
        keys = trajectory_keys(instances, repetitions)
        starts = run_starts(keys)
        trajectories = (np.cumsum(starts) - 1).astype(np.int32)
        is_last = bool_array(op, "is_last_step", output["is_last_step"])
    else:
        trajectories = np.arange(num_rows, dtype=np.int32)
        is_last = np.ones(num_rows, dtype=bool)
    return RowIndex(
        uids=tuple(names),
        group_ids=group_ids,
        trajectory_ids=trajectories,
        is_last_step=is_last,
    )


def split_trajectory_ids(op: str, trajectory_ids: Sequence[Any]) -> tuple[list[Any], np.ndarray]:
    """Return N instance ids and (N,) int64 repetition ids, of pairs or objects with both."""
    try:
        if _all_are(trajectory_ids, (tuple, list)):
            instances = list(map(itemgetter(0), trajectory_ids))
            repetitions = list(map(itemgetter(1), trajectory_ids))
        else:
            instances = list(map(attrgetter("instance_id"), trajectory_ids))
            repetitions = list(map(attrgetter("repetition_id"), trajectory_ids))
        if not _all_are(repetitions, (int, np.integer)):
            raise TypeError("a repetition_id that is not an int")
        numbers = np.array(repetitions, dtype=np.int64)
        kinds = set(map(type, instances))
        if not kinds <= {str, int}:
            instances = list(map(str, instances))
        return instances, numbers
    except (AttributeError, IndexError, TypeError, ValueError, OverflowError) as error:
        for row, entry in enumerate(trajectory_ids):
            if not _is_trajectory_id(entry):
                raise ValueError(
                    f"{op}: trajectory_ids: expected (instance_id, int repetition_id) pairs, got "
                    f"{entry!r} in row {row}"
                ) from error
        raise


def _all_are(values: Sequence[Any], types: tuple[type, ...]) -> bool:
    # By type, of which there are few: a check per row would take longer than reading the rows.
    kinds = set(map(type, values))
    return all(issubclass(kind, types) for kind in kinds)


def _is_trajectory_id(entry: Any) -> bool:
    pair = isinstance(entry, (tuple, list)) and len(entry) == 2
    if pair:
        repetition = entry[1]
    else:
        repetition = getattr(entry, "repetition_id", None)
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
    before = np.concatenate(([-1], ids))
    largest = np.maximum.accumulate(before)
    is_new = ids > largest[:-1]
    return np.flatnonzero(is_new)


def run_starts(ids: np.ndarray) -> np.ndarray:
    """Return (N,) bool, True where a row's id differs from that of the row before."""
    starts = np.ones(len(ids), dtype=bool)
    np.not_equal(ids[1:], ids[:-1], out=starts[1:])
    return starts


def first_return(ids: np.ndarray) -> int | None:
    """Return the first row that starts a second run of the same id, or None."""
    starts = run_starts(ids)
    heads = np.flatnonzero(starts)
    runs = ids[heads]
    num_ids = dense_ids(runs).max() + 1
    if num_ids == len(heads):
        return None
    # Each id may have one run; the heads of all further ones return to it.
    _, first_of_id = np.unique(runs, return_index=True)
    is_return = np.ones(len(heads), dtype=bool)
    is_return[first_of_id] = False
    returns = heads[is_return]
    return int(returns[0])


def bool_array(op: str, field: str, values: Sequence[Any] | np.ndarray) -> np.ndarray:
    """Return (N,) bool from bools, NumPy bools or an array of them."""
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().numpy()
    if isinstance(values, np.ndarray) and values.dtype == np.bool_ and values.ndim == 1:
        return values
    kinds = set(map(type, values))
    if not kinds <= {bool, np.bool_}:
        for row, entry in enumerate(values):
            if not isinstance(entry, (bool, np.bool_)):
                raise ValueError(f"{op}: {field}: expected bools, got {entry!r} in row {row}")
    return np.fromiter(values, bool, len(values))


def row_lengths(op: str, field: str, rows: Sequence[Any]) -> np.ndarray:
    """Return (N,) int64, the length of each row's list or array; a row without one: ValueError."""
    try:
        return np.fromiter(map(len, rows), np.int64, len(rows))
    except TypeError:
        for row, entry in enumerate(rows):
            if not isinstance(entry, (list, tuple)) and getattr(entry, "ndim", 0) == 0:
                raise ValueError(
                    f"{op}: {field}: expected a list or array per row, but row {row} is "
                    f"{'None' if entry is None else type(entry).__name__}"
                ) from None
        raise
