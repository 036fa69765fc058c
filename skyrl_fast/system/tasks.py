"""Tasks of asyncio that run together, and those whose results are not wanted any more."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def gather_or_cancel(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return all results, in order; the first error cancels the others, and is raised at their end.

    It is raised itself: `asyncio.TaskGroup` raises a group, and `asyncio.gather` cancels none.
    """
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def ignore_result(done: asyncio.Future[Any]) -> None:
    """Retrieve the exception of a future that no one awaits, so that asyncio does not report it."""
    if not done.cancelled():
        done.exception()
