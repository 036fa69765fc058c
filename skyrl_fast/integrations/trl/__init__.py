"""TRL with this package's log-probabilities and GRPO loss.

import skyrl_fast.integrations.trl as fast
print(fast.install())  # what it replaces in this TRL; fast.uninstall() restores TRL's own
trainer = fast.GRPOTrainer(...)  # TRL's, with the loss of `policy_loss`
"""

from __future__ import annotations

from typing import Any

from skyrl_fast.integrations.trl.loss import grpo_loss
from skyrl_fast.integrations.trl.switch import (
    TrlFastWarning,
    install,
    report,
    selective_log_softmax,
    uninstall,
)
from skyrl_fast.integrations.trl.trainer import FastGRPOLoss, grpo_trainer

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
    if name == "GRPOTrainer":
        return grpo_trainer()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
