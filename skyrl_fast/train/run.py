"""`train`: a training run from its settings and objects, for scripts, notebooks and the CLI."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from skyrl_fast.config import (
    Config,
    ConfigSource,
    EnvironmentConfig,
    InferenceEngineConfig,
    as_config,
    check_config,
    to_dict,
)
from skyrl_fast.gateway.agents.task import AgentTask
from skyrl_fast.importing import absolute_name, load_object, name_of
from skyrl_fast.ops.advantage.estimators import register_advantage_estimator
from skyrl_fast.ops.policy_loss.custom import register_policy_loss
from skyrl_fast.rollout.env.host import MakeEnv
from skyrl_fast.rollout.env.reward_env import Reward, RewardEnv
from skyrl_fast.rollout.env.reward_functions import TEXT_PROMPT, RewardFunction, RewardFunctions
from skyrl_fast.train.algorithm.advantages import warn_without_baseline
from skyrl_fast.train.callbacks import Callback
from skyrl_fast.train.data.prompts import Prompt, PromptSource, load_prompts, prompts_from
from skyrl_fast.train.data.schedule import total_steps
from skyrl_fast.train.device_plan import MemoryPlan
from skyrl_fast.train.flow.event_loop import StopSignals
from skyrl_fast.train.flow.frozen_heap import frozen_heap
from skyrl_fast.train.flow.rollouts import Rollouts
from skyrl_fast.train.memory_plan import gpu_memory, plan_memory
from skyrl_fast.train.model.activation_memory import UnmeasurableError
from skyrl_fast.train.model.model_folder import model_folder
from skyrl_fast.train.model.models import (
    Models,
    find_device,
    make_models,
    model_path,
    uses_reference,
)
from skyrl_fast.train.model.policy import load_tokenizer
from skyrl_fast.train.output.checkpoint import (
    STATE,
    RunInUseError,
    checkpoints,
    locked_run,
    newest_intact,
    read_state,
    set_aside,
    verify_checkpoint,
    write_json,
)
from skyrl_fast.train.output.loggers import Logger, RunInfo, open_loggers, read_metrics
from skyrl_fast.train.output.plot import plot_learning_curve
from skyrl_fast.train.output.progress import ProgressDisplay
from skyrl_fast.train.output.resumed_settings import warn_of_changed_settings
from skyrl_fast.train.parallel.local_ranks import LocalRanks
from skyrl_fast.train.parallel.rank_processes import RankStarter, started_ranks
from skyrl_fast.train.placement import engine_placement
from skyrl_fast.train.trainer import Components, Progress, Trainer
from skyrl_fast.trajectory_store.parts import parts as stored_parts
from skyrl_fast.trajectory_store.record import total_reward
from skyrl_fast.trajectory_store.words import readable

logger = logging.getLogger(__name__)

MakeRollouts = Callable[[Config, Any, str], Awaitable[Rollouts]]
UNPLANNED_SHARE = 0.5  # gpu_memory_utilization next to a trainer whose memory is unknown
MAX_NAMED = 5  # environments in a warning
EVAL_UID = "eval-"  # prefix of the uids of evaluation prompts
EVAL_REWARD = "eval/all/avg_score"


class SetupError(ValueError):
    """Data, model, packages or engine are not usable; the message says what to fix."""


@dataclass(frozen=True, slots=True)
class TrainResult:
    """How far a run got, and where its files are.

    Args:
        step, total_steps: batches trained, and batches of a complete run.
        signal: number of the signal that stopped it, or None.
        before, after: mean evaluation reward before the first step, and the last one after a step;
            None where there was none.
        run_path: the run folder.
        metrics, trajectories: the file of the metrics, the folder of the trajectories.
        checkpoint: the newest one, or None.
        plot: the learning curve, or None.
        sample: one trajectory as readable text.
        stopped_by: class of the callback that ended the run early, or None.
    """

    step: int
    total_steps: int
    signal: int | None
    before: float | None
    after: float | None
    run_path: Path
    metrics: Path
    trajectories: Path
    checkpoint: Path | None
    plot: Path | None
    sample: str
    stopped_by: str | None = None


def train(
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
) -> TrainResult:
    """Train an agent; all output is written to the run folder.

    The call blocks until the run ends, also in a notebook and inside a running event loop. In a
    script, put it below `if __name__ == "__main__":`, because the engine is a process that imports
    the main module. SIGINT, SIGTERM and SIGHUP end the run with a checkpoint.

    Args:
        config: settings: a `Config`, a mapping with nested or dotted keys, or a YAML file.
        env: an `Env` class or a factory that creates a trajectory's environment from its row; or
            a name as in `environment.env_class`. None: `environment.env_class`.
        prompts: rows (mappings with `prompt`), strings or lists of chat messages; a
            `datasets.Dataset`; a file; or a dataset on the Hugging Face hub, of which the split
            "train" is used. None: `data.train_data`.
        eval_prompts: the same for evaluation (split "test"). None: `data.val_data`.
        reward: instead of an environment: `reward(answer, row)` for single-turn tasks.
        reward_funcs: the same by TRL's reward functions: one, or a list whose rewards are added;
            each is called for one answer, with lists of one: `function(prompts=, completions=,
            **columns)`.
        reward_weights: of `reward_funcs`; None: 1.
        agent: instead of an environment: a function of a module or of the main script, or a name as
            in `agent.function`.
        loss: a policy loss, or a name as in `trainer.algorithm.policy_loss_type`.
        estimator: an advantage estimator, or a name as in
            `trainer.algorithm.advantage_estimator`.
        callbacks: called after steps, evaluations and checkpoints.
        make_rollouts: factory of the rollouts, called with settings, tokenizer and model folder;
            None: vLLM.

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
        >>> train(
        ...     {"trainer.policy.model.path": "Qwen/Qwen2.5-0.5B-Instruct"},
        ...     prompts=[{"prompt": f"What is 3 + {i}?", "sum": 3 + i} for i in range(64)],
        ...     reward=lambda answer, row: float(str(row["sum"]) in answer),
        ... ).step
        1
    """
    _check_main_module()
    config = _with_absolute_paths(as_config(config))
    if sum(given is not None for given in (env, reward, reward_funcs, agent)) > 1:
        raise SetupError("train: wanted one of env, reward, reward_funcs and agent, got several")
    if agent is not None:
        config.agent.function = agent if isinstance(agent, str) else _importable_name(agent)
    functions = _reward_functions(reward_funcs, reward_weights)
    made_by = env if functions is None else functions
    make_env = _with_objects(config, env=made_by, reward=reward, loss=loss, estimator=estimator)
    check_config(config, has_prompts=prompts is not None)
    _check_callbacks(callbacks)
    warn_without_baseline(config)
    run_here = partial(
        _run_here,
        prompts=prompts,
        eval_prompts=eval_prompts,
        make_env=make_env,
        callbacks=callbacks,
        make_rollouts=make_rollouts,
    )
    if config.trainer.placement.policy_num_nodes > 1:
        from skyrl_fast.train.cluster import run_on_cluster

        result = run_on_cluster(config, run_here, _checkpoint_folder(config))
        assert isinstance(result, TrainResult)
        return result
    return run_here(config, StopSignals(), LocalRanks(Path(config.trainer.run_path)))


def _run_here(
    config: Config,
    signals: StopSignals,
    starter: RankStarter,
    *,
    prompts: PromptSource | None,
    eval_prompts: PromptSource | None,
    make_env: MakeEnv | None,
    callbacks: Sequence[Callback],
    make_rollouts: MakeRollouts | None,
) -> TrainResult:
    """Run with rank 0 in this process."""
    run_path = Path(config.trainer.run_path)
    with signals.installed(), locked_run(run_path, _checkpoint_folder(config)):
        start = _starting_point(config)
        with ExitStack() as stack:
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            with _as_setup_error():
                data = _data(config, prompts, eval_prompts, one_env=make_env is not None)
                if isinstance(make_env, RewardFunctions):
                    data = data.with_text_marked()
                folder = _check_models(config, start.checkpoint)
                if make_rollouts is None:
                    _check_rollouts(config, folder, data, make_env)
                plan = _memory_plan(config, start.checkpoint, with_engine=make_rollouts is None)
                saved = None if plan is None else plan.saved_logits_bytes
                make = partial(
                    make_models,
                    config,
                    start.checkpoint,
                    len(data.train),
                    saved_logits_bytes=saved,
                )
                output = _output(config, start, data, plan, stack)
                ranks = stack.enter_context(
                    started_ranks(
                        config.trainer.placement.num_ranks,
                        make,
                        cuda=find_device(config.trainer.device).type == "cuda",
                        starter=starter,
                    )
                )
            if make_rollouts is None:
                make_rollouts = partial(_vllm_rollouts, prompts=data.train, make_env=make_env)
            make = partial(make, ranks)
            return _run(config, start, data, make, output, callbacks, make_rollouts, signals)


def _reward_functions(
    functions: RewardFunction | Sequence[RewardFunction] | None, weights: Sequence[float] | None
) -> RewardFunctions | None:
    """Return the factory of environments of `reward_funcs`; None: there are none.

    Raises:
        SetupError: no functions, or another number of weights.
    """
    if functions is None:
        if weights is not None:
            raise SetupError("train: reward_weights: wanted reward_funcs with it, got none")
        return None
    listed: list[Any] = list(functions) if isinstance(functions, list | tuple) else [functions]
    for function in listed:
        if not callable(function):
            raise SetupError(f"train: reward_funcs: wanted functions, got {function!r:.100}")
    weights = [1.0] * len(listed) if weights is None else list(weights)
    if not listed or len(weights) != len(listed):
        text = f"got {len(listed)} functions and {len(weights)} weights"
        raise SetupError(f"train: reward_funcs: wanted some, each with a weight, {text}")
    return RewardFunctions(listed, weights)


def _importable_name(function: Callable[..., Any]) -> str:
    """Return a function's name as in `agent.function`.

    Raises:
        SetupError: it is not at the top of a module, so that it has no such name.
    """
    try:
        name = f"{name_of(sys.modules[function.__module__])}:{function.__qualname__}"
        found = load_object(name)
    except (AttributeError, KeyError, ValueError) as error:
        text = f"train: agent: wanted a function of a module, got {function!r:.100}"
        raise SetupError(text) from error
    if found is not function:
        raise SetupError(f"train: agent: {name} is another object than the given function")
    return name


def _with_objects(
    config: Config,
    *,
    env: MakeEnv | str | None,
    reward: Reward | None,
    loss: Callable[..., Any] | str | None,
    estimator: Callable[..., Any] | str | None,
) -> MakeEnv | None:
    """Write the names of the given objects into the settings; return the environment factory.

    Raises:
        SetupError: an object that is not callable.
    """
    for name, given in (("env", env), ("reward", reward)):
        is_name = name == "env" and isinstance(given, str)
        if given is not None and not is_name and not callable(given):
            raise SetupError(f"train: {name}: wanted a class or function, got {given!r:.100}")
    algorithm = config.trainer.algorithm
    if loss is not None:
        algorithm.policy_loss_type = _registered(register_policy_loss, loss)
    if estimator is not None:
        algorithm.advantage_estimator = _registered(register_advantage_estimator, estimator)
    if isinstance(env, str):
        config.environment.env_class = env
        return None
    made_by = env or reward
    if made_by is None:
        return None
    config.environment.env_class = getattr(made_by, "__name__", type(made_by).__name__)
    return env if reward is None else partial(RewardEnv, reward)


def _check_callbacks(callbacks: Sequence[Callback]) -> None:
    if isinstance(callbacks, Callback) or not all(isinstance(c, Callback) for c in callbacks):
        raise SetupError(f"train: callbacks: wanted a list of Callback, got {callbacks!r:.100}")


def _registered(register: Callable[..., Any], given: Callable[..., Any] | str) -> str:
    """Return the name of a loss or an estimator; register it if it is a function."""
    return given if isinstance(given, str) else register(given)


@dataclass(frozen=True, slots=True)
class _Data:
    train: list[Prompt]
    evaluation: list[Prompt]

    def with_text_marked(self) -> _Data:
        """Tell environments which prompts were text, not chats."""

        def marked(prompt: Prompt) -> Prompt:
            return replace(prompt, env_extras={**prompt.env_extras, TEXT_PROMPT: prompt.is_text})

        return _Data(list(map(marked, self.train)), list(map(marked, self.evaluation)))


def _data(
    config: Config,
    prompts: PromptSource | None,
    eval_prompts: PromptSource | None,
    *,
    one_env: bool,
) -> _Data:
    """Return the prompts to train and to evaluate on.

    Args:
        one_env: every row gets `environment.env_class`; its own `env_class` is ignored.
    """

    env_class = config.environment.env_class

    def load(given: PromptSource | None, files: list[str], prefix: str, split: str) -> list[Prompt]:
        if given is None:
            found = load_prompts(files, default_env_class=env_class, prefix=prefix, split=split)
        else:
            found = prompts_from(given, default_env_class=env_class, prefix=prefix, split=split)
        return [replace(prompt, env_class=env_class) for prompt in found] if one_env else found

    data = _Data(
        load(prompts, config.data.train_data, "", "train"),
        load(eval_prompts, config.data.val_data, EVAL_UID, "test"),
    )
    if not one_env:
        _warn_of_row_environments(config, data)
    wanted = config.trainer.train_batch_size
    if len(data.train) < wanted:
        source = "data.train_data" if prompts is None else "prompts"
        raise ValueError(
            f"{source}: wanted at least trainer.train_batch_size={wanted} prompts, "
            f"got {len(data.train)}"
        )
    return data


def _warn_of_row_environments(config: Config, data: _Data) -> None:
    """Warn if rows name another environment than one that was set explicitly."""
    chosen = config.environment.env_class
    prompts = [*data.train, *data.evaluation]
    others = Counter(p.env_class for p in prompts if p.env_class != chosen)
    if not others or chosen == EnvironmentConfig().env_class:
        return
    logger.warning(
        "environment.env_class=%s is not used for %d of %d rows, whose column env_class takes "
        "precedence: %s",
        *(chosen, others.total(), len(prompts)),
        ", ".join(f"{name} ({number})" for name, number in others.most_common(MAX_NAMED)),
    )


def _memory_plan(
    config: Config, checkpoint: Path | None, *, with_engine: bool
) -> MemoryPlan | None:
    """Return the plan of a run on GPUs, and place the engine by it; None on a CPU.

    Also None, with a warning, for a model that cannot be measured.

    Raises:
        SetupError: it does not fit; the message is the plan. Or there is no GPU for the engine's
            settings.
    """
    engine = config.generator.inference_engine
    if find_device(config.trainer.device).type == "cpu":
        _refuse_gpu_settings(engine)
        return None
    capacity = gpu_memory(config, with_engine=with_engine)
    assert capacity is not None
    num_gpus = torch.cuda.device_count()
    planned = deepcopy(config)
    planned.trainer.ref.model.path = config.trainer.ref.model.path or model_path(config, None)
    planned.trainer.policy.model.path = model_path(config, checkpoint)
    with_engine = with_engine and engine.run_engines_locally
    if with_engine:
        placement = engine_placement(config, num_gpus)
        engine.gpu_ids = list(placement.gpu_ids)
        engine.enable_sleep_mode = placement.sleeps
        engine.weight_sync_backend = placement.weight_sync
    try:
        plan = plan_memory(planned, capacity=capacity, num_gpus=num_gpus, with_engine=with_engine)
    except UnmeasurableError as error:
        if with_engine and placement.shared and engine.gpu_memory_utilization is None:
            engine.gpu_memory_utilization = UNPLANNED_SHARE
        logger.warning(
            "no memory plan: %s; gpu_memory_utilization=%s", error, engine.gpu_memory_utilization
        )
        return None
    if not plan.fits:
        raise SetupError(f"the run needs more memory than its GPUs have:\n{plan}")
    if plan.engine_share is not None:
        engine.gpu_memory_utilization = plan.engine_share
    return plan


def _refuse_gpu_settings(engine: InferenceEngineConfig) -> None:
    """Raise SetupError for settings of an engine that need a trainer on a GPU."""
    for name, asked, wanted in (
        ("enable_sleep_mode", engine.enable_sleep_mode is True, "null or false"),
        (
            "weight_sync_backend",
            engine.weight_sync_backend in ("ipc", "nccl"),
            "auto, gloo or file",
        ),
    ):
        if asked:
            raise SetupError(
                f"generator.inference_engine.{name}: wanted {wanted}, as the trainer computes on "
                f"the CPU, got {str(getattr(engine, name)).lower()}"
            )


def _check_models(config: Config, checkpoint: Path | None) -> Path:
    """Return the policy's folder; of a hub name, all of the run's models are downloaded.

    Raises:
        ValueError: a model is missing.
    """
    trainer = config.trainer
    others = [("ref", trainer.ref.model.path)] if uses_reference(config) else []
    if checkpoint is None:
        others.append(("critic", trainer.critic.model.path))
    for name, path in others:
        if path is not None:
            model_folder(path, setting=f"trainer.{name}.model.path")
    return model_folder(model_path(config, checkpoint))


def _check_rollouts(config: Config, folder: Path, data: _Data, make_env: MakeEnv | None) -> None:
    from skyrl_fast.train.flow.vllm_rollouts import check_rollouts

    prompts = [*data.train, *data.evaluation]
    check_rollouts(config, str(folder), prompts=prompts, make_env=make_env)


@dataclass(frozen=True, slots=True)
class _Output:
    """Where a run reports to.

    Args:
        closing: closes the loggers.
    """

    display: ProgressDisplay
    loggers: Sequence[Logger]
    closing: ExitStack


def _output(
    config: Config, start: _Start, data: _Data, plan: MemoryPlan | None, stack: ExitStack
) -> _Output:
    """Open the loggers, which may fail: a missing package or key is found before models load."""
    steps = total_steps(config, len(data.train))
    columns = config.trainer.progress
    display = ProgressDisplay(total_steps=steps, start_step=start.step, columns=columns)
    _set_aside(start, display)  # before metrics after the checkpoint are dropped
    run_info = RunInfo(
        Path(config.trainer.run_path),
        config.trainer.project_name,
        config.trainer.run_name,
        to_dict(config),
        start.last_reported,
    )
    loggers = open_loggers(config.trainer.logger, run_info)
    closing = stack.enter_context(ExitStack())
    for receiver in reversed(loggers):
        closing.callback(receiver.close)
    if plan is not None:
        display.say(f"memory plan\n{plan}")
    return _Output(display, loggers, closing)


def _run(
    config: Config,
    start: _Start,
    data: _Data,
    make: Callable[[], Models],
    output: _Output,
    callbacks: Sequence[Callback],
    make_rollouts: MakeRollouts,
    signals: StopSignals,
) -> TrainResult:
    run_path = Path(config.trainer.run_path)
    evaluations = _EvalRewards()
    checkpoint, display = start.checkpoint, output.display
    with _as_setup_error():
        components, policy_path = _components(config, checkpoint, data, make())
        components.callbacks = [evaluations, *callbacks]
        components.loggers = output.loggers
        plot_module_checked = _check_plot(config)
    write_json(run_path / "config.json", to_dict(config))
    _warn_of_another_schedule(config, start, len(components.train_prompts))
    warn_of_changed_settings(start.state.get("config"), to_dict(config))
    progress, received = signals.run(
        _run_loop(config, components, display, checkpoint, policy_path, make_rollouts, signals)
    )
    output.closing.close()
    rows = read_metrics(run_path / "metrics.jsonl")
    rewards = {row["step"]: row[EVAL_REWARD] for row in rows if EVAL_REWARD in row}
    rewards |= evaluations.rewards  # complete also where no logger writes metrics.jsonl
    last = max(rewards, default=0)
    plot = None
    if plot_module_checked and rows:
        plot = plot_learning_curve(
            rows, run_path / "learning_curve.png", title=config.trainer.run_name
        )
    return TrainResult(
        step=progress.step,
        total_steps=total_steps(config, len(data.train)),
        signal=received,
        before=rewards.get(0),
        after=rewards[last] if last else None,
        run_path=run_path,
        metrics=run_path / "metrics.jsonl",
        trajectories=run_path / "trajectories",
        checkpoint=progress.checkpoint,
        plot=plot,
        sample=_sample(progress, components.tokenizer),
        stopped_by=progress.stopped_by,
    )


class _EvalRewards(Callback):
    """Records the mean reward of each evaluation, by step."""

    def __init__(self) -> None:
        self.rewards: dict[int, float] = {}

    def on_eval(self, step: int, metrics: Mapping[str, float]) -> None:
        self.rewards[step] = metrics[EVAL_REWARD]


async def _run_loop(
    config: Config,
    components: Components,
    display: ProgressDisplay,
    checkpoint: Path | None,
    policy_path: str,
    make_rollouts: MakeRollouts,
    signals: StopSignals,
) -> tuple[Progress, int | None]:
    display.say("starting the engine ...")
    with _as_setup_error():
        components.rollouts = await make_rollouts(config, components.tokenizer, policy_path)
    received: list[int] = []
    try:
        trainer = Trainer(config, components, display)
        if checkpoint is not None:
            with _as_setup_error():
                trainer.restore(checkpoint)
            display.say(f"resuming after step {trainer.progress.step} from {checkpoint}")

        def on_signal(number: int) -> None:
            if received:
                if number != signal.SIGHUP:  # a terminal that closes sends it twice
                    _leave_now(number)
                return
            received.append(number)
            display.say("stopping with a checkpoint; a second signal exits immediately")
            trainer.stop.set()

        signals.handle_by(on_signal)
        with display, frozen_heap():
            progress = await trainer.run()
    finally:
        await components.rollouts.close()
    return progress, received[0] if progress.stopped and received else None


def _components(
    config: Config,
    checkpoint: Path | None,
    data: _Data,
    models: Models,
) -> tuple[Components, str]:
    path = model_path(config, checkpoint)
    components = Components(
        policy=models.policy,
        optimizer=models.optimizer,
        tokenizer=load_tokenizer(path),
        rollouts=None,  # type: ignore[arg-type]  # the engine starts last, after all other checks
        train_prompts=data.train,
        eval_prompts=data.evaluation,
        reference=models.reference,
        critic=models.critic,
    )
    return components, path


def _check_main_module() -> None:
    """Raise SetupError in an engine or rank process, which imports the main module again."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise SetupError(
            "train: called by a process that training itself has started and that imports "
            'your main module: put the call below `if __name__ == "__main__":`'
        )


