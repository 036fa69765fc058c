"""The command `skyrl-fast train`."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from skyrl_fast.commands.command import (
    SIGNAL_EXIT,
    add_config_arguments,
    load_settings,
    log_to_stderr,
    needs_extra,
)

if TYPE_CHECKING:
    from skyrl_fast.config import Config
    from skyrl_fast.train.output.result import TrainResult

HELP = "train an agent"
DESCRIPTION = "Train with the settings of a YAML file and overrides."
LOG_FORM = "%(asctime)s %(name)s: %(message)s"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    parser.add_argument(
        "--resume", action="store_true", help="resume from the newest checkpoint, if there is one"
    )
    parser.add_argument("--verbose", action="store_true", help="log at level INFO")


def run(
    options: argparse.Namespace, *, train: Callable[[Config], TrainResult] | None = None
) -> int:
    """Train; return 0, or the exit code of the signal that stopped the run.

    Args:
        options: parsed arguments.
        train: in place of `train_by_settings`.
    """
    config = load_run_settings(options)
    with needs_extra("train"):
        from skyrl_fast.train.run import train_by_settings
    return run_with(train or train_by_settings, config)


def load_run_settings(options: argparse.Namespace) -> Config:
    """Return the settings of a run, whose files and local model are there; start the log."""
    log_to_stderr(logging.INFO if options.verbose else logging.WARNING, LOG_FORM)
    overrides = [*options.overrides, *(["trainer.resume_mode=latest"] if options.resume else [])]
    config = load_settings(options.config, overrides)
    from skyrl_fast.config.files import (
        check_chat_template,
        check_data_files,
        check_local_model,
    )

    check_data_files("data.train_data", config.data.train_data)
    check_data_files("data.val_data", config.data.val_data)
    check_chat_template(config)
    check_local_model(config)
    return config


def run_with(train: Callable[[Config], TrainResult], config: Config) -> int:
    """Train by a function and print the summary; return as `run` does."""
    from skyrl_fast.train.output.summary import summary

    result = train(config)
    sys.stdout.write(summary(result))
    if result.signal is None:
        return 0
    return SIGNAL_EXIT + result.signal
