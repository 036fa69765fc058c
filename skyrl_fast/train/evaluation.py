"""Evaluation without training: models, checkpoints, adapters and servers, on the same prompts.

Nothing is trained, so there is no optimizer, no reference and no checkpoint; of an adapter the
model is loaded once more, to hand the adapter to the engine as a run does.
"""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import os
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from os.path import expanduser
from pathlib import Path
from typing import Any

from skyrl_fast.config import Config, ConfigSource, as_config, check_config, sums_rewards, to_dict
from skyrl_fast.config.asynchronous import FullyAsyncConfig
from skyrl_fast.config.model_folder import POLICY, model_folder
from skyrl_fast.config.modes import EnginePlace
from skyrl_fast.config.settings import CriticConfig, LoraConfig, PlacementConfig
from skyrl_fast.gateway.agents.task import AgentTask
from skyrl_fast.rollout.env.handler import MakeEnv
from skyrl_fast.rollout.env.reward_env import Reward
from skyrl_fast.rollout.env.reward_functions import RewardFunction, RewardFunctions
from skyrl_fast.rollout.failures import FailureWatch, fail_infinite_rewards, log_failures
from skyrl_fast.rollout.trajectory import Trajectory
from skyrl_fast.system.event_loop import run_coroutine
from skyrl_fast.train.checkpoint.local import STATE, read_state, write_json
from skyrl_fast.train.checkpoint.model_export import find_checkpoint
from skyrl_fast.train.data.prompts import Prompt, PromptSource
from skyrl_fast.train.flow.rollouts import MakeRollouts, Rollouts
from skyrl_fast.train.flow.vllm_rollouts import (
    check_parsers_and_servers,
    check_rollouts,
    start_rollouts,
)
from skyrl_fast.train.flow.waiting import until_stopped
from skyrl_fast.train.metrics.evaluation import (
    Estimate,
    estimate,
    evaluation_metrics,
    paired_difference,
    prompt_scores,
)
from skyrl_fast.train.model.loading import load_tokenizer
from skyrl_fast.train.model.lora import CONFIG as ADAPTER_CONFIG
from skyrl_fast.train.model.models import load_policy, model_path
from skyrl_fast.train.output.loggers import JsonlLogger, RunInfo
from skyrl_fast.train.setup.errors import SetupError, as_setup_error, with_short_errors
from skyrl_fast.train.setup.given_objects import GivenObjects, with_absolute_paths
from skyrl_fast.train.setup.run_data import eval_data, text_marked
from skyrl_fast.trajectory_store.writer import TrajectoryWriter

logger = logging.getLogger(__name__)

