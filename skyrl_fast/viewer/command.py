"""The command `skyrl-fast view RUN [--out DIR]`."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

EXIT_USAGE = 2
_MIB = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("run", type=Path, help="folder of a run: trainer.run_path")
    parser.add_argument("--out", type=Path, help="folder to write; default: RUN/view")


def view(options: argparse.Namespace) -> int:
    """Write the page and say where it is; returns the exit code."""
    from skyrl_fast.viewer.build import build_view

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        made = build_view(options.run, options.out)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"skyrl-fast: {error}\n")
        return EXIT_USAGE
    sys.stdout.write(
        f"{made.trajectories} trajectories in {made.chunks} chunks, {made.bytes / _MIB:.1f} MiB\n"
        f"open {made.page.resolve().as_uri()}\n"
    )
    return 0
