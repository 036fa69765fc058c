"""What replay needs of a step, in its line: the tokens it was sampled from, and its routes.

L layers, K experts per token.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from skyrl_fast.rollout.trajectory import Step

KEPT_IDS = "kept_ids"
ROUTES = "routes"


def list_replay_needs(steps: Sequence[Step]) -> list[str]:
    kept = any(step.kept_ids is not None for step in steps)
    routed = any(step.expert_indices is not None for step in steps)
    result: list[str] = []
    for name, there in ((KEPT_IDS, kept), (ROUTES, routed)):
        if there:
            result.append(name)
    return result


def replay_values(steps: Sequence[Step]) -> Iterator[dict[str, Any]]:
    """Yield the values of each step's line; of routes, those that differ from the step before."""
    before: np.ndarray | None = None
    for step in steps:
        values: dict[str, Any] = {}
        if step.kept_ids is not None:
            values[KEPT_IDS] = [ids.tolist() for ids in step.kept_ids]
        routes = step.expert_indices
        if routes is not None:
            # A step's prompt repeats the tokens before it with their routes: all but the new ones
            # are left out.
            shared = _count_shared_rows(routes, before)
            new = routes[shared:]
            dtype = new.dtype.newbyteorder("<")
            data = new.astype(dtype).tobytes()
            values[ROUTES] = {
                "shared": shared,
                "dtype": dtype.str,
                "shape": list(new.shape),
                "data": base64.b64encode(data).decode(),
            }
        before = routes
        yield values


def _count_shared_rows(routes: np.ndarray, before: np.ndarray | None) -> int:
    if before is None or (before.dtype, before.shape[1:]) != (routes.dtype, routes.shape[1:]):
        return 0
    both = min(len(routes), len(before))
    same = (routes[:both] == before[:both]).all(axis=(1, 2))
    # argmin of all True is 0.
    if same.all():
        return both
    return int(same.argmin())


def read_kept_ids(tokens: Mapping[str, Any]) -> list[np.ndarray] | None:
    """Return for each response token the int32 ids that it was sampled from, if stored."""
    if KEPT_IDS not in tokens:
        return None
    return [np.array(ids, np.int32) for ids in tokens[KEPT_IDS]]


def read_routes(tokens: Mapping[str, Any], before: np.ndarray | None) -> np.ndarray | None:
    """Return the routes of a step, integers [tokens, L, K]; None: it has none."""
    if ROUTES not in tokens:
        return None
    stored = tokens[ROUTES]
    data = base64.b64decode(stored["data"], validate=True)
    dtype = np.dtype(stored["dtype"])
    if dtype.kind not in "iu":
        raise ValueError(f"routes: expected integers, got {dtype}")
    new = np.frombuffer(data, dtype).reshape(stored["shape"])
    shared = stored["shared"]
    if not shared:
        return new
    if before is None or len(before) < shared:
        raise ValueError(f"routes: {shared} tokens are those of the step before, which has fewer")
    return np.concatenate([before[:shared], new])
