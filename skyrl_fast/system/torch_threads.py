"""Threads of torch's parallel loops on the CPU, of which each thread of a program has its own."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

_SOFT = 1  # omp_pause_soft; in libgomp the kinds do not differ


def end_torch_threads() -> None:
    """End the threads that torch started for loops of the calling thread; they start when needed.

    GNU's OpenMP, torch's on Linux, starts a team of threads for each thread that runs parallel
    loops, and keeps it. With more of these than cores, none of them spins for a moment before it
    sleeps, and every loop waits for threads to wake up: the passes of a small model take 1.4 times
    as long. Call it in threads that compute now and then, next to one that trains.

    Does nothing with another OpenMP library, and in a parallel loop.
    """
    library = gnu_openmp()
    if library is not None:
        library.omp_pause_resource_all(_SOFT)


@cache
def gnu_openmp() -> Any:
    """Return the process's libgomp (9 or newer); None: there is none, or another library."""
    symbols = ctypes.CDLL(None)
    is_gnu = hasattr(symbols, "GOMP_parallel") and not hasattr(symbols, "__kmpc_fork_call")
    if is_gnu and hasattr(symbols, "omp_pause_resource_all"):
        return symbols
    return None
