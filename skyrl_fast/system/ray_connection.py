"""The connection to a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def import_ray(wanted_by: str) -> Any:
    """Return the package Ray; a ValueError says how to install it if it is missing."""
    try:
        import ray
    except ImportError as error:
        raise ValueError(
            f"{wanted_by}: expected Ray: pip install 'skyrl_fast[ray]', and `ray start` on "
            "each node"
        ) from error
    return ray


@contextmanager
def connect_ray(ray: Any) -> Iterator[bool]:
    """Connect to the cluster of RAY_ADDRESS, else of this machine, else start one.

    Yields whether it was started here, so that other nodes do not join it.
    """
    if ray.is_initialized():
        yield False
        return
    started = _init(ray)
    try:
        yield started
    finally:
        ray.shutdown()


def _init(ray: Any) -> bool:
    if os.environ.get("RAY_ADDRESS"):
        ray.init()
        return False
    try:
        ray.init(address="auto")
    except ConnectionError:  # no cluster on this machine
        ray.init(address="local")
        return True
    return False
