"""The frame of an example's run: make what is missing, then train, all below one folder."""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

# How often a thread of torch's looks for work before it sleeps. The default looks for about a
# millisecond: beside any other busy process that makes a step of a tiny model ten times as long.
SPINS = "2000"


def _nothing(folder: Path) -> AbstractContextManager[Sequence[str]]:
    return nullcontext(())


@dataclass(frozen=True, slots=True)
class Recipe:
    """One offline run.

    Args:
        folder: where its data, model and results go; the name that its config uses.
        config: YAML file of `skyrl-fast train`.
        prepare: makes what is missing in the folder.
        service: what runs beside the training, as a context; gives further settings.
    """

    folder: Path
    config: Path
    prepare: Callable[[Path], None]
    service: Callable[[Path], AbstractContextManager[Sequence[str]]] = _nothing


def make_once(folder: Path, make: Callable[[Path], object]) -> None:
    """Let `make` fill the folder unless it is there; an interruption leaves nothing half made."""
    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    started = time.perf_counter()
    make(partial)
    partial.rename(folder)
    print(f"made {folder} in {time.perf_counter() - started:.0f} s", flush=True)


def main(
    recipes: Mapping[str, Recipe], description: str, arguments: Sequence[str] | None = None
) -> int:
    """Command line of an example; returns the exit code of the training.

    Args:
        recipes: by the name that `--variant` takes; the first is the default.
        description: shown by `--help`.
        arguments: of the command line; None: this process's.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = list(recipes)
    if len(names) > 1:
        parser.add_argument("--variant", choices=names, default=names[0])
    parser.add_argument("--base", type=Path, default=Path("."), help="where its folder is made")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of this run")
    options, rest = parser.parse_known_args(arguments)
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)  # torch reads it when it is first imported
    recipe = recipes[getattr(options, "variant", names[0])]
    options.base.mkdir(parents=True, exist_ok=True)
    os.chdir(options.base)
    recipe.prepare(recipe.folder)

    from skyrl_fast.cli import main as skyrl_fast

    resume = ["--resume"] if options.resume else []
    with recipe.service(recipe.folder) as settings:
        command = ["train", str(recipe.config), *resume, *settings, *options.overrides, *rest]
        return skyrl_fast(command)
