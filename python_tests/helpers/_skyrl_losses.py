"""SkyRL's module of policy losses, imported with its dependencies."""

import importlib.util
import sys
import types
from typing import Any

import pytest


def skyrl_losses() -> types.ModuleType:
    """SkyRL's module of losses; ray, which it only decorates with, may be a placeholder."""
    pytest.importorskip("skyrl", reason="needs the package skyrl")
    for name in ("loguru", "jaxtyping", "omegaconf"):
        pytest.importorskip(name)
    if "ray" not in sys.modules and importlib.util.find_spec("ray") is None:
        ray: Any = types.ModuleType("ray")
        ray.remote = lambda x: x
        ray.is_initialized = lambda: False
        sys.modules.setdefault("ray", ray)
    if sys.version_info < (3, 12):
        import typing

        import typing_extensions

        typing.TypedDict = typing_extensions.TypedDict  # type: ignore[misc]
    from skyrl.backends.skyrl_train.utils import ppo_utils

    return ppo_utils
