"""The command `skyrl-fast view RUN [--out DIR]`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from skyrl_fast.commands.command import as_usage_error, log_to_stderr

_MIB = 1 << 20


HELP = "show a run's trajectories and metrics in a browser"
DESCRIPTION = "Write the report of a run as static pages; no server needed."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="folder of a run (trainer.run_path)")
    parser.add_argument("--out", type=Path, help="output folder (default: RUN/view)")


def run(options: argparse.Namespace) -> int:
    from skyrl_fast.viewer.build import build_view

    log_to_stderr()
    with as_usage_error(ValueError, OSError):
        built = build_view(options.run, options.out)
    sys.stdout.write(
        f"{built.trajectories} trajectories in {built.files} files, "
        f"{built.bytes / _MIB:.1f} MiB\n"
        f"open {built.page.resolve().as_uri()}\n"
    )
    return 0
