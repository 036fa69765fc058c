"""Environments of skyrl-gym with deadlines, and invalid step results."""

import asyncio
import sqlite3
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_envs import CountingEnv, register_fakes

from skyrl_fast.config import EnvironmentConfig, SkyRLGymConfig
from skyrl_fast.rollout.env.answers import AnswerError, EnvAnswer, answer_of, messages_of
from skyrl_fast.rollout.env.errors import EnvError, EnvTimeoutError
from skyrl_fast.rollout.env.factory import EnvFactory
from skyrl_fast.rollout.env.handler import EnvSettings
from skyrl_fast.rollout.env.protocol import Env, EnvStep
from skyrl_fast.rollout.workers.plain import PlainData
from skyrl_fast.rollout.workers.threads import ThreadWorkers

register_fakes()


def with_factory(
    config: EnvironmentConfig, use: Callable[[EnvFactory], Awaitable[Any]], **options: Any
) -> Any:
    async def go() -> Any:
        factory = EnvFactory(config, **options)
        try:
            return await use(factory)
        finally:
            await factory.close()

    return asyncio.run(go())


def gym(**env_config: Any) -> EnvironmentConfig:
    """Return settings with the given skyrl-gym environment settings, by name."""
    return EnvironmentConfig(skyrl_gym=SkyRLGymConfig(env_config=env_config))


def workers(number: int, **options: Any) -> EnvironmentConfig:
    """Return settings with this number of threads."""
    return EnvironmentConfig(skyrl_gym=SkyRLGymConfig(max_env_workers=number), **options)


def test_text2sql_runs_a_query_and_scores_the_solution(tmp_path: Path) -> None:
    folder = tmp_path / "spider" / "database" / "shop"
    folder.mkdir(parents=True)
    with sqlite3.connect(folder / "shop.sqlite") as database:
        database.execute("CREATE TABLE item (name TEXT, price INTEGER)")
        database.execute("INSERT INTO item VALUES ('pen', 3), ('ink', 5)")
    extras = {
        "db_id": "shop",
        "data": "spider",
        "reward_spec": {"ground_truth": "SELECT price FROM item WHERE name = 'ink'"},
        "max_turns": 3,
    }

    async def use(factory: EnvFactory) -> tuple[EnvAnswer, EnvAnswer]:
        env = await factory.make("text2sql", extras)
        first = await env.init([{"role": "user", "content": "What does ink cost?"}])
        assert first == [{"role": "user", "content": "What does ink cost?"}]
        looked = await env.step("<think>a</think><sql>SELECT price FROM item</sql>")
        solved = await env.step(
            "<think>b</think><solution>SELECT price FROM item WHERE name = 'ink'</solution>"
        )
        await env.close()
        return looked, solved

    config = EnvironmentConfig(
        skyrl_gym=SkyRLGymConfig(env_config={"text2sql": {"db_path": str(tmp_path)}})
    )
    looked, solved = with_factory(config, use)
    assert (looked.done, looked.reward) == (False, 0.0)
    assert "5" in looked.messages[0]["content"]
    assert (solved.done, solved.reward, solved.messages) == (True, 1.0, [])


def test_settings_reach_the_environment_as_attributes(tmp_path: Path) -> None:
    path = tmp_path / "with_settings.py"
    path.write_text(
        "import skyrl_gym\n"
        "from skyrl_gym.envs.base_text_env import BaseTextEnv\n"
        "class WithSettings(BaseTextEnv):\n"
        "    def __init__(self, env_config=None, extras=None):\n"
        "        super().__init__()\n"
        "        self.settings = env_config\n"
        "    def step(self, action):\n"
        "        value = getattr(self.settings, action) + self.settings['db_path']\n"
        "        text = [{'role': 'user', 'content': value}]\n"
        "        return dict(observations=text, reward=0, done=False, metadata={})\n"
        "skyrl_gym.register('with_settings', entry_point=WithSettings)\n"
    )

    async def use(factory: EnvFactory) -> str:
        env = await factory.make("with_settings", {})
        answer = await env.step("db_path")
        with pytest.raises(EnvError, match="no 'db_pth'; it has \\['db_path'\\]"):
            await env.step("db_pth")
        return answer.messages[0]["content"]

    config = gym(with_settings={"db_path": "x"})
    config.register = [str(path)]
    assert with_factory(config, use) == "xx"


