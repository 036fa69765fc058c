"""`train_agent`: a run from its settings and objects, for scripts, notebooks and the CLI.

Design: docs/design/008-trainer.md.
"""

from __future__ import annotations

import copy
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from skyrl_fast.config import (
    Config,
    ConfigSource,
    as_config,
    check_config,
    sums_rewards,
    to_dict,
)
from skyrl_fast.config.modes import EnginePlace
from skyrl_fast.config.unread import warn_of_unread_settings
from skyrl_fast.gateway.agents.task import AgentTask
from skyrl_fast.rollout.env.handler import MakeEnv
from skyrl_fast.rollout.env.reward_env import Reward
from skyrl_fast.rollout.env.reward_functions import RewardFunction, RewardFunctions
from skyrl_fast.rollout.loop_settings import read_chat_template
from skyrl_fast.rollout.teachers import Teachers, check_teachers, start_teachers
from skyrl_fast.system.main_guard import find_unguarded_call
from skyrl_fast.train.algorithm.advantages import warn_without_baseline
from skyrl_fast.train.callbacks import Callback
from skyrl_fast.train.checkpoint.local import write_json
from skyrl_fast.train.checkpoint.remote import CheckpointStore
from skyrl_fast.train.checkpoint.resumed_settings import (
    warn_of_changed_settings,
    with_kept_settings,
)
from skyrl_fast.train.checkpoint.starting_point import (
    StartingPoint,
    checkpoint_folder,
    lock_folders,
    set_checkpoints_aside,
    starting_point,
    warn_of_another_schedule,
)
from skyrl_fast.train.data.prompts import Prompt, PromptSource
from skyrl_fast.train.data.schedule import total_steps
from skyrl_fast.train.flow.event_loop import StopSignals
from skyrl_fast.train.flow.frozen_heap import freeze_heap
from skyrl_fast.train.flow.rollouts import MakeRollouts, Rollouts
from skyrl_fast.train.memory.device_plan import MemoryPlan
from skyrl_fast.train.memory.gpus import HERE, GpusOfNode
from skyrl_fast.train.model.loading import load_tokenizer
from skyrl_fast.train.model.models import (
    Models,
    find_device,
    make_models,
    model_path,
    uses_reference,
)
from skyrl_fast.train.output.failure import record_failure
from skyrl_fast.train.output.loggers import (
    Logger,
    RunInfo,
    check_loggers,
    open_loggers,
    read_metrics,
)
from skyrl_fast.train.output.metric_table import EVAL_REWARD, find_warnings
from skyrl_fast.train.output.plot import plot_learning_curve
from skyrl_fast.train.output.progress import ProgressDisplay
from skyrl_fast.train.output.result import TrainResult as TrainResult
from skyrl_fast.train.output.summary import show_summary
from skyrl_fast.train.parallel.local_ranks import LocalRanks
from skyrl_fast.train.parallel.rank_processes import RankProcesses, RankStarter
from skyrl_fast.train.parallel.ranks import Ranks
from skyrl_fast.train.run_progress import RunProgress
from skyrl_fast.train.setup.errors import SetupError, as_setup_error, with_short_errors
from skyrl_fast.train.setup.given_objects import (
    GivenObjects,
    has_one_turn,
    with_absolute_paths,
)
from skyrl_fast.train.setup.model_checks import check_models, plan_run_memory
from skyrl_fast.train.setup.run_data import RunData, run_data
from skyrl_fast.train.trainer import Components, Trainer
from skyrl_fast.trajectory_store.words import readable

logger = logging.getLogger(__name__)


