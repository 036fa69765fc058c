"""The command `skyrl-fast settings`."""

from __future__ import annotations

import argparse
import sys

HELP = "print the settings with their defaults"
DESCRIPTION = (
    "Print the settings that have a word in their name or help, SkyRL's included. Exit code 1: "
    "none has."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("word", nargs="?", default="", help="part of a name or of its help")


def run(options: argparse.Namespace) -> int:
    from skyrl_fast.config.listing import setting_entries  # imports torch

    word = options.word.lower()
    entries = [entry for entry in setting_entries() if word in entry.lower()]
    sys.stdout.write("".join(entries) or f"no setting has {options.word!r} in its name or help\n")
    return 0 if entries else 1
