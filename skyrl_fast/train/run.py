"""A whole training run from its settings: what the command line and the recipes call."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from skyrl_fast.config import Config, to_dict
from skyrl_fast.config.loading import check_config
from skyrl_fast.train.checkpoint import (
    RunInUseError,
    checkpoints,
    latest_checkpoint,
    locked_run,
    read_json,
    write_json,
)
from skyrl_fast.train.critic import Critic, make_critic
from skyrl_fast.train.optimizer import Optimizer
from skyrl_fast.train.plot import plot_learning_curve
from skyrl_fast.train.policy import (
    Policy,
    hide_progress_bars,
    load_model,
    load_tokenizer,
)
from skyrl_fast.train.progress import ProgressDisplay
from skyrl_fast.train.prompts import Prompt, load_prompts
from skyrl_fast.train.random_state import seed_everything
from skyrl_fast.train.rank_processes import started_ranks
from skyrl_fast.train.ranks import Ranks
from skyrl_fast.train.rollouts import Rollouts
from skyrl_fast.train.schedule import total_optimizer_steps, total_steps
from skyrl_fast.train.sinks import RunInfo, open_loggers, read_metrics
from skyrl_fast.train.trainer import Parts, Progress, Trainer
from skyrl_fast.trajectory_store.parts import parts as stored_parts
from skyrl_fast.trajectory_store.record import total_reward
from skyrl_fast.trajectory_store.words import readable

logger = logging.getLogger(__name__)

MakeRollouts = Callable[[Config, Any, str], Awaitable[Rollouts]]
EVAL_REWARD = "eval/all/avg_score"


class SetupError(ValueError):
    """Something that a person can put right before training: data, model, packages, engine."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended and where everything is.

    Args:
        step, total_steps: batches trained, and of the whole run.
        signal: number of the signal that stopped it, or None.
        before, after: mean evaluation reward before the first step, and the last one after a step;
            None where there was none.
        sample: one trajectory in words.
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


def run_training(config: Config, *, make_rollouts: MakeRollouts | None = None) -> Outcome:
    """Train as the settings say; the run folder holds everything that comes of it.

    Args:
        config: settings; checked here.
        make_rollouts: starts the engine from config, tokenizer, model folder; None: vLLM.

    Raises:
        ConfigError: settings that cannot be.
        SetupError: data, model or a package is missing.
        RunInUseError: the run folder belongs to another process or holds an earlier run.
        CheckpointError: a checkpoint cannot be read or written.
        StoreError: trajectories cannot be written.
        RankError: the process of another rank has ended.
        EngineError, WeightSyncError: the engine is gone, or samples from other weights.
        RolloutError, DynamicSamplingError: batch after batch, everything failed or taught nothing.
    """
    _check_main_module()
    check_config(config)
    config = _with_home(config)
    run_path = Path(config.trainer.run_path)
    with locked_run(run_path):
        checkpoint = _starting_point(config)
        with ExitStack() as stack:
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            with _as_setup_error():
                prompts = _prompts(config)
                ranks = stack.enter_context(
                    started_ranks(
                        config.trainer.placement.policy_num_gpus_per_node,
                        partial(_models, config, checkpoint, len(prompts[0])),
                        cuda=_device(config.trainer.device).type == "cuda",
                        folder=run_path,
                    )
                )
            make_rollouts = make_rollouts or _vllm_rollouts
            return _run(config, run_path, checkpoint, prompts, ranks, make_rollouts)


def _run(
    config: Config,
    run_path: Path,
    checkpoint: Path | None,
    prompts: tuple[list[Prompt], list[Prompt]],
    ranks: Ranks,
    make_rollouts: MakeRollouts,
) -> Outcome:
    with _as_setup_error():
        parts, model_path = _parts(config, checkpoint, prompts, ranks)
        plot_module_checked = _check_plot(config)
        run_info = RunInfo(
            run_path,
            config.trainer.project_name,
            config.trainer.run_name,
            to_dict(config),
            _last_reported(checkpoint),
        )
        parts.loggers = open_loggers(config.trainer.logger, run_info)
    write_json(run_path / "config.json", to_dict(config))
    steps = total_steps(config, len(parts.train_prompts))
    display = ProgressDisplay(total_steps=steps, start_step=_step_of(checkpoint))
    try:
        progress, received = asyncio.run(
            _run_loop(config, parts, display, checkpoint, model_path, make_rollouts)
        )
    finally:
        for receiver in parts.loggers:
            receiver.close()
    rows = read_metrics(run_path / "metrics.jsonl")
    rewards = {row["step"]: row[EVAL_REWARD] for row in rows if EVAL_REWARD in row}
    last = max(rewards, default=0)
    plot = None
    if plot_module_checked and rows:
        plot = plot_learning_curve(
            rows, run_path / "learning_curve.png", title=config.trainer.run_name
        )
    return Outcome(
        step=progress.step,
        total_steps=steps,
        signal=received,
        before=rewards.get(0),
        after=rewards[last] if last else None,
        run_path=run_path,
        metrics=run_path / "metrics.jsonl",
        trajectories=run_path / "trajectories",
        checkpoint=progress.checkpoint,
        plot=plot,
        sample=_sample(progress, parts.tokenizer),
    )


