"""The command `skyrl-fast`: quickstart, init, train, try, plan, view, compare, and more."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from io import TextIOWrapper
from typing import Any

from skyrl_fast import __version__
from skyrl_fast.commands.command import SIGNAL_EXIT
from skyrl_fast.errors import RunError
from skyrl_fast.system.printable import MAX_FAILURE, printable

COMMANDS = {  # each a module with HELP, DESCRIPTION, add_arguments and run
    "quickstart": "skyrl_fast.commands.quickstart",
    "init": "skyrl_fast.commands.init",
    "train": "skyrl_fast.commands.train",
    "sft": "skyrl_fast.commands.sft",
    "evaluate": "skyrl_fast.commands.evaluate",
    "try": "skyrl_fast.commands.try_prompt",
    "plan": "skyrl_fast.commands.plan",
    "settings": "skyrl_fast.commands.settings",
    "view": "skyrl_fast.commands.view",
    "compare": "skyrl_fast.commands.compare",
    "doctor": "skyrl_fast.commands.doctor",
    "engine": "skyrl_fast.commands.engine",
    "gateway": "skyrl_fast.commands.gateway",
    "tinker": "skyrl_fast.commands.tinker",
    "export": "skyrl_fast.commands.export",
}
STOPS: dict[Any, str] = {
    SIGNAL_EXIT + number: number.name for number in (signal.SIGTERM, signal.SIGHUP)
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    0: success. 1: it failed. 2: bad configuration or environment. 129, 130, 143: stopped by a
    signal, with a checkpoint if training had begun.
    """
    options = parse_arguments(arguments)
    home = COMMANDS[options.command]
    command = import_module(home)
    return run_command(command.run, options)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of a command; exit with its usage if they are wrong."""
    parser = command_parser()
    options, rest = parser.parse_known_args(arguments)
    takes_overrides = hasattr(options, "overrides")
    if takes_overrides:
        options.overrides += rest  # overrides after an option, which argparse does not assign
    elif rest:
        unknown = " ".join(rest)
        parser.error(f"unrecognized arguments: {unknown}")
    return options


def run_command(command: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """Run a command and return the exit code; say on standard error why it failed or stopped."""
    if isinstance(sys.stdout, TextIOWrapper):  # a model's text, where the terminal has no such sign
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return command(options)
    except RunError as error:
        reason = printable(str(error), MAX_FAILURE)
        sys.stderr.write(f"skyrl-fast: {reason}\n")
        return error.exit_code
    except KeyboardInterrupt:  # training ends with a checkpoint instead, once it has begun
        sys.stderr.write("skyrl-fast: stopped\n")
        return SIGNAL_EXIT + signal.SIGINT
    except SystemExit as stop:
        if stop.code not in STOPS:
            raise
        name = STOPS[stop.code]
        sys.stderr.write(f"skyrl-fast: stopped by {name}\n")
        number = signal.Signals[name]
        return SIGNAL_EXIT + number


def command_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="skyrl-fast", description="Step-wise reinforcement learning of language-model agents."
    )
    version = f"skyrl-fast {__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, home in COMMANDS.items():
        command = import_module(home)
        command.add_arguments(
            commands.add_parser(name, help=command.HELP, description=command.DESCRIPTION)
        )
    return parser


if __name__ == "__main__":
    sys.exit(main())
