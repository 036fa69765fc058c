"""Settings of asynchronous training; SkyRL's names where SkyRL has the key."""

from __future__ import annotations

from dataclasses import dataclass

from skyrl_fast.setting import setting


@dataclass(slots=True)
class FullyAsyncConfig:
    """How far generation may run ahead of training."""

    enabled: bool = setting(
        False, "whether to generate while training; false: as with max_staleness_steps=0"
    )
    max_staleness_steps: int = setting(
        4,
        "maximum policy versions (batches) between a group's start and its training; 0: "
        "generation and training alternate",
        at_least=0,
    )
    weight_update: str = setting(
        "in_flight",
        "how the engine's weights are updated. in_flight: requests are interrupted, keep their "
        "tokens and continue with the new weights; pause: the update waits for running turns",
        choices=("in_flight", "pause"),
    )
