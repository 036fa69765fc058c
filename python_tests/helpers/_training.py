"""Complete runs whose rollouts sample from the policy in this process."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from _fakes import FakeRollouts, FakeTokenizer, tiny_model, write_prompts

import skyrl_fast
from skyrl_fast.config import Config
from skyrl_fast.config.loading import load_config
from skyrl_fast.rollout.trajectory import Trajectory
from skyrl_fast.train import run as run_module
from skyrl_fast.train.checkpoint.run_saver import RunSaver
from skyrl_fast.train.data.prompts import Prompt
from skyrl_fast.train.output.loggers import read_metrics
from skyrl_fast.train.run import TrainResult

CHANGING = ("timing/", "generate/trajectory")  # depend on the clock
RESUME = "trainer.resume_mode=latest"


def fill(folder: Path, monkeypatch: pytest.MonkeyPatch, *, num_prompts: int) -> Path:
    """Write a folder with a model and prompts, without a real tokenizer."""
    tiny_model().save_pretrained(folder / "model")
    write_prompts(folder / "train.jsonl", num_prompts)
    write_prompts(folder / "val.jsonl", 4)
    monkeypatch.setattr(run_module, "load_tokenizer", lambda path: FakeTokenizer())
    # It collects garbage twice, which takes longer than a run, as the tests' heap is large.
    monkeypatch.setattr(run_module, "freeze_heap", nullcontext)
    return folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return fill(tmp_path, monkeypatch, num_prompts=8)


def settings(folder: Path, name: str, *overrides: str) -> Config:
    return load_config(
        None,
        [
            f"data.train_data=[{folder}/train.jsonl]",
            f"data.val_data=[{folder}/val.jsonl]",
            f"trainer.policy.model.path={folder}/model",
            f"trainer.run_path={folder}/{name}",
            "trainer.policy.optimizer_config.lr=0.01",
            "trainer.train_batch_size=4",
            "trainer.policy_mini_batch_size=2",
            "trainer.epochs=3",
            "trainer.eval_interval=2",
            "trainer.ckpt_interval=2",
            "trainer.max_ckpts_to_keep=-1",
            "trainer.logger=[jsonl]",
            "trainer.plot=false",
            "generator.n_samples_per_prompt=4",
            *overrides,
        ],
    )


class DiedError(Exception):
    """Simulates kill -9: nothing is written afterwards."""


class Recorder:
    """Creates and records fake rollouts.

    `during` is called before each batch is generated; `edit` changes what was generated.
    """

    def __init__(
        self,
        during: Callable[[int], Awaitable[None]] | None = None,
        edit: Callable[[FakeRollouts, list[Trajectory], str], None] | None = None,
    ) -> None:
        self.rollouts: list[FakeRollouts] = []
        self.during, self.edit = during, edit

    async def __call__(self, config: Config, tokenizer: Any, model_path: str) -> FakeRollouts:
        during, edit = self.during, self.edit

        class Watched(FakeRollouts):
            async def before_batch(self, step: int, phase: str) -> None:
                if during is not None and phase == "train":
                    await during(step)

            async def generate(
                self, prompts: Sequence[Prompt], *, step: int, phase: str
            ) -> list[Trajectory]:
                trajectories = await super().generate(prompts, step=step, phase=phase)
                if edit is not None:
                    edit(self, trajectories, phase)
                return trajectories

        self.rollouts.append(Watched(config, tiny_model(seed=1)))
        return self.rollouts[-1]

    @property
    def order(self) -> list[tuple[int, list[str]]]:
        return [(s, uids) for r in self.rollouts for s, phase, uids in r.calls if phase == "train"]


@contextmanager
def dying() -> Iterator[None]:
    """Let a run die of DiedError as by kill -9: without a last checkpoint."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(DiedError):
        patch.setattr(RunSaver, "rescue", lambda self: None)
        yield


def dies_at(step: int) -> Callable[[int], Awaitable[None]]:
    async def die(now: int) -> None:
        if now == step:
            raise DiedError

    return die


def assert_same_files(one: TrainResult, two: TrainResult, *files: str | Path) -> None:
    """Compare files of the last checkpoints of two runs, to the bit."""
    assert one.checkpoint is not None and two.checkpoint is not None
    for file in files:
        assert (one.checkpoint / file).read_bytes() == (two.checkpoint / file).read_bytes(), file


def interrupted_in(step: int) -> Recorder:
    async def during(now: int) -> None:
        if now == step:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(60)  # cancelled by the stop

    return Recorder(during)


def train(config: Config, recorder: Any = None) -> TrainResult:
    return skyrl_fast.train_agent(config, make_rollouts=recorder or Recorder())


def steady(path: Path, *changing: str) -> list[dict[str, Any]]:
    """Return the metrics without those that depend on the clock, or begin as the others."""
    left_out = (*CHANGING, *changing)
    return [
        {name: value for name, value in row.items() if not name.startswith(left_out)}
        for row in read_metrics(path)
    ]


def after(rows: list[dict[str, Any]], step: int) -> list[dict[str, Any]]:
    return [row for row in rows if row["step"] > step]


def assert_same_curves(one: Path, two: Path) -> None:
    """Raise unless two runs measured about the same in each step."""
    wanted, found = (steady(path / "metrics.jsonl") for path in (one, two))
    assert len(wanted) == len(found)
    for a, b in zip(wanted, found, strict=True):
        assert b.keys() >= a.keys()
        for name in {"reward/avg_raw_reward", "policy/grad_norm", "policy/loss"} & a.keys():
            assert b[name] == pytest.approx(a[name], rel=1e-2, abs=1e-4), name
