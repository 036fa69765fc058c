"""Environments of skyrl-gym, stepped in threads, with a deadline for every call."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import logging
import math
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

Message = dict[str, Any]


class EnvError(RuntimeError):
    """An environment raised, or answered something that is no answer."""


class EnvTimeoutError(EnvError):
    """An environment's call did not return in time; its thread was given up."""


@dataclass(frozen=True, slots=True)
class EnvConfig:
    """How environments are made and run.

    Args:
        register: modules (import paths or .py files) imported first; they call skyrl_gym.register.
        settings: for each env class what its constructor gets as `env_config`.
        max_env_workers: environment calls running at once.
        timeout_seconds: for one call, from when it runs (waiting for a worker does not count).
    """

    register: tuple[str, ...] = ()
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    max_env_workers: int = 32
    timeout_seconds: float = 60.0


@dataclass(frozen=True, slots=True)
class EnvAnswer:
    """What an environment said to one action.

    Args:
        messages: chat messages for the model; may be empty.
        reward: of this step; finite.
        done: the episode is over.
        postprocessed_action: text that takes the action's place in the history, or None.
        seconds: time in the environment.
    """

    messages: list[Message]
    reward: float
    done: bool
    postprocessed_action: str | None
    seconds: float


class EnvFactory:
    """Makes environments and owns the threads that run them. Close it at the end.

    Example:
        factory = EnvFactory(EnvConfig(settings={"text2sql": {"db_path": "data"}}))
        env = await factory.make("text2sql", extras)
        messages = await env.init(prompt)
        answer = await env.step("<sql>SELECT 1</sql>")
    """

    def __init__(self, config: EnvConfig) -> None:
        """Import what registers environments.

        Raises:
            ValueError: a module of `register` cannot be imported, or a number is out of range.
        """
        if config.max_env_workers < 1:
            raise ValueError(
                f"EnvConfig: max_env_workers: wanted >= 1, got {config.max_env_workers}"
            )
        if config.timeout_seconds <= 0:
            raise ValueError(
                f"EnvConfig: timeout_seconds: wanted > 0, got {config.timeout_seconds}"
            )
        self._config = config
        self._threads = _Threads(config.max_env_workers)
        for module in config.register:
            import_registering_module(module)

    @property
    def num_abandoned(self) -> int:
        """Calls that never returned in time, since the start."""
        return self._threads.num_abandoned

    async def make(self, env_class: str, extras: Mapping[str, Any]) -> Env:
        """A new environment; EnvError if its constructor raises or no such class is registered."""
        settings = self._config.settings.get(env_class, {})
        made = await self._call(
            env_class, "make", lambda: _make(env_class, dict(settings), dict(extras))
        )
        return Env(self, env_class, made)

    async def close(self) -> None:
        """Let idle threads end; threads that hang are daemons and die with the process."""
        self._threads.close()

    async def _call(self, env_class: str, what: str, call: Callable[[], Any]) -> Any:
        try:
            return await self._threads.run(call, self._config.timeout_seconds)
        except TimeoutError as error:
            raise EnvTimeoutError(
                f"environment {env_class}: {what} did not return within "
                f"{self._config.timeout_seconds:g} s"
            ) from error
        except Exception as error:
            raise EnvError(
                f"environment {env_class}: {what} raised {type(error).__name__}: {error}"
            ) from error


class Env:
    """One environment of one trajectory; made by `EnvFactory.make`."""

    def __init__(self, factory: EnvFactory, env_class: str, env: Any) -> None:
        self._factory = factory
        self._env_class = env_class
        self._env = env

    async def init(self, messages: Sequence[Message]) -> list[Message]:
        """Begin an episode; return the first prompt's messages (the environment may change them).

        Raises:
            EnvError, EnvTimeoutError: it raised, hung, or returned something else.
        """
        answer = await self._call("init", lambda: self._env.init([dict(m) for m in messages]))
        first = answer[0] if isinstance(answer, tuple) and answer else answer
        return _messages(first, f"environment {self._env_class}: init")

    async def step(self, action: str) -> EnvAnswer:
        """Give the model's answer to the environment.

        Raises:
            EnvError, EnvTimeoutError: it raised, hung, or returned something else.
        """
        started = time.perf_counter()
        answer = await self._call("step", lambda: self._env.step(action))
        seconds = time.perf_counter() - started
        return _answer(answer, seconds, f"environment {self._env_class}: step")

    async def metrics(self) -> dict[str, Any]:
        """The environment's own numbers of this episode; {} if it has none."""
        get = getattr(self._env, "get_metrics", None)
        if get is None:
            return {}
        return dict(await self._call("get_metrics", get) or {})

    async def close(self) -> None:
        """Free what it holds; a failure is logged, for the episode is over."""
        try:
            await self._call("close", self._env.close)
        except EnvError as error:
            log.warning("%s", error)

    async def _call(self, what: str, call: Callable[[], Any]) -> Any:
        return await self._factory._call(self._env_class, what, call)


# --- skyrl_gym ---------------------------------------------------------------------------------


