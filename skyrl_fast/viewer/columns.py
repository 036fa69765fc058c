"""Index entries as columns, the data of the page's list and filters."""

from __future__ import annotations

from typing import Any

import numpy as np

from skyrl_fast.trajectory_store.parts import IndexEntry

FAILURE_CHARACTERS = 300  # length of a failure in the list; an open trajectory shows all of it
SIGNIFICANT_DIGITS = 4
CATEGORICAL = ("uid", "phase", "stop_reason", "env_class", "data_source", "failure")
NUMERIC = (
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
    """Index entries as columns; strings as indices into a table of names."""

    def __init__(self) -> None:
        self._names: dict[str, dict[str, int]] = {name: {} for name in CATEGORICAL}
        self._columns: dict[str, list[Any]] = {
            name: [] for name in (*CATEGORICAL, *NUMERIC, "script", "place")
        }

    def add(self, entry: IndexEntry, script: int, place: int) -> None:
        """Append the entry of a trajectory whose head is at this place of this script."""
        for name in CATEGORICAL:
            text = str(getattr(entry, name))
            if name == "failure":
                text = text[:FAILURE_CHARACTERS]
            names = self._names[name]
            self._columns[name].append(names.setdefault(text, len(names)))
        for name in NUMERIC:
            value = getattr(entry, name)
            self._columns[name].append(
                round_significant(value) if isinstance(value, float) else value
            )
        self._columns["script"].append(script)
        self._columns["place"].append(place)

    def __len__(self) -> int:
        return len(self._columns["script"])

    def as_dict(self) -> dict[str, Any]:
        return {
            "names": {name: list(names) for name, names in self._names.items()},
            "columns": self._columns,
        }


class MagnitudeSample:
    """An evenly spaced sample of the magnitudes of a run's token values.

    Args:
        max_size: values kept; beyond it every second one is dropped and the stride doubled.
    """

    def __init__(self, max_size: int = 1 << 17) -> None:
        self._max_size = max_size
        self._kept: list[np.ndarray] = []
        self._count = 0
        self._stride = 1
        self._skip = 0  # values to skip until the next one is sampled

    def add(self, values: np.ndarray) -> None:
        """Add (A,) values; NaN is ignored."""
        present = values[~np.isnan(values)]
        taken = np.abs(present[self._skip :: self._stride])
        self._skip = (self._skip - len(present)) % self._stride
        self._kept.append(taken)
        self._count += len(taken)
        if self._count > self._max_size:
            self._kept = [np.concatenate(self._kept)[::2]]
            self._count = len(self._kept[0])
            self._stride *= 2

    def percentile(self, percent: float) -> float | None:
        """Return this percentile of the magnitudes; None without values."""
        if not self._count:
            return None
        return round_significant(float(np.percentile(np.concatenate(self._kept), percent)))


def round_significant(value: float) -> float:
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}")
