"""Environments called in threads or processes, with a deadline for every call."""

from __future__ import annotations

import asyncio
import logging
import os
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from skyrl_fast.config import EnvironmentConfig, SkyRLGymConfig, check_limits
from skyrl_fast.rollout.env import skyrl_gym_env
from skyrl_fast.rollout.env.answers import EnvAnswer
from skyrl_fast.rollout.env.errors import EnvError, EnvTimeoutError
from skyrl_fast.rollout.env.handler import EnvSettings, GymSettings, MakeEnv
from skyrl_fast.rollout.env.protocol import Message
from skyrl_fast.rollout.env.signatures import check_environment
from skyrl_fast.rollout.workers.loop_thread import loop_thread
from skyrl_fast.rollout.workers.processes import ProcessWorkers
from skyrl_fast.rollout.workers.protocol import CallResult, Worker
from skyrl_fast.rollout.workers.threads import ThreadWorkers
from skyrl_fast.rollout.workers.traces import innermost_place
from skyrl_fast.system.importing import absolute_name, load_module, load_object
from skyrl_fast.system.printable import MAX_FAILURE, log_line, printable

log = logging.getLogger(__name__)

LONGEST_TEXT = 1 << 24  # characters of an answer's texts, unless the caller knows better
MAX_TRACES = 20  # different ones that are logged; failures are counted in any case


class EnvFactory:
    """Create environments, and own the threads or processes that run them. Close it at the end.

    Args:
        make_env: returns an `Env` for a row's extras (a class does); None: by `env_class`.
        longest_text: characters of an answer's texts together; what is longer is cut.

    Raises:
        ValueError: a module of `register` or `env_class` cannot be imported, a setting is out of
            range, or `make_env` cannot be imported by processes.
    """

    def __init__(
        self,
        config: EnvironmentConfig,
        *,
        make_env: MakeEnv | None = None,
        longest_text: int = LONGEST_TEXT,
    ) -> None:
        check_limits(config, "environment")
        self._timeout = config.timeout_seconds
        self._folder = Path.cwd()  # environments may change it
        self._num_slots = config.skyrl_gym.max_env_workers
        self._slots: asyncio.Semaphore | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.num_abandoned = 0  # calls that did not return in time, since the start
        self._traced: set[str] = set()  # places whose trace was logged
        for module in config.register:
            try:
                load_module(module)
            except ValueError as error:
                raise ValueError(f"environment.register: {error}") from error
        modules = list(config.register)
        if make_env is None and ":" in config.env_class:
            try:
                load_object(config.env_class)
            except ValueError as error:
                raise ValueError(f"environment.env_class: {error}") from error
            modules.append(config.env_class.rpartition(":")[0])
        modules = [absolute_name(name, self._folder) for name in modules]
        settings = EnvSettings(gym_settings(config.skyrl_gym), make_env, longest_text, modules)
        self._workers: ThreadWorkers | ProcessWorkers
        if config.workers == "process":
            self._workers = ProcessWorkers(settings)
        else:
            self._workers = ThreadWorkers(settings)

    async def make(self, env_class: str, extras: Mapping[str, Any]) -> EnvSession:
        """Return a new environment.

        Args:
            env_class: `module:Class`, `module:factory`, or a name registered in skyrl_gym.

        Raises:
            EnvError: the constructor raises, there is no such class, or its result is no `Env`.
        """
        try:
            worker: Worker = await self._workers.acquire()
        except OSError as error:
            raise EnvError(f"environment {env_class}: {error}") from error
        session = EnvSession(self, env_class, worker)
        argument = (absolute_name(env_class, self._folder), dict(extras))
        try:
            await session.call("make", argument)
        except BaseException:  # also if the caller is cancelled
            worker.release()
            raise
        return session

    async def close(self) -> None:
        await self._workers.close()

    async def run_call(
        self, env_class: str, worker: Worker, what: str, argument: Any
    ) -> CallResult:
        """Return a call's result; EnvTimeoutError if it is late, without the wait for a slot.

        A slot is a call in a thread: calls that wait in the loop of asynchronous code have none.
        """
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # a semaphore belongs to one loop
            self._loop, self._slots = loop, asyncio.Semaphore(self._num_slots)
        assert self._slots is not None
        try:
            async with self._slots:
                started = time.monotonic()
                outcome = await worker.call(what, argument, self._timeout)
            if isinstance(outcome, CallResult):
                return outcome
            remaining = started + self._timeout - time.monotonic()
            return await loop_thread().run(outcome, max(remaining, 0.0))
        except TimeoutError as error:
            self.num_abandoned += 1
            failure = f"{what} did not return within {self._timeout:g} s"
            trace = str(error)
            place_of_call = innermost_place(trace)
            if place_of_call:
                failure += f"; it was at: {place_of_call}"
                self.log_trace(env_class, failure, trace)
            raise EnvTimeoutError(f"environment {env_class}: {failure}", trace) from error

    def log_trace(self, env_class: str, failure: str, trace: str) -> None:
        """Log a failure with its trace, if it is the first one at its place."""
        place = innermost_place(trace)
        if not place or place in self._traced or len(self._traced) == MAX_TRACES:
            return
        self._traced.add(place)
        # Indented, so that no line of it looks like a record of the log.
        lines = textwrap.indent(printable(trace, MAX_FAILURE).rstrip(), "  ")
        log.warning(
            "environment %s: %s; later failures at this place are only counted\n%s",
            env_class,
            log_line(failure),
            lines,
        )