def import_registering_module(name: str) -> None:
    """Import a module by its import path, or a .py file; a second time does nothing.

    Raises:
        ValueError: it is missing or raises; names the module and the error.
    """
    try:
        if not name.endswith(".py"):
            importlib.import_module(name)
            return
        path = Path(name).expanduser().resolve()
        module_name = f"skyrl_fast_registered_{path.stem}_{abs(hash(str(path)))}"
        if module_name in sys.modules:
            return
        spec = importlib.util.spec_from_file_location(module_name, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"no Python file: {path}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[module_name]
            raise
    except Exception as error:
        raise ValueError(
            f"environment.register: cannot import {name!r}: {type(error).__name__}: {error}"
        ) from error


class _Settings(dict[str, Any]):
    """A dict whose keys are attributes too, as environments of skyrl_gym expect."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"env_config has no {name!r}; it has {sorted(self)}") from None


def _make(env_class: str, settings: dict[str, Any], extras: dict[str, Any]) -> Any:
    import skyrl_gym

    try:
        spec = skyrl_gym.spec(env_class)
    except skyrl_gym.error.Error:
        known = ", ".join(sorted(skyrl_gym.registry))
        raise ValueError(
            f"no environment of this name is registered (known: {known}); name the module that "
            "registers yours in environment.register"
        ) from None
    env_config = _Settings({**_default_settings(spec.entry_point), **settings})
    return skyrl_gym.make(env_class, env_config=env_config, extras=extras)


def _default_settings(entry_point: Any) -> dict[str, Any]:
    """Fields of the one `...EnvConfig` dataclass beside the environment, where there is one."""
    if isinstance(entry_point, str):
        module: Any = importlib.import_module(entry_point.partition(":")[0])
    else:
        module = sys.modules.get(getattr(entry_point, "__module__", ""))
    configs: list[Any] = [
        item
        for name, item in (vars(module).items() if module else ())
        if name.endswith("EnvConfig") and is_dataclass(item)
    ]
    if len(configs) != 1:
        return {}
    try:
        return asdict(configs[0]())
    except TypeError:  # a field without default
        return {}


def _messages(value: Any, where: str) -> list[Message]:
    """Observations as chat messages: a list of them, one of them, a plain text, or nothing."""
    if value is None or (isinstance(value, str) and value == ""):
        return []
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list | tuple) or not all(
        isinstance(m, Mapping) and "role" in m and "content" in m for m in value
    ):
        raise EnvError(f"{where}: wanted messages with role and content, got {value!r:.200}")
    return [dict(m) for m in value]


def _answer(answer: Any, seconds: float, where: str) -> EnvAnswer:
    if not isinstance(answer, Mapping):
        raise EnvError(
            f"{where}: wanted a mapping with observations, reward, done; got "
            f"{type(answer).__name__}"
        )
    absent = [key for key in ("observations", "reward", "done") if key not in answer]
    if absent:
        raise EnvError(f"{where}: the answer lacks {', '.join(absent)}; it has {sorted(answer)}")
    try:
        reward = float(answer["reward"])
    except (TypeError, ValueError):
        reward = math.nan
    if not math.isfinite(reward):
        raise EnvError(f"{where}: reward: wanted a finite number, got {answer['reward']!r:.100}")
    action = answer.get("postprocessed_action")
    if action is not None and not isinstance(action, str):
        raise EnvError(f"{where}: postprocessed_action: wanted text, got {type(action).__name__}")
    messages = _messages(answer["observations"], where)
    return EnvAnswer(messages, reward, bool(answer["done"]), action, seconds)


# --- threads -----------------------------------------------------------------------------------


class _Threads:
    """At most `limit` calls at once, each in a daemon thread; one that hangs is replaced.

    A ThreadPoolExecutor would lose a worker to every call that never returns, and would wait for
    it when the process ends.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._slots: asyncio.Semaphore | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._idle: list[_Worker] = []
        self.num_abandoned = 0

    async def run(self, call: Callable[[], Any], timeout: float) -> Any:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # a semaphore belongs to one loop
            self._loop, self._slots = loop, asyncio.Semaphore(self._limit)
        assert self._slots is not None
        async with self._slots:
            worker = self._idle.pop() if self._idle else _Worker()
            future = loop.create_future()
            worker.submit(call, loop, future)
            try:
                result = await asyncio.wait_for(future, timeout)
            except BaseException as error:
                if future.done() and not future.cancelled():
                    self._idle.append(worker)  # the call itself raised: the thread is free
                else:
                    worker.stop()
                    if isinstance(error, TimeoutError):
                        self.num_abandoned += 1
                raise
            self._idle.append(worker)
            return result

    def close(self) -> None:
        for worker in self._idle:
            worker.stop()
        self._idle.clear()


class _Worker:
    """A daemon thread that runs one call after the other."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="environment", daemon=True).start()

    def submit(
        self,
        call: Callable[[], Any],
        loop: asyncio.AbstractEventLoop,
        future: asyncio.Future[Any],
    ) -> None:
        self._calls.put((call, loop, future))

    def stop(self) -> None:
        """End after the call that is running, if any."""
        self._calls.put(None)

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            call, loop, future = item
            result: Any = None
            error: Exception | None = None
            try:
                result = call()
            except TimeoutError as caught:  # the environment's own, not our deadline
                error = RuntimeError(f"TimeoutError: {caught}")
            except StopIteration as caught:  # a future refuses to carry it
                error = RuntimeError(f"StopIteration: {caught}")
            except Exception as caught:
                error = caught
            except BaseException as caught:  # sys.exit in an environment ends only its call
                error = RuntimeError(f"{type(caught).__name__}: {caught}")
            try:
                loop.call_soon_threadsafe(_settle, future, result, error)
            except RuntimeError:  # the loop is closed: nobody waits any more
                return


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
