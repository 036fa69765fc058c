"""The one loop: rollouts, batch, advantages, optimizer steps, weights to the engine, again.

A step is one batch of prompts. What it leaves (weights, counters, data position) is a function of
the seed and the step number alone, so that a resumed run goes on as if it had never stopped.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from skyrl_fast.batch import StepBatch
from skyrl_fast.batch.metrics import eval_metrics
from skyrl_fast.config import Config, max_input_length, to_dict
from skyrl_fast.rollout.failures import FailureWatch, log_failures
from skyrl_fast.rollout.trajectory import Trajectory
from skyrl_fast.train.algorithm.dynamic_sampling import GroupSampling
from skyrl_fast.train.algorithm.off_policy import warn_of_stale_tokens
from skyrl_fast.train.callbacks import Callback, CallbackList
from skyrl_fast.train.data.prompts import Prompt, PromptSampler
from skyrl_fast.train.data.random_state import load_random_state, save_random_state
from skyrl_fast.train.data.schedule import total_steps
from skyrl_fast.train.flow.batch_source import BatchSource, Judged, token_staleness
from skyrl_fast.train.flow.group_flow import GroupFlow
from skyrl_fast.train.flow.rollouts import Rollouts, split_rollout_time
from skyrl_fast.train.flow.waiting import Beside, Compute, StopRequested, Stopwatch, until_stopped
from skyrl_fast.train.model.critic import Critic
from skyrl_fast.train.model.optimizer import Optimizer
from skyrl_fast.train.model.policy import Policy
from skyrl_fast.train.output.checkpoint import (
    latest_checkpoint,
    read_json,
    write_checkpoint,
    write_json,
)
from skyrl_fast.train.output.loggers import Logger
from skyrl_fast.train.output.progress import ProgressDisplay
from skyrl_fast.train.prepare_batch import judged_rows, training_batch, with_advantages
from skyrl_fast.train.update import update_policy
from skyrl_fast.trajectory_store.writer import TrajectoryWriter

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(slots=True)
class Parts:
    """Everything that a trainer works with; `run.py` makes it from a config, tests from fakes."""

    policy: Policy
    optimizer: Optimizer
    tokenizer: Any
    rollouts: Rollouts
    train_prompts: Sequence[Prompt]
    eval_prompts: Sequence[Prompt]
    loggers: Sequence[Logger] = ()
    callbacks: Sequence[Callback] = ()
    reference: Policy | None = None
    critic: Critic | None = None
    clock: Callable[[], float] = time.perf_counter


@dataclass(slots=True)
class Progress:
    """What a run has reached.

    Args:
        step: batches trained.
        stopped: it was asked to stop before its end.
        stopped_by: class of the callback that asked for that, or None.
        checkpoint: the newest one.
        trajectories: the last evaluation's, else the last batch's.
    """

    step: int = 0
    stopped: bool = False
    stopped_by: str | None = None
    checkpoint: Path | None = None
    trajectories: list[Trajectory] = field(default_factory=list)


class Trainer:
    """Runs the loop over the given parts.

    Args:
        config: checked settings.
        parts: models, engine, prompts, loggers.
        display: shows phases and steps.
    """

    def __init__(self, config: Config, parts: Parts, display: ProgressDisplay) -> None:
        settings = config.trainer
        self.progress = Progress()
        self.stop = asyncio.Event()
        self._config = config
        self._parts = parts
        self._display = display
        self._run_path = Path(settings.run_path)
        self._checkpoints = Path(settings.ckpt_path or self._run_path / "checkpoints")
        self._sampler = PromptSampler(
            len(parts.train_prompts), batch_size=settings.train_batch_size, seed=settings.seed
        )
        self.total_steps = total_steps(config, len(parts.train_prompts))
        self._kl_coef = settings.algorithm.kl_loss_coef  # of the next step
        self._saved_step = -1
        self._used_up = 0  # epochs whose last prompts made no whole batch
        self._writer: TrajectoryWriter | None = None  # none: nothing is dumped
        self._whole = True  # weights, counters and data position belong together
        # Metrics of the step that was trained, until it is reported; step 0's are its evaluation's.
        first = settings.eval_before_train and parts.eval_prompts
        self._unreported: dict[str, Any] | None = {} if first else None
        self._compute = Compute()
        self._beside = Beside(parts.clock)  # writes trajectories
        self._timed = Stopwatch(parts.clock, display.phase)
        self._callbacks = CallbackList(parts.callbacks)
        self._failures = FailureWatch()
        self._source = BatchSource(config, self._failures)
        self._flow: GroupFlow | None = None

    async def run(self) -> Progress:
        """Train to the end, or until `stop` is set; a checkpoint is left either way.

        Raises:
            Whatever a part raises, after a checkpoint of the last whole step.
        """
        try:
            await self._train()
        except StopRequested:
            self.progress.stopped = True
            self.progress.stopped_by = self._callbacks.stopped_by
        except Exception:
            self._rescue()
            raise
        finally:
            if self._flow is not None:
                await self._flow.close()
            self._compute.close()
            self._beside.close()
        if self._saved_step != self.progress.step:
            self._save()
            self._announce_checkpoint()
        self._beside.wait()
        return self.progress

    def restore(self, checkpoint: Path) -> None:
        """Go on from a checkpoint; the policy's weights were loaded from its folder already.

        Raises:
            CheckpointError: it cannot be read.
            ValueError: data, batch size or seed are not those of the checkpoint.
        """
        state = read_json(checkpoint / "state.json")
        self._sampler.restore(state["sampler"])
        self._kl_coef = state.get("kl_coef", self._kl_coef)
        self._unreported = state.get("unreported")
        self._used_up = state.get("epochs_used_up", 0)
        self._parts.optimizer.load(checkpoint / "optimizer.safetensors")
        if self._parts.critic is not None:
            self._parts.critic.restore(checkpoint / "critic")
        load_random_state(checkpoint / "random.safetensors", state["random"])
        self.progress.step = self._saved_step = state["step"]
        self.progress.checkpoint = checkpoint

    # --- the loop ---------------------------------------------------------------------------

    async def _train(self) -> None:
        settings = self._config.trainer
        if settings.dump_trajectories:
            self._writer = TrajectoryWriter(
                self._run_path / "trajectories",
                self._parts.tokenizer,
                last_step=self.progress.step,
            )
        synced: dict[str, Any] = {}
        await self._sync(synced, {})
        warn_of_stale_tokens(self._config)
        self._flow = flow = GroupFlow(
            self._parts.rollouts,
            self._parts.train_prompts,
            self._sampler,
            batch_size=settings.train_batch_size,
            max_staleness=self._config.max_staleness,
            version=self.progress.step,
            epochs=settings.epochs,
            last_version=self.total_steps,
            clock=self._parts.clock,
        )
        if self._unreported is not None:
            await self._conclude(synced | self._unreported if self.progress.step else {})
        while not self._over():
            if self.stop.is_set():
                raise StopRequested
            if not await self._step(flow):
                await self._end_early()
                break

    async def _step(self, flow: GroupFlow) -> bool:
        """Train one batch; False if the prompts ended before it was full."""
        parts = self._parts
        started = parts.clock()
        times: dict[str, float] = {}
        sample = await self._sample(flow, times)
        if sample is None:
            return False
        groups, ages = sample
        trajectories = groups.trajectories()
        split_rollout_time(times, groups.sampled)
        batch, metrics = await self._timed(
            "batch",
            times,
            self._compute(lambda: training_batch(trajectories, self._config, groups.rows())),
        )
        batch, facts, kl_coef = await self._timed(
            "advantages", times, self._compute(self._with_advantages, batch)
        )
        metrics |= groups.metrics() | facts | ages
        self._whole = False
        trainer_logprobs = torch.full_like(batch.rewards, float("nan"))
        metrics |= await self._timed(
            "forward_backward", times, self._compute(self._update, batch, trainer_logprobs)
        )
        # Only now, so that a step that was broken off is done again from its beginning.
        self._sampler, self._kl_coef = flow.consume(), kl_coef
        self.progress.step += 1
        metrics["trainer/epoch"] = float(self._sampler.epoch)
        self._whole, self._unreported = True, metrics
        # Before anything that may fail: no checkpoint of this step is without them.
        storing = self._store("train", trajectories, batch, trainer_logprobs)
        await self._timed("store", times, storing)
        times["store_beside"] = self._beside.took()
        await self._sync(metrics, times)
        flow.advance(self.progress.step)
        self.progress.trajectories = trajectories
        times["step"] = parts.clock() - started
        metrics |= {f"timing/{name}": seconds for name, seconds in times.items()}
        metrics["timing/tokens_per_second"] = batch.num_tokens / times["step"]
        await self._conclude(metrics)
        return True

    async def _conclude(self, metrics: dict[str, Any]) -> None:
        """Evaluate where that is due, and report the step. A resumed run does what a stop left."""
        step = self.progress.step
        first = step == 0
        evaluation: dict[str, float] = {}
        if self._parts.eval_prompts and (first or self._due(self._config.trainer.eval_interval)):
            evaluation = await self._evaluate()
        metrics |= evaluation
        self._report(metrics)
        self._unreported = None
        if not first:
            self._callbacks.on_step(step, metrics)
        if evaluation:
            self._callbacks.on_eval(step, evaluation)
        outdated = self._saved_step == self.progress.step  # that checkpoint says otherwise
        if outdated or (not first and self._due(self._config.trainer.ckpt_interval)):
            await self._compute(self._save)  # generation goes on meanwhile
            self._announce_checkpoint()
        if self._callbacks.stopped_by is not None and not self._over():
            raise StopRequested

    async def _sample(
        self, flow: GroupFlow, times: dict[str, float]
    ) -> tuple[GroupSampling, dict[str, float]] | None:
        """The step's groups, and their ages and faults; None if the data ended first."""
        version = self.progress.step

        async def wait(work: Coroutine[Any, Any, T]) -> T:
            return await self._timed("rollout", times, self._until_stopped(work))

        async def judge(trajectories: Sequence[Trajectory]) -> Judged:
            work = self._compute(judged_rows, trajectories, self._config)
            return await self._timed("batch", times, work)

        step = await self._source.next(flow, version, wait=wait, judge=judge)
        if step is None:
            return None
        sampling, facts = step
        if self._config.max_staleness:
            facts |= token_staleness(sampling.trajectories(), version) | flow.metrics()
        faults = self._parts.rollouts.faults() | flow.faults
        return sampling, facts | {f"faults/{name}": float(n) for name, n in faults.items()}

    def _with_advantages(self, batch: StepBatch) -> tuple[StepBatch, dict[str, float], float]:
        return with_advantages(
            batch,
            self._config.trainer.algorithm,
            policy=self._parts.policy,
            reference=self._parts.reference,
            critic=self._parts.critic,
            kl_coef=self._kl_coef,
        )

    def _update(self, batch: StepBatch, trainer_logprobs: torch.Tensor) -> dict[str, float]:
        settings, critic = self._config.trainer, self._parts.critic
        facts = {} if critic is None else critic.update(batch)
        return facts | update_policy(
            self._parts.policy,
            self._parts.optimizer,
            batch,
            algorithm=settings.algorithm,
            mini_batch_size=settings.policy_mini_batch_size,
            update_epochs=settings.update_epochs_per_batch,
            max_seq_len=settings.algorithm.max_seq_len
            or max_input_length(self._config)
            + self._config.generator.sampling_params.max_generate_length,
            reference=self._parts.reference,
            seen_logprobs=trainer_logprobs,
        )

    async def _end_early(self) -> None:
        """The evaluation at the end, where the last step could not know that it was the last."""
        if self._parts.eval_prompts and not self._due(self._config.trainer.eval_interval):
            metrics = await self._evaluate()
            self._report(metrics)
            self._callbacks.on_eval(self.progress.step, metrics)
        self._used_up, self._saved_step = self._config.trainer.epochs, -1  # a checkpoint says so

    async def _sync(self, metrics: dict[str, Any], times: dict[str, float]) -> None:
        work = self._parts.rollouts.update_weights(self._parts.policy, version=self.progress.step)
        metrics |= await self._timed("sync", times, work)

    async def _evaluate(self) -> dict[str, float]:
        """Reward on the held-out prompts, sampled with the same seeds every time."""
        parts, size = self._parts, self._config.trainer.eval_batch_size
        times: dict[str, float] = {}
        trajectories: list[Trajectory] = []
        for start in range(0, len(parts.eval_prompts), size):
            prompts = parts.eval_prompts[start : start + size]
            work = parts.rollouts.generate(prompts, step=0, phase="eval")
            sampled = await self._timed("eval", times, self._until_stopped(work))
            log_failures(sampled)
            self._failures.see(sampled)
            trajectories += sampled
        sources = [t.data_source for t in trajectories]
        named = any(source is not None for source in sources)
        samples = self._config.generator.eval_n_samples_per_prompt
        metrics = eval_metrics(
            trajectories, ks=sorted({1, samples}), data_sources=sources if named else None
        )
        turns = sum(len(trajectory.steps) for trajectory in trajectories)
        metrics["eval/all/avg_num_turns"] = turns / len(trajectories)
        metrics["timing/eval"] = times["eval"]
        self.progress.trajectories = trajectories
        await self._store("eval", trajectories)
        return metrics

    # --- what it leaves -----------------------------------------------------------------------

    def _report(self, metrics: dict[str, float]) -> None:
        for receiver in self._parts.loggers:
            receiver.write(self.progress.step, metrics)
        self._display.step(self.progress.step, metrics)

    async def _store(
        self,
        phase: str,
        trajectories: list[Trajectory],
        batch: StepBatch | None = None,
        trainer_logprobs: torch.Tensor | None = None,
    ) -> None:
        """The trajectories go to the run folder beside what comes next; one part at a time."""
        if self._writer is not None:
            write = partial(self._writer.write, batch=batch, trainer_logprobs=trainer_logprobs)
            part = partial(write, self.progress.step, phase, trajectories)
            await self._beside.start(part)

    def _save(self) -> None:
        self._display.phase("checkpoint")
        self._beside.wait()  # a checkpoint says that what came before it is in the store
        self.progress.checkpoint = write_checkpoint(
            self._checkpoints,
            self.progress.step,
            self._write_state,
            keep=self._config.trainer.max_ckpts_to_keep,
        )
        self._saved_step = self.progress.step

    def _announce_checkpoint(self) -> None:
        assert self.progress.checkpoint is not None
        self._callbacks.on_checkpoint(self.progress.step, self.progress.checkpoint)

    def _write_state(self, folder: Path) -> None:
        parts = self._parts
        parts.policy.save(folder / "policy", parts.tokenizer)
        parts.optimizer.save(folder / "optimizer.safetensors")
        if parts.critic is not None:
            parts.critic.save(folder / "critic")
        state = {
            "step": self.progress.step,
            "policy_version": self.progress.step,
            "sampler": self._sampler.state(),
            "groups": {} if self._flow is None else self._flow.state(),
            "kl_coef": self._kl_coef,
            "unreported": self._unreported,
            "epochs_used_up": self._used_up,
            "random": save_random_state(folder / "random.safetensors"),
            "config": to_dict(self._config),
        }
        write_json(folder / "state.json", state)

    def _rescue(self) -> None:
        """After an error: keep what the last whole step reached, without hiding the error."""
        if not self._whole or self._saved_step == self.progress.step or self.progress.step == 0:
            return
        try:
            self._save()
        except Exception:
            latest = latest_checkpoint(self._checkpoints)
            logger.exception("no checkpoint after the error; the last one is %s", latest)

    # --- waiting ------------------------------------------------------------------------------

    def _over(self) -> bool:
        # Dynamic sampling takes more prompts per step: then the epochs end before total_steps.
        spent = max(self._sampler.epoch, self._used_up) >= self._config.trainer.epochs
        return spent or self.progress.step >= self.total_steps

    def _due(self, interval: int) -> bool:
        return self._over() or (interval > 0 and self.progress.step % interval == 0)

    async def _until_stopped(self, work: Coroutine[Any, Any, T]) -> T:
        rollouts = self._parts.rollouts
        repair = partial(rollouts.repair, self._parts.policy, version=self.progress.step)
        return await until_stopped(
            work, stop=self.stop, wait_for_fault=rollouts.wait_for_fault, repair=repair
        )