def test_settings_left_out_take_the_environments_defaults() -> None:
    async def use(factory: EnvFactory) -> Any:
        extras = {"max_turns": 2, "reward_spec": {"ground_truth": {"target": "x"}}}
        env = await factory.make("search", extras)
        return env._worker._handler._env.env.tool_group

    tools = with_factory(gym(search={"topk": 7}), use)
    assert (tools.topk, tools.search_url) == (7, "http://127.0.0.1:8000/retrieve")


def test_user_module_registers_its_environment(tmp_path: Path) -> None:
    path = tmp_path / "my_env.py"
    path.write_text(
        "import skyrl_gym\n"
        "from skyrl_gym.envs.base_text_env import BaseTextEnv\n"
        "class Mine(BaseTextEnv):\n"
        "    def __init__(self, env_config=None, extras=None): super().__init__()\n"
        "    def step(self, action):\n"
        "        return dict(observations=[], reward=len(action), done=True, metadata={})\n"
        "skyrl_gym.register('mine', entry_point=Mine)\n"
    )

    async def use(factory: EnvFactory) -> EnvAnswer:
        return await (await factory.make("mine", {})).step("four")

    for _ in range(2):  # skyrl_gym refuses a second registration
        assert with_factory(EnvironmentConfig(register=[str(path)]), use).reward == 4.0


OWN_ENV = """
from skyrl_fast.rollout.env.protocol import Env, EnvStep

class Echo(Env):
    def __init__(self, row):
        self.row = row

    def step(self, action):
        done = action == self.row["word"]
        return EnvStep(float(done), done=done, observations="" if done else "again")

    def metrics(self):
        return {"word_length": len(self.row["word"])}

def shouting(row):
    return Echo({"word": row["word"].upper()})

class Nothing:
    def __init__(self, row): pass
    def step(self, action): return {}

class Gym(Env):
    def reset(self): return "the first prompt"
    def step(self, action): return EnvStep(0.0, done=True)

class Both(Gym):
    def init(self, messages): return [{"role": "user", "content": self.reset()}]
"""


@pytest.mark.parametrize(("name", "word"), [("Echo", "yes"), ("shouting", "YES")])
def test_environment_by_class_or_factory(name: str, word: str, tmp_path: Path) -> None:
    path = tmp_path / "own_env.py"
    path.write_text(OWN_ENV)
    env_class = f"{path}:{name}"

    async def use(factory: EnvFactory) -> None:
        env = await factory.make(env_class, {"word": "yes"})
        prompt = [{"role": "user", "content": "say it"}]
        assert await env.init(prompt) == prompt
        first, second = await env.step("no"), await env.step(word)
        assert (first.messages, first.reward, first.done) == (
            [{"role": "user", "content": "again"}],
            0.0,
            False,
        )
        assert (second.messages, second.reward, second.done) == ([], 1.0, True)
        assert await env.metrics() == {"word_length": 3}
        await env.close()

    with_factory(EnvironmentConfig(env_class=env_class), use)


def test_environment_without_required_methods_is_named(tmp_path: Path) -> None:
    path = tmp_path / "own_env.py"
    path.write_text(OWN_ENV)
    wanted = "expected an Env, got Nothing without init, metrics, close"
    with pytest.raises(EnvError, match=wanted):
        with_factory(EnvironmentConfig(), lambda factory: factory.make(f"{path}:Nothing", {}))


