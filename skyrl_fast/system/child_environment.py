"""Environment variables of processes that run what models write: without the engine's key."""

from __future__ import annotations

import os

KEY_VARIABLE = "SKYRL_FAST_ENGINE_KEY"


def environment_without_key() -> dict[str, str]:
    """Return this process's environment variables for a child that never calls the engine."""
    result: dict[str, str] = {}
    for name, value in os.environ.items():
        if name != KEY_VARIABLE:
            result[name] = value
    return result
