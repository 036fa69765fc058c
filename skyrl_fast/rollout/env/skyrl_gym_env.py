"""Environments of skyrl-gym behind the `Env` protocol.

`env_class` is a name that is registered in skyrl_gym; its settings are those of
`environment.skyrl_gym`. skyrl_gym is imported when the first environment is made.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any

from skyrl_fast.rollout.env.protocol import Env, Message
from skyrl_fast.system.importing import load_object

# By the entry point in skyrl_gym: the same environment, with the model's SQL in a sandbox.
REPLACEMENTS = {"skyrl_gym.envs.sql.env:SQLEnv": "skyrl_fast.extras.text2sql.env:Text2SqlEnv"}


class SkyRLGymEnv(Env):
    """One environment of skyrl-gym."""

    def __init__(self, env: Any) -> None:
        self.env = env

    def init(self, messages: list[Message]) -> Sequence[Mapping[str, Any]]:
        answer = self.env.init(messages)
        first: Sequence[Mapping[str, Any]] = (
            answer[0] if isinstance(answer, tuple) and answer else answer
        )
        return first

    def step(self, action: str) -> Mapping[str, Any]:
        answer: Mapping[str, Any] = self.env.step(action)
        return answer

    def metrics(self) -> Mapping[str, Any]:
        get = getattr(self.env, "get_metrics", None)
        if get is None:
            return {}
        return get() or {}

    def close(self) -> None:
        self.env.close()


def make(env_class: str, settings: Mapping[str, Any], extras: dict[str, Any]) -> SkyRLGymEnv:
    """Return a new environment, `settings` over its defaults; ValueError if there is none such."""
    import skyrl_gym

    spec = check_registered(env_class)
    env_config = _EnvConfig({**_default_settings(spec.entry_point), **settings})
    if spec.entry_point in REPLACEMENTS:
        return SkyRLGymEnv(load_object(REPLACEMENTS[spec.entry_point])(env_config, extras))
    return SkyRLGymEnv(skyrl_gym.make(env_class, env_config=env_config, extras=extras))


def check_registered(env_class: str) -> Any:
    try:
        import skyrl_gym
    except ImportError as error:
        raise ValueError(
            f"expected module:Class, or skyrl-gym for the environments registered there ({error}), "
            f"got {env_class!r}"
        ) from error
    try:
        return skyrl_gym.spec(env_class)
    except skyrl_gym.error.Error:
        known = ", ".join(sorted(skyrl_gym.registry))
        raise ValueError(
            f"no environment of the name {env_class!r} is registered (known: {known}); name the "
            "module that registers yours in environment.register"
        ) from None


class _EnvConfig(dict[str, Any]):
    """A dict whose keys are also attributes, as environments of skyrl_gym expect."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"env_config has no {name!r}; it has {sorted(self)}") from None


def _default_settings(entry_point: Any) -> dict[str, Any]:
    """Return the fields of the one `...EnvConfig` dataclass in the environment's module, if any."""
    if isinstance(entry_point, str):
        module: Any = importlib.import_module(entry_point.partition(":")[0])
    else:
        module = sys.modules.get(getattr(entry_point, "__module__", ""))
    configs: list[Any] = [
        item
        for name, item in (vars(module).items() if module else ())
        if name.endswith("EnvConfig")
        and is_dataclass(item)
        and getattr(item, "__module__", "") == module.__name__  # not an imported one
    ]
    if len(configs) != 1:
        return {}
    try:
        return asdict(configs[0]())
    except TypeError:  # a field without default
        return {}