async def _run_loop(
    config: Config,
    parts: Parts,
    display: ProgressDisplay,
    checkpoint: Path | None,
    model_path: str,
    make_rollouts: MakeRollouts,
) -> tuple[Progress, int | None]:
    display.say("starting the engine ...")
    with _as_setup_error():
        parts.rollouts = await make_rollouts(config, parts.tokenizer, model_path)
    received: list[int] = []
    try:
        trainer = Trainer(config, parts, display)
        if checkpoint is not None:
            with _as_setup_error():
                trainer.restore(checkpoint)
            display.say(f"resuming after step {trainer.progress.step} from {checkpoint}")
        loop = asyncio.get_running_loop()

        def on_signal(number: int) -> None:
            if received:
                _leave_now(number)
            received.append(number)
            display.say("stopping with a checkpoint; once more stops at once")
            trainer.stop.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal, number)
        with display:
            progress = await trainer.run()
    finally:
        await parts.rollouts.close()
    return progress, received[0] if progress.stopped else None


def _prompts(config: Config) -> tuple[list[Prompt], list[Prompt]]:
    """Those to train on, and those to evaluate on."""
    env_class = config.environment.env_class
    train_prompts = load_prompts(config.data.train_data, default_env_class=env_class)
    eval_prompts = load_prompts(config.data.val_data, default_env_class=env_class, prefix="eval-")
    wanted = config.trainer.train_batch_size
    if len(train_prompts) < wanted:
        raise ValueError(
            f"data.train_data: wanted at least trainer.train_batch_size={wanted} prompts, "
            f"got {len(train_prompts)}"
        )
    return train_prompts, eval_prompts


def _parts(
    config: Config,
    checkpoint: Path | None,
    prompts: tuple[list[Prompt], list[Prompt]],
    ranks: Ranks,
) -> tuple[Parts, str]:
    model_path = _model_path(config, checkpoint)
    models = _models(config, checkpoint, len(prompts[0]), ranks)
    parts = Parts(
        policy=models.policy,
        optimizer=models.optimizer,
        tokenizer=load_tokenizer(model_path),
        rollouts=None,  # type: ignore[arg-type]  # the engine starts when all else is right
        train_prompts=prompts[0],
        eval_prompts=prompts[1],
        reference=models.reference,
        critic=models.critic,
    )
    return parts, model_path


def _model_path(config: Config, checkpoint: Path | None) -> str:
    start_path = config.trainer.policy.model.path
    assert start_path is not None
    return start_path if checkpoint is None else str(checkpoint / "policy")


@dataclass(frozen=True, slots=True)
class _Models:
    policy: Policy
    optimizer: Optimizer
    reference: Policy | None
    critic: Critic | None


