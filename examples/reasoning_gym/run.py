"""Train SmolLM2-135M-Instruct on a task of reasoning-gym, offline on two cores.

    python examples/reasoning_gym/run.py
    python examples/reasoning_gym/run.py --variant tries      two tries, the second with feedback
    python examples/reasoning_gym/run.py --variant others     rewards of another question: a control
    python examples/reasoning_gym/run.py trainer.policy.optimizer_config.lr=0     overrides, as in
                                                      `skyrl-fast train config.yaml key=value`

The model is that of examples/smollm, in runs/smollm; reasoning-gym is installed into
runs/reasoning_gym/packages. What exists is not created again. Results are in
runs/reasoning_gym/run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # this file may be started from anywhere

from examples.reasoning_gym.packages import PACKAGES, make_importable  # noqa: E402
from examples.smollm.run import prepare as prepare_smollm  # noqa: E402
from examples.tiny_model.recipe import Recipe, install, main, make_once  # noqa: E402

FOLDER = Path("runs/reasoning_gym")
SMOLLM = Path("runs/smollm")


def prepare(folder: Path) -> None:
    """Create the model in `runs/smollm`, and `packages` and `data` in the folder, if missing."""
    from examples.reasoning_gym.make_data import make_data

    prepare_smollm(SMOLLM)
    make_once(folder / "packages", lambda path: install(path, PACKAGES))
    make_importable(folder / "packages")
    make_once(folder / "data", make_data)


@contextmanager
def two_tries(folder: Path) -> Iterator[Sequence[str]]:
    """Yield the settings of two tries at each question."""
    data = folder / "data"
    yield (
        f"data.train_data=[{data / 'train_tries.jsonl'}]",
        f"data.val_data=[{data / 'eval_tries.jsonl'}]",
        "generator.max_turns=2",
        f"trainer.run_path={folder / 'tries'}",
    )


@contextmanager
def rewards_of_others(folder: Path) -> Iterator[Sequence[str]]:
    """Yield the setting of rewards that are those of another question."""
    yield (
        f"data.train_data=[{folder / 'data' / 'train_others.jsonl'}]",
        f"trainer.run_path={folder / 'others'}",
    )


CONFIG = HERE / "config.yaml"
RECIPES = {
    "task": Recipe(FOLDER, CONFIG, prepare),
    "tries": Recipe(FOLDER, CONFIG, prepare, two_tries),
    "others": Recipe(FOLDER, CONFIG, prepare, rewards_of_others),
}

if __name__ == "__main__":
    sys.exit(main(RECIPES, __doc__))
