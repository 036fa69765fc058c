"""Environments in processes: killed at their deadline, and ended with the trainer."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import process_envs
import pytest
from fake_envs import FakePrompt, ScriptedEngine, loop_config, says
from hostile_answers import HostileEnv

from skyrl_fast.config import EnvironmentConfig, SkyRLGymConfig
from skyrl_fast.rollout.env.errors import EnvError, EnvTimeoutError
from skyrl_fast.rollout.env.factory import EnvFactory
from skyrl_fast.rollout.env.protocol import Env
from skyrl_fast.rollout.env.reward_env import RewardEnv
from skyrl_fast.rollout.groups import rollout

FILE = str(Path(process_envs.__file__))
GUIDES = Path(__file__).resolve().parents[2] / "docs" / "guide"
SCRIPTED = f"{FILE}:Scripted"
MESSAGES = [{"role": "user", "content": "begin"}]
SHORT = 2.0  # seconds of a call, which takes milliseconds
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


def with_factory(use: Callable[[EnvFactory], Awaitable[Any]], **options: Any) -> Any:
    make_env = options.pop("make_env", None)
    config = EnvironmentConfig(**({"workers": "process", "env_class": SCRIPTED} | options))

    async def go() -> Any:
        factory = EnvFactory(config, make_env=make_env, longest_text=1_000_000)
        try:
            return await use(factory)
        finally:
            await factory.close()

    return asyncio.run(go())


@pytest.fixture(scope="module")
def shared() -> Iterator[EnvFactory]:
    """Return a factory whose fork server has started, for tests that leave it as it is."""
    config = EnvironmentConfig(workers="process", env_class=SCRIPTED, timeout_seconds=SHORT)
    factory = EnvFactory(config, longest_text=1_000_000)
    yield factory
    asyncio.run(factory.close())


async def seen(env: Any, action: str = "a") -> dict[str, Any]:
    """Return what the environment says of its process."""
    return json.loads((await env.step(action)).messages[0]["content"])


@pytest.mark.spec("rollout.env-processes")
def test_trajectory_stays_in_one_process_which_then_serves_another() -> None:
    async def use(factory: EnvFactory) -> None:
        first = await factory.make(SCRIPTED, {"a": 1})
        second = await factory.make(SCRIPTED, {"a": 1})
        assert await first.init(MESSAGES) == MESSAGES
        one, two = await seen(first, "é\ud800"), await seen(first)
        other = await seen(second)
        assert (one["turns"], two["turns"], one["action"]) == (1, 2, "é\ud800")
        assert len({one["pid"], other["pid"], os.getpid()}) == 3
        assert one["pid"] == two["pid"]
        assert await first.metrics() == {"turns": 2}
        await first.close()
        third = await factory.make(SCRIPTED, {})
        again = await seen(third)
        assert (again["pid"], again["turns"], again["constructed"]) == (one["pid"], 1, 2)

    with_factory(use)


@pytest.mark.spec("rollout.env-processes")
@pytest.mark.parametrize("do", ["hang", "hold_lock"])
def test_late_call_is_killed_and_others_are_not(shared: EnvFactory, do: str) -> None:
    async def use(factory: EnvFactory) -> None:
        before = factory.num_abandoned
        good = await factory.make(SCRIPTED, {})
        pid = (await seen(good))["pid"]
        late = await factory.make(SCRIPTED, {"do": do})
        with pytest.raises(EnvTimeoutError, match=r"step did not return within 2 s"):
            await late.step("a")
        assert await late.metrics() == {}
        await late.close()
        assert (await seen(good))["pid"] == pid
        fresh = await factory.make(SCRIPTED, {})
        assert (await seen(fresh))["turns"] == 1
        assert factory.num_abandoned == before + 1

    asyncio.run(use(shared))


@pytest.mark.parametrize(
    ("do", "failure"),
    [
        ("raise", "step raised RuntimeError: the database is locked"),
        ("odd", r"step raised Odd: \(its text cannot be read\)"),
        ("segfault", "step: its process was killed by SIGSEGV"),
        ("exit", r"step: its process exited \(3\)"),
        ("unnamed_signal", r"step: its process was killed by signal 35"),
    ],
)
def test_failure_in_a_process_is_an_error_of_the_environment(
    shared: EnvFactory, do: str, failure: str
) -> None:
    async def use(factory: EnvFactory) -> None:
        env = await factory.make(SCRIPTED, {"do": do})
        with pytest.raises(EnvError, match=failure):
            await env.step("a")
        await env.close()
        assert (await seen(await factory.make(SCRIPTED, {})))["turns"] == 1

    asyncio.run(use(shared))


@pytest.mark.parametrize(
    "text",
    [
        *("[" * 100_000, "3", "[1]", "[1, 2, 3, 4]", "\\", "null", '[5, null, ""]'),
        '[{"messages": 5, "reward": 1, "done": false}, null, ""]',
        '[{"messages": [], "reward": "x", "done": false}, null, ""]',
        '[{"messages": [], "reward": NaN, "done": false}, null, ""]',
        '[{"messages": [], "done": false}, null, [1]]',
        "[null, 5, [1]]",
    ],
)
def test_invalid_answer_of_a_process_is_an_error_of_the_environment(
    shared: EnvFactory, text: str
) -> None:
    async def use(factory: EnvFactory) -> None:
        env = await factory.make(SCRIPTED, {"do": "write", "write": text})
        with pytest.raises(EnvError):
            await env.step("a")

    asyncio.run(use(shared))


def test_processes_of_environments_do_not_inherit_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYRL_FAST_ENGINE_KEY", "k" * 32)
    monkeypatch.setenv("OTHER", "stays")
    file = tmp_path / "variables"

    async def use(factory: EnvFactory) -> None:
        env = await factory.make(SCRIPTED, {"do": "variables", "file": str(file)})
        await env.step("a")

    with_factory(use)
    variables = json.loads(file.read_text())
    assert variables["OTHER"] == "stays"
    assert "SKYRL_FAST_ENGINE_KEY" not in variables


@pytest.mark.parametrize("do", ["child", "child_and_exit"])
def test_what_a_killed_process_has_started_is_killed_too(
    shared: EnvFactory, tmp_path: Path, do: str
) -> None:
    file = tmp_path / "pid"

    async def use(factory: EnvFactory) -> None:
        env = await factory.make(SCRIPTED, {"do": do, "file": str(file)})
        with pytest.raises(EnvError):
            await env.step("a")

    asyncio.run(use(shared))
    wait_until(lambda: not alive(int(file.read_text())))


def test_cancelled_call_is_killed(shared: EnvFactory) -> None:
    async def use(factory: EnvFactory) -> None:
        env = await factory.make(SCRIPTED, {"do": "hang"})
        pid = env._worker._process._pid
        call = asyncio.create_task(env.step("a"))
        await asyncio.sleep(0.1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await env.close()
        await asyncio.to_thread(wait_until, lambda: not alive(pid))

    asyncio.run(use(shared))


def test_texts_of_an_answer_are_cut_in_the_process(shared: EnvFactory) -> None:
    async def use(factory: EnvFactory) -> None:
        env = await factory.make(SCRIPTED, {"do": "long"})
        await env.step("a")
        (message,) = (await env.step("a")).messages
        assert message == {"role": "user", "content": "\ud800" * 1_000_000}

    asyncio.run(use(shared))


def test_processes_draw_different_random_numbers(shared: EnvFactory, tmp_path: Path) -> None:
    file = tmp_path / "numbers"

    async def use(factory: EnvFactory) -> None:
        envs = [await factory.make(SCRIPTED, {"do": "draw", "file": str(file)}) for _ in range(3)]
        for env in envs:
            await env.step("a")

    asyncio.run(use(shared))
    numbers = [json.loads(line) for line in file.read_text().splitlines()]
    assert len({number for number, _ in numbers}) == len({number for _, number in numbers}) == 3


@pytest.mark.spec("rollout.env-folder")
def test_process_begins_each_trajectory_in_the_same_folder(shared: EnvFactory) -> None:
    async def use(factory: EnvFactory) -> None:
        env = await factory.make(SCRIPTED, {"do": "chdir"})
        moved = await seen(env)
        await env.close()
        again = await seen(await factory.make(SCRIPTED, {}))
        assert (moved["folder"], again["folder"]) == ("/", os.getcwd())
        assert moved["pid"] == again["pid"]

    asyncio.run(use(shared))


@pytest.mark.spec("rollout.env-folder")
@pytest.mark.parametrize("workers", ["thread", "process"])
def test_relative_file_is_that_of_the_start(
    workers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(Path(FILE).read_text())
    monkeypatch.chdir(tmp_path)
    options: dict[str, Any] = {"workers": workers, "env_class": "mine.py:Scripted"}

    async def use(factory: EnvFactory) -> None:
        await (await factory.make("mine.py:Scripted", {})).close()
        monkeypatch.chdir("/")
        assert (await seen(await factory.make("mine.py:Scripted", {})))["turns"] == 1

    with_factory(use, **options)


def test_alarms_need_a_process_as_the_guide_says(shared: EnvFactory) -> None:
    async def use(factory: EnvFactory) -> None:
        env = await factory.make(SCRIPTED, {"do": "set_alarm"})
        assert (await seen(env))["turns"] == 1
        await env.close()

    asyncio.run(use(shared))
    with pytest.raises(EnvError, match="signal only works in main thread"):
        with_factory(use, workers="thread")
    guide = (GUIDES / "environments.md").read_text()
    assert "(SIGALRM) needs `environment.workers=process`" in guide


def test_names_of_skyrl_gym_and_registered_modules(tmp_path: Path) -> None:
    pytest.importorskip("skyrl_gym")
    (tmp_path / "own.py").write_text(
        "import skyrl_gym\n"
        "from skyrl_gym.envs.base_text_env import BaseTextEnv\n"
        "class Own(BaseTextEnv):\n"
        "    def __init__(self, env_config=None, extras=None): self.word = env_config.word\n"
        "    def step(self, action):\n"
        "        return dict(observations=[], reward=len(self.word), done=True, metadata={})\n"
        "skyrl_gym.register('own_in_process', entry_point=Own)\n"
    )
    options = {
        "env_class": "own_in_process",
        "register": [str(tmp_path / "own.py")],
        "skyrl_gym": SkyRLGymConfig(env_config={"own_in_process": {"word": "four"}}),
    }

    async def use(factory: EnvFactory) -> float:
        return (await (await factory.make("own_in_process", {})).step("a")).reward

    assert with_factory(use, **options) == 4.0


def test_importable_reward_is_called_in_processes() -> None:
    async def use(factory: EnvFactory) -> list[float]:
        envs = [await factory.make("reward", {"word": word}) for word in ("yes", "no")]
        return [(await env.step("yes")).reward for env in envs]

    assert with_factory(use, make_env=partial(RewardEnv, process_envs.reward)) == [1.0, 0.0]


def test_object_that_processes_cannot_import_is_refused() -> None:
    class Local(Env):
        def step(self, action: str) -> Any:
            return {}

    for make_env in (Local, lambda row: Local()):
        with pytest.raises(ValueError, match=r"environment\.workers: process wants an environment"):
            EnvFactory(EnvironmentConfig(workers="process"), make_env=make_env)


def test_fork_server_that_was_killed_is_replaced() -> None:
    async def use(factory: EnvFactory) -> None:
        env = await factory.make(SCRIPTED, {})
        server = factory._workers._server._process
        server.kill()
        server.wait()
        with pytest.raises(EnvError, match="step: its process ended with the fork server"):
            await env.step("a")
        await env.close()
        assert (await seen(await factory.make(SCRIPTED, {})))["turns"] == 1

    with_factory(use)


TRAINER = """
import asyncio, sys
from skyrl_fast.config import EnvironmentConfig
from skyrl_fast.rollout.env.factory import EnvFactory

