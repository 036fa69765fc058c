"""The command `skyrl-fast quickstart`."""

from __future__ import annotations

import argparse
import sys
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


def run(options: argparse.Namespace) -> int:
    find_examples()
    with needs_extra("train"):
        from examples.quickstart.run import RECIPES
        from examples.tiny_model import recipe

        base = options.base
        overrides = options.overrides
        return recipe.run(RECIPES["quickstart"], base, overrides, is_resumed=options.resume)


def find_examples() -> None:
    """Make `examples` importable."""
    folder = next(parent for parent in _PARENTS if (parent / "examples" / "quickstart").is_dir())
    sys.path.insert(0, str(folder))
