"""Asynchronous training, with rollouts that sample from the model itself, at their own pace.

What is random in a real run (which group ends when) is drawn from a seed here.
"""

import asyncio
import logging
import math
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import _training
import pytest
from _fakes import FakeRollouts, tiny_model
from _training import DiedError, assert_same_files, fill, steady

import skyrl_fast
from skyrl_fast.config import Config
from skyrl_fast.rollout.failures import RolloutError
from skyrl_fast.rollout.group_runner import GroupDroppedError
from skyrl_fast.rollout.trajectory import Trajectory
from skyrl_fast.train.checkpoint.local import checkpoints
from skyrl_fast.train.checkpoint.run_saver import RunSaver
from skyrl_fast.train.data.prompts import Prompt, PromptSampler
from skyrl_fast.train.flow.group_flow import wait_for_change
from skyrl_fast.train.model.policy import Policy
from skyrl_fast.train.output.loggers import read_metrics
from skyrl_fast.train.run import TrainResult
from skyrl_fast.trajectory_store import read_index

pytestmark = pytest.mark.ci


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return fill(tmp_path, monkeypatch, num_prompts=24)


def settings(folder: Path, name: str, *overrides: str, staleness: int = 1) -> Config:
    return _training.settings(
        folder,
        name,
        "trainer.policy_mini_batch_size=4",
        "trainer.epochs=2",
        "trainer.eval_interval=6",
        "trainer.ckpt_interval=3",
        "trainer.fully_async.enabled=true",
        f"trainer.fully_async.max_staleness_steps={staleness}",
        "trainer.algorithm.off_policy_correction.tis_ratio_type=token",
        "generator.n_samples_per_prompt=2",
        *overrides,
    )


class PacedRollouts(FakeRollouts):
    """Each group takes a random number of event-loop iterations; records its events."""

    def __init__(self, config: Config, model: Any, seed: int) -> None:
        super().__init__(config, model)
        self.random = random.Random(seed)
        self.running = 0
        self.most_running = 0
        self.started: list[tuple[int, str]] = []

    async def generate(
        self, prompts: Sequence[Prompt], *, step: int, phase: str
    ) -> list[Trajectory]:
        if phase == "eval":
            return await super().generate(prompts, step=step, phase=phase)
        assert step == self.version
        self.started.append((step, prompts[0].uid))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            for _ in range(self.random.choice([0, 1, 2, 30])):
                await asyncio.sleep(0.0005)
            await self.fault(prompts[0], step)
            return await super().generate(prompts, step=step, phase=phase)
        finally:
            self.running -= 1

    async def fault(self, prompt: Prompt, step: int) -> None:
        """Hook for tests that inject faults."""


class Maker:
    """Creates and records paced rollouts."""

    def __init__(self, seed: int = 0, kind: type[PacedRollouts] = PacedRollouts) -> None:
        self.seed = seed
        self.kind = kind
        self.made: list[PacedRollouts] = []

    async def __call__(self, config: Config, tokenizer: Any, model_path: str) -> FakeRollouts:
        self.made.append(self.kind(config, tiny_model(), self.seed + len(self.made)))
        return self.made[-1]


def train(config: Config, make: Any = None) -> TrainResult:
    return skyrl_fast.train_agent(config, make_rollouts=make or Maker())


def trained(outcome: TrainResult) -> list[tuple[int, str, int]]:
    """Return (step, uid, repetition) of every trained trajectory."""
    return [
        (entry.step, entry.uid, entry.repetition_id)
        for entry in read_index(outcome.run_path)
        if entry.phase == "train"
    ]


@pytest.mark.spec("async.synchronous-equal")
def test_staleness_zero_equals_the_synchronous_loop_bit_for_bit(folder: Path) -> None:
    expected = train(settings(folder, "off", "trainer.fully_async.enabled=false"))
    outcome = train(settings(folder, "zero", staleness=0), Maker(seed=5))
    clock = "async/num_groups_r"  # are running, or ready, when a step begins
    assert steady(outcome.metrics, clock) == steady(expected.metrics, clock)
    assert_same_files(outcome, expected, "policy/model.safetensors", "optimizer.safetensors")


