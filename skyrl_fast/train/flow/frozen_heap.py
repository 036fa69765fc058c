"""Garbage collections that visit only what a run allocates."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def freeze_heap() -> Iterator[None]:
    """Exempt the objects that exist now from garbage collection in the context."""
    # Models and libraries are over a million objects. A full collection visits all of them, 0.3
    # seconds in the event loop, every few steps of a small model. A program that has frozen objects
    # keeps its choice: `gc.unfreeze()` at the end would undo it.
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
