"""Train an agent that uses the OpenAI client on the quickstart's task, through the gateway.

    python examples/gateway/run.py
    python examples/gateway/run.py --variant langgraph     a graph that compacts its context;
                                                      needs langgraph and langchain-openai
    python examples/gateway/run.py --variant policies      a planner and a worker: two policies
    python examples/gateway/run.py trainer.policy.optimizer_config.lr=0     overrides, as in
                                                      `skyrl-fast train config.yaml key=value`

Data and model are the quickstart's, and are made if they are missing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # this file may be started from anywhere

from examples.quickstart.run import prepare  # noqa: E402
from examples.tiny_model.recipe import Recipe, main  # noqa: E402


def agent(
    file: str, run: str, *more: str
) -> Callable[[Path], AbstractContextManager[Sequence[str]]]:
    """Return what gives the settings that replace the quickstart's environment by an agent.

    Args:
        more: YAML files with further settings.
    """

    def settings(folder: Path) -> AbstractContextManager[Sequence[str]]:
        return nullcontext(
            [
                f"agent.function={HERE / file}:solve",
                f"trainer.run_path={folder / run}",
                f"trainer.run_name={run}",
                "trainer.row_layout=tree",
                *(str(HERE / name) for name in more),
            ]
        )

    return settings


CONFIG = HERE.parent / "quickstart" / "config.yaml"
FILES = {
    "openai": ("sql_agent.py",),
    "langgraph": ("langgraph_agent.py",),
    "policies": ("two_policies.py", "policies.yaml"),
}
RECIPES = {
    name: Recipe(Path("quickstart"), CONFIG, prepare, agent(file, name, *more))
    for name, (file, *more) in FILES.items()
}

if __name__ == "__main__":
    sys.exit(main(RECIPES, __doc__))