@pytest.mark.spec("async.data-order", "async.staleness-bound", "async.group-bound", "async.metrics")
@pytest.mark.parametrize("staleness", [1, 3])
def test_groups_are_trained_in_data_order_within_the_staleness_bound(
    folder: Path, staleness: int
) -> None:
    make = Maker(seed=staleness)
    outcome = train(settings(folder, "run", staleness=staleness), make)
    rollouts = make.made[0]
    assert outcome.step == 12
    order = PromptSampler(24, batch_size=4, seed=42)
    data = [str(order.next_prompt()) for _ in range(48)]
    assert [uid.partition("~")[0] for _, uid in rollouts.started] == data
    assert [uid.partition("~")[0] for _, uid, r in trained(outcome) if r == 0] == data
    assert 4 < rollouts.most_running <= 4 * (staleness + 1)
    ahead = [batch // 4 - version for batch, (version, _) in enumerate(rollouts.started)]
    assert max(ahead) == staleness and min(ahead) >= 0
    rows = read_metrics(outcome.metrics)[1:]
    assert max(row["async/staleness_max"] for row in rows) == staleness
    assert rows[0]["async/staleness_max"] == 0
    for row in rows:
        counts = [row.get(f"async/num_groups_of_staleness_{s}", 0) for s in range(staleness + 1)]
        assert sum(counts) == 4
        mean = sum(s * n for s, n in enumerate(counts)) / 4
        assert row["async/staleness_mean"] == mean
        assert row["async/token_staleness_max"] <= row["async/staleness_max"]


@pytest.mark.spec("async.importance-warning")
def test_stale_tokens_are_corrected_or_cause_a_warning(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    outcome = train(settings(folder, "run", staleness=2))
    rows = read_metrics(outcome.metrics)[1:]
    assert rows[0]["policy/is_ratio_std"] < 1e-4  # on policy
    assert max(row["policy/is_ratio_std"] for row in rows) > 1e-3
    assert "as if the present policy had sampled them" not in caplog.text
    nothing = "trainer.algorithm.off_policy_correction.tis_ratio_type=null"
    train(settings(folder, "plain", nothing, "trainer.max_training_steps=1"))
    assert "tokens up to 1 policy versions old are trained as if" in caplog.text


@pytest.mark.spec("async.importance-warning")
@pytest.mark.parametrize(
    ("overrides", "metric"),
    [
        (
            ["trainer.algorithm.policy_loss_type=rollout_is",
             "trainer.algorithm.off_policy_correction={tis_ratio_type: null}"],
            "policy/loss",
        ),
        (
            [
                "trainer.algorithm.off_policy_correction={tis_ratio_type: sequence, "
                "sequence_mask_metric: geometric}"
            ],
            "policy/geo_sequence_mask_masked_ratio",
        ),
        (
            ["trainer.algorithm.policy_loss_type=gspo", "trainer.algorithm.old_logprobs=rollout",
             "trainer.algorithm.off_policy_correction={tis_ratio_type: null}"],
            "policy/loss",
        ),
    ],
)  # fmt: skip
def test_corrections_work_at_trajectory_scope_on_stale_groups(
    folder: Path, overrides: list[str], metric: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = settings(folder, "run", "trainer.epochs=1", *overrides, staleness=2)
    assert config.trainer.algorithm.sequence_scope == "trajectory"
    rows = read_metrics(train(config).metrics)[1:]
    assert len(rows) == 6 and max(row["async/staleness_max"] for row in rows) == 2
    assert all(math.isfinite(row[metric]) for row in rows)
    if "ratio" in metric:  # nothing is masked on policy, some tokens later
        assert rows[0][metric] == 0 < max(row[metric] for row in rows)
    assert "as if the present policy had sampled them" not in caplog.text


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))]