@with_short_errors
def train_agent(
    config: ConfigSource,
    *,
    env: MakeEnv | str | None = None,
    prompts: PromptSource | None = None,
    eval_prompts: PromptSource | None = None,
    reward: Reward | None = None,
    reward_funcs: RewardFunction | Sequence[RewardFunction] | None = None,
    reward_weights: Sequence[float] | None = None,
    agent: Callable[[AgentTask], Any] | str | None = None,
    loss: Callable[..., Any] | str | None = None,
    estimator: Callable[..., Any] | str | None = None,
    callbacks: Sequence[Callback] = (),
    make_rollouts: MakeRollouts | None = None,
    check_rollouts: Callable[[Config, str], None] | None = None,
) -> TrainResult:
    """Train an agent; all output is written to the run folder, a summary to standard error.

    The call blocks until the run ends, also in a notebook and inside a running event loop. In a
    script, put it below `if __name__ == "__main__":`, because the engine is a process that imports
    the main module. SIGINT, SIGTERM and SIGHUP end the run with a checkpoint.

    Args:
        config: settings: a `Config`, a mapping with nested or dotted keys, or a YAML file.
        env: an `Env` class or a factory that creates a trajectory's environment from its row; or
            a name as in `environment.env_class`. None: `environment.env_class`.
        prompts: rows (mappings with `prompt`), strings or lists of chat messages; a
            `datasets.Dataset` or a table of pandas, polars or pyarrow; a file; or a dataset on the
            Hugging Face hub, of which the split "train" is used. None: `data.train_data`.
        eval_prompts: the same for evaluation (split "test"). None: `data.val_data`.
        reward: instead of an environment: `reward(answer, row)` for single-turn tasks.
        reward_funcs: the same by TRL's reward functions: one, or a list whose rewards are added;
            each is called for one group of answers: `function(prompts=, completions=, **columns)`.
        reward_weights: a weight for each of `reward_funcs`; None: 1.
        agent: instead of an environment: a function of a module or of the main script, or a name as
            in `agent.function`.
        loss: a policy loss, or a name as in `trainer.algorithm.policy_loss_type`.
        estimator: an advantage estimator, or a name as in
            `trainer.algorithm.advantage_estimator`.
        callbacks: called after steps, evaluations and checkpoints.
        make_rollouts: factory of the rollouts, called with settings, tokenizer and model folder;
            None: vLLM.
        check_rollouts: called with settings and model folder before a run loads its model for the
            first time; raises ValueError for data that `make_rollouts` refuses.

    Raises:
        ConfigError: a setting is unknown, of the wrong type or out of range.
        SetupError: data, a model or a package is missing.
        RunInUseError: the run folder belongs to another process or holds an earlier run.
        CallbackError: a callback raised; the last complete step has a checkpoint.
        CheckpointError: a checkpoint cannot be written, or the one to resume from is damaged.
        StoreError: trajectories cannot be written.
        DivergedError: the gradients of most optimizer steps are infinite or NaN.
        RankError: the process of another rank has exited.
        EngineError, WeightSyncError: the engine has died, or samples from different weights.
        RolloutError, DynamicSamplingError: in batch after batch all trajectories failed, or no
            group was informative.

    Example:
        >>> train_agent(
        ...     {"trainer.policy.model.path": "Qwen/Qwen2.5-0.5B-Instruct"},
        ...     prompts=[{"prompt": f"What is 3 + {i}?", "sum": 3 + i} for i in range(64)],
        ...     reward=lambda answer, row: float(str(row["sum"]) in answer),
        ... ).step
        1
    """
    given = GivenObjects(
        "train_agent",
        env=env,
        reward=reward,
        reward_funcs=reward_funcs,
        reward_weights=reward_weights,
        agent=agent,
        loss=loss,
        estimator=estimator,
    )
    request = RunRequest(prompts, eval_prompts, None, callbacks, make_rollouts, check_rollouts)
    result = run_request(config, given, request)
    show_summary(result)
    return result


def train_by_settings(config: ConfigSource) -> TrainResult:
    """Train by settings alone, as `train_agent` does, and leave the summary to the caller."""
    return run_request(config, GivenObjects("train_agent"), RunRequest())


