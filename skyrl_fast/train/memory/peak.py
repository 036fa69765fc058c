"""Peak memory of a step on the trainer's GPU."""

from __future__ import annotations

from typing import Any

import torch

from skyrl_fast.train.memory.device_plan import GIB


class PeakMemory:
    """Measures the peak between two calls of `metrics`; nothing on a CPU.

    Args:
        device: whose memory is measured.
        counters: torch's functions that count it.
    """

    def __init__(self, device: torch.device, *, counters: Any = torch.cuda) -> None:
        self._counters = counters
        self._device = device if device.type == "cuda" else None

    def metrics(self) -> dict[str, float]:
        """Return the peaks in GiB of what torch allocated and reserved since the last call."""
        if self._device is None:
            return {}
        values = {
            "memory/peak_allocated_gib": self._counters.max_memory_allocated(self._device) / GIB,
            "memory/peak_reserved_gib": self._counters.max_memory_reserved(self._device) / GIB,
        }
        self._counters.reset_peak_memory_stats(self._device)
        return values
