"""Objects given to `train_agent`: written into the settings by name, or made an environment."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from os.path import expanduser
from pathlib import Path
from typing import Any

from fsspec import get_filesystem_class
from fsspec.core import split_protocol

from skyrl_fast.config import Config, ConfigError
from skyrl_fast.ops.advantage.estimators import register_advantage_estimator
from skyrl_fast.ops.policy_loss.custom import register_policy_loss
from skyrl_fast.rollout.env.handler import MakeEnv
from skyrl_fast.rollout.env.reward_env import Reward, RewardEnv
from skyrl_fast.rollout.env.reward_functions import RewardFunction, RewardFunctions
from skyrl_fast.rollout.env.signatures import check_environment, check_reward
from skyrl_fast.system.importing import absolute_name, load_object, name_of
from skyrl_fast.train.setup.errors import SetupError


def with_objects(
    config: Config,
    *,
    env: MakeEnv | str | None,
    reward: Reward | None,
    loss: Callable[..., Any] | str | None,
    estimator: Callable[..., Any] | str | None,
) -> MakeEnv | None:
    """Write the names of the given objects into the settings; return the environment factory.

    Raises:
        SetupError: an object that is not callable, or not with what it will be called with.
    """
    for name, given in (("env", env), ("reward", reward)):
        is_name = name == "env" and isinstance(given, str)
        if given is not None and not is_name and not callable(given):
            raise SetupError(
                f"train_agent: {name}: expected a class or function, got {given!r:.100}"
            )
    try:
        if reward is not None:
            check_reward(reward)
        if callable(env) and not isinstance(env, RewardFunctions):
            check_environment("env", env)
    except ValueError as error:
        raise SetupError(f"train_agent: {error}") from error
    algorithm = config.trainer.algorithm
    if loss is not None:
        # As a name in the settings, which reach other ranks and the checkpoint.
        algorithm.policy_loss_type = _register(register_policy_loss, loss)
    if estimator is not None:
        algorithm.advantage_estimator = _register(register_advantage_estimator, estimator)
    if isinstance(env, str):
        config.environment.env_class = env
        return None
    made_by = env or reward
    if made_by is None:
        return None
    # Only a name, for records and messages: the factory makes the environments.
    config.environment.env_class = getattr(made_by, "__name__", type(made_by).__name__)
    return env if reward is None else partial(RewardEnv, reward)


def reward_functions(
    functions: RewardFunction | Sequence[RewardFunction] | None, weights: Sequence[float] | None
) -> RewardFunctions | None:
    """Return the factory of environments of `reward_funcs`; None: there are none.

    Raises:
        SetupError: no functions, or another number of weights.
    """
    if functions is None:
        if weights is not None:
            raise SetupError("train_agent: reward_weights: expected reward_funcs with it, got none")
        return None
    listed: list[Any] = list(functions) if isinstance(functions, list | tuple) else [functions]
    for function in listed:
        if not callable(function):
            raise SetupError(
                f"train_agent: reward_funcs: expected functions, got {function!r:.100}"
            )
    weights = [1.0] * len(listed) if weights is None else list(weights)
    if not listed or len(weights) != len(listed):
        text = f"got {len(listed)} functions and {len(weights)} weights"
        raise SetupError(f"train_agent: reward_funcs: expected some, each with a weight, {text}")
    return RewardFunctions(listed, weights)


def importable_name(function: Callable[..., Any]) -> str:
    """Return a function's name as in `agent.function`.

    Raises:
        SetupError: it is not at the top of a module, so that it has no such name.
    """
    try:
        name = f"{name_of(sys.modules[function.__module__])}:{function.__qualname__}"
        found = load_object(name)
    except (AttributeError, KeyError, ValueError) as error:
        text = f"train_agent: agent: expected a function of a module, got {function!r:.100}"
        raise SetupError(text) from error
    # A decorator or a later definition took its name: processes that import it would call another.
    if found is not function:
        raise SetupError(f"train_agent: agent: {name} is another object than the given function")
    return name


def _register(register: Callable[..., Any], given: Callable[..., Any] | str) -> str:
    """Return the name of a loss or an estimator; register it if it is a function."""
    return given if isinstance(given, str) else register(given)


def is_url(path: str) -> bool:
    """Return whether a path is scheme://..., not one of a mounted file system."""
    return "://" in path


def _check_url(setting: str, url: str) -> None:
    if setting not in ("trainer.ckpt_path", "trainer.resume_path"):
        raise ConfigError(
            f"{setting}: expected a path of a (mounted) file system, got {url}; checkpoints may be "
            "at a URL: trainer.ckpt_path"
        )
    protocol, _ = split_protocol(url)
    if protocol is None or "::" in url:
        raise ConfigError(f"{setting}: expected one scheme://, got {url}")
    try:
        get_filesystem_class(protocol)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{setting}: {url}: {error}") from error


def with_absolute_paths(config: Config) -> Config:
    """Make paths that are used later absolute: an environment may change the current folder.

    Raises:
        ConfigError: one is a URL that cannot be one: what a run writes is locked, renamed and read
            in place, checkpoints excepted; or the scheme's package is missing. Or it is in the home
            folder of an unknown user.
    """
    trainer, engine = config.trainer, config.generator.inference_engine
    for section, name in (
        *((trainer, name) for name in ("run_path", "ckpt_path", "resume_path")),
        *((engine, name) for name in ("weight_sync_path", "api_key_file")),
    ):
        path = getattr(section, name)
        key = "trainer" if section is trainer else "generator.inference_engine"
        if path is not None and is_url(path):
            _check_url(f"{key}.{name}", path)
        elif path is not None:
            found = expanduser(path)
            if found.startswith("~"):  # it would become a folder of that name
                raise ConfigError(f"{key}.{name}: expected a known user's home folder, got {path}")
            setattr(section, name, str(Path(found).absolute()))
    policy = trainer.policy.model
    for model in (policy, policy.lora, trainer.ref.model, trainer.critic.model):
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
