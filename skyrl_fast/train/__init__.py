"""Train agents from Python: `skyrl_fast.train_agent(config, prompts=..., reward=...)`.

Extension points of a run:

- `Env`, `EnvStep`, `Action`: an environment, its answer to one action, and that action
- `AgentTask`: what an agent at the gateway gets
- `register_policy_loss`, `register_advantage_estimator`: custom losses and estimators, with
  `LossInputs`, `LossOutput`, `EstimatorInputs`, `EstimatorOutput`
- `Callback`, `CallbackError`: hooks after steps, evaluations and checkpoints
- `Logger`, `RunInfo`: where metrics go, and what a logger is constructed with

It returns a `TrainResult`, or raises a `SetupError` that says what to fix.

Example:
    import skyrl_fast

    rows = [{"prompt": f"What is 3 + {i}?", "sum": 3 + i} for i in range(64)]
    skyrl_fast.train_agent(
        {"trainer.policy.model.path": "Qwen/Qwen2.5-0.5B-Instruct"},
        prompts=rows,
        reward=lambda answer, row: float(str(row["sum"]) in answer),
    )
"""

from __future__ import annotations

import importlib
from typing import Any

# Imported on first use: `import skyrl_fast` stays light. Type checkers read __init__.pyi.
_HOMES = {
    "Action": "skyrl_fast.rollout.env.protocol",
    "AgentTask": "skyrl_fast.gateway.agents.task",
    "Callback": "skyrl_fast.train.callbacks",
    "CallbackError": "skyrl_fast.train.callbacks",
    "Env": "skyrl_fast.rollout.env.protocol",
    "EnvStep": "skyrl_fast.rollout.env.protocol",
    "EstimatorInputs": "skyrl_fast.ops.advantage.estimators",
    "EstimatorOutput": "skyrl_fast.ops.advantage.estimators",
    "LossInputs": "skyrl_fast.ops.policy_loss.custom",
    "LossOutput": "skyrl_fast.ops.policy_loss.custom",
    "Logger": "skyrl_fast.train.output.loggers",
    "RunInfo": "skyrl_fast.train.output.loggers",
    "SetupError": "skyrl_fast.train.setup.errors",
    "TrainResult": "skyrl_fast.train.run",
    "register_advantage_estimator": "skyrl_fast.ops.advantage.estimators",
    "register_policy_loss": "skyrl_fast.ops.policy_loss.custom",
    "sft": "skyrl_fast.train.supervised",
    "train_agent": "skyrl_fast.train.run",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
