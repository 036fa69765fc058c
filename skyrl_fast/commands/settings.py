"""The command `skyrl-fast settings`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

HELP = "print the settings with their defaults"
DESCRIPTION = (
    "Print the settings that have all words in their name or help, SkyRL's included. Exit code 1: "
    "none has."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", metavar="word", help="part of a name or of its help")


def run(options: argparse.Namespace) -> int:
    from skyrl_fast.config.listing import setting_entries

    text = " ".join(options.words)
    words = text.lower().split()
    entries = [entry for entry in setting_entries() if _has_all(words, entry)]
    if not entries:
        sys.stdout.write(f"no setting has {text!r} in its name or help\n")
        return 1
    sys.stdout.write("".join(entries))
    return 0


def _has_all(words: Sequence[str], entry: str) -> bool:
    entry = entry.lower()
    return all(word in entry for word in words)
