"""Pauses in the phases of a run's step, so that a test kills what it wants in the one it wants.

A process of the run that comes to a phase, for which there is a file to pause, takes the file and
waits until it is gone: the test sees that it waits, and nothing else happens meanwhile.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = "SKYRL_FAST_TEST_PHASES"  # a variable of the processes of a run
PHASES = ("generation", "hand-over", "update", "checkpoint")
SECONDS = 300.0


def pause(phase: str) -> None:
    """Wait if the test has asked for it; once, in one process."""
    folder = os.environ.get(FOLDER)
    if folder is None:
        return
    waiting = Path(folder, f"waiting {phase}")
    try:
        Path(folder, f"pause {phase}").rename(waiting)
    except FileNotFoundError:
        return
    wait_while(waiting.exists)


def ask_to_pause(folder: Path, phase: str) -> None:
    Path(folder, f"pause {phase}").touch()


def wait_for_pause(folder: Path, phase: str) -> None:
    wait_while(lambda: not Path(folder, f"waiting {phase}").exists())


def end_pause(folder: Path, phase: str) -> None:
    Path(folder, f"waiting {phase}").unlink()


def wait_while(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited for {SECONDS:g} s")
        time.sleep(0.05)


def then_pause(phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that pauses when it has done its work."""

    def paused(*arguments: Any, **options: Any) -> Any:
        result = function(*arguments, **options)
        pause(phase)
        return result

    return paused


def pause_in_phases() -> None:
    """Let rank 0, which is this process, pause after its gradients and within a checkpoint."""
    from skyrl_fast.train import update
    from skyrl_fast.train.parallel import export

    names: Any = update
    names.accumulate_gradient = then_pause("update", update.accumulate_gradient)
    of_files: Any = export
    of_files.save_file = then_pause("checkpoint", export.save_file)


def paused_share_of_e(answer: str, row: dict[str, Any]) -> float:
    """Return a reward, after a pause in the generation of its batch."""
    pause("generation")
    return sum(letter in "aeiou" for letter in answer) / 8