def _models(config: Config, checkpoint: Path | None, num_prompts: int, ranks: Ranks) -> _Models:
    """What every rank makes, in this order."""
    settings = config.trainer
    _set_threads(settings.num_threads, ranks)
    seed_everything(settings.seed)
    hide_progress_bars()
    device = _device(settings.device)
    dtype, head = _dtype(settings.policy.dtype, device), settings.policy.lm_head_dtype

    def policy_of(path: str, *, trained: bool) -> Policy:
        model = load_model(
            path, device=device, gradient_checkpointing=trained and settings.gradient_checkpointing
        )
        return Policy(
            model.requires_grad_(trained),
            temperature=config.generator.sampling_params.temperature,
            max_tokens_per_microbatch=settings.max_tokens_per_microbatch,
            dtype=dtype,
            head_dtype=dtype if head == "auto" else getattr(torch, head),
            # The reference chooses its own experts: what it would have done is what is asked.
            router_replay=trained and settings.policy.moe_enable_routing_replay,
            tree=settings.rows == "tree",
            ranks=ranks,
        )

    policy = policy_of(_model_path(config, checkpoint), trained=True)
    reference = None
    if settings.algorithm.use_kl_loss or settings.algorithm.use_kl_in_reward:
        reference = policy_of(settings.ref.model.path or _model_path(config, None), trained=False)
    optimizer = Optimizer(
        policy,
        settings.policy.optimizer_config,
        total_steps=total_optimizer_steps(config, num_prompts),
    )
    critic = None
    if settings.critic.model.path is not None:
        source = settings.critic.model.path if checkpoint is None else str(checkpoint / "critic")
        critic = make_critic(config, source, device, dtype, num_prompts=num_prompts, ranks=ranks)
    return _Models(policy, optimizer, reference, critic)


def _set_threads(chosen: int | None, ranks: Ranks) -> None:
    if chosen is None and ranks.size > 1:
        chosen = max(1, torch.get_num_threads() // ranks.size)
    if chosen is not None:
        torch.set_num_threads(chosen)


def _check_main_module() -> None:
    """Engine and ranks are processes that import the main module: it must not train again."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise SetupError(
            "run_training: called by a process that training itself has started, and that imports "
            'your main module: put the call below `if __name__ == "__main__":`'
        )


def _with_home(config: Config) -> Config:
    """Return the settings with ~ in the run's paths as the home folder, as in those of data."""
    settings = replace(config.trainer)
    for name in ("run_path", "ckpt_path", "resume_path"):
        path = getattr(settings, name)
        setattr(settings, name, None if path is None else str(Path(path).expanduser()))
    return replace(config, trainer=settings)


def _starting_point(config: Config) -> Path | None:
    """The checkpoint to go on from, or None for a new run in a folder without one."""
    settings = config.trainer
    run_path = Path(settings.run_path)
    folder = Path(settings.ckpt_path or run_path / "checkpoints")
    if settings.resume_mode == "from_path":
        path = Path(str(settings.resume_path))
        if not (path / "state.json").is_file():
            raise SetupError(f"trainer.resume_path: no checkpoint in {path}")
        later = [other.name for step, other in checkpoints(folder) if step > _step_of(path)]
        if later:
            raise SetupError(
                f"trainer.resume_path: wanted no checkpoint after step {_step_of(path)} in "
                f"{folder}, got {', '.join(later)}: move or delete them, or choose another "
                "trainer.run_path (or ckpt_path)"
            )
        return path
    if settings.resume_mode == "latest":
        return latest_checkpoint(folder)
    logged = read_metrics(run_path / "metrics.jsonl")
    if checkpoints(folder) or logged or stored_parts(run_path / "trajectories"):
        raise RunInUseError(
            f"run folder {run_path} holds an earlier run: --resume goes on with it; for a new run "
            "choose another trainer.run_path or delete the folder"
        )
    return None


def _step_of(checkpoint: Path | None) -> int:
    return 0 if checkpoint is None else int(read_json(checkpoint / "state.json")["step"])


def _last_reported(checkpoint: Path | None) -> int:
    """Return the last step whose metrics were written before the checkpoint; -1: none."""
    if checkpoint is None:
        return -1
    state = read_json(checkpoint / "state.json")
    return int(state["step"]) - (state.get("unreported") is not None)


def _device(name: str) -> torch.device:
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ValueError("trainer.device: cuda was asked for, but torch finds no GPU")
    return torch.device("cuda" if name != "cpu" and available else "cpu")


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


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


async def _vllm_rollouts(config: Config, tokenizer: Any, model_path: str) -> Rollouts:
    from skyrl_fast.train.vllm_rollouts import start_rollouts

    return await start_rollouts(config, tokenizer, model_path)


def _sample(progress: Progress, tokenizer: Any) -> str:
    """One trajectory in words: a rewarded one of several turns if there is one."""
    if not progress.trajectories:
        return ""
    best = max(progress.trajectories, key=lambda t: (total_reward(t), len(t.steps)))
    return readable(best, tokenizer=tokenizer)


def _leave_now(number: int) -> None:
    """The second signal: no cleaning up, but no orphans either."""
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(128 + number)


@contextmanager
def _as_setup_error() -> Any:
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        raise SetupError(str(error)) from error
