"""The quickstart: makes the data, warm-starts the model, trains it, all in one folder.

    python examples/quickstart/run.py                 what `make train` calls
    python examples/quickstart/run.py --resume        goes on after an interruption, even kill -9
    python examples/quickstart/run.py trainer.policy.optimizer_config.lr=0     overrides, as in
                                                      `skyrl-fast train config.yaml key=value`

What is there already is not made again. Training itself is the command `skyrl-fast train`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
FOLDER = "quickstart"  # the name that config.yaml uses


def make_once(folder: Path, make: Callable[[Path], object]) -> None:
    """Let `make` fill the folder unless it is there; an interruption leaves nothing half made."""
    if folder.exists():
        return
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    started = time.perf_counter()
    make(partial)
    partial.rename(folder)
    print(f"made {folder} in {time.perf_counter() - started:.0f} s", flush=True)


def prepare(folder: Path, *, seed: int = 0) -> None:
    """Make `data` and `model` in the folder, where they are missing."""
    sys.path.insert(0, str(HERE))
    from make_data import make_data
    from warm_start import warm_start

    folder.mkdir(parents=True, exist_ok=True)
    make_once(folder / "data", lambda path: make_data(path, seed=seed))
    make_once(folder / "model", lambda path: warm_start(folder / "data", path, seed=seed))


def main() -> int:
    """Command line; returns the exit code of the training."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", type=Path, default=Path("."), help="where quickstart/ is made")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of this run")
    options, rest = parser.parse_known_args()
    options.base.mkdir(parents=True, exist_ok=True)
    os.chdir(options.base)
    prepare(Path(FOLDER))

    from skyrl_fast.cli import main as skyrl_fast

    resume = ["--resume"] if options.resume else []
    return skyrl_fast(["train", str(HERE / "config.yaml"), *resume, *options.overrides, *rest])


if __name__ == "__main__":
    sys.exit(main())
