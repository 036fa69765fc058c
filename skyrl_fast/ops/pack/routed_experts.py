"""The record of the experts that a growing sequence was routed to.

L layers, K experts per token. Row j of a record belongs to token j of its sequence.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch

OP = "append_rollout_expert_indices"

Routes: TypeAlias = "np.ndarray | torch.Tensor"


def append_rollout_expert_indices(recorded: Any, new: Any, *, start: int = 0) -> Routes | None:
    """Return the record with the rows of `new` beyond its end; recorded rows never change.

    An engine runs a longer sequence each turn, and returns routes for all of it. Those of earlier
    tokens may have been recomputed, and differ from the ones that the sampled tokens came from. So
    recorded rows stay, and only rows of tokens without one are added. That is valid while each
    turn's tokens begin with those of the previous turn; after a fork, begin a new record: pass
    None as `recorded`.

    Args:
        recorded: (tokens so far, L, K) integers: a numpy array, a tensor or nested lists. None or
            empty: nothing is recorded yet.
        new: (rows, L, K) integers of the tokens from `start` on. None: this turn has no routes.
        start: the token of the first row of `new`, for an engine that returns only new routes. At
            most the number of recorded rows.

    Returns:
        (max of both ends, L, K): `recorded` itself where `new` ends with it, `new` itself where
        nothing was recorded, else a new array (a tensor where `recorded` is one). None where both
        are None.

    Raises:
        TypeError: rows that are not integers.
        ValueError: not three dimensions, another L or K, `new` ends before `recorded` does, or
            rows are missing between the two.

    Source: rollout routing replay (R3), https://arxiv.org/abs/2510.11370.

    Example:
        >>> turn_1 = np.array([[[3]], [[1]]], np.uint8)  # 2 tokens, L = K = 1
        >>> turn_2 = np.array([[[3]], [[7]], [[2]]], np.uint8)
        >>> append_rollout_expert_indices(turn_1, turn_2).tolist()
        [[[3]], [[1]], [[2]]]
    """
    if isinstance(start, bool) or not isinstance(start, (int, np.integer)) or start < 0:
        raise ValueError(f"{OP}: start: expected an int of at least 0, got {start!r}")
    if new is None:
        if recorded is None:
            return None
        return _routes("recorded", recorded)
    new = _routes("new", new)
    if recorded is None:
        num_recorded = 0
    else:
        num_recorded = len(recorded)
    if start > num_recorded:
        raise ValueError(
            f"{OP}: start: expected at most the number of recorded rows ({num_recorded}), got "
            f"{start}: rows are missing between"
        )
    if num_recorded == 0:
        return new
    recorded = _routes("recorded", recorded)
    if new.shape[1:] != recorded.shape[1:]:
        raise ValueError(
            f"{OP}: new: expected the layers and experts per token of recorded, (L, K) = "
            f"{tuple(recorded.shape[1:])}, got {tuple(new.shape[1:])}"
        )
    end = start + len(new)
    if end < num_recorded:
        raise ValueError(
            f"{OP}: new must reach at least as far as recorded ({num_recorded} rows), got {end}"
        )
    if end == num_recorded:
        return recorded
    beyond = new[num_recorded - start :]
    if isinstance(recorded, torch.Tensor):
        return torch.cat([recorded, torch.as_tensor(beyond, device=recorded.device)])
    return np.concatenate([recorded, np.asarray(beyond)])


def _routes(name: str, rows: Any) -> Routes:
    """Return rows as a 3-D integer array or tensor."""
    array: Routes = rows if isinstance(rows, torch.Tensor) else np.asarray(rows)
    if isinstance(array, torch.Tensor):
        integers = not (array.is_floating_point() or array.is_complex())
        integers = integers and array.dtype != torch.bool
    else:
        integers = array.dtype.kind in "iu" or array.size == 0
    if not integers:
        raise TypeError(f"{OP}: {name}: expected integers, got {array.dtype}")
    if array.ndim != 3:
        raise ValueError(f"{OP}: {name}: expected shape (tokens, L, K), got {tuple(array.shape)}")
    return array
