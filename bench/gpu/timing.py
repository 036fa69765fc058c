"""Timing on a GPU: CUDA events around each call, caches flushed before it, peak memory of one call.

On a CPU (a smoke test without a GPU, whose times mean nothing) a clock replaces them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

ROUNDS = 30
LONGEST_MS = 1500  # total of all rounds
WARM_UP = 5
FLUSH_BYTES = 512 << 20  # several times the last cache of any of these GPUs


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds of a call, its peak extra memory, and the peak of all memory, in bytes."""

    median_ms: float
    p10_ms: float
    p90_ms: float
    rounds: int
    peak_bytes: int
    total_bytes: int

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Peak rates of the machine, measured in the same run."""

    copy_bytes_per_s: float  # read and written, in the device's memory
    bus_bytes_per_s: float  # from pinned memory to the device
    launch_ms: float  # one kernel with nothing to do

    def floor_ms(self, moved: float, sent: float) -> float:
        """Return the milliseconds to move these bytes on the device, and to it."""
        return (moved / self.copy_bytes_per_s + sent / self.bus_bytes_per_s) * 1e3


class Stopwatch:
    """Times calls on one device."""

    def __init__(
        self, device: str, *, rounds: int = ROUNDS, flush_bytes: int = FLUSH_BYTES
    ) -> None:
        self.device = torch.device(device)
        self.rounds = rounds
        self.flush = torch.empty(flush_bytes, dtype=torch.uint8, device=device)

    def once(self, call: Callable[[], object]) -> float:
        """Return the milliseconds of one call that starts with cold caches."""
        self.flush.zero_()
        if self.device.type != "cuda":
            start = time.perf_counter()
            call()
            return (time.perf_counter() - start) * 1e3
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    def measure(self, call: Callable[[], object], prepare: Callable[[], object]) -> Timing:
        """Return the timing of `call`, already warmed up; `prepare` runs before each call, untimed.

        Longer calls get fewer rounds; a very long one runs once.
        """

        def prepared() -> float:
            prepare()
            return self.once(call)

        prepare()
        once, peak, total = self.with_peak(call)
        times, rounds = [once], min(self.rounds, round(LONGEST_MS / once))
        if rounds > 1:
            for _ in range(min(WARM_UP, rounds)):
                prepared()
            times = [prepared() for _ in range(rounds)]
        times.sort()
        tenth = len(times) // 10
        low, high = times[tenth], times[-1 - tenth]
        return Timing(statistics.median(times), low, high, len(times), peak, total)

    def with_peak(self, call: Callable[[], object]) -> tuple[float, int, int]:
        """Return the milliseconds of a call, its peak extra memory and the peak of all, in bytes.

        What the stopwatch itself holds is not counted.
        """
        if self.device.type != "cuda":
            return self.once(call), 0, 0
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        milliseconds = self.once(call)
        peak = torch.cuda.max_memory_allocated()
        return milliseconds, peak - before, peak - self.flush.nbytes

    def ceilings(self, num_bytes: int) -> Ceilings:
        """Return the rates of a copy of `num_bytes` and one to the device, and a launch's time."""
        source = torch.randint(256, (num_bytes,), dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        host = torch.empty(num_bytes // 4, dtype=torch.uint8)
        if self.device.type == "cuda":
            host = host.pin_memory()
        part = target[: len(host)]
        copy, bus, launch = (
            self.measure(call, call).median_ms * 1e-3
            for call in (
                lambda: target.copy_(source),
                lambda: part.copy_(host, non_blocking=True),
                lambda: target[:32].add_(1),
            )
        )
        return Ceilings(2 * num_bytes / copy, len(host) / bus, launch * 1e3)