def run_request(config: ConfigSource, given: GivenObjects, request: RunRequest) -> TrainResult:
    """Train as `train_agent` does.

    Args:
        config: settings, as of `train_agent`.
        given: objects whose names become settings, or that make environments.
        request: what the run gets next to the settings.
    """
    config = as_config(config)
    _check_main_module(config, request)
    config = with_absolute_paths(config)
    make_env = given.write_into(config)
    check_config(config, has_prompts=request.prompts is not None)
    _check_callbacks(request.callbacks)
    warn_of_unread_settings(config, has_eval_prompts=request.eval_prompts is not None)
    warn_without_baseline(config)
    warn_of_the_reference(config)
    run_here = replace(request, make_env=make_env).run_here
    if config.trainer.placement.policy_num_nodes > 1 or config.engine_place is EnginePlace.CLUSTER:
        from skyrl_fast.train.cluster import run_on_cluster

        with_engines = request.make_rollouts is None
        folder = checkpoint_folder(config)
        result = run_on_cluster(config, run_here, folder, with_engines=with_engines)
        assert isinstance(result, TrainResult)
        return result
    return run_here(config, StopSignals(), LocalRanks(Path(config.trainer.run_path)))


def warn_of_the_reference(config: Config) -> None:
    lora = config.trainer.policy.model.lora
    if lora.path is not None and uses_reference(config) and config.shares_reference:
        logger.warning(
            "the reference model of the KL term is the base, not the adapter of "
            "trainer.policy.model.lora.path that training continues from: set "
            "trainer.ref.model.path to a merged export of it for a KL of 0 at the start"
        )


@dataclass(frozen=True, slots=True)
class RunRequest:
    """What a run gets next to its settings; the fields are arguments of `train_agent`.

    Args:
        make_env: factory of environments; None: those of `environment.env_class`.
        parts: what plans and loads the run.
    """

    prompts: PromptSource | None = None
    eval_prompts: PromptSource | None = None
    make_env: MakeEnv | None = None
    callbacks: Sequence[Callback] = ()
    make_rollouts: MakeRollouts | None = None
    check_rollouts: Callable[[Config, str], None] | None = None
    parts: RunParts = field(default_factory=lambda: RunParts())

    def run_here(self, config: Config, signals: StopSignals, starter: RankStarter) -> TrainResult:
        """Train with rank 0 in this process.

        Args:
            signals: what ends the run with a checkpoint.
            starter: starts the other ranks, and knows where engines may start.
        """
        with signals.install(), lock_folders(config) as store, ExitStack() as stack:
            with as_setup_error():
                cuda = find_device(config.trainer.device).type == "cuda"
                processes = stack.enter_context(closing(RankProcesses(starter, cuda=cuda)))
                # Where the plan chooses the number of ranks, it needs the checkpoint.
                size = config.trainer.placement.num_ranks
                read_digests = partial(processes.digest_pieces, size)
                start = starting_point(config, store, stack, read_digests)
            if start.checkpoint is not None:
                saved = start.state.get("config")
                warn_of_changed_settings(saved, to_dict(config))
                config = with_kept_settings(copy.deepcopy(config), saved)
            # A run sets torch's threads; a notebook keeps its own.
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            with as_setup_error():
                run = self._prepare(config, start, store, signals, processes, stack)
            return _train(run)

    def _prepare(
        self,
        config: Config,
        start: StartingPoint,
        store: CheckpointStore | None,
        signals: StopSignals,
        processes: RankProcesses,
        stack: ExitStack,
    ) -> _PreparedRun:
        """Check data, model and memory, and load the models; the engine starts later."""
        check_loggers(config.trainer.logger)  # before data and models are downloaded
        if self.make_rollouts is None:
            _check_parsers_and_servers(config)
        data = self._load_data(config)
        self._check(config, start, data)
        with_engine = self.make_rollouts is None
        plan_memory = self.parts.plan_memory
        num_gpus = processes.starter.num_gpus
        if num_gpus is not None:
            plan_memory = partial(plan_memory, gpus=GpusOfNode(HERE, num_gpus))
        plan = plan_memory(config, start.checkpoint, with_engine=with_engine)
        make: Callable[[Ranks], Models] = partial(
            self.parts.make_models,
            config,
            start.checkpoint,
            len(data.train),
            saved_logits_bytes=None if plan is None else plan.saved_logits_bytes,
            holds_gradients=plan is None or plan.held_gradient_bytes > 0,
            offloads_base=with_engine and config.offloads_base(config.engine_place),
            offloads_weights=with_engine and config.offloads_weights(config.engine_place),
        )
        output = _open_output(config, start, data, plan, stack, store)
        if with_engine:
            output.display.say(limits_text(config, one_turn=has_one_turn(self.make_env)))
        stack.enter_context(record_failure(Path(config.trainer.run_path)))
        ranks = processes.connect(config.trainer.placement.num_ranks, make)
        models = make(stack.enter_context(ranks))
        make_rollouts = self.make_rollouts or partial(
            _vllm_rollouts,
            prompts=data.train,
            make_env=self.make_env,
            starter=processes.starter,
            say=output.display.say,
            is_stopping=signals.is_stopping,
        )
        return _PreparedRun(
            config,
            start,
            data,
            models,
            output,
            self.callbacks,
            make_rollouts,
            signals,
            self.parts,
        )

    def _load_data(self, config: Config) -> RunData:
        has_one_env = self.make_env is not None
        data = run_data(config, self.prompts, self.eval_prompts, one_env=has_one_env)
        if isinstance(self.make_env, RewardFunctions):
            return data.with_text_marked()
        return data

    def _check(self, config: Config, start: StartingPoint, data: RunData) -> None:
        """Raise now what would else be raised once models have loaded or the engine has started."""
        folder = check_models(config, start.checkpoint)
        check_teachers(config)
        if self.make_rollouts is None:
            self.parts.check_rollouts(config, folder, data, self.make_env)
        if self.check_rollouts is not None and start.checkpoint is None:
            self.check_rollouts(config, str(folder))


