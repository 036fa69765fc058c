"""The quickstart's environment, made slow, unreliable or both: the case for asynchronous training.

Registered as `slow_text2sql`. Settings (environment.skyrl_gym.env_config.slow_text2sql) in addition
to text2sql's: `shortest` and `longest` seconds of a step, drawn uniformly on a logarithmic scale;
`failures`: share of the episodes that raise; `hanging`: of those that never return; `freezing`: of
those that never return and hold the interpreter's lock, for `environment.workers=process` only.
"""

from __future__ import annotations

import ctypes
import math
import random
import time
from collections.abc import Mapping
from typing import Any

import skyrl_gym

from skyrl_fast.extras.text2sql.env import Text2SqlEnv

HANGING_SECONDS = 3600.0


class SlowText2SqlEnv(Text2SqlEnv, skyrl_gym.Env):
    """Waits before each step; sometimes raises, or never returns."""

    def __init__(self, env_config: Mapping[str, Any], extras: Mapping[str, Any]) -> None:
        super().__init__(env_config, extras)
        self._shortest = float(env_config.get("shortest", 0.05))
        self._longest = float(env_config.get("longest", 2.0))
        # Unseeded: the faults are not meant to be repeatable. Of the module's generator, which each
        # process seeds again.
        fate = random.random()
        raising = env_config.get("failures", 0.0)
        hanging = 1 - env_config.get("hanging", 0.0)
        self._raises = fate < raising
        self._hangs = fate > hanging
        self._freezes = hanging >= fate > hanging - env_config.get("freezing", 0.0)

    def step(self, action: str) -> dict[str, Any]:
        """Return text2sql's answer, after a delay."""
        if self._raises:
            raise ConnectionError("the database went away")
        if self._hangs:
            time.sleep(HANGING_SECONDS)
        if self._freezes:
            ctypes.PyDLL(None).sleep(int(HANGING_SECONDS))  # PyDLL keeps the interpreter's lock
        low, high = math.log(self._shortest), math.log(self._longest)
        time.sleep(math.exp(random.uniform(low, high)))
        return super().step(action)


if "slow_text2sql" not in skyrl_gym.registry:
    skyrl_gym.register("slow_text2sql", entry_point=SlowText2SqlEnv)
