"""Table of loggers: the name in `trainer.logger` and its class."""

from __future__ import annotations

LOGGERS = {
    "jsonl": "skyrl_fast.train.output.loggers:JsonlLogger",
    "tensorboard": "skyrl_fast.train.output.loggers:TensorBoardLogger",
    "wandb": "skyrl_fast.train.output.loggers:WandbLogger",
    "mlflow": "skyrl_fast.train.output.loggers:MlflowLogger",
    "trackio": "skyrl_fast.train.output.loggers:TrackioLogger",
}