def test_a_reset_that_nothing_calls_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "own_env.py"
    path.write_text(OWN_ENV)
    wanted = r"Gym: expected init\(messages\), which returns the first prompt, got reset, which is"
    with pytest.raises(EnvError, match=wanted):
        with_factory(EnvironmentConfig(), lambda factory: factory.make(f"{path}:Gym", {}))

    async def begin(factory: EnvFactory) -> None:
        env = await factory.make(f"{path}:Both", {})
        assert await env.init([]) == [{"role": "user", "content": "the first prompt"}]
        await env.close()

    with_factory(EnvironmentConfig(), begin)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:Env", "env_class: cannot import 'no_such_module'"),
        ("json:Env", "env_class: 'json' has no 'Env'"),
    ],
)
def test_environment_that_cannot_be_imported_is_refused_at_the_start(
    name: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        EnvFactory(EnvironmentConfig(env_class=name))


@pytest.mark.parametrize("module", ["no_such_module_anywhere", "/nowhere/env.py"])
def test_module_that_cannot_be_imported_is_named(module: str) -> None:
    with pytest.raises(ValueError, match=f"environment.register: cannot import '{module}'"):
        EnvFactory(EnvironmentConfig(register=[module]))


def test_unknown_environment_lists_the_known_ones() -> None:
    with pytest.raises(EnvError, match=r"no environment of the name.*text2sql"):
        with_factory(EnvironmentConfig(), lambda factory: factory.make("typo", {}))


def test_constructor_that_raises_is_named() -> None:
    with pytest.raises(EnvError, match=r"text2sql: make raised ValueError: the row lacks db_id"):
        with_factory(EnvironmentConfig(), lambda factory: factory.make("text2sql", {}))


def test_call_that_never_returns_times_out_without_losing_a_worker() -> None:
    async def use(factory: EnvFactory) -> float:
        stuck = await factory.make("counting", {"max_turns": 1, "hang_at": 1, "hang_seconds": 1.0})
        with pytest.raises(EnvTimeoutError, match=r"step did not return within 0\.05 s"):
            await stuck.step("a")
        started = time.perf_counter()
        for _ in range(3):  # the only worker was replaced
            fine = await factory.make("counting", {"max_turns": 1, "turns": 1})
            assert (await fine.step("a")).done
        assert factory.num_abandoned == 1
        return time.perf_counter() - started

    assert with_factory(workers(1, timeout_seconds=0.05), use) < 0.9


@pytest.mark.spec("rollout.env-error")
async def test_call_that_returned_in_time_is_not_late_on_a_busy_loop() -> None:
    threads = ThreadWorkers(EnvSettings({}, None, 1_000))
    call = asyncio.create_task(threads.run(lambda: "an answer", 0.02))
    await asyncio.sleep(0)
    await asyncio.sleep(0)  # the call runs
    time.sleep(0.1)  # the loop is busy when the call returns and at its deadline
    assert (await call) == "an answer"


def in_threads(function: Callable[[], Any], *, number: int) -> list[Any]:
    """Return the results of calls that begin together."""

    async def use() -> list[Any]:
        threads = ThreadWorkers(EnvSettings({}, None, 1_000))
        found = await asyncio.gather(*[threads.run(function, 20.0) for _ in range(number)])
        await threads.close()
        return found

    return asyncio.run(use())


def test_quick_calls_share_a_thread_and_calls_that_block_get_more() -> None:
    assert len(set(in_threads(threading.get_ident, number=64))) < 32
    barrier = threading.Barrier(16)
    assert sorted(in_threads(barrier.wait, number=16)) == list(range(16))


async def test_cancelled_calls_are_not_made_and_free_their_thread() -> None:
    made = []

    threads = ThreadWorkers(EnvSettings({}, None, 1_000), join_seconds=60.0)
    release = threading.Event()
    hung = asyncio.create_task(threads.run(release.wait, 20.0))
    await asyncio.sleep(0)
    waiting = asyncio.create_task(threads.run(lambda: made.append(1), 20.0))
    await asyncio.sleep(0)
    waiting.cancel()
    hung.cancel()
    await asyncio.wait([waiting, hung])
    answer = await threads.run(lambda: "an answer", 20.0)  # by another thread
    release.set()
    assert answer == "an answer" and made == []


@pytest.mark.spec("rollout.env-closed")
def test_environment_created_after_its_deadline_is_closed() -> None:
    CountingEnv.closed.clear()

    async def use(factory: EnvFactory) -> None:
        with pytest.raises(EnvTimeoutError, match="make did not return"):
            await factory.make("counting", {"max_turns": 1, "name": "late", "make_seconds": 0.2})
        for _ in range(100):  # of 0.05 s, until its constructor returns
            if CountingEnv.closed:
                break
            await asyncio.sleep(0.05)

    with_factory(EnvironmentConfig(timeout_seconds=0.05), use)
    assert CountingEnv.closed == ["late"]


@pytest.mark.spec("rollout.env-step")
def test_concurrent_calls_are_limited_by_the_workers() -> None:
    running, most = 0, 0
    lock = threading.Lock()

    def step(self: CountingEnv, action: str) -> dict[str, Any]:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.01)
        with lock:
            running -= 1
        return dict(GOOD)

    async def use(factory: EnvFactory) -> None:
        envs = [await factory.make("counting", {"max_turns": 1}) for _ in range(12)]
        await asyncio.gather(*[env.step("a") for env in envs])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CountingEnv, "step", step)
        with_factory(workers(3), use)
    assert 1 < most <= 3