def _with_absolute_paths(config: Config) -> Config:
    """Make paths that are used later absolute: an environment may change the current folder."""
    trainer, engine = config.trainer, config.generator.inference_engine
    for section, name in (
        *((trainer, name) for name in ("run_path", "ckpt_path", "resume_path")),
        *((engine, name) for name in ("weight_sync_path", "api_key_file")),
    ):
        path = getattr(section, name)
        if path is not None:
            setattr(section, name, str(Path(path).expanduser().absolute()))
    for model in (trainer.policy.model, trainer.ref.model, trainer.critic.model):
        if model.path is not None and Path(model.path).is_dir():  # not a name on the hub
            model.path = str(Path(model.path).absolute())
    algorithm, environment = config.trainer.algorithm, config.environment
    for section, name in (
        (algorithm, "policy_loss_type"),
        (algorithm, "advantage_estimator"),
        (environment, "env_class"),
        (config.agent, "function"),
    ):
        if getattr(section, name) is not None:
            setattr(section, name, absolute_name(getattr(section, name), Path.cwd()))
    environment.register = [absolute_name(name, Path.cwd()) for name in environment.register]
    return config


def _checkpoint_folder(config: Config) -> Path:
    return Path(config.trainer.ckpt_path or Path(config.trainer.run_path) / "checkpoints")


