"""SkyRL-SQL offline: a tiny agent that queries SQLite databases, on the quickstart's data.

    python examples/text2sql/run.py                        the history is kept verbatim
    python examples/text2sql/run.py --variant thinking     the template strips earlier thoughts
    python examples/text2sql/run.py --resume               resumes after an interruption
    python examples/text2sql/run.py trainer.seed=7         settings, as in `skyrl-fast train`

Existing data and models are not created again. Results are in runs/text2sql, or
runs/text2sql_thinking.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # this file may be started from anywhere

from examples.tiny_model.recipe import Recipe, main, make_once  # noqa: E402

NUM_THINKING_STEPS = 500  # every turn is a row there, and a chat has more than two


def prepare(folder: Path, *, thinking: bool, seed: int = 0) -> None:
    """Create `data` and `model` in the folder if they are missing."""
    from examples.quickstart.make_data import make_data
    from examples.quickstart.warm_start import warm_start
    from examples.tiny_model.model import THINKING_CHAT_TEMPLATE

    def warm(path: Path) -> None:
        data = folder / "data"
        if thinking:
            warm_start(
                data,
                path,
                seed=seed,
                chat_template=THINKING_CHAT_TEMPLATE,
                keeps_history=False,
                num_steps=NUM_THINKING_STEPS,
            )
        else:
            warm_start(data, path, seed=seed)

    make_once(folder / "data", lambda path: make_data(path, seed=seed))
    make_once(folder / "model", warm)


RECIPES = {
    "append": Recipe(
        Path("runs/text2sql"),
        HERE / "offline.yaml",
        lambda folder: prepare(folder, thinking=False),
    ),
    "thinking": Recipe(
        Path("runs/text2sql_thinking"),
        HERE / "offline_thinking.yaml",
        lambda folder: prepare(folder, thinking=True),
    ),
}

if __name__ == "__main__":
    sys.exit(main(RECIPES, __doc__))
