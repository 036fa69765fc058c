"""Load a checked `Config` from YAML and dotted overrides; every error names the dotted key."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from skyrl_fast.config.agent import check_agent_names
from skyrl_fast.config.algorithm import check_estimator, check_policy_loss
from skyrl_fast.config.corrections import MAX_KL_STEP
from skyrl_fast.config.distillation import SETTING as DISTILLATION
from skyrl_fast.config.distillation import is_server
from skyrl_fast.config.engine import LORA_RANKS
from skyrl_fast.config.features import check_features
from skyrl_fast.config.loggers import LOGGERS
from skyrl_fast.config.modes import EngineWeights
from skyrl_fast.config.parse import as_config, read_yaml
from skyrl_fast.config.progress import PROGRESS
from skyrl_fast.config.sampling import check_sampling
from skyrl_fast.config.settings import REFERENCE, Config, leaves
from skyrl_fast.setting import ConfigError, limit_error, tools_error

_POLICY_NAME = re.compile(r"[A-Za-z0-9_-]+")  # part of the names of files, metrics and modules
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
            "export a merged model (skyrl-fast export --to model) and set "
            "trainer.policy.model.path, with trainer.policy.model.lora.rank=0 and no lora.path"
        )


def check_config(config: Config, *, has_prompts: bool = False) -> None:
    """Raise ConfigError for values of the wrong type, out of range or incompatible.

    Args:
        config: its sections may be mappings, as in `as_config`.
        has_prompts: training prompts are given in memory, so `data.train_data` may be empty.
    """
    config = as_config(config)
    check_limits(config)
    trainer = config.trainer
    generator = config.generator
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
    for name, model in (("policy", trainer.policy), ("critic", trainer.critic)):
        betas = model.optimizer_config.adam_betas
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ConfigError(
                f"trainer.{name}.optimizer_config.adam_betas: expected two numbers in [0, 1), "
                f"got {betas}"
            )
    ranks = trainer.placement.num_ranks
    shared = trainer.policy.sequence_parallel_size
    is_known = trainer.placement.policy_num_gpus_per_node is not None
    if is_known and ranks % shared:
        raise ConfigError(
            "trainer.policy.sequence_parallel_size: expected a divisor of the number of ranks, "
            f"{ranks} (trainer.placement), got {shared}"
        )
    _check_teachers(trainer.algorithm.distillation.teachers)
    check_policy_loss(config.trainer.algorithm)
    check_estimator(trainer.algorithm)
    check_features(config)
    _check_algorithm(config)
    check_agent_names(config)
    urls = generator.inference_engine.external_server_urls
    _check_server_addresses(urls, "generator.inference_engine.external_server_urls")
    nodes = trainer.placement.policy_num_nodes
    num_engines = generator.inference_engine.num_engines or nodes
    if config.spreads_engines and num_engines % nodes:
        raise ConfigError(
            "generator.inference_engine.num_engines: expected null, 1 or a multiple of "
            f"trainer.placement.policy_num_nodes={nodes}, got {num_engines}"
        )
    budget = generator.compaction.budget
    if budget is not None and budget > generator.max_input_length:
        raise ConfigError(
            "generator.compaction.budget: expected at most generator.max_input_length="
            f"{generator.max_input_length}, the longest prompt, got {budget}"
        )
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


def _check_lora(config: Config) -> None:
    lora = config.trainer.policy.model.lora
    key = "trainer.policy.model.lora"
    _check_policy_names(config.policies, config.agent.upstreams)
    _check_roles(config.roles)
    if config.engine_weights is EngineWeights.ADAPTER and lora.rank > LORA_RANKS[-1]:
        raise ConfigError(
            f"{key}.rank: expected at most {LORA_RANKS[-1]}, vLLM's limit, unless "
            f"{key}.weight_sync=merged, got {lora.rank}"
        )


def _check_policy_names(names: Sequence[str], upstreams: Mapping[str, Any]) -> None:
    key = "trainer.policy.model.lora"
    if not names:
        return
    from torch.nn import ModuleDict

    for name in names:
        if not _POLICY_NAME.fullmatch(name) or names.count(name) > 1:
            raise ConfigError(
                f"{key}.policies: expected different names of letters, digits, - and _, got "
                f"{', '.join(map(repr, names))}"
            )
        if name in _TAKEN_NAMES or hasattr(ModuleDict(), name):  # torch keeps adapters by name
            raise ConfigError(f"{key}.policies: expected another name than {name}, which has a use")
    if REFERENCE in upstreams:
        raise ConfigError(
            f"agent.upstreams: expected another name than {REFERENCE}, which is that of the model "
            f"without an adapter in a run with {key}.policies"
        )


def _check_roles(names: Sequence[str]) -> None:
    are_names = all(_POLICY_NAME.fullmatch(name) for name in names)
    is_several = len(names) != 1 and len(set(names)) == len(names)
    if not are_names or not is_several:
        raise ConfigError(
            "trainer.policy.roles: expected none, or several different names of letters, digits, - "
            f"and _, got {', '.join(map(repr, names))}"
        )


def _check_algorithm(config: Config) -> None:
    """Check numbers of the algorithm that depend on numbers of the batch."""
    trainer = config.trainer
    algorithm = trainer.algorithm
    critic_size = trainer.critic_mini_batch_size or trainer.policy_mini_batch_size
    if trainer.train_batch_size % critic_size:
        raise ConfigError(
            "trainer.critic_mini_batch_size: expected a divisor of trainer.train_batch_size="
            f"{trainer.train_batch_size}, got {critic_size}"
        )
    if algorithm.dynamic_sampling.max_sample_batches == 0:
        raise ConfigError(
            "trainer.algorithm.dynamic_sampling.max_sample_batches: expected >= 1 or -1, got 0"
        )
    trajectories = trainer.train_batch_size * config.generator.n_samples_per_prompt
    least = MAX_KL_STEP * trajectories
    is_adaptive = algorithm.use_kl_in_reward and algorithm.kl_ctrl.type == "adaptive"
    if is_adaptive and algorithm.kl_ctrl.horizon <= least:
        raise ConfigError(
            f"trainer.algorithm.kl_ctrl.horizon: expected more than {least:g} (otherwise one batch "
            f"can make the coefficient 0 or negative), got {algorithm.kl_ctrl.horizon}"
        )


def _check_teachers(teachers: Mapping[str, str]) -> None:
    for source, teacher in teachers.items():
        key = f"{DISTILLATION}.teachers.{source}"
        if not isinstance(teacher, str) or not teacher:
            raise ConfigError(
                f"{key}: expected a model folder, a hub name or http://host:port, got {teacher!r}"
            )
        if is_server(teacher):
            _check_server_addresses([teacher], key)


def _check_server_addresses(urls: Sequence[str], key: str) -> None:
    for url in urls:
        if not url.startswith(("http://", "https://")) or not _has_host(url):
            raise ConfigError(f"{key}: expected http://host:port, got {url!r}")
        parts = urlsplit(url)
        if parts.path.rstrip("/").endswith("/v1") or parts.query or parts.fragment:
            raise ConfigError(
                f"{key}: expected http://host:port, the server's address without /v1 or a query, "
                f"got {url!r}"
            )
    distinct = {url.rstrip("/") for url in urls}
    if len(distinct) < len(urls):
        raise ConfigError(f"{key}: expected different ones, got one twice")


def _has_host(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0  # an invalid port raises
    except ValueError:
        return False


def environment_setting(name: str) -> str:
    return os.environ.get(name, "")