class EnvSession:
    """The environment of one trajectory; made by `EnvFactory.make`."""

    def __init__(self, factory: EnvFactory, env_class: str, worker: Worker) -> None:
        self._factory = factory
        self._env_class = env_class
        self._worker = worker
        self._busy = False  # a call was abandoned and may still run

    async def init(self, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
        first: list[Message] = await self.call("init", [dict(m) for m in messages])
        return first

    async def step(self, action: str) -> EnvAnswer:
        started = time.perf_counter()
        answer: EnvAnswer = await self.call("step", action)
        return replace(answer, seconds=time.perf_counter() - started)

    async def metrics(self) -> dict[str, Any]:
        """Return the environment's own metrics of this episode; {} if it has none."""
        # A failure is only logged, since the episode is over. {} also while a call may still run.
        if self._busy:
            return {}
        try:
            metrics: dict[str, Any] = await self.call("metrics", None)
            return metrics
        except EnvError as error:
            log.warning("%s", log_line(error))
            return {}

    async def close(self) -> None:
        """Close the environment; a failure is only logged, since the episode is over."""
        if not self._worker.usable:
            return
        try:
            await self.call("close", None)
        except EnvError as error:
            log.warning("%s", log_line(error))
        self._worker.release()

    async def call(self, what: str, argument: Any) -> Any:
        """Return plain data; EnvError if the call raised or is invalid, EnvTimeoutError if late."""
        try:
            result = await self._factory.run_call(self._env_class, self._worker, what, argument)
        except (EnvTimeoutError, asyncio.CancelledError):
            self._busy = True
            raise
        if result.failure is not None:
            self._factory.log_trace(self._env_class, result.failure, result.trace)
            raise EnvError(f"environment {self._env_class}: {result.failure}", result.trace)
        return result.value


def check_env_classes(names: Iterable[str], config: EnvironmentConfig) -> None:
    """Import the environments that rows name.

    Raises:
        ValueError: there is none of a name, it cannot be called, or it may not be imported.
    """
    for name in sorted(set(names)):
        is_of_a_row = ":" in name and name != config.env_class
        if is_of_a_row and not config.import_row_env_classes:
            raise ValueError(
                "environment.import_row_env_classes is false, and rows have the env_class "
                f"{printable(name)!r}, which names Python code"
            )
        try:
            if ":" in name:
                check_environment(name.rpartition(":")[2], load_object(name))
            else:
                skyrl_gym_env.check_registered(name)
        except ValueError as error:
            raise ValueError(f"environment.env_class, or env_class of a row: {error}") from error


def gym_settings(config: SkyRLGymConfig) -> GymSettings:
    """Return settings by env_class; `db_path` is absolute: environments may change the folder."""
    text2sql = dict(config.text2sql)
    if isinstance(text2sql.get("db_path"), str):
        text2sql["db_path"] = os.path.abspath(text2sql["db_path"])
    return {
        "text2sql": text2sql,
        "search": config.search,
        "gsm8k_llm_as_a_judge": config.llm_as_a_judge,
        **config.env_config,
    }
