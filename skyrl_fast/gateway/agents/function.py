"""An agent that is a Python function, `agent(task) -> reward`, synchronous or not."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from skyrl_fast.gateway.agents.outcome import OutcomeError, outcome_of
from skyrl_fast.gateway.agents.task import AgentTask, BlackBox
from skyrl_fast.gateway.messages import Outcome
from skyrl_fast.rollout.env.errors import EnvError
from skyrl_fast.rollout.rows import copy_row
from skyrl_fast.rollout.workers.traces import trace_of_error


class FunctionAgent(BlackBox):
    """Calls the function for each task.

    A coroutine function runs in the event loop of the caller, which it must not block. Any other
    function runs in a thread, which is abandoned where its trajectory's deadline passes.

    Args:
        function: gets an `AgentTask`; returns a value for `outcome_of`.
    """

    def __init__(self, function: Callable[[AgentTask], Any]) -> None:
        self._function = function

    async def run(self, task: AgentTask) -> Outcome:
        # In a thread, since it takes 150 ms for a row of 1 MB.
        task = replace(task, row=await asyncio.to_thread(copy_row, task.row))
        try:
            if inspect.iscoroutinefunction(inspect.unwrap(self._function)):
                value = await self._function(task)
            else:
                value = await _in_thread(self._function, task)
                if inspect.isawaitable(value):
                    value = await value
            return outcome_of(value)
        except OutcomeError as error:
            raise EnvError(f"agent.function: {error}") from error
        except asyncio.CancelledError as error:
            task_here = asyncio.current_task()
            if task_here is None or task_here.cancelling():  # by the caller
                raise
            raise _failure(error) from error
        except (Exception, SystemExit) as error:  # whatever the user's code raises
            raise _failure(error) from error
        finally:
            await task.close()


async def _in_thread(function: Callable[[AgentTask], Any], task: AgentTask) -> Any:
    """Return the function's result from a daemon thread, which does not keep the process alive."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if not result.done():
            result.set_result(value) if error is None else result.set_exception(error)

    def work() -> None:
        value: Any = None
        failure: BaseException | None = None
        try:
            value = function(task)
        except StopIteration as error:  # no future takes it
            failure = RuntimeError(f"StopIteration: {error}")
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the thread was abandoned, and the loop is closed
            loop.call_soon_threadsafe(settle, value, failure)

    threading.Thread(target=work, name="agent", daemon=True).start()
    return await result


def _failure(error: BaseException) -> EnvError:
    text = f"agent.function: {type(error).__name__}: {error}{_innermost_place(error)}"
    return EnvError(text, trace_of_error(error, caller=Path(__file__)))


def _innermost_place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    if frames:
        return f" ({frames[-1].filename}:{frames[-1].lineno})"
    return ""
