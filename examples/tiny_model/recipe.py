"""The command line of an example: create missing data and models, then train, in one folder."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

# How often a waiting torch thread polls for work before it sleeps. By default it polls for about a
# millisecond: next to any other busy process, this makes a step of a tiny model ten times as long.
SPINS = "2000"
TRAIN_OPTIONS = ("--verbose",)  # of `skyrl-fast train`, passed on


def _nothing(folder: Path) -> AbstractContextManager[Sequence[str]]:
    return nullcontext(())


@dataclass(frozen=True, slots=True)
class Recipe:
    """One offline run.

    Args:
        folder: of its data, model and results; the name that its config uses.
        config: YAML file for `skyrl-fast train`.
        prepare: creates missing data and models in the folder.
        service: context of a service that runs during the training; it yields further settings.
    """

    folder: Path
    config: Path
    prepare: Callable[[Path], None]
    service: Callable[[Path], AbstractContextManager[Sequence[str]]] = _nothing


def make_once(folder: Path, make: Callable[[Path], object]) -> None:
    """Let `make` fill the folder unless it exists; an interruption leaves no incomplete folder."""
    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    started = time.perf_counter()
    make(partial)
    partial.rename(folder)
    print(f"created {folder} in {time.perf_counter() - started:.0f} s", flush=True)


def install(folder: Path, packages: Sequence[str]) -> None:
    """Install packages into a new folder, without what they depend on."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    subprocess.run([*pip, str(folder), *packages], check=True)


def environment_with(packages: Path) -> dict[str, str]:
    """Return the environment of a process that also sees a folder of packages."""
    path = os.pathsep.join([str(packages.resolve()), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path}


def main(
    recipes: Mapping[str, Recipe], description: str, arguments: Sequence[str] | None = None
) -> int:
    """Run the command line of an example; return the exit code of the training.

    Args:
        recipes: by the value of `--variant`; the first is the default.
        description: shown by `--help`.
        arguments: of the command line; None: this process's.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = list(recipes)
    if len(names) > 1:
        parser.add_argument("--variant", choices=names, default=names[0], help="recipe to run")
    parser.add_argument("--base", type=Path, default=Path("."), help="parent of the run's folder")
    parser.add_argument("--resume", action="store_true", help="resume from the newest checkpoint")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of this run")
    options, rest = parser.parse_known_args(arguments)
    recipe = recipes[getattr(options, "variant", names[0])]
    return run(recipe, options.base, [*options.overrides, *rest], is_resumed=options.resume)


def run(recipe: Recipe, base: Path, overrides: Sequence[str], *, is_resumed: bool) -> int:
    """Prepare and train a recipe in a folder; return the exit code of the training."""
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)  # torch reads it when it is first imported
    from skyrl_fast.config.loading import load_config
    from skyrl_fast.setting import ConfigError

    config = recipe.config.absolute()
    settings_given = [word for word in overrides if word not in TRAIN_OPTIONS]
    try:
        load_config(config, settings_given)  # before minutes of data and warm start
    except ConfigError as error:
        print(f"skyrl-fast: {error}", file=sys.stderr)
        return error.exit_code
    try:
        base.mkdir(parents=True, exist_ok=True)
        os.chdir(base)
        recipe.prepare(recipe.folder)
    except OSError as error:
        sys.exit(f"{base}: {error}")

    from skyrl_fast.cli import main as skyrl_fast

    resume = ["--resume"] if is_resumed else []
    with recipe.service(recipe.folder) as settings:
        return skyrl_fast(["train", str(config), *resume, *settings, *overrides])
