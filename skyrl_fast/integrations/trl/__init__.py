"""TRL with this package's log-probabilities and GRPO loss.

import skyrl_fast.integrations.trl as fast
print(fast.install())  # what it replaces in this TRL; fast.uninstall() restores TRL's own
trainer = fast.GRPOTrainer(...)  # TRL's, with the loss of `policy_loss`
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from skyrl_fast.integrations.trl.loss import grpo_loss
from skyrl_fast.integrations.trl.switch import (
    TrlFastWarning,
    install,
    report,
    selective_log_softmax,
    uninstall,
)

if TYPE_CHECKING:
    from skyrl_fast.integrations.trl.trainer import FastGRPOLoss, GRPOTrainer

__all__ = [
    "FastGRPOLoss",
    "GRPOTrainer",
    "TrlFastWarning",
    "grpo_loss",
    "install",
    "report",
    "selective_log_softmax",
    "uninstall",
]


def __getattr__(name: str) -> Any:
    """Import the trainer, and with it TRL, on first use."""
    if name not in ("FastGRPOLoss", "GRPOTrainer"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from skyrl_fast.integrations.trl import trainer

    return getattr(trainer, name)
