"""All trajectories in short, column by column: what the page's list and filters work on."""

from __future__ import annotations

from typing import Any

import numpy as np

from skyrl_fast.trajectory_store.parts import IndexEntry

FAILURE_CHARACTERS = 300  # of a failure in the list; the trajectory itself has all of it
SIGNIFICANT_DIGITS = 4
NAMED = ("uid", "phase", "stop_reason", "env_class", "data_source", "failure")
NUMBERED = (
    "step",
    "repetition_id",
    "reward",
    "advantage",
    "filtered",
    "policy_version",
    "staleness",
    "seconds",
    "turns",
    "tokens",
    "trained_tokens",
)


class Columns:
    """Collects index entries as columns; texts as numbers into a table of names."""

    def __init__(self) -> None:
        self._names: dict[str, dict[str, int]] = {name: {} for name in NAMED}
        self._columns: dict[str, list[Any]] = {name: [] for name in (*NAMED, *NUMBERED, "chunk")}

    def add(self, entry: IndexEntry, chunk: int) -> None:
        """Append one trajectory, whose text is in this chunk."""
        for name in NAMED:
            text = str(getattr(entry, name))
            if name == "failure":
                text = text[:FAILURE_CHARACTERS]
            names = self._names[name]
            self._columns[name].append(names.setdefault(text, len(names)))
        for name in NUMBERED:
            value = getattr(entry, name)
            self._columns[name].append(short(value) if isinstance(value, float) else value)
        self._columns["chunk"].append(chunk)

    def __len__(self) -> int:  # noqa: D105
        return len(self._columns["chunk"])

    def as_dict(self) -> dict[str, Any]:
        """Return names and columns."""
        return {
            "names": {name: list(names) for name, names in self._names.items()},
            "columns": self._columns,
        }


class Spread:
    """How large the values of a run's tokens are, from an even sample of them."""

    _MOST = 1 << 17  # values kept; then every second one goes, and every second is taken

    def __init__(self) -> None:
        self._kept: list[np.ndarray] = []
        self._count = 0
        self._stride = 1
        self._skip = 0  # values until the next one that is taken

    def add(self, values: np.ndarray) -> None:
        """Take (A,) values; NaN is none."""
        known = values[~np.isnan(values)]
        taken = np.abs(known[self._skip :: self._stride])
        self._skip = (self._skip - len(known)) % self._stride
        self._kept.append(taken)
        self._count += len(taken)
        if self._count > self._MOST:
            self._kept = [np.concatenate(self._kept)[::2]]
            self._count = len(self._kept[0])
            self._stride *= 2

    def percentile(self, percent: float) -> float | None:
        """Return the magnitude below which so many percent lie; None without values."""
        if not self._count:
            return None
        return short(float(np.percentile(np.concatenate(self._kept), percent)))


def short(value: float) -> float:
    """Return the number with the digits that a page shows."""
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}")
