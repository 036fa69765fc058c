"""Distillation: a tiny student loses its bad habits by a teacher's probabilities, without a reward.

    python examples/distillation/run.py               data, two warm starts, training
    python examples/distillation/run.py --resume      resumes after an interruption
    python examples/distillation/run.py trainer.algorithm.distillation.top_k=8
                                                      the KL over the teacher's likely tokens

The rewards of the environment are shown, and not trained. Results are in runs/distillation.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # this file may be started from anywhere

from examples.tiny_model.recipe import Recipe, main, make_once  # noqa: E402


def prepare(folder: Path, *, seed: int = 0) -> None:
    """Create `data` and `models` in the folder if they are missing."""
    from examples.distillation.make_models import make_demonstrations, make_models

    make_once(folder / "data", lambda path: make_demonstrations(path, seed=seed))
    make_once(folder / "models", lambda path: make_models(folder / "data", path, seed=seed))


RECIPES = {"distillation": Recipe(Path("runs/distillation"), HERE / "config.yaml", prepare)}

if __name__ == "__main__":
    sys.exit(main(RECIPES, __doc__))