def _check_callbacks(callbacks: Sequence[Callback]) -> None:
    if isinstance(callbacks, Callback) or not all(isinstance(c, Callback) for c in callbacks):
        raise SetupError(
            f"train_agent: callbacks: expected a list of Callback, got {callbacks!r:.100}"
        )


def _check_parsers_and_servers(config: Config) -> None:
    from skyrl_fast.train.flow.vllm_rollouts import check_parsers_and_servers

    check_parsers_and_servers(config)


def _check_rollouts(config: Config, folder: Path, data: RunData, make_env: MakeEnv | None) -> None:
    from skyrl_fast.train.flow.vllm_rollouts import check_rollouts

    prompts = [*data.train, *data.evaluation]
    check_rollouts(config, str(folder), prompts=prompts, make_env=make_env)


@dataclass(frozen=True, slots=True)
class RunParts:
    """What plans and loads a run, on this machine.

    Args:
        plan_memory: returns the plan of the GPUs' memory.
        make_models: loads the models on a rank.
        check_rollouts: raises what the engine or the environments would raise later.
        start_teachers: starts the engines of teachers, for settings and tokenizer.
        clock: in seconds, for the times of a step.
    """

    plan_memory: Callable[..., MemoryPlan | None] = plan_run_memory
    make_models: Callable[..., Models] = make_models
    check_rollouts: Callable[[Config, Path, RunData, MakeEnv | None], None] = _check_rollouts
    start_teachers: Callable[..., Awaitable[Teachers | None]] = start_teachers
    clock: Callable[[], float] = time.perf_counter


@dataclass(frozen=True, slots=True)
class _Output:
    """Where a run reports to."""

    display: ProgressDisplay
    loggers: Sequence[Logger]
    closing: ExitStack
    store: CheckpointStore | None


def _open_output(
    config: Config,
    start: StartingPoint,
    data: RunData,
    plan: MemoryPlan | None,
    stack: ExitStack,
    store: CheckpointStore | None,
) -> _Output:
    steps = total_steps(config, len(data.train))
    columns = config.trainer.progress
    display = ProgressDisplay(total_steps=steps, start_step=start.step, columns=columns)
    set_checkpoints_aside(start, store, display)  # before metrics after the checkpoint are dropped
    run_info = RunInfo(
        Path(config.trainer.run_path),
        config.trainer.project_name,
        config.trainer.run_name,
        to_dict(config),
        start.last_reported,
    )
    # Before models load: a package or a key may be missing.
    loggers = open_loggers(config.trainer.logger, run_info)
    closing = stack.enter_context(ExitStack())
    # An exit stack closes the last one first.
    for receiver in reversed(loggers):
        closing.callback(receiver.close)
    if plan is not None:
        display.say(f"memory plan\n{plan}")
    return _Output(display, loggers, closing, store)


