"""Settings of generation beside training; SkyRL's names where SkyRL has the key."""

from __future__ import annotations

from dataclasses import dataclass

from skyrl_fast.setting import setting


@dataclass(slots=True)
class FullyAsyncConfig:
    """How far generation may run ahead of training."""

    enabled: bool = setting(False, "generate while training; false: as with max_staleness_steps=0")
    max_staleness_steps: int = setting(
        4,
        "a group is trained at most so many policy versions (batches) after its start; 0: one "
        "after the other",
        at_least=0,
    )
    weight_update: str = setting(
        "in_flight",
        "in_flight: requests are interrupted, keep their tokens and go on with the new weights; "
        "pause: the update waits until the turns that are being generated are over",
        choices=("in_flight", "pause"),
    )
