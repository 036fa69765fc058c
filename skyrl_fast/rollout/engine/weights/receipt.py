"""Receipts: what an engine's process says of the weights that it loaded, and their check.

An update at a learning rate of 1e-6 moves log-probabilities by less than bfloat16 rounds, so they
cannot show that one layer of it is missing. Digests can: they are exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from skyrl_fast.errors import RunError
from skyrl_fast.rollout.engine.weights.digest import tensor_digest

MAX_NAMES = 8  # named in an error


class WeightSyncError(RunError):
    """The engine does not hold the trainer's weights."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """What one worker loaded.

    Args:
        digests: of each tensor that the model's loader took, by its Hugging Face name.
        unloaded: the engine's parameters that got no new value.
        dtype: name of the dtype in which the engine computes.
    """

    digests: dict[str, str]
    unloaded: list[str]
    dtype: str


def recorded(
    weights: Iterable[tuple[str, torch.Tensor]], digests: dict[str, str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights, and add the digests of those that were taken."""
    for name, tensor in weights:
        digests[name] = tensor_digest(tensor)
        yield name, tensor


def read_receipts(answers: Any) -> list[Receipt]:
    """Return the workers' receipts; raise TypeError, KeyError or the like for other answers."""
    if not isinstance(answers, list):
        raise TypeError(f"wanted a list, got {type(answers).__name__}")
    return [
        Receipt(
            digests={str(name): str(digest) for name, digest in answer["digests"].items()},
            unloaded=[str(name) for name in answer["unloaded"]],
            dtype=str(answer["dtype"]),
        )
        for answer in answers
    ]


def check_receipts(receipts: Sequence[Receipt], sent: Mapping[str, str]) -> torch.dtype:
    """Return the engine's dtype.

    Args:
        receipts: of the engine's workers.
        sent: the digests of the trainer's tensors by name.

    Raises:
        WeightSyncError: a worker has not loaded exactly these tensors, or a parameter got none.
    """
    if not receipts:
        raise WeightSyncError("no worker of the engine confirmed the new weights")
    for receipt in receipts:
        got = receipt.digests
        _refuse("the engine did not receive", [name for name in sent if name not in got])
        _refuse("the engine loaded unknown tensors", [name for name in got if name not in sent])
        _refuse(
            "the engine loaded other values than the trainer's",
            [
                f"{name} ({got[name]}, wanted {sent[name]})"
                for name in sent
                if got[name] != sent[name]
            ],
        )
        _refuse(
            "the engine's parameters got no new values",
            receipt.unloaded,
            hint=". The state dict must contain every parameter under its Hugging Face name",
        )
    return _dtype({receipt.dtype for receipt in receipts})


def _refuse(what: str, names: Iterable[str], *, hint: str = "") -> None:
    found = sorted(names)
    if found:
        more = f" and {len(found) - MAX_NAMES} more" if len(found) > MAX_NAMES else ""
        raise WeightSyncError(f"{what}: {', '.join(found[:MAX_NAMES])}{more}{hint}")


def _dtype(names: set[str]) -> torch.dtype:
    dtype = getattr(torch, names.pop(), None)
    if names or not isinstance(dtype, torch.dtype):
        raise WeightSyncError("the engine's workers do not name one dtype")
    return dtype
