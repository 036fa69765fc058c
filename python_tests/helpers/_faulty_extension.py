"""A worker extension that loads weights wrongly on request, in a real engine's process."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any
from unittest.mock import patch

import torch
from _probe_sweep import KERNEL_FAULTS, TRANSFER_FAULTS

from skyrl_fast.rollout.engine.weights import worker
from skyrl_fast.rollout.engine.weights.receipt import Receipt, dtype_name, record_digests
from skyrl_fast.rollout.engine.weights.transports.file import receive_by_file
from skyrl_fast.rollout.engine.weights.worker import WeightUpdateExtension

STALE = "engine stale by one update"


class FaultyExtension(WeightUpdateExtension):
    """See `set_fault`."""

    fault: tuple[str, str] | None = None
    last_receipt: dict[str, Any] | None = None

    def set_fault(self, place: str | None, name: str = "") -> None:
        """Load with this fault from now on; None: correctly."""
        self.fault = None if place is None else (place, name)

    def load_weights_file(self, path: str) -> dict[str, Any]:
        """Load with the fault."""
        match self.fault:
            case None:
                self.last_receipt = super().load_weights_file(path)
                return self.last_receipt
            case ("transfer", name) if name == STALE:
                assert self.last_receipt is not None
                return self.last_receipt
            case ("kernels", name) if name == STALE:
                digests: dict[str, str] = {}
                list(record_digests(receive_by_file(path), digests))
                return asdict(Receipt(digests, [], dtype_name(self.model_config.dtype)))
            case ("transfer", name):
                arriving = TRANSFER_FAULTS[name](list(receive_by_file(path)), random.Random(0))
                with patch.object(worker, "receive_by_file", lambda _: iter(arriving)):
                    return super().load_weights_file(path)
            case (_, name):
                with patch.object(worker, "record_digests", _changed_after_recording(name)):
                    return super().load_weights_file(path)
        raise AssertionError(self.fault)


def _changed_after_recording(name: str) -> Any:
    def changed(
        weights: Iterable[tuple[str, torch.Tensor]], digests: dict[str, str]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        taken = list(record_digests(weights, digests))
        return iter(KERNEL_FAULTS[name](taken, random.Random(0)))

    return changed
