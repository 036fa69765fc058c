"""Environments called in threads, with a deadline for every call; their answers are checked."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from skyrl_fast.config import EnvironmentConfig, check_limits
from skyrl_fast.importing import load_module, load_object
from skyrl_fast.printable import log_line
from skyrl_fast.rollout.env import skyrl_gym_env
from skyrl_fast.rollout.env.protocol import Env, EnvStep, Message
from skyrl_fast.rollout.env.threads import EnvThreads

log = logging.getLogger(__name__)

MakeEnv = Callable[[dict[str, Any]], Env]
METHODS = ("init", "step", "metrics", "close")  # of an Env
LARGEST_REWARD = 3.4028234663852886e38  # of float32, in which rewards are trained


class EnvError(RuntimeError):
    """An environment raised, or returned an invalid answer."""


class EnvTimeoutError(EnvError):
    """An environment's call did not return in time; its thread was abandoned."""


@dataclass(frozen=True, slots=True)
class EnvAnswer:
    """A checked `EnvStep`, and the time that it took.

    Args:
        messages: chat messages for the model; may be empty.
        reward: of this step; finite.
        done: the episode is over.
        postprocessed_action: text that replaces the action in the history; or an assistant message
            that holds the same action with its tool calls; or None.
        seconds: time in the environment.
    """

    messages: list[Message]
    reward: float
    done: bool
    postprocessed_action: str | Message | None
    seconds: float


class EnvFactory:
    """Create environments, and own the threads that run them. Close it at the end.

    Args:
        config: the settings of `environment`.
        make_env: returns an `Env` for a row's extras (a class does); None: by `env_class`.

    Raises:
        ValueError: a module of `register` or `env_class` cannot be imported, or a setting is out
            of range.

    Example:
        factory = EnvFactory(EnvironmentConfig(env_class="my_module:Guess"))
        env = await factory.make("my_module:Guess", extras)
        messages = await env.init(prompt)
        answer = await env.step("seven")
    """

    def __init__(self, config: EnvironmentConfig, *, make_env: MakeEnv | None = None) -> None:
        check_limits(config, "environment")
        self._config = config
        self._make_env = make_env
        self._threads = EnvThreads(config.skyrl_gym.max_env_workers)
        for module in config.register:
            try:
                load_module(module)
            except ValueError as error:
                raise ValueError(f"environment.register: {error}") from error
        if make_env is None and ":" in config.env_class:
            try:
                load_object(config.env_class)
            except ValueError as error:
                raise ValueError(f"environment.env_class: {error}") from error

    @property
    def num_abandoned(self) -> int:
        """Number of calls that did not return in time, since the start."""
        return self._threads.num_abandoned

    async def make(self, env_class: str, extras: Mapping[str, Any]) -> EnvSession:
        """Return a new environment.

        Args:
            env_class: `module:Class`, `module:factory`, or a name registered in skyrl_gym.
            extras: of the row.

        Raises:
            EnvError: the constructor raises, there is no such class, or its result is no `Env`.
        """
        handover = _Handover()
        try:
            env = await self._call(
                env_class, "make", lambda: handover.keep(self._created(env_class, dict(extras)))
            )
        except BaseException:  # also if the caller is cancelled: no one else closes it
            handover.give_up()
            raise
        return EnvSession(self, env_class, env)

    def _created(self, env_class: str, extras: dict[str, Any]) -> Env:
        make_env = self._make_env
        if make_env is None and ":" in env_class:
            make_env = load_object(env_class)
        if make_env is None:
            return skyrl_gym_env.make(env_class, self._config.skyrl_gym, extras)
        env = make_env(extras)
        absent = [name for name in METHODS if not callable(getattr(env, name, None))]
        if absent:
            raise TypeError(
                f"wanted an Env, got {type(env).__name__} without {', '.join(absent)}; a subclass "
                "of skyrl_fast.train.Env has to define only step"
            )
        return env

    async def close(self) -> None:
        """End idle threads; hanging threads are daemons and end with the process."""
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


class _Handover:
    """Passes a new environment to its caller, and closes it if the caller has given up."""

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
        if env is not None:  # created just before; closing may block
            threading.Thread(target=env.close, daemon=True).start()


class EnvSession:
    """The environment of one trajectory, called in threads; made by `EnvFactory.make`."""

    def __init__(self, factory: EnvFactory, env_class: str, env: Env) -> None:
        self._factory = factory
        self._env_class = env_class
        self._env = env
        self._busy = False  # a call was abandoned and may still run

    async def init(self, messages: Sequence[Message]) -> list[Message]:
        """Begin an episode; return the first prompt's messages (the environment may change them).

        Raises:
            EnvError, EnvTimeoutError: it raised, hung, or returned something invalid.
        """
        answer = await self._call("init", lambda: self._env.init([dict(m) for m in messages]))
        return _messages(answer, f"environment {self._env_class}: init")

    async def step(self, action: str) -> EnvAnswer:
        """Pass the model's answer to the environment; return its checked answer.

        Raises:
            EnvError, EnvTimeoutError: it raised, hung, or returned something invalid.
        """
        started = time.perf_counter()
        answer = await self._call("step", lambda: self._env.step(action))
        seconds = time.perf_counter() - started
        return _answer(answer, seconds, f"environment {self._env_class}: step")

    async def metrics(self) -> dict[str, Any]:
        """Return the environment's own metrics of this episode; {} if it has none.

        A failure is only logged, since the episode is over. {} also while a call may still run.
        """
        if self._busy:
            return {}
        try:
            return dict(await self._call("metrics", self._env.metrics))
        except (EnvError, TypeError, ValueError) as error:
            log.warning("%s", log_line(error))
            return {}

    async def close(self) -> None:
        """Close the environment; a failure is only logged, since the episode is over."""
        try:
            await self._call("close", self._env.close)
        except EnvError as error:
            log.warning("%s", log_line(error))

    async def _call(self, what: str, call: Callable[[], Any]) -> Any:
        try:
            return await self._factory._call(self._env_class, what, call)
        except (EnvTimeoutError, asyncio.CancelledError):
            self._busy = True
            raise


def _messages(value: Any, where: str) -> list[Message]:
    """Return observations as chat messages; they may be a list, one message, plain text or None."""
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
    """Return whether it is a chat message; other keys pass to the chat template unchanged."""
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("role"), str)
        and ("content" in value or bool(value.get("tool_calls")))
    )


def _answer(answer: Any, seconds: float, where: str) -> EnvAnswer:
    if isinstance(answer, EnvStep):
        answer = {item.name: getattr(answer, item.name) for item in fields(answer)}
    if not isinstance(answer, Mapping):
        raise EnvError(
            f"{where}: wanted an EnvStep, or a mapping with observations, reward, done; got "
            f"{type(answer).__name__}"
        )
    absent = [key for key in ("observations", "reward", "done") if key not in answer]
    if absent:
        has = sorted(map(str, answer))
        raise EnvError(f"{where}: the answer lacks {', '.join(absent)}; it has {has}")
    try:
        reward = float(answer["reward"])
    except Exception:  # of any type: an array, a tensor, a huge integer
        reward = math.nan
    if not abs(reward) <= LARGEST_REWARD:
        raise EnvError(f"{where}: reward: wanted a finite number, got {answer['reward']!r:.100}")
    try:
        done = bool(answer["done"])
    except Exception as error:  # an array of several elements has no truth value
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
