"""Coroutines from code that may itself run in an event loop, as in a notebook."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


def run_coroutine(work: Coroutine[Any, Any, T]) -> T:
    """Run the coroutine in a new event loop and return its result.

    If this thread already runs an event loop, the new one runs in another thread and this call
    blocks until it ends.
    """
    # Raised outside of `except`, so that an error of the coroutine is not "during the handling" of
    # the one that says that no loop runs.
    if not _is_loop_running():
        return asyncio.run(work)
    with ThreadPoolExecutor(1, thread_name_prefix="train") as thread:
        return thread.submit(asyncio.run, work).result()


def _is_loop_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