@dataclass(frozen=True, slots=True)
class _Start:
    """Where a run starts.

    Args:
        checkpoint: to resume from, or None.
        state: content of its `state.json`.
        aside: checkpoints to be set aside, each with the suffix of its name and the reason.
    """

    checkpoint: Path | None = None
    state: Mapping[str, Any] = field(default_factory=dict)
    aside: Sequence[tuple[Path, str, str]] = ()

    @property
    def step(self) -> int:
        """Steps trained before."""
        return int(self.state.get("step", 0))

    @property
    def last_reported(self) -> int:
        """The last step whose metrics were written before the checkpoint; -1: none."""
        if self.checkpoint is None:
            return -1
        return self.step - (self.state.get("unreported") is not None)


def _starting_point(config: Config) -> _Start:
    """Return the verified checkpoint to resume from, if any, and those that are not to be read.

    Raises:
        CheckpointError: the chosen checkpoint, or every one, is damaged.
        RunInUseError: a new run in a folder that holds an earlier one.
        SetupError: there is no checkpoint in `trainer.resume_path`.
    """
    settings = config.trainer
    run_path = Path(settings.run_path)
    folder = _checkpoint_folder(config)
    if settings.resume_mode == "from_path":
        chosen = Path(str(settings.resume_path))
        if not (chosen / STATE).is_file():
            raise SetupError(f"trainer.resume_path: no checkpoint in {chosen}")
        verify_checkpoint(chosen)
        state = read_state(chosen)
        reason = f"it is later than trainer.resume_path={chosen}"
        later = [other for step, other in checkpoints(folder) if step > state["step"]]
        return _Start(chosen, state, [(other, "later", reason) for other in later])
    if settings.resume_mode == "latest":
        newest, damaged = newest_intact(folder)
        state = {} if newest is None else read_state(newest)
        return _Start(newest, state, [(path, "damaged", why) for path, why in damaged])
    logged = read_metrics(run_path / "metrics.jsonl")
    if checkpoints(folder) or logged or stored_parts(run_path / "trajectories"):
        raise RunInUseError(
            f"run folder {run_path} holds an earlier run: --resume continues it; for a new run "
            "choose another trainer.run_path or delete the folder"
        )
    return _Start()


