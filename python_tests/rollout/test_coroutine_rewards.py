"""Coroutine reward functions are called in one event loop, whichever thread calls them."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from skyrl_fast.rollout.env.reward_functions import call_reward_function

kept: dict[str, asyncio.Semaphore] = {}


async def judge(completions: list[str], **columns: Any) -> list[float]:
    semaphore = kept.setdefault("semaphore", asyncio.Semaphore(1))

    async def one() -> float:
        async with semaphore:
            await asyncio.sleep(0.001)
            return 0.5

    return list(await asyncio.gather(*(one() for _ in completions)))


def test_what_a_function_keeps_belongs_to_the_loop_of_all_calls() -> None:
    kept.clear()
    arguments = {"completions": ["a", "b"]}
    with ThreadPoolExecutor(4) as threads:
        calls = [threads.submit(call_reward_function, judge, arguments, 2) for _ in range(8)]
        assert [call.result() for call in calls] == [[(0.5, {}), (0.5, {})]] * 8
