"""The table of loggers: the name in `trainer.logger`, and the class behind it."""

from __future__ import annotations

LOGGERS = {
    "jsonl": "skyrl_fast.train.sinks:JsonlLogger",
    "tensorboard": "skyrl_fast.train.sinks:TensorBoardLogger",
    "wandb": "skyrl_fast.train.sinks:WandbLogger",
    "mlflow": "skyrl_fast.train.sinks:MlflowLogger",
    "trackio": "skyrl_fast.train.sinks:TrackioLogger",
}
