"""GSM8K offline: create word problems, warm-start a tiny model, train it with real vLLM.

    python examples/gsm8k/run.py                            one answer, one reward
    python examples/gsm8k/run.py --variant multi_turn       several tries, a reward for each
    python examples/gsm8k/run.py --resume                   resumes after an interruption
    python examples/gsm8k/run.py trainer.seed=7             settings, as in `skyrl-fast train`

Existing data and models are not created again. Results are in runs/gsm8k, or runs/gsm8k_multi_turn.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # this file may be started from anywhere

from examples.tiny_model.recipe import Recipe, main, make_once  # noqa: E402

# The chats of several tries are longer and show more sums.
NUM_WARM_STEPS = {"gsm8k": 450, "gsm8k_multi_turn": 400}


def prepare(folder: Path, *, env_class: str, seed: int = 0) -> None:
    """Create `data` and `model` in the folder if they are missing."""
    from examples.gsm8k.make_data import make_data
    from examples.gsm8k.warm_start import warm_start

    make_once(folder / "data", lambda path: make_data(path, env_class=env_class, seed=seed))
    steps = NUM_WARM_STEPS[env_class]
    make_once(
        folder / "model",
        lambda path: warm_start(folder / "data", path, seed=seed, num_steps=steps),
    )


RECIPES = {
    "single_turn": Recipe(
        Path("runs/gsm8k"),
        HERE / "offline.yaml",
        lambda folder: prepare(folder, env_class="gsm8k"),
    ),
    "multi_turn": Recipe(
        Path("runs/gsm8k_multi_turn"),
        HERE / "offline_multi_turn.yaml",
        lambda folder: prepare(folder, env_class="gsm8k_multi_turn"),
    ),
}

if __name__ == "__main__":
    sys.exit(main(RECIPES, __doc__))