@dataclass(frozen=True, slots=True)
class _PreparedRun:
    """A run that lacks only its engine."""

    config: Config
    start: StartingPoint
    data: RunData
    models: Models
    output: _Output
    callbacks: Sequence[Callback]
    make_rollouts: MakeRollouts
    signals: StopSignals
    parts: RunParts


def _train(run: _PreparedRun) -> TrainResult:
    config = run.config
    run_path = Path(config.trainer.run_path)
    # A callback like a user's: it sees evaluations also where no logger writes a file.
    evaluations = _EvalRewards()
    policy_path = model_path(config, run.start.checkpoint)
    with as_setup_error():
        tokenizer = _load_tokenizer(config, policy_path)
        # Now, not after hours of training.
        plot_module_checked = _check_plot(config)
    write_json(run_path / "config.json", to_dict(config))
    warn_of_another_schedule(config, run.start, len(run.data.train))
    progress, received = run.signals.run(_run_loop(run, tokenizer, policy_path, evaluations))
    # Closed first: a logger may write its last metrics only then, and they are read next.
    run.output.closing.close()
    # Rows of a resumed run include those of its earlier processes.
    rows = read_metrics(run_path / "metrics.jsonl")
    rewards = {}
    for row in rows:
        if EVAL_REWARD in row:
            rewards[row["step"]] = row[EVAL_REWARD]
    rewards |= evaluations.rewards  # complete also where no logger writes metrics.jsonl
    plot = None
    if plot_module_checked and rows:
        plot = plot_learning_curve(
            rows, run_path / "learning_curve.png", title=config.trainer.run_name
        )
    return TrainResult(
        step=progress.step,
        total_steps=total_steps(config, len(run.data.train)),
        signal=received,
        evaluations=dict(sorted(rewards.items())),
        run_path=run_path,
        metrics=run_path / "metrics.jsonl",
        trajectories=run_path / "trajectories",
        checkpoint=progress.checkpoint,
        plot=plot,
        sample=_sample(progress, tokenizer, config),
        stopped_by=progress.stopped_by,
        warnings=find_warnings(rows),
    )


class _EvalRewards(Callback):
    def __init__(self) -> None:
        self.rewards: dict[int, float] = {}

    def on_eval(self, step: int, metrics: Mapping[str, float]) -> None:
        self.rewards[step] = metrics[EVAL_REWARD]


def limits_text(config: Config, *, one_turn: bool = False) -> str:
    """Return what ends a trajectory, each limit with its setting.

    Args:
        one_turn: whether its environment is a reward function, which ends it in its first turn.
    """
    generator = config.generator
    if one_turn:
        turns = "one turn"
    elif generator.turn_limit == 1:
        turns = "one turn (generator.max_turns)"
    else:
        turns = f"at most {generator.turn_limit} turns (generator.max_turns)"
    return (
        f"a trajectory has {turns}, prompts of "
        f"{generator.max_input_length} tokens (generator.max_input_length), answers of "
        f"{generator.sampling_params.max_generate_length} (sampling_params.max_generate_length)"
    )


async def _run_loop(
    run: _PreparedRun, tokenizer: Any, policy_path: str, evaluations: _EvalRewards
) -> tuple[RunProgress, int | None]:
    """Start the engine and train; return how far the run got, and the signal that stopped it."""
    config = run.config
    checkpoint = run.start.checkpoint
    display = run.output.display
    # What loading and measuring have left is the engine's by the memory plan.
    run.models.policy.free_cached_memory()
    with as_setup_error():
        # The engine last: it takes minutes, and whatever else can fail has failed by now.
        rollouts = await run.make_rollouts(config, tokenizer, policy_path)
    received: list[int] = []
    teachers = None
    try:
        with as_setup_error():
            teachers = await run.parts.start_teachers(config, tokenizer, say=display.say)
        components = _components(run, tokenizer, rollouts, teachers, evaluations)
        trainer = Trainer(config, components, display)
        if checkpoint is not None:
            with as_setup_error():
                trainer.restore(checkpoint)
            display.say(f"resuming after step {trainer.progress.step} from {checkpoint}")

        def on_signal(number: int) -> None:
            if received:
                if number != signal.SIGHUP:  # a terminal that closes sends it twice
                    _leave_now(number)
                return
            received.append(number)
            display.say(
                f"stopping with a checkpoint, in the phase {display.current_phase}; "
                "a second signal exits immediately"
            )
            trainer.stop.set()

        run.signals.handle_by(on_signal)
        with display, freeze_heap():
            progress = await trainer.run()
    finally:
        if teachers is not None:
            await teachers.close()
        await rollouts.close()
    return progress, received[0] if progress.stopped and received else None


