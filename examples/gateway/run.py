"""Train an agent that uses the OpenAI client on the quickstart's task, through the gateway.

    python examples/gateway/run.py
    python examples/gateway/run.py trainer.policy.optimizer_config.lr=0     overrides, as in
                                                      `skyrl-fast train config.yaml key=value`

Data and model are the quickstart's, and are made if they are missing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # this file may be started from anywhere

from examples.quickstart.run import prepare  # noqa: E402
from examples.tiny_model.recipe import Recipe, main  # noqa: E402


@contextmanager
def agent(folder: Path) -> Iterator[Sequence[str]]:
    """Yield the settings that replace the quickstart's environment by the agent."""
    yield [
        f"agent.function={HERE / 'sql_agent.py'}:solve",
        f"trainer.run_path={folder / 'gateway_run'}",
        "trainer.run_name=gateway",
        "trainer.rows=tree",
    ]


CONFIG = HERE.parent / "quickstart" / "config.yaml"
RECIPES = {"gateway": Recipe(Path("quickstart"), CONFIG, prepare, agent)}

if __name__ == "__main__":
    sys.exit(main(RECIPES, __doc__))
