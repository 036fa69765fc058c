"""The quickstart's environment, made slow, unreliable or both: the case for asynchronous training.

Registered as `slow_text2sql`. Settings (environment.skyrl_gym.env_config.slow_text2sql) in addition
to text2sql's: `shortest` and `longest` seconds of a step, drawn uniformly on a logarithmic scale;
`failures`: share of the episodes that raise; `hanging`: share of the episodes that never return.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Mapping
from typing import Any

import skyrl_gym

from skyrl_fast.extras.text2sql.env import Text2SqlEnv

HANGING_SECONDS = 3600.0
_draw = random.Random()  # unseeded: the faults are not meant to be repeatable


class SlowText2SqlEnv(Text2SqlEnv, skyrl_gym.Env):
    """Waits before each step; sometimes raises, or never returns."""

    def __init__(self, env_config: Mapping[str, Any], extras: Mapping[str, Any]) -> None:
        super().__init__(env_config, extras)
        self._shortest = float(env_config.get("shortest", 0.05))
        self._longest = float(env_config.get("longest", 2.0))
        fate = _draw.random()
        self._raises = fate < env_config.get("failures", 0.0)
        self._hangs = not self._raises and fate > 1 - env_config.get("hanging", 0.0)

    def step(self, action: str) -> dict[str, Any]:
        """Return text2sql's answer, after a delay."""
        if self._raises:
            raise ConnectionError("the database went away")
        if self._hangs:
            time.sleep(HANGING_SECONDS)
        low, high = math.log(self._shortest), math.log(self._longest)
        time.sleep(math.exp(_draw.uniform(low, high)))
        return super().step(action)


if "slow_text2sql" not in skyrl_gym.registry:
    skyrl_gym.register("slow_text2sql", entry_point=SlowText2SqlEnv)
