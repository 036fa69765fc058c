"""Why a run failed, in its folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from skyrl_fast.system.printable import MAX_FAILURE, printable

FAILURE = "failure.txt"


@contextmanager
def record_failure(run_path: Path) -> Iterator[None]:
    """Write the error that the block raises into the run folder; remove that of an earlier start.

    Args:
        run_path: an existing folder.
    """
    file = run_path / FAILURE
    file.unlink(missing_ok=True)
    try:
        yield
    except Exception as error:
        text = printable(f"{type(error).__name__}: {error}", MAX_FAILURE)
        with suppress(OSError):  # the disk may be full, which the error says
            file.write_text(f"{text}\n", encoding="utf-8")
        raise