FILE = "evaluation.json"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What one model scored.

    Args:
        name: of its folder and in tables.
        target: what was given: a folder, the name of a model, a URL.
        step: of the checkpoint; 0 of other targets.
        metrics: `eval/...`, as a run reports them.
        scores: mean reward of each prompt, by uid.
        folder: with its metrics.jsonl and trajectories, as of a run.
    """

    name: str
    target: str
    step: int
    metrics: Mapping[str, float]
    scores: Mapping[str, float]
    folder: Path

    @property
    def score(self) -> Estimate:
        """Mean reward over the prompts, with its standard error."""
        return estimate(self.scores)

    def difference(self, first: Evaluation) -> Estimate:
        """Return how much more this one scored than `first`, with the paired standard error."""
        return paired_difference(first.scores, self.scores)


@dataclass(frozen=True, slots=True)
class _Target:
    """What is evaluated: the settings of its engine, and a checkpoint of a run."""

    name: str
    given: str
    config: Config
    checkpoint: Path | None = None
    is_server: bool = False

    @property
    def step(self) -> int:
        if self.checkpoint is None:
            return 0
        return int(read_state(self.checkpoint)["step"])

    @property
    def has_adapter(self) -> bool:
        """Whether the engine gets an adapter; what a server has is not known."""
        return self.config.trains_adapter and not self.is_server

    @property
    def path(self) -> str:
        """The model that the engine starts with."""
        return model_path(self.config, self.checkpoint)


@with_short_errors
def evaluate(
    config: ConfigSource,
    targets: Sequence[str | Path] = (),
    *,
    out: str | Path,
    env: MakeEnv | str | None = None,
    eval_prompts: PromptSource | None = None,
    reward: Reward | None = None,
    reward_funcs: RewardFunction | Sequence[RewardFunction] | None = None,
    reward_weights: Sequence[float] | None = None,
    agent: Callable[[AgentTask], Any] | str | None = None,
    make_rollouts: MakeRollouts | None = None,
    say: Callable[[str], None] | None = None,
) -> list[Evaluation]:
    """Sample the evaluation prompts from each target, and return what it scored.

    Prompts, environment, sampling and seeds are those of a run's evaluation, so that a checkpoint
    scores what its run has reported: exactly where the engine is the same and samples greedily in
    float32, else within the sampling error.

    Args:
        config: settings of a run. `generator.eval_n_samples_per_prompt` trajectories of each prompt
            of `data.val_data`, with `generator.eval_sampling_params`.
        targets: each the folder of a run (its newest checkpoint), of a checkpoint, of a PEFT
            adapter of `trainer.policy.model.path`, or of a model; a model on the Hugging Face hub;
            or the URL of a server. None given: the model of the settings, or their servers. Where
            the settings name policies, a model answers for each of them; an adapter or a server is
            one policy, and refused.
        out: folder to write, which must not exist: evaluation.json, and for each target a folder
            with metrics.jsonl and trajectories, for `skyrl-fast compare` and `view`.
        env, eval_prompts, reward, reward_funcs, reward_weights, agent, make_rollouts: as for
            `train_agent`.
        say: called with each line of progress; None: they are logged.

    Raises:
        ConfigError, SetupError: as for `train_agent`; or a target is none of these.
        CheckpointError: a checkpoint is damaged.
        EngineError, WeightSyncError: an engine has died, or samples from different weights.
        RolloutError: all trajectories of a target failed.

    Example:
        >>> base, trained = evaluate("config.yaml", ["Qwen/Qwen3-0.6B", "runs/one"], out="scores")
        >>> trained.difference(base)
        Estimate(mean=0.21, error=0.034)
    """
    config = with_absolute_paths(as_config(config))
    given = GivenObjects(
        "evaluate",
        env=env,
        reward=reward,
        reward_funcs=reward_funcs,
        reward_weights=reward_weights,
        agent=agent,
    )
    make_env = given.write_into(config)
    check_config(config, has_prompts=True)
    folder = Path(out).absolute()
    if folder.exists():
        raise SetupError(f"evaluate: out: expected no such file or folder, got {folder}")
    with as_setup_error():
        if make_rollouts is None:
            check_parsers_and_servers(config)
        prompts = eval_data(config, eval_prompts, one_env=make_env is not None)
        if isinstance(make_env, RewardFunctions):
            prompts = text_marked(prompts)
        if not prompts:
            raise SetupError("data.val_data: expected prompts to evaluate on, got none")
        chosen = _named_targets([_find_target(str(target), config) for target in targets])
        chosen = chosen or [_target_of_settings(config)]
        if targets:
            given_by = "targets"
        else:
            given_by = POLICY
        # All of them before the first engine, which takes minutes.
        for target in chosen:
            path = str(model_folder(target.path, setting=given_by))
            if make_rollouts is None:
                check_rollouts(target.config, path, prompts=prompts, make_env=make_env)
    results = []
    for target in chosen:
        samples = target.config.generator.eval_n_samples_per_prompt
        line = f"{target.name}: {len(prompts)} prompts, {samples} trajectories of each ..."
        (say or logger.info)(line)
        run_path = folder / target.name
        run_path.mkdir(parents=True)
        target.config.trainer.run_path = str(run_path)
        tokenizer = load_tokenizer(target.path)
        start = make_rollouts or partial(
            start_rollouts,
            prompts=prompts,
            make_env=make_env,
            trained=target.has_adapter,
            say=say,
        )
        trajectories = run_coroutine(_sample(target, tokenizer, prompts, start))
        result = _result(target, trajectories, run_path)
        _write(target, tokenizer, result, trajectories)
        results.append(result)
        score = result.score
        (say or logger.info)(f"{target.name}: score {score.mean:.4f} +- {score.error:.4f}")
    write_json(folder / FILE, _report(results))
    return results


# --- targets ------------------------------------------------------------------------------------


def _find_target(given: str, config: Config) -> _Target:
    """Return what a target is; ValueError if it is nothing that can be evaluated."""
    config = _without_training(config)
    model = config.trainer.policy.model
    if given.startswith(("http://", "https://")):
        engine = config.generator.inference_engine
        engine.external_server_urls = [given]
        _check_one_policy(config, given, "a server")
        return _Target(given.partition("://")[2], given, config, is_server=True)
    config.generator.inference_engine.external_server_urls = []
    path = Path(expanduser(given)).absolute()
    name = path.name or "model"
    if (path / STATE).is_file() or ((path / "config.json").is_file() and _is_run(path)):
        checkpoint, saved = find_checkpoint(path)
        base = model.path
        config.trainer.policy.model = model = saved.trainer.policy.model
        if os.path.isabs(str(model.path)) and not os.path.exists(str(model.path)):
            model.path = base  # the model that the run began with has been moved
        if (path / STATE).is_file():
            return _Target(name, given, config, checkpoint)
        return _Target(f"{name}-{checkpoint.name}", given, config, checkpoint)
    if (path / ADAPTER_CONFIG).is_file() and not (path / "config.json").is_file():
        _check_one_policy(config, given, "an adapter")
        model.lora = _read_lora(path)
        return _Target(name, given, config)
    if path.is_dir() and not (path / "config.json").is_file():
        raise ValueError(
            f"evaluate: {given}: expected the folder of a run with a checkpoint, of a checkpoint, "
            "an adapter or a model, got none of their files"
        )
    if path.is_dir():
        model.path = str(path)
    else:
        model.path = given
    model.lora = _without_adapter(model.lora)
    return _Target(name, given, config)


def _check_one_policy(config: Config, given: str, what: str) -> None:
    """Raise ValueError if the settings name policies."""
    if config.policies:
        raise ValueError(
            f"evaluate: {given}: expected a run, a checkpoint or a model, as the settings name the "
            f"policies {', '.join(config.policies)}, got {what}, which is one policy"
        )


def _without_adapter(lora: LoraConfig) -> LoraConfig:
    """Return the settings of a model that answers as it is, under the names of the policies."""
    if not lora.policies:
        return LoraConfig()
    return replace(lora, path=None)  # new adapters, which change nothing


def _target_of_settings(config: Config) -> _Target:
    config = _without_training(config)
    engine = config.generator.inference_engine
    if config.engine_place is EnginePlace.SERVERS:
        urls = ", ".join(engine.external_server_urls)
        return _Target("servers", urls, config, is_server=True)
    model = config.trainer.policy.model
    if model.lora.path is None:
        model.lora = _without_adapter(model.lora)
    path = str(model.path)
    return _Target(Path(path).name, path, config)


def _without_training(config: Config) -> Config:
    """Return the settings for one engine in this process, without what only a training reads."""
    config = copy.deepcopy(config)
    trainer = replace(
        config.trainer,
        critic=CriticConfig(),
        fully_async=FullyAsyncConfig(),
        placement=PlacementConfig(),
        gradient_checkpointing=False,
    )
    return replace(config, trainer=trainer)


def _is_run(path: Path) -> bool:
    """Return whether a folder's config.json is that of a run, not of a model."""
    content = json.loads((path / "config.json").read_text(encoding="utf-8"))
    return isinstance(content, Mapping) and "trainer" in content


