"""Runs an environment in a worker: a call in, plain values or the text of a failure out."""

from __future__ import annotations

import asyncio
import inspect
import pickle
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from skyrl_fast.rollout.env import skyrl_gym_env
from skyrl_fast.rollout.env.answers import REWARD, AnswerError, answer_of, messages_of
from skyrl_fast.rollout.env.protocol import Env
from skyrl_fast.rollout.rows import copy_row
from skyrl_fast.rollout.workers.loop_thread import loop_thread
from skyrl_fast.rollout.workers.plain import PlainData, plain_text, type_name
from skyrl_fast.rollout.workers.protocol import CallResult, HandlerSettings
from skyrl_fast.rollout.workers.traces import trace_of_error
from skyrl_fast.system.importing import load_object
from skyrl_fast.system.printable import MAX_FAILURE

MakeEnv = Callable[[dict[str, Any]], Env]
GymSettings = Mapping[str, Mapping[str, Any]]
METHODS = ("init", "step", "metrics", "close")  # methods of an Env
MAX_METRICS_TEXT = 100_000  # characters in the metrics of an episode
BYTES_PER_CHARACTER = 4  # most bytes of a character in UTF-8
MORE_BYTES = 64 << 20  # memory of an answer, next to its texts


@dataclass(frozen=True, slots=True)
class EnvSettings(HandlerSettings):
    """What the thread or process of an environment needs; `skyrl_gym` is by env_class."""

    skyrl_gym: GymSettings
    make_env: MakeEnv | None
    longest_text: int
    modules: Sequence[str] = ()

    optional_modules: ClassVar[Sequence[str]] = ("skyrl_gym",)
    first_call: ClassVar[str] = "make"

    @property
    def max_bytes(self) -> int:
        return BYTES_PER_CHARACTER * self.longest_text + MORE_BYTES

    def handler(self) -> EnvHandler:
        return EnvHandler(self)

    def check_value(self, what: str, value: Any) -> Any:
        if what in ("make", "close"):
            return None
        data = PlainData(self.max_bytes)
        if what == "init":
            return messages_of(value, data)
        if not isinstance(value, dict):
            raise ValueError(f"{what}: expected a mapping, got {type(value).__name__}")
        if what == "step":
            reward = {**value.get("reward_parts", {}), REWARD: value.get("reward")}
            given = {**value, "observations": value.get("messages"), "reward": reward}
            return answer_of(given, data)
        return value

    def check_importable(self) -> None:
        try:
            pickled = pickle.dumps(self)
        except Exception as error:
            raise ValueError(f"{_NOT_IMPORTABLE}: {error}") from error
        if self.make_env is not None and b"__main__" in pickled:
            raise ValueError(f"{_NOT_IMPORTABLE}, got one of the main script")


_NOT_IMPORTABLE = (
    "environment.workers: process wants an environment or reward that other processes can import "
    "(module:Class or file.py:Class)"
)


class EnvHandler:
    """The environment of one trajectory; `call` never raises."""

    def __init__(self, settings: EnvSettings) -> None:
        self._settings = settings
        self._env: Env | None = None
        self._lock = threading.Lock()
        self._given_up = False

    def call(self, what: str, argument: Any) -> CallResult:
        """Return the outcome of `begin`; the thread waits for it."""
        outcome = self.begin(what, argument)
        if isinstance(outcome, CallResult):
            return outcome
        return loop_thread().run_to_end(outcome)

    def begin(self, what: str, argument: Any) -> CallResult | Coroutine[Any, Any, CallResult]:
        """Call the environment, and check and convert what it returns.

        Args:
            what: "make" or one of METHODS.
            argument: env_class and extras for "make", messages for "init", the action for "step".

        Returns:
            The outcome, or a coroutine of it where the environment returns an awaitable.
        """
        try:
            value = self._call_env(what, argument)
            if inspect.isawaitable(value):
                return self._await_value(what, value)
            return CallResult(self._plain(what, value))
        except BaseException as error:  # sys.exit in an environment ends only its call
            return _failure(what, error)

    async def _await_value(self, what: str, value: Awaitable[Any]) -> CallResult:
        try:
            return CallResult(self._plain(what, await value))
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            return _failure(what, error)

    def give_up(self) -> None:
        """Close an environment that no one will use, also one that is still being created."""
        with self._lock:
            self._given_up = True
            created = self._env is not None
        if created:  # closing may block
            threading.Thread(target=self.call, args=("close", None), daemon=True).start()

    def _call_env(self, what: str, argument: Any) -> Any:
        if what == "make":
            env_class, extras = argument
            return self._make(env_class, copy_row(extras))
        if what == "close":
            # The last reference: code that runs when an object is freed runs here, too.
            env = self._env
            self._env = None
            if env is None:
                return None
            return env.close()
        assert self._env is not None
        argument = copy_row({what: argument})[what]  # the context reads messages and calls later
        if what == "init":
            return self._env.init(argument)
        if what == "step":
            return self._env.step(argument)
        assert what == "metrics"
        return self._env.metrics()

    def _plain(self, what: str, value: Any) -> Any:
        """Return what a method returned, checked and as plain data."""
        if what == "init":
            return messages_of(value, PlainData(self._settings.longest_text))
        if what == "step":
            return answer_of(value, PlainData(self._settings.longest_text))
        if what == "metrics":
            return PlainData(MAX_METRICS_TEXT, unknown_as_text=True).of(dict(value))
        return None

    def _make(self, env_class: str, extras: dict[str, Any]) -> None:
        settings = self._settings
        env = create_env(env_class, settings.skyrl_gym, extras, settings.make_env)
        with self._lock:
            self._env = env
            late = self._given_up
        if late:
            self.call("close", None)


def _failure(what: str, error: BaseException) -> CallResult:
    text = plain_text(error, MAX_FAILURE)
    if isinstance(error, AnswerError):
        return CallResult(failure=f"{what}: {text}")
    return CallResult(None, f"{what} raised {type_name(error)}: {text}", trace_of_error(error))


def create_env(
    env_class: str,
    skyrl_gym: GymSettings,
    extras: dict[str, Any],
    make_env: MakeEnv | None = None,
) -> Env:
    """Return a new environment; `env_class` as of `EnvFactory.make`.

    Raises:
        ValueError, TypeError: there is no such class, or its result is no `Env`.
        Whatever the environment's code raises.
    """
    if make_env is None and ":" in env_class:
        make_env = load_object(env_class)
    if make_env is None:
        return skyrl_gym_env.make(env_class, copy_row(skyrl_gym.get(env_class, {})), extras)
    env = make_env(extras)
    absent = []
    for name in METHODS:
        if not callable(getattr(env, name, None)):
            absent.append(name)
    if absent:
        raise TypeError(
            f"expected an Env, got {type_name(env)} without {', '.join(absent)}; a subclass "
            "of skyrl_fast.train.Env has to define only step"
        )
    if _resets_in_vain(env):
        raise TypeError(
            f"{type_name(env)}: expected init(messages), which returns the first prompt, got "
            "reset, which is never called"
        )
    return env


def _resets_in_vain(env: Any) -> bool:
    """Return whether an environment begins an episode as in Gymnasium, where nothing calls it."""
    kind = type(env)
    return Env in kind.__mro__ and hasattr(env, "reset") and kind.init is Env.init
