"""The command `skyrl-fast quickstart`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from skyrl_fast.commands.command import needs_extra

HELP = "train a tiny agent here, in two minutes on two idle cores"
DESCRIPTION = (
    "Create a tiny model and a text-to-SQL task in the folder quickstart, and train it: what "
    "`make train` does, without a clone."
)
# A wheel has these examples inside the package; a clone has them beside it.
_PARENTS = (Path(__file__).parents[1] / "bundled", Path(__file__).parents[2])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the run")
    parser.add_argument("--base", type=Path, default=Path("."), help="parent of the new folder")
    parser.add_argument("--resume", action="store_true", help="resume from the newest checkpoint")


def run(options: argparse.Namespace, *, start: Callable[..., int] | None = None) -> int:
    """Train the recipe; return the exit code.

    Args:
        options: parsed arguments.
        start: runs a recipe; None: `recipe.run`.
    """
    find_examples()
    with needs_extra("train"):
        from examples.quickstart.run import RECIPES
        from examples.tiny_model import recipe

        base = options.base
        overrides = options.overrides
        run_recipe = recipe.run if start is None else start
        return run_recipe(RECIPES["quickstart"], base, overrides, is_resumed=options.resume)


def find_examples() -> None:
    """Make `examples` importable."""
    folder = next(parent for parent in _PARENTS if (parent / "examples" / "quickstart").is_dir())
    sys.path.insert(0, str(folder))