def _read_lora(folder: Path) -> LoraConfig:
    saved = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    targets = saved.get("target_modules")
    excluded = saved.get("exclude_modules")
    if isinstance(targets, str):
        target_modules = [targets]
    else:
        # PEFT may write full names; an engine joins modules by the last parts of theirs.
        target_modules = sorted({name.rpartition(".")[2] for name in targets})
    return LoraConfig(
        rank=int(saved["r"]),
        alpha=int(saved["lora_alpha"]),
        target_modules=target_modules,
        exclude_modules=list(excluded or []),
        use_rslora=bool(saved.get("use_rslora", False)),
        path=str(folder),
    )


def _named_targets(targets: Sequence[_Target]) -> list[_Target]:
    """Return the targets with names of folders, each once."""
    taken: dict[str, int] = {}
    named = []
    for target in targets:
        name = re.sub(r"[^\w.-]", "_", target.name)
        taken[name] = taken.get(name, 0) + 1
        if taken[name] == 1:
            unique = name
        else:
            unique = f"{name}-{taken[name]}"
        named.append(replace(target, name=unique))
    return named


# --- sampling -----------------------------------------------------------------------------------


async def _sample(
    target: _Target, tokenizer: Any, prompts: Sequence[Prompt], start: MakeRollouts
) -> list[Trajectory]:
    config = target.config
    if target.has_adapter:
        policy = load_policy(config, target.checkpoint)
    else:
        policy = None
    with as_setup_error():
        rollouts = await start(config, tokenizer, str(model_folder(target.path)))
    try:
        if policy is not None:
            # The probe verifies that the engine samples from the adapter.
            await rollouts.update_weights(policy, version=target.step)
        repair = partial(rollouts.repair, policy, version=target.step)
        return await _generate(rollouts, prompts, config.trainer.eval_batch_size, repair)
    finally:
        await rollouts.close()


