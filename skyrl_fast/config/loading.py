"""Load a checked `Config` from YAML and dotted overrides; every error names the dotted key."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from torch.nn import ModuleDict

from skyrl_fast.config.agent import check_agent
from skyrl_fast.config.algorithm import (
    check_estimator,
    check_policy_loss,
    estimator_spec,
    is_ratio_to_rollout,
    policy_loss_settings,
    policy_loss_spec,
)
from skyrl_fast.config.corrections import MAX_KL_STEP
from skyrl_fast.config.engine import LORA_RANKS, InferenceEngineConfig
from skyrl_fast.config.loggers import LOGGERS
from skyrl_fast.config.parse import as_config, read_yaml
from skyrl_fast.config.progress import PROGRESS
from skyrl_fast.config.sampling import check_sampling
from skyrl_fast.config.settings import REFERENCE, AlgorithmConfig, Config, leaves, merges_steps
from skyrl_fast.ops.policy_loss.losses import POLICY_LOSSES, Cispo, LossSpec
from skyrl_fast.setting import ConfigError, limit_error, tools_error

_POLICY_NAME = re.compile(r"[A-Za-z0-9_-]+")  # of files, metrics and modules
_TAKEN_NAMES = (REFERENCE, "default")  # of the model without an adapter, of an adapter without name


def load_config(
    path: str | Path | None = None, overrides: Sequence[str] = (), *, has_prompts: bool = False
) -> Config:
    """Return the checked settings of a YAML file with dotted overrides.

    Args:
        path: YAML file with the sections data, trainer, generator, environment; None: all defaults.
        overrides: strings such as "trainer.seed=7", or further YAML files; they take precedence
            over the file, and later ones over earlier ones.
        has_prompts: as for `check_config`.

    Raises:
        ConfigError: the file is missing or not YAML, a key is unknown (the message suggests the
            nearest one), or a value has the wrong type or is out of range.

    Example:
        >>> load_config(None, ["data.train_data=[a.jsonl]", "trainer.policy.model.path=m"])
        Config(...)
    """
    config = as_config(read_yaml(path, overrides))
    check_config(config, has_prompts=has_prompts)
    return config


def check_without_adapter(config: Config, command: str) -> None:
    """Raise ConfigError for an adapter that a command's engine would not load.

    Engines get an adapter by an update of weights, which only a run sends.
    """
    path = config.trainer.policy.model.lora.path
    if path is not None:
        raise ConfigError(
            f"trainer.policy.model.lora.path: {command} samples from the base alone, got {path}; "
            "export a merged model (skyrl-fast export --merge) and set trainer.policy.model.path, "
            "with trainer.policy.model.lora.rank=0 and no lora.path"
        )


def check_config(config: Config, *, has_prompts: bool = False) -> None:
    """Raise ConfigError for values of the wrong type, out of range or incompatible.

    Args:
        config: its sections may be mappings, as in `as_config`.
        has_prompts: training prompts are given in memory, so `data.train_data` may be empty.
    """
    config = as_config(config)
    check_limits(config)
    trainer, generator = config.trainer, config.generator
    loggers = [name for name in trainer.logger if ":" not in name]  # others are module:Class
    columns = [name for name in trainer.progress or () if "/" not in name]  # others are metrics
    for key, table, named in (("logger", LOGGERS, loggers), ("progress", PROGRESS, columns)):
        wrong = limit_error({"choices": tuple(table)}, named)
        if wrong is not None:
            raise ConfigError(f"trainer.{key}: {wrong}")
    if not config.data.train_data and not has_prompts:
        raise ConfigError("data.train_data: expected at least one file of prompts, got none")
    if trainer.policy.model.path is None:
        raise ConfigError(
            "trainer.policy.model.path: expected a model folder or hub name, got null"
        )
    if trainer.train_batch_size % trainer.policy_mini_batch_size:
        raise ConfigError(
            "trainer.policy_mini_batch_size: expected a divisor of trainer.train_batch_size="
            f"{trainer.train_batch_size}, got {trainer.policy_mini_batch_size}"
        )
    _check_lora(config)
    recorded = generator.inference_engine.enable_return_routed_experts
    if trainer.policy.moe_enable_routing_replay and not recorded:
        raise ConfigError(
            "generator.inference_engine.enable_return_routed_experts: expected true "
            "(trainer.policy.moe_enable_routing_replay repeats what it records), got false"
        )
    for name, model in (("policy", trainer.policy), ("critic", trainer.critic)):
        betas = model.optimizer_config.adam_betas
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ConfigError(
                f"trainer.{name}.optimizer_config.adam_betas: expected two numbers in [0, 1), "
                f"got {betas}"
            )
    if trainer.resume_mode == "from_path" and trainer.resume_path is None:
        raise ConfigError(
            "trainer.resume_path: expected a checkpoint folder (resume_mode=from_path), got null"
        )
    ranks, shared = trainer.placement.num_ranks, trainer.policy.sequence_parallel_size
    if ranks % shared:
        raise ConfigError(
            "trainer.policy.sequence_parallel_size: expected a divisor of the number of ranks, "
            f"{ranks} (trainer.placement), got {shared}"
        )
    check_policy_loss(config)
    check_estimator(trainer.algorithm)
    _check_algorithm(trainer.algorithm)
    _check_group_sizes(config)
    _check_estimator_rows(config)
    check_agent(config)
    _check_engines(generator.inference_engine, is_synchronous=config.max_staleness == 0)
    _check_cluster_engines(config)
    _check_rows(config)
    wrong = tools_error(generator.chat_template_kwargs.get("tools"))
    if wrong is not None:
        raise ConfigError(f"generator.chat_template_kwargs.tools: {wrong}")
    check_sampling("generator.sampling_params", generator.sampling_params, trained=True)
    if generator.eval_sampling_params is not None:
        check_sampling(
            "generator.eval_sampling_params", generator.eval_sampling_params, trained=False
        )
    if trainer.eval_interval == 0 or trainer.ckpt_interval == 0 or trainer.max_ckpts_to_keep == 0:
        raise ConfigError(
            "trainer.eval_interval, ckpt_interval, max_ckpts_to_keep: expected >= 1 or -1, got 0"
        )


def check_limits(section: Any, key: str = "") -> None:
    """Raise ConfigError for an out-of-range value in this section, whose dotted key is `key`."""
    for path, value, item in leaves(section, key):
        wrong = limit_error(item.metadata, value)
        if wrong is not None:
            raise ConfigError(f"{path}: {wrong}")


def _check_rows(config: Config) -> None:
    generator, rows = config.generator, config.trainer.rows
    if generator.merge_stepwise_output and not generator.step_wise_trajectories:
        raise ConfigError(
            "generator.merge_stepwise_output: expected false where "
            "generator.step_wise_trajectories is false (one row per trajectory already), got true"
        )
    one_row = not generator.step_wise_trajectories
    if config.trainer.algorithm.observation_loss_coef and not (one_row or merges_steps(config)):
        raise ConfigError(
            "trainer.algorithm.observation_loss_coef: expected 0, as a row per step has no tokens "
            "of the environment (trainer.rows=merged or generator.merge_stepwise_output=true has), "
            f"got {config.trainer.algorithm.observation_loss_coef:g}"
        )
    if rows == "step" and (one_row or generator.merge_stepwise_output):
        other = "step_wise_trajectories=false" if one_row else "merge_stepwise_output=true"
        raise ConfigError(f"trainer.rows: expected another form with generator.{other}, got step")


def _check_lora(config: Config) -> None:
    lora, key = config.trainer.policy.model.lora, "trainer.policy.model.lora"
    if lora.path is not None and lora.rank == 0:
        raise ConfigError(f"{key}.rank: expected that of the adapter in {lora.path}, got 0")
    if lora.policies:
        _check_policies(config)
    if not config.sends_adapter:
        return
    if lora.rank > LORA_RANKS[-1]:
        raise ConfigError(
            f"{key}.rank: expected at most {LORA_RANKS[-1]}, vLLM's limit, unless "
            f"{key}.weight_sync=merged, got {lora.rank}"
        )


def _check_policies(config: Config) -> None:
    trainer, names = config.trainer, config.policies
    lora, key = trainer.policy.model.lora, "trainer.policy.model.lora"
    for name in names:
        if not _POLICY_NAME.fullmatch(name) or names.count(name) > 1:
            raise ConfigError(
                f"{key}.policies: expected different names of letters, digits, - and _, got "
                f"{', '.join(map(repr, names))}"
            )
        if name in _TAKEN_NAMES or hasattr(ModuleDict(), name):  # of adapters by name
            raise ConfigError(f"{key}.policies: expected another name than {name}, which has a use")
    if lora.rank == 0:
        raise ConfigError(f"{key}.rank: expected that of the policies' adapters, got 0")
    if not (config.sends_adapter and config.engine_in_process):
        raise ConfigError(
            f"{key}.policies: expected an engine of this process, which gets the adapters alone "
            "(run_engines_locally and colocate_all true, weight_sync=adapter): servers, engines of "
            "a cluster and weight_sync=merged get one policy's weights"
        )
    if REFERENCE in config.agent.upstreams:
        raise ConfigError(
            f"agent.upstreams: expected another name than {REFERENCE}, which is that of the model "
            f"without an adapter in a run with {key}.policies"
        )
    if trainer.critic.model.path is not None:
        raise ConfigError(
            f"trainer.critic.model.path: expected null with {key}.policies, as a critic values "
            f"one policy, got {trainer.critic.model.path}"
        )


def _check_algorithm(algorithm: AlgorithmConfig) -> None:
    key = "trainer.algorithm"
    terms = algorithm.use_kl_loss, algorithm.use_entropy_loss, algorithm.observation_loss_coef > 0
    if algorithm.policy_loss_coef == 0 and not any(terms):
        raise ConfigError(
            f"{key}.policy_loss_coef: expected more than 0, as the loss has no other term "
            "(use_kl_loss, use_entropy_loss, observation_loss_coef), got 0"
        )
    if algorithm.use_kl_in_reward and algorithm.use_kl_loss:
        raise ConfigError(
            f"{key}.use_kl_in_reward: expected only one of use_kl_in_reward and use_kl_loss, "
            "got both"
        )
    correction = algorithm.off_policy_correction
    spec, loss = policy_loss_spec(algorithm), policy_loss_settings(algorithm)
    if correction.enabled and isinstance(spec, LossSpec) and spec.scope == "mini_batch":
        others = [one.name for one in POLICY_LOSSES.values() if one.scope == spec.scope]
        raise ConfigError(
            f"{key}.off_policy_correction: expected a policy_loss_type other than "
            f"{' and '.join(others)}, got {algorithm.policy_loss_type}"
        )
    if is_ratio_to_rollout(algorithm) and correction.tis_ratio_type is not None:
        which = "cispo_ratio=rollout" if isinstance(loss, Cispo) else algorithm.policy_loss_type
        raise ConfigError(
            f"{key}.off_policy_correction.tis_ratio_type: expected null with {which}, whose ratio "
            f"corrects already, got {correction.tis_ratio_type}"
        )
    if correction.enabled and algorithm.old_logprobs == "rollout":
        raise ConfigError(
            f"{key}.off_policy_correction: expected old_logprobs=policy to compare with the "
            "engine's, got rollout"
        )
    if algorithm.dynamic_sampling.max_sample_batches == 0:
        raise ConfigError(f"{key}.dynamic_sampling.max_sample_batches: expected >= 1 or -1, got 0")


def _check_group_sizes(config: Config) -> None:
    """Check the group size of baselines over others, and the horizon of the KL controller."""
    algorithm, samples = config.trainer.algorithm, config.generator.n_samples_per_prompt
    if estimator_spec(algorithm).needs_others and samples == 1:
        raise ConfigError(
            "generator.n_samples_per_prompt: expected at least 2 with trainer.algorithm."
            f"advantage_estimator={algorithm.advantage_estimator}, whose advantage is 0 in a group "
            "of one, got 1"
        )
    least, control = MAX_KL_STEP * config.trainer.train_batch_size * samples, algorithm.kl_ctrl
    adaptive = algorithm.use_kl_in_reward and control.type == "adaptive"
    if adaptive and control.horizon <= least:
        raise ConfigError(
            f"trainer.algorithm.kl_ctrl.horizon: expected more than {least:g} (otherwise one batch "
            f"can make the coefficient 0 or negative), got {control.horizon}"
        )


def _check_engines(engine: InferenceEngineConfig, *, is_synchronous: bool) -> None:
    key = "generator.inference_engine"
    if engine.enable_sleep_mode and not (engine.run_engines_locally and is_synchronous):
        reason = (
            "the engine generates during updates (trainer.fully_async)"
            if engine.run_engines_locally
            else "servers do not sleep"
        )
        raise ConfigError(f"{key}.enable_sleep_mode: expected null or false, as {reason}, got true")
    if engine.run_engines_locally == bool(engine.external_server_urls):
        wanted = "none" if engine.run_engines_locally else "at least one address"
        raise ConfigError(
            f"{key}.external_server_urls: expected {wanted} with "
            f"run_engines_locally={str(engine.run_engines_locally).lower()}, got "
            f"{engine.external_server_urls}"
        )
    local = ("auto", "ipc", "nccl", "gloo", "file")
    choices = local if engine.run_engines_locally else ("auto", "file", "reload")
    if engine.weight_sync_backend not in choices:
        raise ConfigError(
            f"{key}.weight_sync_backend: expected one of {', '.join(choices)} with "
            f"run_engines_locally={str(engine.run_engines_locally).lower()}, got "
            f"{engine.weight_sync_backend}"
        )
    replicas = engine.engine_init_kwargs.get("data_parallel_size", 1)
    if engine.weight_sync_backend in ("nccl", "gloo") and replicas != 1:
        raise ConfigError(
            f"{key}.weight_sync_backend: expected auto or file, as weights are broadcast to the "
            f"workers of one replica (data_parallel_size={replicas}), got "
            f"{engine.weight_sync_backend}"
        )
    for url in engine.external_server_urls:
        if not url.startswith(("http://", "https://")) or not _has_host(url):
            raise ConfigError(f"{key}.external_server_urls: expected http://host:port, got {url!r}")
        parts = urlsplit(url)
        if parts.path.rstrip("/").endswith("/v1") or parts.query or parts.fragment:
            raise ConfigError(
                f"{key}.external_server_urls: expected http://host:port, the server's address "
                f"without /v1 or a query, got {url!r}"
            )
    if len({url.rstrip("/") for url in engine.external_server_urls}) < len(
        engine.external_server_urls
    ):
        raise ConfigError(f"{key}.external_server_urls: expected different ones, got one twice")


def _check_cluster_engines(config: Config) -> None:
    engine, key = config.generator.inference_engine, "generator.inference_engine"
    if not config.engines_on_cluster:
        if engine.num_engines > 1:
            wanted = (
                "trainer.placement.colocate_all=false with it"
                if engine.run_engines_locally
                else "1, as the servers are those of external_server_urls"
            )
            raise ConfigError(f"{key}.num_engines: expected {wanted}, got {engine.num_engines}")
        return
    reason = "with trainer.placement.colocate_all=false, where Ray chooses the engines' GPUs"
    for name in ("gpu_ids", "enable_sleep_mode"):
        if getattr(engine, name):
            raise ConfigError(f"{key}.{name}: expected null {reason}, got {getattr(engine, name)}")
    if engine.weight_sync_backend == "ipc":
        raise ConfigError(f"{key}.weight_sync_backend: expected another one {reason}, got ipc")
    if engine.weight_sync_backend == "file" and engine.weight_sync_path is None:
        raise ConfigError(
            f"{key}.weight_sync_path: expected a folder that all nodes share, with "
            "weight_sync_backend=file and trainer.placement.colocate_all=false, got null"
        )


def _has_host(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0  # an invalid port raises
    except ValueError:
        return False


def _check_estimator_rows(config: Config) -> None:
    trainer, generator = config.trainer, config.generator
    estimator, spec = trainer.algorithm.advantage_estimator, estimator_spec(trainer.algorithm)
    has_critic = trainer.critic.model.path is not None
    if has_critic != spec.needs_values:
        wanted, got = ("null", trainer.critic.model.path) if has_critic else ("a model", "null")
        raise ConfigError(
            f"trainer.critic.model.path: expected {wanted} with "
            f"trainer.algorithm.advantage_estimator={estimator}, got {got}"
        )
    critic_size = trainer.critic_mini_batch_size or trainer.policy_mini_batch_size
    if trainer.train_batch_size % critic_size:
        raise ConfigError(
            "trainer.critic_mini_batch_size: expected a divisor of trainer.train_batch_size="
            f"{trainer.train_batch_size}, got {critic_size}"
        )
    rows_are_turns = generator.step_wise_trajectories and not merges_steps(config)
    if spec.level == "turn" and not rows_are_turns:
        raise ConfigError(
            f"trainer.algorithm.advantage_estimator: {estimator} is per turn and needs a row for "
            "each turn: generator.step_wise_trajectories=true and merge_stepwise_output=false"
        )


def environment_setting(name: str) -> str:
    return os.environ.get(name, "")
