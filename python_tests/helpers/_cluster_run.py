"""What tests run on the nodes of a Ray cluster: rollouts without an engine."""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _fakes import FakeRollouts, FakeTokenizer, tiny_model
from _thorough import THOROUGH

from skyrl_fast.config import Config
from skyrl_fast.train import run
from skyrl_fast.train.flow.event_loop import StopSignals
from skyrl_fast.train.parallel.rank_processes import RankStarter

# Of kills at random, per test.
MOMENTS = 5 if THOROUGH else 1
TWO_NODES = "trainer.placement.policy_num_nodes=2"
TAG = "SKYRL_FAST_TEST_CLUSTER"  # a variable of the processes of a test's cluster


@dataclass(frozen=True)
class Here:
    """Runs rank 0 where it is called, and pauses once: in a step, before its batch.

    Args:
        once: a file that exists from then on.
        step: None: no pause.
    """

    once: Path
    step: int | None = None

    def __call__(self, config: Config, signals: StopSignals, starter: RankStarter) -> Any:
        run.load_tokenizer = lambda path: FakeTokenizer()  # type: ignore[assignment]
        run.freeze_heap = contextlib.nullcontext  # type: ignore[assignment]
        request = run.RunRequest(make_rollouts=self._rollouts)
        return request.run_here(config, signals, starter)

    async def _rollouts(self, config: Config, tokenizer: Any, model_path: str) -> FakeRollouts:
        here = self

        class Watched(FakeRollouts):
            async def before_batch(self, step: int, phase: str) -> None:
                if phase == "train" and step == here.step and not here.once.exists():
                    here.once.touch()
                    await asyncio.sleep(1)  # in which a signal arrives

        return Watched(config, tiny_model(seed=1))


def share_of_e(answer: str, row: dict[str, Any]) -> float:
    """Return a reward, not before the file `row["hold"]` is gone."""
    while os.path.exists(row["hold"]):
        time.sleep(0.05)
    return sum(letter in "aeiou" for letter in answer) / 8


def workers(name: str) -> list[int]:
    """Return the processes of this test's cluster whose title begins with a name."""
    return processes(lambda command: command.startswith(name.encode()))


def processes(chosen: Callable[[bytes], bool]) -> list[int]:
    """Return the processes of this test's cluster with such a command line, ascending.

    Other tests run at the same time; a cluster's processes inherit a variable.
    """
    tag = f"{TAG}={os.environ[TAG]}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            variables = (folder / "environ").read_bytes().split(b"\0")
            if tag in variables and chosen((folder / "cmdline").read_bytes()):
                found.append(int(folder.name))
    return sorted(found)
