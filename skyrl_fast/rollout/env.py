"""Environments of skyrl-gym, stepped in threads, with a deadline for every call."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

from skyrl_fast.rollout import text2sql
from skyrl_fast.rollout.env_threads import EnvThreads

log = logging.getLogger(__name__)

Message = dict[str, Any]
LARGEST_REWARD = 3.4028234663852886e38  # of float32, in which rewards are trained


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
        postprocessed_action: text that takes the action's place in the history; or an assistant
            message that says the same action with its tool calls; or None.
        seconds: time in the environment.
    """

    messages: list[Message]
    reward: float
    done: bool
    postprocessed_action: str | Message | None
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
        self._threads = EnvThreads(config.max_env_workers)
        for module in config.register:
            import_registering_module(module)

    @property
    def num_abandoned(self) -> int:
        """Calls that never returned in time, since the start."""
        return self._threads.num_abandoned

    async def make(self, env_class: str, extras: Mapping[str, Any]) -> Env:
        """A new environment; EnvError if its constructor raises or no such class is registered."""
        settings = self._config.settings.get(env_class, {})
        made = _Made()
        try:
            env = await self._call(
                env_class, "make", lambda: made.keep(_make(env_class, dict(settings), dict(extras)))
            )
        except BaseException:  # a cancelled caller, too, leaves nobody to close it
            made.give_up()
            raise
        return Env(self, env_class, env)

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


class _Made:
    """An environment that is closed where nobody waits for it any more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._given_up = False
        self._env: Any = None

    def keep(self, env: Any) -> Any:
        with self._lock:
            self._env = env
            late = self._given_up
        if late:
            env.close()
        return env

    def give_up(self) -> None:
        with self._lock:
            self._given_up = True
            env = self._env
        if env is not None:  # made in the very moment; closing may block
            threading.Thread(target=env.close, daemon=True).start()


class Env:
    """One environment of one trajectory; made by `EnvFactory.make`."""

    def __init__(self, factory: EnvFactory, env_class: str, env: Any) -> None:
        self._factory = factory
        self._env_class = env_class
        self._env = env
        self._busy = False  # a call was given up and may still run

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
        """The environment's own numbers of this episode; {} if it has none.

        A failure is logged, for the episode is over. Not asked while a call may still run.
        """
        get = getattr(self._env, "get_metrics", None)
        if get is None or self._busy:
            return {}
        try:
            return dict(await self._call("get_metrics", get) or {})
        except (EnvError, TypeError, ValueError) as error:
            log.warning("%s", error)
            return {}

    async def close(self) -> None:
        """Free what it holds; a failure is logged, for the episode is over."""
        try:
            await self._call("close", self._env.close)
        except EnvError as error:
            log.warning("%s", error)

    async def _call(self, what: str, call: Callable[[], Any]) -> Any:
        try:
            return await self._factory._call(self._env_class, what, call)
        except (EnvTimeoutError, asyncio.CancelledError):
            self._busy = True
            raise


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
    if spec.entry_point == text2sql.ENTRY_POINT:  # the same, for SQL that nobody vouches for
        return text2sql.Text2SqlEnv(env_config, extras)
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
        if name.endswith("EnvConfig")
        and is_dataclass(item)
        and getattr(item, "__module__", "") == module.__name__  # not one that it imports
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
    if not isinstance(value, list | tuple) or not all(map(_is_message, value)):
        raise EnvError(f"{where}: wanted messages with role and content, got {value!r:.200}")
    return [dict(m) for m in value]


def _is_message(value: Any) -> bool:
    """Whatever else it has (`name`, `tool_call_id`, ...) goes to the chat template as it is."""
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("role"), str)
        and ("content" in value or bool(value.get("tool_calls")))
    )


def _answer(answer: Any, seconds: float, where: str) -> EnvAnswer:
    if not isinstance(answer, Mapping):
        raise EnvError(
            f"{where}: wanted a mapping with observations, reward, done; got "
            f"{type(answer).__name__}"
        )
    absent = [key for key in ("observations", "reward", "done") if key not in answer]
    if absent:
        has = sorted(map(str, answer))
        raise EnvError(f"{where}: the answer lacks {', '.join(absent)}; it has {has}")
    try:
        reward = float(answer["reward"])
    except Exception:  # of whatever it is: an array, a tensor, a huge integer
        reward = math.nan
    if not abs(reward) <= LARGEST_REWARD:
        raise EnvError(f"{where}: reward: wanted a finite number, got {answer['reward']!r:.100}")
    try:
        done = bool(answer["done"])
    except Exception as error:  # an array of several has no truth
        text = f"{where}: done: wanted true or false, got {answer['done']!r:.100}"
        raise EnvError(text) from error
    action = answer.get("postprocessed_action")
    if isinstance(action, Mapping) and _is_message(action) and action["role"] == "assistant":
        action = dict(action)
    elif action is not None and not isinstance(action, str):
        raise EnvError(
            f"{where}: postprocessed_action: wanted text or an assistant message, got "
            f"{action!r:.200}"
        )
    messages = _messages(answer["observations"], where)
    return EnvAnswer(messages, reward, done, action, seconds)
