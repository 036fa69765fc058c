"""Signals that stop a run: before it trains, while something blocks its event loop, later."""

import asyncio
import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import Process

import pytest

from skyrl_fast.rollout.engine.vllm_start import end_on_signals
from skyrl_fast.train.flow.event_loop import StopSignals, discard_output

pytestmark = pytest.mark.spec("run.signals")


@pytest.fixture(autouse=True)
def _attached_to_a_terminal() -> Iterator[None]:
    """Undo what nohup does, which the tests may run under: it ignores SIGHUP."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


NUMBERS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
BLOCKED_SECONDS = 60.0  # the test ends long before


def wanted(number: int) -> tuple[type[BaseException], int | None]:
    return (KeyboardInterrupt, None) if number == signal.SIGINT else (SystemExit, 128 + number)


@contextmanager
def stopped_by(number: int) -> Iterator[None]:
    kind, code = wanted(number)
    with pytest.raises(kind) as caught:
        yield
    assert getattr(caught.value, "code", None) == code


@pytest.mark.parametrize("number", NUMBERS)
def test_signal_before_the_event_loop_ends_the_run(number: int) -> None:
    before = signal.getsignal(number)
    with stopped_by(number), StopSignals().install():
        os.kill(os.getpid(), number)
        time.sleep(BLOCKED_SECONDS)
    assert signal.getsignal(number) is before


async def block_the_loop() -> None:
    """As vLLM's start does."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(BLOCKED_SECONDS)


async def block_a_task_of_the_loop() -> None:
    await asyncio.gather(asyncio.create_task(block_the_loop()))


async def wait_for_a_signal() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(BLOCKED_SECONDS)


@pytest.mark.parametrize("work", [block_the_loop, block_a_task_of_the_loop, wait_for_a_signal])
def test_signal_while_the_engine_starts_ends_the_run(
    work: Callable[[], object], caplog: pytest.LogCaptureFixture
) -> None:
    started = time.monotonic()
    signals = StopSignals()
    with stopped_by(signal.SIGTERM), signals.install():
        signals.run(work())  # type: ignore[arg-type]
    gc.collect()
    # Such as a task whose exception was never retrieved; clients of other tests may log, too.
    assert not [record for record in caplog.records if record.name == "asyncio"]
    assert time.monotonic() - started < BLOCKED_SECONDS / 2


def test_signal_is_handled_in_the_loop_from_then_on() -> None:
    signals = StopSignals()

    async def work() -> list[int]:
        received: list[int] = []
        signals.handle_by(received.append)
        for number in NUMBERS:
            os.kill(os.getpid(), number)
        while len(received) < len(NUMBERS):
            await asyncio.sleep(0)
        return received

    with signals.install():
        assert sorted(signals.run(work())) == sorted(NUMBERS)


def test_signal_in_training_ends_an_engine_that_is_restarting() -> None:
    """The handler of a run that trains only takes note: the loop is blocked by the start."""
    received: list[int] = []
    started = time.monotonic()
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        older, engine = (Process(target=time.sleep, args=(BLOCKED_SECONDS,)) for _ in range(2))
        older.start()
        with end_on_signals():
            engine.start()
            os.kill(os.getpid(), signal.SIGTERM)
            engine.join()
        os.kill(os.getpid(), signal.SIGTERM)
        assert received == [signal.SIGTERM, signal.SIGTERM]
        assert (engine.exitcode, older.is_alive()) == (-signal.SIGKILL, True)
        assert time.monotonic() - started < BLOCKED_SECONDS / 2
    finally:
        signal.signal(signal.SIGTERM, before)
        older.kill()


def test_a_signal_is_known_before_the_loop_handles_it() -> None:
    signals = StopSignals()
    known: list[bool] = []

    async def work() -> None:
        received: list[int] = []
        signals.handle_by(received.append)
        known.append(signals.is_stopping())
        os.kill(os.getpid(), signal.SIGTERM)
        known.append(signals.is_stopping())
        assert received == []  # not before this coroutine waits
        await asyncio.sleep(0)

    with signals.install():
        signals.run(work())
    assert known == [False, True]
    other = StopSignals()
    other.forward(signal.SIGTERM)
    assert other.is_stopping()


def test_ignored_sighup_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals().install():
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_output_after_the_terminal_has_closed_is_discarded() -> None:
    import pty

    keyboard, screen = pty.openpty()
    os.close(keyboard)
    with pytest.raises(OSError, match="Input/output"):
        os.write(screen, b"lost")
    discard_output([screen])
    assert os.write(screen, b"discarded") == 9
    os.close(screen)


def test_an_error_of_a_run_is_not_raised_during_the_handling_of_another() -> None:
    async def fail() -> None:
        raise ValueError("a setting")

    with pytest.raises(ValueError) as caught:
        StopSignals().run(fail())
    assert caught.value.__context__ is None
