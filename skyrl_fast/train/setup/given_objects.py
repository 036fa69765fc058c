"""Objects that a caller gives: their names in the settings, and factories of environments."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from os.path import expanduser
from pathlib import Path
from typing import Any

from fsspec import get_filesystem_class
from fsspec.core import split_protocol

from skyrl_fast.config import Config, ConfigError
from skyrl_fast.gateway.agents.task import AgentTask
from skyrl_fast.ops.advantage.estimators import register_advantage_estimator
from skyrl_fast.ops.policy_loss.custom import register_policy_loss
from skyrl_fast.rollout.env.handler import MakeEnv
from skyrl_fast.rollout.env.reward_env import Reward, RewardEnv
from skyrl_fast.rollout.env.reward_functions import RewardFunction, RewardFunctions
from skyrl_fast.rollout.env.signatures import SignatureError, check_environment, check_reward
from skyrl_fast.system.importing import absolute_name, load_object, name_of
from skyrl_fast.train.setup.errors import SetupError


@dataclass(frozen=True, slots=True)
class GivenObjects:
    """What a caller gives next to the settings; the arguments are those of `train_agent`.

    Args:
        op: the function that was called, for messages.
    """

    op: str
    env: MakeEnv | str | None = None
    reward: Reward | None = None
    reward_funcs: RewardFunction | Sequence[RewardFunction] | None = None
    reward_weights: Sequence[float] | None = None
    agent: Callable[[AgentTask], Any] | str | None = None
    loss: Callable[..., Any] | str | None = None
    estimator: Callable[..., Any] | str | None = None

    def write_into(self, config: Config) -> MakeEnv | None:
        """Write the objects' names into the settings; return the factory of environments, if any.

        Raises:
            SetupError: an object that is not callable, or not with what it will be called with, or
                several of which a run has one.
        """
        plays = [self.env, self.reward, self.reward_funcs, self.agent]
        num_given = sum(given is not None for given in plays)
        if num_given > 1:
            raise self._error("expected one of env, reward, reward_funcs and agent, got several")
        if self.agent is not None:
            # By name, as settings are stored, and read by other processes.
            config.agent.function = self._agent_name()
        elif config.agent.is_set and num_given:
            raise self._error(
                "expected no env, reward or reward_funcs with the agent of the settings "
                "(agent.function, agent.command), which plays in its own environment, got one"
            )
        self._write_algorithm(config)
        functions = self._reward_functions()
        if functions is not None:
            return _named(config, functions, functions)
        self._check_callable("env", self.env)
        self._check_callable("reward", self.reward)
        if isinstance(self.env, str):
            config.environment.env_class = self.env
            return None
        if self.reward is not None:
            return _named(config, self.reward, partial(RewardEnv, self.reward))
        if self.env is None:
            return None
        return _named(config, self.env, self.env)

    def _error(self, text: str) -> SetupError:
        return SetupError(f"{self.op}: {text}")

    def _write_algorithm(self, config: Config) -> None:
        # As names in the settings, which reach other ranks and the checkpoint.
        algorithm = config.trainer.algorithm
        if self.loss is not None:
            algorithm.policy_loss_type = _register(register_policy_loss, self.loss)
        if self.estimator is not None:
            algorithm.advantage_estimator = _register(register_advantage_estimator, self.estimator)

    def _check_callable(self, name: str, given: Any) -> None:
        if given is None or (name == "env" and isinstance(given, str)):
            return
        if not callable(given):
            raise self._error(f"{name}: expected a class or function, got {given!r:.100}")
        try:
            if name == "reward":
                check_reward(given)
            else:
                check_environment(name, given)
        except SignatureError as error:
            raise self._error(str(error)) from None

    def _reward_functions(self) -> RewardFunctions | None:
        functions = self.reward_funcs
        weights = self.reward_weights
        if functions is None:
            if weights is not None:
                raise self._error("reward_weights: expected reward_funcs with it, got none")
            return None
        listed: list[Any] = list(functions) if isinstance(functions, list | tuple) else [functions]
        for function in listed:
            if not callable(function):
                raise self._error(f"reward_funcs: expected functions, got {function!r:.100}")
        if weights is None:
            weights = [1.0] * len(listed)
        else:
            weights = list(weights)
        if not listed or len(weights) != len(listed):
            raise self._error(
                "reward_funcs: expected some, each with a weight, "
                f"got {len(listed)} functions and {len(weights)} weights"
            )
        return RewardFunctions(listed, weights)

    def _agent_name(self) -> str:
        """Return the agent's name as in `agent.function`, at the top of a module."""
        function: Any = self.agent
        if isinstance(function, str):
            return function
        try:
            name = f"{name_of(sys.modules[function.__module__])}:{function.__qualname__}"
            found = load_object(name)
        except (AttributeError, KeyError, ValueError) as error:
            raise self._error(
                f"agent: expected a function of a module, got {function!r:.100}"
            ) from error
        # A decorator or a later definition took its name: processes that import it would call
        # another.
        if found is not function:
            raise self._error(f"agent: {name} is another object than the given function")
        return name


def has_one_turn(make_env: MakeEnv | None) -> bool:
    """Return whether a factory's environments are reward functions, which end in the first turn."""
    if isinstance(make_env, RewardFunctions):
        return True
    return isinstance(make_env, partial) and make_env.func is RewardEnv


def _named(config: Config, given: Any, make_env: MakeEnv) -> MakeEnv:
    # Only a name, for records and messages: the factory makes the environments.
    config.environment.env_class = getattr(given, "__name__", type(given).__name__)
    return make_env


def _register(register: Callable[..., Any], given: Callable[..., Any] | str) -> str:
    """Return the name of a loss or an estimator; register it if it is a function."""
    if isinstance(given, str):
        return given
    return register(given)


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
    trainer = config.trainer
    engine = config.generator.inference_engine
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
    algorithm = config.trainer.algorithm
    distillation = algorithm.distillation
    for source, teacher in distillation.teachers.items():
        # Another type is refused later, by its name.
        if isinstance(teacher, str) and Path(teacher).is_dir():
            distillation.teachers[source] = str(Path(teacher).absolute())
    if distillation.api_key_file is not None:
        distillation.api_key_file = str(Path(expanduser(distillation.api_key_file)).absolute())
    environment = config.environment
    for section, name in (
        (algorithm, "policy_loss_type"),
        (algorithm, "advantage_estimator"),
        (environment, "env_class"),
        (config.agent, "function"),
        (config.data, "curriculum"),
        (config.generator.compaction, "policy"),
    ):
        if getattr(section, name) is not None:
            setattr(section, name, absolute_name(getattr(section, name), Path.cwd()))
    environment.register = [absolute_name(name, Path.cwd()) for name in environment.register]
    return config