def test_waiting_for_a_worker_does_not_count_against_the_deadline() -> None:
    async def use(factory: EnvFactory) -> list[EnvAnswer]:
        extras = {"max_turns": 1, "turns": 1, "hang_at": 1, "hang_seconds": 0.1}
        envs = [await factory.make("counting", extras) for _ in range(6)]
        return await asyncio.gather(*[env.step("a") for env in envs])

    answers = with_factory(workers(1, timeout_seconds=0.4), use)
    assert [a.done for a in answers] == [True] * 6


class Exits(Env):
    def __init__(self, row: Any) -> None:
        self.row = row

    def step(self, action: str) -> EnvStep:
        sys.exit(3)

    def metrics(self) -> dict[str, Any]:
        return {"turns": 0}


def test_sys_exit_in_an_environment_fails_only_its_call() -> None:
    async def use(factory: EnvFactory) -> None:
        env = await factory.make("exits", {})
        with pytest.raises(EnvError, match="SystemExit: 3"):
            await env.step("a")
        assert await env.metrics() == {"turns": 0}

    with_factory(EnvironmentConfig(), use, make_env=Exits)


GOOD = {"observations": [], "reward": 1, "done": False}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "expected an EnvStep, or a mapping with observations, reward, done; got NoneType"),
        ({"reward": 1.0}, "the answer lacks observations, done"),
        ({**GOOD, "reward": float("nan")}, "reward: expected a finite float32 number, got nan"),
        ({**GOOD, "reward": "1"}, "reward: expected a finite float32 number, got '1'"),
        ({**GOOD, "reward": "high"}, "reward: expected a finite float32 number, got 'high'"),
        ({**GOOD, "reward": None}, "reward: expected a finite float32 number, got None"),
        ({**GOOD, "reward": 10**400}, "reward: expected a finite float32 number, got 1000"),
        (
            {**GOOD, "reward": -1e39},
            "reward: expected a finite float32 number, got -1e",
        ),  # out of float32's range
        ({**GOOD, "reward": np.ones(2)}, "reward: expected a finite float32 number, got array"),
        ({**GOOD, "done": np.array([True, False])}, "done: expected true or false, got array"),
        ({**GOOD, "done": "False"}, "done: expected true or false, got 'False'"),
        ({"observations": [], 3: 4}, r"lacks reward, done; it has \['3', 'observations'\]"),
        ({**GOOD, "observations": [1]}, "expected messages with role and content"),
        ({**GOOD, "observations": [{"role": "user"}]}, "expected messages with role and content"),
        (
            {**GOOD, "observations": [{"role": "tool", "content": {}}]},
            "message 0: content: expected",
        ),
        ({**GOOD, "postprocessed_action": {"role": "assistant", "content": [{}]}}, "got a part of"),
        (
            {**GOOD, "postprocessed_action": 3},
            "postprocessed_action: expected text or an assistant",
        ),
        ({**GOOD, "postprocessed_action": {"role": "user", "content": ""}}, "assistant message"),
    ],
)
def test_invalid_step_results(answer: Any, message: str) -> None:
    with pytest.raises(AnswerError, match=message):
        answer_of(answer, PlainData(1_000))


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (None, []),
        ("", []),
        ([], []),
        ("text", [{"role": "user", "content": "text"}]),
        ({"role": "tool", "content": "t"}, [{"role": "tool", "content": "t"}]),
        ([{"role": "user", "content": "a"}], [{"role": "user", "content": "a"}]),
        (
            [{"role": "developer", "content": [{"text": "a"}, "b"], "own": 1, "name": None}],
            [{"role": "system", "content": "a\nb", "own": 1}],
        ),
    ],
)
def test_observation_formats(value: Any, wanted: list[dict[str, Any]]) -> None:
    assert messages_of(value, PlainData(1_000)) == wanted


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (workers(0), "max_env_workers: expected at least 1, got 0"),
        (EnvironmentConfig(timeout_seconds=0), "timeout_seconds: expected more than 0, got 0"),
    ],
)
def test_config_out_of_range(config: EnvironmentConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EnvFactory(config)
