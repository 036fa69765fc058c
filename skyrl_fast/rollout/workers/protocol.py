"""What a worker is, and what runs in one: a call in, a value or the text of a failure out."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol


@dataclass(frozen=True, slots=True)
class CallResult:
    """The result of a call; plain data.

    Args:
        value: what was returned, if nothing failed.
        failure: what failed, at most MAX_FAILURE characters; None: nothing.
        trace: the calls in the environment that failed, see `trace_of_error`; "" for none.
    """

    value: Any = None
    failure: str | None = None
    trace: str = ""


class CallHandler(Protocol):
    """Answers the calls that arrive at a worker: an environment, an agent or a parser."""

    def call(self, what: str, argument: Any) -> CallResult:
        """Return the outcome of a call; never raise."""


class HandlerSettings(Protocol):
    """What a process needs to make a handler; picklable.

    Attributes:
        first_call: name of a trajectory's first call, which begins in the folder of the start.
    """

    first_call: ClassVar[str] = ""

    @property
    def modules(self) -> Sequence[str]:
        """Modules or files that the fork server imports."""
        return ()

    @property
    def optional_modules(self) -> Sequence[str]:
        """The same, where they are installed."""
        return ()

    @property
    def max_bytes(self) -> int:
        """Limit of an answer."""

    def handler(self) -> CallHandler:
        """Return a new handler, called in the process."""

    def check_value(self, what: str, value: Any) -> Any:
        """Return a call's value, checked and rebuilt: code of a model could have sent it."""

    def check_importable(self) -> None:
        """Raise ValueError if other processes cannot import what they need."""
        return


class Worker(Protocol):
    """Runs one handler, in a thread or a process."""

    usable: bool  # false: the handler is gone

    async def call(
        self, what: str, argument: Any, timeout: float
    ) -> CallResult | Coroutine[Any, Any, CallResult]:
        """Return the outcome of a call, or a coroutine of it, for the process's `loop_thread`.

        Raises:
            TimeoutError: it takes longer than `timeout` seconds; its text is the calls that it is
                in, if known, as in `CallResult.trace`.
        """

    def release(self) -> None:
        """Free the worker after its handler is closed."""