async def main():
    factory = EnvFactory(EnvironmentConfig(workers="process", env_class=sys.argv[1]))
    idle = await factory.make(sys.argv[1], {})
    held = await factory.make(sys.argv[1], {"do": "hold_lock"})
    print(factory._workers._server._process.pid, idle._worker._process._pid,
          held._worker._process._pid, flush=True)
    await held.step("a")

asyncio.run(main())
"""


def test_processes_end_with_the_trainer_also_in_a_call_that_holds_the_lock() -> None:
    command = [sys.executable, "-c", TRAINER, SCRIPTED]
    trainer = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert trainer.stdout is not None
    pids = [int(pid) for pid in trainer.stdout.readline().split()]
    time.sleep(0.2)
    assert len(pids) == 3 and all(map(alive, pids))
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    trainer.stdout.close()
    wait_until(lambda: not any(map(alive, pids)))


def test_no_process_is_left_after_close() -> None:
    pids: list[int] = []

    async def use(factory: EnvFactory) -> None:
        envs = [await factory.make(SCRIPTED, {}) for _ in range(4)]
        pids.extend([(await seen(env))["pid"] for env in envs])
        await envs[0].close()

    with_factory(use)
    wait_until(lambda: not any(map(alive, pids)))


@pytest.mark.spec("rollout.env-hostile-objects")
def test_random_hostile_answers_in_processes(tiny_tokenizer: Any, caplog: Any) -> None:
    caplog.set_level("CRITICAL")

    async def use(factory: EnvFactory) -> Any:
        engine = ScriptedEngine(lambda call, number: says(tiny_tokenizer, "ok"))
        prompts = [FakePrompt(f"p{seed}", env_extras={"seed": seed}) for seed in range(100)]
        config = loop_config(max_turns=2, max_retries=0, max_concurrent_trajectories=4)
        options: dict[str, Any] = {"phase": "train", "policy_version": 1, "seed": 1}
        return await rollout(prompts, engine, tiny_tokenizer, factory, config, **options)

    ended = [trajectory.stop_reason for trajectory in with_factory(use, make_env=HostileEnv)]
    assert set(ended) <= {"env_error", "stop", "max_turns", "length"}
    assert ended.count("env_error") > 10
    assert ended.count("max_turns") > 5


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)
