"""Train agents from Python: `skyrl_fast.train_agent(config, prompts=..., reward=...)`.

`skyrl_fast` has all of these names, too.

Extension points of a run:

- `Env`, `EnvStep`, `Action`: an environment, its answer to one action, and that action
- `AgentTask`: what an agent at the gateway gets
- `register_policy_loss`, `register_advantage_estimator`: custom losses and estimators, with
  `LossInputs`, `LossOutput`, `EstimatorInputs`, `EstimatorOutput`
- `Callback`, `CallbackError`: hooks after steps, evaluations and checkpoints
- `Logger`, `RunInfo`: where metrics go, and what a logger is constructed with

`evaluate` samples the evaluation of a run from models, checkpoints, adapters or servers, and
returns an `Evaluation` of each.

Parts of a loop of one's own, as examples/own_loop.py puts them together:

- `load_config`, a `Config`; `load_prompts`, each a `Prompt`; `load_tokenizer`
- `start_rollouts`: `Rollouts`, which sample trajectories and take new weights
- `compute_advantages` of the rows that `skyrl_fast.batch.batch_from_trajectories` makes
- `load_policy`, a `Policy`, of whose forward passes each is a `MicroBatch`; `response_positions`;
  `Optimizer`

`train_agent` returns a `TrainResult`, or raises a `SetupError` that says what to fix.

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
    "Config": "skyrl_fast.config",
    "Env": "skyrl_fast.rollout.env.protocol",
    "EnvStep": "skyrl_fast.rollout.env.protocol",
    "EstimatorInputs": "skyrl_fast.ops.advantage.estimators",
    "EstimatorOutput": "skyrl_fast.ops.advantage.estimators",
    "Evaluation": "skyrl_fast.train.evaluation",
    "Logger": "skyrl_fast.train.output.loggers",
    "LossInputs": "skyrl_fast.ops.policy_loss.custom",
    "LossOutput": "skyrl_fast.ops.policy_loss.custom",
    "MicroBatch": "skyrl_fast.train.model.forward_pass",
    "Optimizer": "skyrl_fast.train.model.optimizer",
    "Policy": "skyrl_fast.train.model.policy",
    "Prompt": "skyrl_fast.train.data.prompts",
    "Rollouts": "skyrl_fast.train.flow.rollouts",
    "RunInfo": "skyrl_fast.train.output.loggers",
    "SetupError": "skyrl_fast.train.setup.errors",
    "TrainResult": "skyrl_fast.train.output.result",
    "compute_advantages": "skyrl_fast.train.algorithm.advantages",
    "evaluate": "skyrl_fast.train.evaluation",
    "load_config": "skyrl_fast.config.loading",
    "load_policy": "skyrl_fast.train.model.models",
    "load_prompts": "skyrl_fast.train.data.prompts",
    "load_tokenizer": "skyrl_fast.train.model.loading",
    "register_advantage_estimator": "skyrl_fast.ops.advantage.estimators",
    "register_policy_loss": "skyrl_fast.ops.policy_loss.custom",
    "response_positions": "skyrl_fast.train.model.forward_pass",
    "sft": "skyrl_fast.train.supervised",
    "start_rollouts": "skyrl_fast.train.flow.vllm_rollouts",
    "train_agent": "skyrl_fast.train.run",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
