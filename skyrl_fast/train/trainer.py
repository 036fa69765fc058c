"""The training loop: rollouts, batch, advantages, optimizer steps, weight sync.

A step is one batch of prompts. Its result (weights, counters, data position) is a function of the
seed and the step number alone, so that a resumed run continues as if it had never stopped.

Design: docs/design/008-trainer.md.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from skyrl_fast.batch import StepBatch
from skyrl_fast.config import Config, sums_rewards, to_dict
from skyrl_fast.rollout.engine.protocol import EngineStoppedError
from skyrl_fast.rollout.failures import FailureWatch, fail_infinite_rewards, log_failures
from skyrl_fast.rollout.teachers import Teachers
from skyrl_fast.rollout.trajectory import Trajectory
from skyrl_fast.train.algorithm.batch_warnings import BatchWarnings
from skyrl_fast.train.algorithm.distillation import (
    distillation_metrics,
    with_teacher_logprobs,
)
from skyrl_fast.train.algorithm.dynamic_sampling import GroupSampling
from skyrl_fast.train.algorithm.off_policy import warn_of_stale_tokens
from skyrl_fast.train.algorithm.policies import join_roles, split_by_policy
from skyrl_fast.train.algorithm.reward_parts import RewardParts
from skyrl_fast.train.algorithm.sequence_scope import Sequences
from skyrl_fast.train.algorithm.training_rows import SampledRows
from skyrl_fast.train.callbacks import Callback, CallbackList
from skyrl_fast.train.checkpoint.local import STATE, CheckpointError, read_state, write_json
from skyrl_fast.train.checkpoint.run_saver import RunSaver
from skyrl_fast.train.checkpoint.starting_point import checkpoint_folder
from skyrl_fast.train.checkpoint.writer import CheckpointWriter
from skyrl_fast.train.data.mixture import MixtureSampler, load_curriculum, make_sampler
from skyrl_fast.train.data.prompts import Prompt, digest_of
from skyrl_fast.train.data.random_state import load_random_state, save_random_state
from skyrl_fast.train.data.schedule import total_steps
from skyrl_fast.train.divergence import DivergenceWatch
from skyrl_fast.train.flow.batch_source import BatchSource, Judged, token_staleness
from skyrl_fast.train.flow.group_flow import GroupFlow
from skyrl_fast.train.flow.rollouts import Rollouts, count_sampled_tokens, split_rollout_time
from skyrl_fast.train.flow.waiting import (
    BackgroundWriter,
    Compute,
    StopRequested,
    Stopwatch,
    until_stopped,
)
from skyrl_fast.train.memory.peak import PeakMemory
from skyrl_fast.train.metrics.evaluation import evaluation_metrics
from skyrl_fast.train.metrics.rewards import metric_name, source_metrics, source_statistics
from skyrl_fast.train.model.critic import Critic
from skyrl_fast.train.model.models import TrainedPolicy
from skyrl_fast.train.model.policy import Policy, Reference
from skyrl_fast.train.output.loggers import Logger
from skyrl_fast.train.output.progress import ProgressDisplay
from skyrl_fast.train.output.time_shares import time_shares
from skyrl_fast.train.output.timeline import Timeline
from skyrl_fast.train.prepare_batch import (
    build_rows,
    judge_groups,
    rollout_metrics,
    training_batch,
    with_advantages,
)
from skyrl_fast.train.run_progress import RunProgress
from skyrl_fast.train.update import update_policy
from skyrl_fast.trajectory_store.trained import TrainedRows
from skyrl_fast.trajectory_store.writer import TrajectoryWriter

logger = logging.getLogger(__name__)
T = TypeVar("T")

OPTIMIZERS = "optimizers"  # part of a checkpoint: a folder for each named policy


@dataclass(slots=True)
class Components:
    """What a trainer works with; `run.py` builds it from a config, tests from fakes.

    Args:
        trained: by the policy's name, None where there is one without a name.
        upload: called with each complete checkpoint.
    """

    trained: Mapping[str | None, TrainedPolicy]
    tokenizer: Any
    rollouts: Rollouts
    train_prompts: Sequence[Prompt]
    eval_prompts: Sequence[Prompt]
    loggers: Sequence[Logger] = ()
    callbacks: Sequence[Callback] = ()
    reference: Reference | None = None
    critic: Critic | None = None
    teachers: Teachers | None = None
    clock: Callable[[], float] = time.perf_counter
    upload: Callable[[Path], None] | None = None

    @property
    def policy(self) -> Policy:
        """The first policy, whose model all share."""
        return next(iter(self.trained.values())).policy


@dataclass(frozen=True, slots=True)
class _TrainedPart:
    """What a policy was trained on in a step."""

    policy: str | None
    rows: TrainedRows
    kl_coef: float  # coefficient of its next step
    optimizer_steps: int
    skipped_steps: int


class Trainer:
    """Runs the training loop over the given components."""

    def __init__(self, config: Config, components: Components, display: ProgressDisplay) -> None:
        settings = config.trainer
        self.progress = RunProgress()
        self.stop = asyncio.Event()
        self._config = config
        self._components = components
        self._display = display
        self._run_path = Path(settings.run_path)
        self._callbacks = CallbackList(components.callbacks)
        self.saver = RunSaver(
            self.progress,
            CheckpointWriter(
                checkpoint_folder(config),
                keep=settings.max_ckpts_to_keep,
                ranks=components.policy.ranks,
                upload=components.upload,
            ),
            prepare=self._prepare_checkpoint,
            write_state=self.write_state,
            on_checkpoint=self._callbacks.on_checkpoint,
        )
        self._curriculum = load_curriculum(config.data.curriculum)
        self._sampler = make_sampler(
            components.train_prompts,
            config.data.mixture,
            batch_size=settings.train_batch_size,
            seed=settings.seed,
            digest=digest_of(components.train_prompts),
        )
        self.total_steps = total_steps(config, len(components.train_prompts))
        # The coefficient of each policy in the next step.
        self._kl_coefs = dict.fromkeys(components.trained, settings.algorithm.kl_loss_coef)
        self._used_up = 0  # epochs that ended without a full batch
        self._writer: TrajectoryWriter | None = None  # None: dump_trajectories is off
        if settings.eval_before_train and components.eval_prompts:
            self.saver.unreported = {}  # step 0 has only an evaluation
        self._compute = Compute()
        self._background = BackgroundWriter(components.clock)  # writes trajectories
        self._timeline = Timeline(
            self._run_path / "timeline", settings.profile_steps, components.rollouts.board
        )
        self._timed = Stopwatch(components.clock, display.phase, self._timeline.phase)
        self._failures = FailureWatch()
        self._divergence = {name: DivergenceWatch() for name in components.trained}
        self._memory = PeakMemory(components.policy.device)
        self._batch_warnings = BatchWarnings(config)
        self._reward_parts = RewardParts(config.trainer.algorithm.gdpo_weights)
        self._source = BatchSource(config, self._failures)
        self._flow: GroupFlow | None = None

    async def run(self) -> RunProgress:
        """Train to the end, or until `stop` is set; either way a checkpoint is written.

        Raises:
            Whatever a component raises, after a checkpoint of the last complete step.
        """
        try:
            await self._train()
        except (StopRequested, EngineStoppedError):
            self.progress.stopped = True
            self.progress.stopped_by = self._callbacks.stopped_by
        except Exception:
            self.saver.rescue()
            raise
        finally:
            if self._flow is not None:
                await self._flow.close()
            self._compute.close()
            self._background.close()
        try:
            self.saver.save_last()
        except CheckpointError:
            # The error may be of an earlier checkpoint, written in the background: the last step
            # needs one, too.
            self.saver.rescue()
            raise
        self._background.wait()
        return self.progress

    def restore(self, checkpoint: Path) -> None:
        """Resume from a verified checkpoint whose policy weights are already loaded.

        Raises:
            CheckpointError: the checkpoint is damaged, or has an impossible state.
        """
        state = read_state(checkpoint)
        self._sampler.restore(state["sampler"])
        if self._config.trainer.algorithm.kl_ctrl.type == "adaptive":
            saved = state.get("kl_coef", self._kl_coefs)
            if isinstance(saved, dict):
                self._kl_coefs |= saved
            else:
                self._kl_coefs |= {None: saved}
        self._used_up = state.get("epochs_used_up", 0)
        for name, one in self._components.trained.items():
            one.optimizer.load(checkpoint if name is None else checkpoint / OPTIMIZERS / name)
        if self._components.critic is not None:
            self._components.critic.restore(checkpoint / "critic")
        load_random_state(checkpoint / "random.safetensors", state["random"])
        self.progress.step = state["step"]
        self.saver.resume(checkpoint, state.get("unreported"))

    # --- the loop ---------------------------------------------------------------------------

    async def _train(self) -> None:
        settings = self._config.trainer
        if settings.dump_trajectories:
            self._writer = TrajectoryWriter(
                self._run_path / "trajectories",
                self._components.tokenizer,
                last_step=self.progress.step,
                sums_rewards=sums_rewards(self._config),
            )
        synced: dict[str, Any] = {}
        # Also verifies that the engine has loaded what the policy was loaded from.
        await self._sync(synced, {})
        warn_of_stale_tokens(self._config)
        self._flow = flow = GroupFlow(
            self._components.rollouts,
            self._components.train_prompts,
            self._sampler,
            batch_size=settings.train_batch_size,
            max_staleness=self._config.max_staleness,
            version=self.progress.step,
            epochs=settings.epochs,
            last_version=self.total_steps,
            clock=self._components.clock,
        )
        unreported = self.saver.unreported
        if unreported is not None:
            await self._conclude(synced | unreported if self.progress.step else {})
        while not self._over():
            if self.stop.is_set():
                raise StopRequested
            with self._timeline.of_step(self.progress.step + 1):
                trained = await self._step(flow)
            # Dynamic sampling and dropped groups use up prompts before the last planned step.
            if not trained:
                await self._end_early()
                break
        self._failures.end()

    async def _step(self, flow: GroupFlow) -> bool:
        """Train one batch; return False if the prompts ran out before it was full."""
        # Several ranks, and uploads, complete a checkpoint during a later step.
        self.saver.report_finished()
        components = self._components
        started = components.clock()
        generating = components.rollouts.board.generating_seconds()
        times: dict[str, float] = {}
        sample = await self._sample(flow, times)
        if sample is None:
            return False
        groups, ages = sample
        # The engine frees a shared GPU before anything of the update is allocated.
        await self._timed("sync", times, components.rollouts.sleep(components.policy))
        trajectories = groups.trajectories()
        times["trainer_idle"] = times["wait" if self._config.max_staleness else "rollout"]
        if not self._config.max_staleness:  # otherwise generation does not wait for the trainer
            split_rollout_time(times, groups.sampled)
        parts, metrics = await self.train_policies(trajectories, groups.rows, times)
        metrics |= groups.metrics() | ages
        if components.teachers is not None:
            metrics |= components.teachers.faults()
        # Only now, so that an interrupted step is repeated from its beginning.
        self._sampler = flow.consume()
        metrics |= self._follow_curriculum(trajectories)
        # With the data position: an interrupted step must not move the coefficient twice.
        self._kl_coefs |= {part.policy: part.kl_coef for part in parts}
        self.progress.step += 1
        metrics["trainer/epoch"] = float(self._sampler.epoch)
        self.saver.complete_step(metrics)
        # Before anything that can fail: every checkpoint of this step has its trajectories.
        storing = self._store("train", trajectories, [part.rows for part in parts])
        await self._timed("store", times, storing)
        times["store_background"] = self._background.take_elapsed()
        for part in parts:
            self._divergence[part.policy].see(part.skipped_steps, part.optimizer_steps)
        await self._sync(metrics, times)
        # Only now may groups start that are to be sampled with the new weights.
        flow.advance(self.progress.step)
        self.progress.trajectories = trajectories
        times["step"] = components.clock() - started
        generating = components.rollouts.board.generating_seconds() - generating
        if generating:
            times["engine_idle"] = max(0.0, times["step"] - generating)
        metrics |= {f"timing/{name}": seconds for name, seconds in times.items()}
        metrics["timing/tokens_per_second"] = count_sampled_tokens(groups.sampled) / times["step"]
        trained_tokens = float(sum((part.rows.batch.loss_mask != 0).sum() for part in parts))
        metrics["timing/trained_tokens_per_second"] = trained_tokens / times["step"]
        metrics |= self._memory.metrics()
        if components.policy.ranks.size > 1:
            metrics |= components.policy.ranks.traffic.take()
        await self._conclude(metrics)
        return True

    def _follow_curriculum(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Let the curriculum set the weights of what is drawn next; return metrics by source."""
        statistics = source_statistics(trajectories, sums_rewards=sums_rewards(self._config))
        metrics = source_metrics(statistics)
        if not isinstance(self._sampler, MixtureSampler):
            return metrics
        if self._curriculum is not None:
            self._sampler.follow(self._curriculum, self.progress.step + 1, statistics)
        weights = self._sampler.weights
        return metrics | {f"data/{metric_name(name)}/weight": w for name, w in weights.items()}

    async def _conclude(self, metrics: dict[str, Any]) -> None:
        """Evaluate if due, and report the step; a resumed run catches up on what was missed."""
        step = self.progress.step
        first = step == 0
        evaluation: dict[str, float] = {}
        if self._components.eval_prompts and (
            first or self._due(self._config.trainer.eval_interval)
        ):
            evaluation = await self._evaluate()
        metrics |= evaluation
        if "timing/step" in metrics:
            metrics |= time_shares(metrics)
        self._report(metrics)
        self.saver.end_report()
        if not first:
            self._callbacks.on_step(step, metrics)
        if evaluation:
            self._callbacks.on_eval(step, evaluation)
        # The step's checkpoint was written before the step was reported.
        is_outdated = self.saver.is_saved
        if is_outdated or (not first and self._due(self._config.trainer.ckpt_interval)):
            await self._compute(self.saver.wait)  # the one before
            self.saver.report_finished()
            await self._compute(self.saver.save)  # generation continues meanwhile
            self.saver.report_finished()
        if self._callbacks.stopped_by is not None and not self._over():
            raise StopRequested

    async def _sample(
        self, flow: GroupFlow, times: dict[str, float]
    ) -> tuple[GroupSampling, dict[str, float]] | None:
        """Return the step's groups, their staleness and fault metrics; None if the data ran out."""
        version = self.progress.step

        async def wait(work: Coroutine[Any, Any, T]) -> T:
            name = "wait" if self._config.max_staleness else "rollout"
            return await self._timed(name, times, self._until_stopped(work))

        async def judge(trajectories: Sequence[Trajectory]) -> Judged:
            work = self._compute(judge_groups, trajectories, self._config)
            return await self._timed("batch", times, work)

        step = await self._source.next(flow, version, wait=wait, judge=judge)
        if step is None:
            return None
        sampling, metrics = step
        if self._config.max_staleness:
            metrics |= token_staleness(sampling.trajectories(), version) | flow.metrics()
        faults = self._components.rollouts.faults() | flow.faults
        return sampling, metrics | {f"faults/{name}": float(n) for name, n in faults.items()}

    async def train_policies(
        self,
        trajectories: Sequence[Trajectory],
        find_rows: Callable[[], SampledRows | None],
        times: dict[str, float],
    ) -> tuple[list[_TrainedPart], dict[str, float]]:
        """Train each policy on its own steps, or those of its roles; return these, and metrics."""
        self._batch_warnings.see_batch(trajectories)
        self._reward_parts.see_batch(trajectories)
        names = self._config.call_names
        if not names:
            part, metrics = await self.train_policy(None, trajectories, find_rows, times)
            return [part], metrics
        report = self._compute(
            lambda: rollout_metrics(trajectories, self._config, find_rows()),
        )
        metrics = await self._timed("batch", times, report)
        parts = []
        sums = sums_rewards(self._config)
        of_names = split_by_policy(trajectories, names, sums_rewards=sums)
        if self._config.roles and of_names:
            part, of_roles = await self._train_roles(of_names, times)
            return [part], of_roles | metrics
        for name, own in of_names.items():
            # Without `find_rows`, whose rows are of the complete trajectories.
            part, of_policy = await self.train_policy(name, own, lambda: None, times)
            parts.append(part)
            # Metrics without a policy's name are of the complete trajectories.
            metrics |= {f"{name}/{key}": value for key, value in of_policy.items()}
        if not parts:
            logger.warning("no policy was called for this batch: no weight changes")
        return parts, metrics

    async def _train_roles(
        self, of_roles: Mapping[str, Sequence[Trajectory]], times: dict[str, float]
    ) -> tuple[_TrainedPart, dict[str, float]]:
        """Train the policy on the steps of all its roles, each compared with itself alone."""
        joined, uids = join_roles(of_roles)
        num_roles = len(of_roles)
        part, metrics = await self.train_policy(None, joined, lambda: None, times, num_roles)
        for role, own in of_roles.items():
            work = self._compute(
                lambda own=own: rollout_metrics(own, self._config, build_rows(own, self._config)),
            )
            report = await self._timed("batch", times, work)
            metrics |= {f"{role}/{key}": value for key, value in report.items()}
        # Stored with the steps of their trajectories, under the names of the prompts.
        own_uids = [replace(one, uid=uid) for one, uid in zip(joined, uids, strict=True)]
        return replace(part, rows=replace(part.rows, trajectories=own_uids)), metrics

    async def train_policy(
        self,
        name: str | None,
        trajectories: Sequence[Trajectory],
        find_rows: Callable[[], SampledRows | None],
        times: dict[str, float],
        groups_per_prompt: int = 1,
    ) -> tuple[_TrainedPart, dict[str, float]]:
        self._batch_warnings.see_policy(trajectories)
        # In the thread, too: `find_rows` joins the rows that dynamic sampling has built.
        work = self._compute(lambda: training_batch(trajectories, self._config, find_rows()))
        batch, units, metrics = await self._timed("batch", times, work)
        batch, kl_metrics, kl_coef = await self._timed(
            "advantages", times, self._compute(self._with_advantages, name, batch, units)
        )
        batch, of_teachers = await self._ask_teachers(batch, trajectories, times)
        self.saver.begin_update()
        # NaN: not computed. The update fills in what it computes anyway.
        trained = TrainedRows(trajectories, batch, torch.full_like(batch.rewards, float("nan")))
        updated = await self._timed(
            "forward_backward",
            times,
            self._compute(self._update, name, trained, groups_per_prompt),
        )
        steps = updated["policy/optimizer_steps"]
        skipped = updated["policy/nonfinite_steps_skipped"] * steps  # the metric is their share
        part = _TrainedPart(name, trained, kl_coef, round(steps), round(skipped))
        if trained.trainer_logprobs is not None and batch.teacher_logprobs is not None:
            of_teachers |= distillation_metrics(batch, trajectories, trained.trainer_logprobs)
        return part, metrics | kl_metrics | updated | of_teachers

    async def _ask_teachers(
        self, batch: StepBatch, trajectories: Sequence[Trajectory], times: dict[str, float]
    ) -> tuple[StepBatch, dict[str, float]]:
        """Return the batch with the teachers' log-probabilities, if the run has teachers."""
        teachers = self._components.teachers
        if teachers is None:
            return batch, {}
        work = with_teacher_logprobs(
            batch,
            trajectories,
            teachers,
            top_k=self._config.trainer.algorithm.distillation.top_k,
            vocab_size=self._components.policy.vocab_size,
        )
        return await self._timed("teachers", times, self._until_stopped(work))

    def _with_advantages(
        self, name: str | None, batch: StepBatch, units: Sequences
    ) -> tuple[StepBatch, dict[str, float], float]:
        return with_advantages(
            batch,
            units,
            self._config.trainer.algorithm,
            policy=self._components.trained[name].policy,
            reference=self._components.reference,
            critic=self._components.critic,
            kl_coef=self._kl_coefs[name],
        )

    def _update(
        self, name: str | None, trained: TrainedRows, groups_per_prompt: int
    ) -> dict[str, float]:
        settings = self._config.trainer
        critic = self._components.critic
        if critic is None:
            critic_metrics = {}
        else:
            critic_metrics = critic.update(trained.batch)
        one = self._components.trained[name]
        return critic_metrics | update_policy(
            one.policy,
            one.optimizer,
            trained.batch,
            algorithm=settings.algorithm,
            mini_batch_size=settings.policy_mini_batch_size * groups_per_prompt,
            update_epochs=settings.update_epochs_per_batch,
            max_seq_len=settings.algorithm.max_seq_len
            or self._config.generator.max_input_length
            + self._config.generator.sampling_params.max_generate_length,
            reference=self._components.reference,
            seen_logprobs=trained.trainer_logprobs,
        )

    async def _end_early(self) -> None:
        """Evaluate after the prompts ran out: the last step could not tell that it was the last."""
        if self._components.eval_prompts and not self._due(self._config.trainer.eval_interval):
            metrics = await self._evaluate()
            self._report(metrics)
            self._note_end()  # now: a run that resumes after an error below has reported it
            self._callbacks.on_eval(self.progress.step, metrics)
        self._note_end()

    def _note_end(self) -> None:
        """Let the next checkpoint say that no further batch can be filled."""
        self._used_up = self._config.trainer.epochs
        self.saver.discard()

    async def _sync(self, metrics: dict[str, Any], times: dict[str, float]) -> None:
        work = self._components.rollouts.update_weights(
            self._components.policy, version=self.progress.step
        )
        metrics |= await self._timed("sync", times, work)

    async def _evaluate(self) -> dict[str, float]:
        components = self._components
        size = self._config.trainer.eval_batch_size
        times: dict[str, float] = {}
        trajectories: list[Trajectory] = []
        for start in range(0, len(components.eval_prompts), size):
            prompts = components.eval_prompts[start : start + size]
            # The seeds of step 0 every time: evaluations differ by the weights alone.
            work = components.rollouts.generate(prompts, step=0, phase="eval")
            sampled = await self._timed("eval", times, self._until_stopped(work))
            fail_infinite_rewards(sampled)
            log_failures(sampled)
            self._failures.see(sampled)
            trajectories += sampled
        samples = self._config.generator.eval_n_samples_per_prompt
        metrics = evaluation_metrics(trajectories, self._config, ks={1, samples})
        metrics["timing/eval"] = times["eval"]
        self.progress.trajectories = trajectories
        # In the background, but in the order of the steps.
        await self._store("eval", trajectories)
        return metrics

    # --- output -------------------------------------------------------------------------------

    def _report(self, metrics: dict[str, float]) -> None:
        for receiver in self._components.loggers:
            receiver.write(self.progress.step, metrics)
        self._display.step(self.progress.step, metrics)

    async def _store(
        self,
        phase: str,
        trajectories: list[Trajectory],
        trained: Sequence[TrainedRows] = (),
    ) -> None:
        if self._writer is not None:
            write = partial(self._writer.write, trained=trained)
            await self._background.start(partial(write, self.progress.step, phase, trajectories))

    def _prepare_checkpoint(self) -> None:
        self._display.phase("checkpoint")
        self._background.wait()  # the store must hold all steps up to the checkpoint's

    def write_state(self, folder: Path) -> None:
        components = self._components
        components.policy.save(folder / "policy", components.tokenizer)
        for name, one in components.trained.items():
            if name is None:
                of_policy = folder
            else:
                of_policy = folder / OPTIMIZERS / name
            of_policy.mkdir(parents=True, exist_ok=True)
            one.optimizer.save(of_policy)
        if components.critic is not None:
            components.critic.save(folder / "critic")
        state = {
            "step": self.progress.step,
            "sampler": self._sampler.state(),
            "kl_coef": self._kl_coefs.get(None, self._kl_coefs),
            "unreported": self.saver.unreported,
            "epochs_used_up": self._used_up,
            "random": save_random_state(folder / "random.safetensors"),
            "config": to_dict(self._config),
        }
        write_json(folder / STATE, state)

    # --- waiting ------------------------------------------------------------------------------

    def _over(self) -> bool:
        # Dynamic sampling uses more prompts per step, so the epochs can end before total_steps.
        spent = max(self._sampler.epoch, self._used_up) >= self._config.trainer.epochs
        return spent or self.progress.step >= self.total_steps

    def _due(self, interval: int) -> bool:
        return self._over() or (interval > 0 and self.progress.step % interval == 0)

    async def _until_stopped(self, work: Coroutine[Any, Any, T]) -> T:
        rollouts = self._components.rollouts
        repair = partial(rollouts.repair, self._components.policy, version=self.progress.step)
        return await until_stopped(
            work, stop=self.stop, wait_for_fault=rollouts.wait_for_fault, repair=repair
        )