async def _generate(
    rollouts: Rollouts,
    prompts: Sequence[Prompt],
    batch_size: int,
    repair: Callable[[], Awaitable[None]],
) -> list[Trajectory]:
    failures = FailureWatch()
    trajectories: list[Trajectory] = []
    for start in range(0, len(prompts), batch_size):
        sampled = await until_stopped(
            # The seeds of step 0, as in every evaluation of a run.
            rollouts.generate(prompts[start : start + batch_size], step=0, phase="eval"),
            stop=asyncio.Event(),
            wait_for_fault=rollouts.wait_for_fault,
            repair=repair,
        )
        fail_infinite_rewards(sampled)
        log_failures(sampled)
        failures.see(sampled)
        trajectories += sampled
    failures.end()
    return trajectories


# --- output -------------------------------------------------------------------------------------


def _result(target: _Target, trajectories: Sequence[Trajectory], folder: Path) -> Evaluation:
    config = target.config
    samples = config.generator.eval_n_samples_per_prompt
    ks = {1, samples, *(2**power for power in range(samples.bit_length()))}
    return Evaluation(
        name=target.name,
        target=target.given,
        step=target.step,
        metrics=evaluation_metrics(trajectories, config, ks={k for k in ks if k <= samples}),
        scores=prompt_scores(trajectories, sums_rewards=sums_rewards(config)),
        folder=folder,
    )


def _write(
    target: _Target,
    tokenizer: Any,
    result: Evaluation,
    trajectories: Sequence[Trajectory],
) -> None:
    settings = to_dict(target.config)
    write_json(result.folder / "config.json", settings)
    trainer = target.config.trainer
    receiver = JsonlLogger(
        RunInfo(result.folder, trainer.project_name, result.name, settings, result.step - 1)
    )
    receiver.write(result.step, result.metrics)
    receiver.close()
    writer = TrajectoryWriter(
        result.folder / "trajectories",
        tokenizer,
        last_step=result.step,
        sums_rewards=sums_rewards(target.config),
    )
    writer.write(result.step, "eval", trajectories)


def _report(results: Sequence[Evaluation]) -> dict[str, Any]:
    """Return the content of evaluation.json; differences are to the first target."""
    rows = []
    for result in results:
        row: dict[str, Any] = {
            "name": result.name,
            "target": result.target,
            "step": result.step,
            "score": result.score._asdict(),
            "metrics": dict(result.metrics),
            "scores": dict(result.scores),
        }
        if result is not results[0]:
            row["difference"] = result.difference(results[0])._asdict()
        rows.append(row)
    return {"evaluations": rows}
