"""Environments and rewards that are coroutine functions."""

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import pytest

from skyrl_fast.config import EnvironmentConfig
from skyrl_fast.rollout.env.errors import EnvError, EnvTimeoutError
from skyrl_fast.rollout.env.factory import EnvFactory
from skyrl_fast.rollout.env.protocol import Action, EnvStep
from skyrl_fast.rollout.env.reward_env import RewardEnv
from skyrl_fast.rollout.env.reward_functions import ANSWERS, RewardFunctions
from skyrl_fast.rollout.workers import loop_thread as loops
from skyrl_fast.train import Env

LOOPS: set[int] = set()  # of which coroutines have seen


class Sleeper(Env):
    """Sleep in every method, each in the loop that it finds."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.row = row
        self.closed = False

    async def init(self, messages: list[Any]) -> list[Any]:
        LOOPS.add(id(asyncio.get_running_loop()))
        await asyncio.sleep(0)
        return [*messages, {"role": "user", "content": "begin"}]

    async def step(self, action: Action) -> EnvStep:
        LOOPS.add(id(asyncio.get_running_loop()))
        await asyncio.sleep(self.row["seconds"])
        if self.row.get("fails"):
            raise RuntimeError("no such table")
        return EnvStep(2.0, done=True, observations="more")

    async def metrics(self) -> Mapping[str, Any]:
        return {"slept": self.row["seconds"]}

    async def close(self) -> None:
        await asyncio.sleep(0)
        CLOSED.append(self.row["seconds"])


class Blocker(Env):
    """Block the loop that asynchronous environments share."""

    async def step(self, action: Action) -> EnvStep:
        time.sleep(3.0)
        return EnvStep(0.0, done=True)


CLOSED: list[float] = []


class OnlyStep(Env):
    """Define what is required."""

    def step(self, action: Action) -> EnvStep:
        return EnvStep(1.0, done=True)


async def _answer(factory: EnvFactory, row: dict[str, Any]) -> Any:
    session = await factory.make("env", row)
    try:
        messages = await session.init([{"role": "user", "content": "hello"}])
        answer = await session.step("x")
        return messages, answer, await session.metrics()
    finally:
        await session.close()


@pytest.mark.parametrize("workers", ["thread", "process"])
async def test_methods_may_be_coroutine_functions(workers: str) -> None:
    factory = EnvFactory(EnvironmentConfig(env_class="process_envs:AsyncGuess", workers=workers))
    session = await factory.make("process_envs:AsyncGuess", {"number": 3})
    assert await session.init([{"role": "user", "content": "?"}]) == [
        {"role": "user", "content": "?"}
    ]
    assert (await session.step("3")).reward == 1.0
    assert await session.metrics() == {"guesses": 1}
    await session.close()
    await factory.close()


@pytest.mark.spec("rollout.env-async")
async def test_all_methods_run_in_one_loop_which_is_not_the_trainers() -> None:
    LOOPS.clear()
    CLOSED.clear()
    factory = EnvFactory(EnvironmentConfig(), make_env=Sleeper)
    results = [await _answer(factory, {"seconds": 0.01 * n}) for n in range(3)]
    for messages, answer, metrics in results:
        assert [m["content"] for m in messages] == ["hello", "begin"]
        assert (answer.reward, answer.done) == (2.0, True)
        assert list(metrics) == ["slept"]
    assert len(LOOPS) == 1
    assert {id(asyncio.get_running_loop())} != LOOPS
    assert CLOSED == [0.0, 0.01, 0.02]
    await factory.close()


class Meeting(Sleeper):
    """End a step only when all steps have begun."""

    size = 256
    present = 0
    complete: asyncio.Event

    async def step(self, action: Action) -> EnvStep:
        if Meeting.present == 0:
            Meeting.complete = asyncio.Event()
        Meeting.present += 1
        if Meeting.present == self.size:
            Meeting.complete.set()
        await Meeting.complete.wait()
        return await super().step(action)


async def test_hundreds_of_environments_wait_at_a_time() -> None:
    config = EnvironmentConfig()
    assert config.skyrl_gym.max_env_workers < Meeting.size
    factory = EnvFactory(config, make_env=Meeting)
    rows = [{"seconds": 1.0}] * Meeting.size
    started = time.process_time()
    results = await asyncio.gather(*(_answer(factory, row) for row in rows))
    processor_seconds = time.process_time() - started
    assert [answer.reward for _, answer, _ in results] == [2.0] * Meeting.size
    assert Meeting.present == Meeting.size
    # Measured: 0.14 to 0.18 for five calls of each environment; waiting costs nothing.
    assert processor_seconds < 0.8
    await factory.close()


async def test_an_error_has_its_name_and_place(caplog: pytest.LogCaptureFixture) -> None:
    factory = EnvFactory(EnvironmentConfig(), make_env=Sleeper)
    with pytest.raises(EnvError, match="step raised RuntimeError: no such table"):
        await _answer(factory, {"seconds": 0.0, "fails": True})
    assert 'raise RuntimeError("no such table")' in caplog.text
    await factory.close()


async def test_a_late_call_is_cancelled_and_its_place_named() -> None:
    factory = EnvFactory(EnvironmentConfig(timeout_seconds=0.3), make_env=Sleeper)
    session = await factory.make("env", {"seconds": 60.0})
    with pytest.raises(EnvTimeoutError, match=r"within 0.3 s; it was at: .*test_async_env.* step$"):
        await session.step("x")
    tasks = asyncio.run_coroutine_threadsafe(_running_tasks(), loops.loop_thread().loop)
    assert await asyncio.wrap_future(tasks) == 1
    await factory.close()


async def _running_tasks() -> int:
    await asyncio.sleep(0.01)  # a cancelled one ends
    return len(asyncio.all_tasks())


@pytest.mark.spec("rollout.env-async")
async def test_code_that_blocks_the_loop_is_named_and_others_get_a_new_loop() -> None:
    factory = EnvFactory(EnvironmentConfig(timeout_seconds=0.5), make_env=Blocker)
    session = await factory.make("env", {})
    with pytest.raises(EnvTimeoutError, match=r"it was at: .*test_async_env.*, in step"):
        await session.step("x")
    await factory.close()
    others = EnvFactory(EnvironmentConfig(timeout_seconds=2.0), make_env=Sleeper)
    _, answer, _ = await _answer(others, {"seconds": 0.01})
    assert answer.reward == 2.0
    await others.close()


async def test_only_step_is_required() -> None:
    factory = EnvFactory(EnvironmentConfig(), make_env=OnlyStep)
    _, answer, metrics = await _answer(factory, {"anything": 1})
    assert (answer.reward, answer.done, metrics) == (1.0, True, {})
    await factory.close()


async def test_a_reward_may_be_a_coroutine_function() -> None:
    async def judge(answer: str, row: dict[str, Any]) -> float:
        await asyncio.sleep(0)
        return float(row["prompt"][0]["content"] == "hello" and answer == "x")

    factory = EnvFactory(EnvironmentConfig(), make_env=lambda row: RewardEnv(judge, row))
    _, answer, _ = await _answer(factory, {})
    assert answer.reward == 1.0
    await factory.close()


async def test_reward_functions_keep_their_clients_from_group_to_group() -> None:
    at_once = asyncio.Semaphore(1)  # belongs to the loop of its first use
    seen: list[asyncio.AbstractEventLoop] = []

    async def judge(completions: list[Any], **columns: Any) -> list[float]:
        async with at_once:
            seen.append(asyncio.get_running_loop())
            await asyncio.sleep(0.01)
            return [1.0 for _ in completions]

    make_env = RewardFunctions([judge], [2.0])
    factory = EnvFactory(EnvironmentConfig(), make_env=make_env)

    async def group() -> Any:
        session = await factory.make("env", {ANSWERS: (["a", "b"], [[1], [2]])})
        await session.init([{"role": "user", "content": "hello"}])
        await session.step("")
        found = await session.metrics()
        await session.close()
        return found

    results = await asyncio.gather(*(group() for _ in range(4)))
    assert [found["rewards"] for found in results] == [[2.0, 2.0]] * 4
    assert len(set(map(id, seen))) == 1
    await factory.close()
