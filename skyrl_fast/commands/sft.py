"""The command `skyrl-fast sft`."""

from __future__ import annotations

import argparse

from skyrl_fast.commands.command import needs_extra
from skyrl_fast.commands.train import add_arguments as add_arguments
from skyrl_fast.commands.train import load_run_settings, run_with

HELP = "train a model on demonstrations"
DESCRIPTION = "Supervised fine-tuning: data.train_data are chats whose assistant turns are trained."


def run(options: argparse.Namespace) -> int:
    config = load_run_settings(options)
    with needs_extra("train"):
        from skyrl_fast.train.supervised import sft_by_settings
    return run_with(sft_by_settings, config)
