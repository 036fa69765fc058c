"""A worker extension that loads weights wrongly on request, in a real engine's process."""

import random
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from typing import Any
from unittest.mock import patch

import torch
from _probe_sweep import KERNEL_FAULTS, TRANSFER_FAULTS

from skyrl_fast.rollout.engine.weights import worker
from skyrl_fast.rollout.engine.weights.receipt import Receipt, dtype_name, record_digests
from skyrl_fast.rollout.engine.weights.transports import TRANSPORTS
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

    def load_weights_file(self, path: str, **adapter: Any) -> dict[str, Any]:
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
                by_file = replace(TRANSPORTS["file"], receive=lambda *_: iter(arriving))
                with patch.dict(TRANSPORTS, file=by_file):
                    return super().load_weights_file(path)
            case (_, name):
                with patch.object(worker, "record_digests", _changed_after_recording(name)):
                    return super().load_weights_file(path)
        raise AssertionError(self.fault)


class FaultyAdapters(WeightUpdateExtension):
    """Loads adapters with a fault; see `ADAPTER_FAULTS`."""

    fault = ""
    last: dict[str, torch.Tensor]

    def set_fault(self, name: str) -> None:
        """Load with this fault from now on; empty: correctly."""
        self.fault = name

    def _load_adapter(
        self, matrices: dict[str, torch.Tensor], config: dict[str, Any], version: int
    ) -> list[str]:
        loaded = {name: value.clone() for name, value in matrices.items()}
        if self.fault:
            loaded, config = ADAPTER_FAULTS[self.fault](loaded, config, self)
        else:
            self.last = matrices
        return super()._load_adapter(
            {name: value.clone() for name, value in loaded.items()}, config, version
        )


def _leave_out_module(matrices: Any, config: Any, _: Any) -> Any:
    return {n: v for n, v in matrices.items() if "layers.1.self_attn.o_proj" not in n}, config


def _swap_modules(matrices: Any, config: Any, _: Any) -> Any:
    """Give two layers' adapters to each other."""
    layers = {"layers.0.": "layers.1.", "layers.1.": "layers.0."}
    swapped = {}
    for name, value in matrices.items():
        (layer,) = (one for one in layers if one in name)
        swapped[name.replace(layer, layers[layer])] = value
    return swapped, config


def _swap_matrices(matrices: Any, config: Any, _: Any) -> Any:
    """Take A of B's values and B of A's, where the shapes allow it."""
    swapped = {}
    for name, value in matrices.items():
        other = name.replace("lora_A", "lora_C").replace("lora_B", "lora_A")
        twin = matrices[other.replace("lora_C", "lora_B")].T.contiguous()
        swapped[name] = twin if twin.shape == value.shape else value
    return swapped, config


# Of an engine that confirms the new adapter and computes with another one.
ADAPTER_FAULTS: dict[str, Any] = {
    "stale adapter": lambda matrices, config, worker: (worker.last, config),
    "no adapter": lambda matrices, config, _: ({n: 0 * v for n, v in matrices.items()}, config),
    "module left out": _leave_out_module,
    "layers swapped": _swap_modules,
    "A and B swapped": _swap_matrices,
    "wrong alpha": lambda matrices, config, _: (
        matrices,
        {**config, "lora_alpha": 2 * config["lora_alpha"]},
    ),
}


def _changed_after_recording(name: str) -> Any:
    def changed(
        weights: Iterable[tuple[str, torch.Tensor]], digests: dict[str, str]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        taken = list(record_digests(weights, digests))
        return iter(KERNEL_FAULTS[name](taken, random.Random(0)))

    return changed
