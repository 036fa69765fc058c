"""Ops on tensors: packing, advantages, log-probabilities, losses. Nothing here knows rollouts."""

from typing import Any

from skyrl_fast.ops.comparison import comparison


def _compare(op: str, device: Any, backend: str) -> str:
    from skyrl_fast.ops.first_use import check_first_use  # imports torch

    return check_first_use(op, device, backend)


comparison.compare = _compare
