"""Compaction: a tiny agent learns to finish its summaries, all in one folder.

    python examples/compaction/run.py
    python examples/compaction/run.py trainer.algorithm.summary_weight=0      overrides, as in
                                                      `skyrl-fast train config.yaml key=value`

Existing data and models are not created again. Training itself is the command `skyrl-fast train`.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # this file may be started from anywhere

from examples.tiny_model.recipe import Recipe, main, make_once  # noqa: E402


def prepare(folder: Path, *, seed: int = 0) -> None:
    """Create `data` and `model` in the folder if they are missing."""
    from examples.compaction.make_data import make_data
    from examples.compaction.warm_start import warm_start

    make_once(folder / "data", lambda path: make_data(path, seed=seed))
    make_once(folder / "model", lambda path: warm_start(folder / "data", path, seed=seed))


RECIPES = {"compaction": Recipe(Path("compaction"), HERE / "config.yaml", prepare)}

if __name__ == "__main__":
    sys.exit(main(RECIPES, __doc__))