def _set_aside(start: _Start, display: ProgressDisplay) -> None:
    """Rename the checkpoints that the run must not read, and say so."""
    for checkpoint, suffix, reason in start.aside:
        aside = set_aside(checkpoint, suffix)
        note = f"{checkpoint.name} was renamed to {aside}: {reason}"
        logger.warning("%s", note)
        display.say(note)


def _warn_of_another_schedule(config: Config, start: _Start, num_prompts: int) -> None:
    """Warn if a resumed run has another length than before, and the learning rate follows it."""
    scheduler = config.trainer.policy.optimizer_config.scheduler
    if start.checkpoint is None or scheduler not in ("linear", "cosine"):
        return
    saved = start.state.get("config", {}).get("trainer", {})
    lengths = {n: saved[n] for n in ("epochs", "max_training_steps") if n in saved}
    earlier = replace(config, trainer=replace(config.trainer, **lengths))
    before, now = total_steps(earlier, num_prompts), total_steps(config, num_prompts)
    if before != now:
        logger.warning(
            "resume: the run had %d steps and now has %d: the %s schedule of the learning rate is "
            "stretched over all of them, so the rate jumps here",
            *(before, now, scheduler),
        )


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
) -> Rollouts:
    from skyrl_fast.train.flow.vllm_rollouts import start_rollouts

    return await start_rollouts(config, tokenizer, model_path, prompts=prompts, make_env=make_env)


def _sample(progress: Progress, tokenizer: Any) -> str:
    """Return one trajectory as text: the one of highest reward, then of most turns."""
    if not progress.trajectories:
        return ""
    best = max(progress.trajectories, key=lambda t: (total_reward(t), len(t.steps)))
    return readable(best, tokenizer=tokenizer)


def _leave_now(number: int) -> None:
    """Exit on the second signal: without cleanup, but without orphaned processes."""
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(128 + number)


@contextmanager
def _as_setup_error() -> Any:
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        raise SetupError(str(error)) from error