def _components(
    run: _PreparedRun,
    tokenizer: Any,
    rollouts: Rollouts,
    teachers: Teachers | None,
    evaluations: _EvalRewards,
) -> Components:
    store = run.output.store
    if store is None:
        upload = None
    else:
        upload = store.upload
    return Components(
        trained=run.models.trained,
        tokenizer=tokenizer,
        rollouts=rollouts,
        train_prompts=run.data.train,
        eval_prompts=run.data.evaluation,
        loggers=run.output.loggers,
        callbacks=[evaluations, *run.callbacks],
        reference=run.models.reference,
        critic=run.models.critic,
        teachers=teachers,
        upload=upload,
        clock=run.parts.clock,
    )


def _load_tokenizer(config: Config, path: str) -> Any:
    tokenizer = load_tokenizer(path)
    # So that what is saved with the weights renders prompts as they were trained.
    template = read_chat_template(config.generator.chat_template)
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


def _check_main_module(config: Config, request: RunRequest) -> None:
    """Raise SetupError where processes import the main module, and would train again."""
    guard = 'put the call below `if __name__ == "__main__":`'
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise SetupError(
            "train_agent: called by a process that training itself has started and that imports "
            f"your main module: {guard}"
        )
    has_engines = request.make_rollouts is None
    if imports_main_module(config, has_engines=has_engines):
        place = find_unguarded_call()
        if place is not None:
            raise SetupError(
                f"train_agent: {place.file}, line {place.line}: the processes that training starts "
                f"import this file and would train, too: {guard}"
            )


def imports_main_module(config: Config, *, has_engines: bool) -> bool:
    """Return whether a process that the run starts imports the main module of this one."""
    placement = config.trainer.placement
    # Where the plan chooses their number, there may be several.
    if placement.policy_num_gpus_per_node is None or placement.num_ranks > 1:
        return True
    engine = config.generator.inference_engine
    # Several engines are programs of their own.
    has_several = config.num_engines > 1 or len(engine.gpu_ids or ()) > engine.num_gpus
    return has_engines and config.engine_place.is_here and not has_several


def _check_plot(config: Config) -> bool:
    if not config.trainer.plot:
        return False
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        logger.warning(
            "no learning curve at the end: pip install matplotlib, or trainer.plot=false"
        )
        return False
    return True


async def _vllm_rollouts(
    config: Config,
    tokenizer: Any,
    model_path: str,
    *,
    prompts: Sequence[Prompt],
    make_env: MakeEnv | None,
    starter: RankStarter,
    say: Callable[[str], None],
    is_stopping: Callable[[], bool],
) -> Rollouts:
    from skyrl_fast.train.flow.vllm_rollouts import start_rollouts

    return await start_rollouts(
        config,
        tokenizer,
        model_path,
        prompts=prompts,
        make_env=make_env,
        address=starter.address,
        bundles=starter.engine_bundles,
        say=say,
        is_stopping=is_stopping,
    )


def _sample(progress: RunProgress, tokenizer: Any, config: Config) -> str:
    """Return one trajectory as text: the one of highest reward, then of most turns."""
    if not progress.trajectories:
        return ""
    sums = sums_rewards(config)
    best = max(progress.trajectories, key=lambda t: (t.outcome(sums_rewards=sums), len(t.steps)))
    return readable(best, tokenizer=tokenizer, sums_rewards=sums)


def _leave_now(number: int) -> None:
    """Exit on the second signal: without cleanup, but without orphaned processes."""
    # Engines and ranks, which would hold the GPUs.
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(128 + number)