@pytest.mark.spec("async.resume")
@pytest.mark.parametrize("seed", SEEDS)
def test_each_sample_is_trained_exactly_once_after_kill_and_resume(
    folder: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = Counter((uid, r) for _, uid, r in trained(train(settings(folder, "expected"))))
    moments = random.Random(seed)
    name = f"killed{seed}"
    outcome = None
    while outcome is None:
        starts = moments.randrange(3, 40)

        class Killed(PacedRollouts):
            async def fault(self, prompt: Prompt, step: int, starts: int = starts) -> None:
                if len(self.started) >= starts:
                    raise DiedError

        config = settings(folder, name, "trainer.resume_mode=latest", staleness=2)
        with monkeypatch.context() as patch:
            patch.setattr(RunSaver, "rescue", lambda self: None)
            try:
                outcome = train(config, Maker(seed, Killed))
            except DiedError:
                continue
    once = Counter((uid.partition("~")[0], r) for _, uid, r in trained(outcome))
    assert outcome.step == 12
    assert once == Counter({(uid.partition("~")[0], r): 2 for uid, r in undisturbed})


FILTER = "trainer.algorithm.dynamic_sampling.type=filter"


@pytest.mark.spec("async.dynamic-sampling")
@pytest.mark.parametrize("kind", ["filter", "replace"])
def test_dynamic_sampling_drops_complete_groups_and_the_next_take_their_place(
    folder: Path, kind: str
) -> None:
    class Graded(PacedRollouts):
        async def generate(
            self, prompts: Sequence[Prompt], *, step: int, phase: str
        ) -> list[Trajectory]:
            trajectories = await super().generate(prompts, step=step, phase=phase)
            for one in trajectories:
                easy = int(one.uid.partition("~")[0].removeprefix("eval-")) % 3 == 0
                one.steps[-1].reward = 1.0 if easy else float(one.repetition_id % 2)
            return trajectories

    make = Maker(2, Graded)
    wanted = f"{{type: {kind}, min_replace_ratio: 0}}"
    outcome = train(
        settings(folder, "run", f"trainer.algorithm.dynamic_sampling={wanted}", staleness=2), make
    )
    rows = read_metrics(outcome.metrics)[1:]
    for row in rows:
        assert row["reward/avg_raw_reward"] == 0.5
        assert row["policy/optimizer_steps"] == 1
        assert row["async/staleness_max"] <= 2
        assert row["dynamic_sampling/num_groups_unused"] == 0
    assert make.made[0].most_running <= 12
    order = PromptSampler(24, batch_size=4, seed=42)
    data = [str(order.next_prompt()) for _ in range(48)]
    if kind == "filter":
        good = [uid for uid in data if int(uid) % 3]
        got = [uid.partition("~")[0] for _, uid, r in trained(outcome) if r == 0]
        assert outcome.step == len(good) // 4
        assert got == good[: 4 * outcome.step]  # in data order, without gaps
    else:
        assert outcome.step == 12


@pytest.mark.spec("async.dynamic-sampling")
def test_dynamic_sampling_limits_the_requested_groups(folder: Path) -> None:
    class Easy(PacedRollouts):
        async def generate(
            self, prompts: Sequence[Prompt], *, step: int, phase: str
        ) -> list[Trajectory]:
            trajectories = await super().generate(prompts, step=step, phase=phase)
            for one in trajectories:
                one.steps[-1].reward = 1.0
            return trajectories

    limit = "trainer.algorithm.dynamic_sampling.max_sample_batches=3"
    with pytest.raises(Exception, match="after 3 batches of prompts 0 of 12 sampled"):
        train(settings(folder, "run", FILTER, limit), Maker(0, Easy))


@pytest.mark.spec("async.lost-group")
def test_dropped_group_is_replaced_by_the_next(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Stuck(PacedRollouts):
        async def fault(self, prompt: Prompt, step: int) -> None:
            if prompt.uid in ("3", "7"):
                raise GroupDroppedError(f"group {prompt.uid}: all were stuck")

    outcome = train(settings(folder, "run", "trainer.epochs=1"), Maker(0, Stuck))
    order = PromptSampler(24, batch_size=4, seed=42)
    data = [str(order.next_prompt()) for _ in range(24)]
    left = [uid for uid in data if uid not in ("3", "7")]
    assert outcome.step == 5  # of 22 groups
    assert [uid for _, uid, r in trained(outcome) if r == 0] == left[:20]
    rows = [row for row in read_metrics(outcome.metrics) if "faults/dropped_groups" in row]
    assert rows[-1]["faults/dropped_groups"] == 2
    assert "dropped: group 3: all were stuck" in caplog.text


def test_run_ends_if_all_groups_are_dropped(folder: Path) -> None:
    class Stuck(PacedRollouts):
        async def fault(self, prompt: Prompt, step: int) -> None:
            raise GroupDroppedError(f"group {prompt.uid}: all were stuck")

    with pytest.raises(RolloutError, match=r"1\d groups in a row were dropped, the last one:"):
        train(settings(folder, "run"), Maker(0, Stuck))


@pytest.mark.spec("async.group-error")
def test_error_in_a_group_ends_the_run_with_a_checkpoint(folder: Path) -> None:
    class Broken(PacedRollouts):
        async def fault(self, prompt: Prompt, step: int) -> None:
            if step == 4:
                raise RuntimeError("a mistake in the package")

    make = Maker(0, Broken)
    with pytest.raises(RuntimeError, match="a mistake in the package"):
        train(settings(folder, "run"), make)
    assert checkpoints(folder / "run/checkpoints")[-1][0] >= 4
    assert make.made[0].running == 0 and make.made[0].closed


@pytest.mark.spec("async.interrupt")
def test_a_signal_leaves_a_checkpoint_and_the_run_resumes(folder: Path) -> None:
    class Interrupted(PacedRollouts):
        async def fault(self, prompt: Prompt, step: int) -> None:
            if len(self.started) == 30:
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.sleep(60)  # cancelled by the stop

    make = Maker(0, Interrupted)
    stopped = train(settings(folder, "run"), make)
    assert stopped.signal == signal.SIGTERM
    assert make.made[0].running == 0
    assert stopped.checkpoint is not None
    assert stopped.checkpoint.name == f"step_{stopped.step:06d}"
    resumed = train(settings(folder, "run", "trainer.resume_mode=latest"))
    assert (resumed.step, resumed.signal) == (12, None)
    once = Counter((uid.partition("~")[0], r) for _, uid, r in trained(resumed))
    assert set(once.values()) == {2}


@pytest.mark.spec("async.engine-restart")
def test_engine_is_repaired_while_the_trainer_waits(folder: Path) -> None:
    class Mortal(PacedRollouts):
        alive = True
        repaired: list[int] = []  # noqa: RUF012 - one run

        async def fault(self, prompt: Prompt, step: int) -> None:
            if step == 2 and not self.repaired:
                self.alive = False
            while not self.alive:
                await asyncio.sleep(0.001)

        async def wait_for_fault(self) -> None:
            while self.alive:
                await asyncio.sleep(0.001)

        async def repair(self, policy: Policy | None, *, version: int) -> None:
            self.model.load_state_dict(policy.model.state_dict())
            self.repaired.append(version)
            self.alive = True

    outcome = train(settings(folder, "run"), Maker(0, Mortal))
    assert outcome.step == 12
    assert len(Mortal.repaired) == 1 and Mortal.repaired[0] >= 2
    once = Counter((uid.partition("~")[0], r) for _, uid, r in trained(outcome))
    assert set(once.values()) == {2}


@pytest.mark.spec("async.wait-log")
def test_group_that_ends_as_a_wait_times_out_is_not_waited_for() -> None:
    class Changed:
        ended = False

        def is_set(self) -> bool:
            return self.ended

        async def wait(self) -> None:
            self.ended = True
            raise TimeoutError

    def none_is_left() -> str:
        raise AssertionError("there is nothing to wait for")

    changed: Any = Changed()
    asyncio.run(wait_for_change(changed, none_is_left, 60.0))


@pytest.mark.spec("async.wait-log")
def test_long_waits_are_logged(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyrl_fast.train.flow.group_flow.WAIT_LOG_SECONDS", 0.05)

    class Slow(PacedRollouts):
        async def fault(self, prompt: Prompt, step: int) -> None:
            if prompt.uid == self.started[0][1] and step == 0:
                deadline = time.monotonic() + 20
                while "running for" not in caplog.text and time.monotonic() < deadline:
                    await asyncio.sleep(0.02)

        def activity(self, uids: Sequence[str]) -> list[str]:
            return [f"{uids[0]}/0: turn 2, in its environment for 61 s"]

    make = Maker(0, Slow)
    with caplog.at_level(logging.WARNING):
        train(settings(folder, "run", "trainer.max_training_steps=2"), make)
    first = make.made[0].started[0][1]
    said = rf"first for {first}, running for \d+ s. {first}/0: turn 2, in its"
    assert re.search(said, caplog.text)
