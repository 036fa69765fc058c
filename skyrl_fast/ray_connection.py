"""The connection to a Ray cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def imported_ray(wanted_by: str) -> Any:
    """Return the package Ray.

    Args:
        wanted_by: the settings that need it.

    Raises:
        ValueError: it is missing; the message says how to install it.
    """
    try:
        import ray
    except ImportError as error:
        raise ValueError(
            f"{wanted_by}: wanted Ray: pip install 'skyrl_fast[ray]', and `ray start` on each node"
        ) from error
    return ray


@contextmanager
def connected(ray: Any) -> Iterator[None]:
    """Connect to the cluster of RAY_ADDRESS, else of this machine, else start one."""
    if ray.is_initialized():
        yield
        return
    ray.init()
    try:
        yield
    finally:
        ray.shutdown()
