"""Shares of a step's time by phase."""

from __future__ import annotations

from collections.abc import Mapping

# Phases of the trainer, one after the other. Others, and what has no name, take little.
PHASES = (
    "generate",
    "environment",
    "wait",
    "batch",
    "advantages",
    "teachers",
    "forward_backward",
    "sync",
    "eval",
)
IDLE = ("engine_idle", "trainer_idle")


def time_shares(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the shares of the step and its evaluation, of the phases that it has.

    Args:
        metrics: metrics of the step, with `timing/step`.

    Example:
        >>> time_shares({"timing/step": 3.0, "timing/sync": 1.0, "timing/eval": 1.0})
        {'timing/sync_share': 0.25, 'timing/eval_share': 0.25}
    """
    total = metrics["timing/step"] + metrics.get("timing/eval", 0.0)
    seconds = {name: metrics.get(f"timing/{name}") for name in (*PHASES, *IDLE)}
    return {
        f"timing/{name}_share": value / total
        for name, value in seconds.items()
        if value is not None and total
    }
