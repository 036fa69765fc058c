"""The command `skyrl-fast view RUN [--out DIR]`."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from skyrl_fast.printable import MAX_FAILURE, printable

EXIT_USAGE = 2
_MIB = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `skyrl-fast view` to the parser."""
    parser.add_argument("run", type=Path, help="folder of a run (trainer.run_path)")
    parser.add_argument("--out", type=Path, help="output folder (default: RUN/view)")


def view(options: argparse.Namespace) -> int:
    """Write the page, print its address and return the exit code."""
    from skyrl_fast.viewer.build import build_view

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        built = build_view(options.run, options.out)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"skyrl-fast: {printable(str(error), MAX_FAILURE)}\n")
        return EXIT_USAGE
    sys.stdout.write(
        f"{built.trajectories} trajectories in {built.files} files, "
        f"{built.bytes / _MIB:.1f} MiB\n"
        f"open {built.page.resolve().as_uri()}\n"
    )
    return 0
