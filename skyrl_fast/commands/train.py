"""The command `skyrl-fast train`."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from shlex import quote
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
    from skyrl_fast.train.run import TrainResult

HELP = "train an agent"
DESCRIPTION = "Train with the settings of a YAML file and overrides."
_BARS = "▁▂▃▄▅▆▇█"
_MAX_BARS = 40
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
        train: in place of `train_agent`.
    """
    config = load_run_settings(options)
    with needs_extra("train"):
        from skyrl_fast.train.run import train_agent
    return run_with(train or train_agent, config)


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
    result = train(config)
    sys.stdout.write(summary(result))
    if result.signal is None:
        return 0
    return SIGNAL_EXIT + result.signal


def summary(result: TrainResult) -> str:
    """Return the summary of a run: rewards before and after, files, one trajectory."""
    done = f"{result.step} of {result.total_steps} steps"
    lines = ["", f"{'finished' if result.signal is None else 'stopped'}: {done}"]
    rewards = []
    for when, reward in (("before", result.before), ("after", result.after)):
        if reward is not None:
            rewards.append(f"{reward:.3f} {when}")
    if rewards:
        curve = draw_curve(list(result.evaluations.values()))
        lines.append(f"evaluation reward: {', '.join(rewards)}  {curve}".rstrip())
    for name, path in (
        ("learning curve", result.plot),
        ("metrics", result.metrics),
        ("trajectories", result.trajectories),
        ("checkpoint", result.checkpoint),
    ):
        if path is not None and path.exists():
            lines.append(f"{name + ':':16}{path}")
    if result.trajectories.is_dir():
        lines.append(f"{'view it:':16}skyrl-fast view {quote(str(result.run_path))}")
    lines += [f"{'look at:':16}{warning}" for warning in result.warnings]
    if result.warnings:
        lines.append(f"{'':16}what they mean: the page Metrics of the documentation")
    if result.sample:
        lines += ["", "one trajectory:", result.sample]
    if result.signal is not None:
        lines += ["", "run the same command with --resume to continue"]
    return "\n".join(lines) + "\n"


def draw_curve(values: Sequence[float]) -> str:
    """Return values as a line of bars; "" for fewer than two, or where stdout has no such sign."""
    if len(values) < 2 or "utf" not in (sys.stdout.encoding or "").lower():
        return ""
    least = min(values)
    most = max(values)
    scale = (len(_BARS) - 1) / ((most - least) or 1)
    return "".join(_BARS[round((value - least) * scale)] for value in values[-_MAX_BARS:])
