"""An environment of skyrl-gym that describes a room after each answer."""

from __future__ import annotations

from typing import Any

import skyrl_gym
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

ROOMS = ("a red door and a lamp", "a small table left", "a large window", "nothing else")


class RoomsEnv(BaseTextEnv):
    """Ends after `max_turns` answers; the reward is 1 for one that says "yes"."""

    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.max_turns = (extras or {})["max_turns"]

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Return the next room."""
        self.turns += 1
        done = self.turns >= self.max_turns
        text = f"you see {ROOMS[self.turns % len(ROOMS)]} go on"
        return BaseTextEnvStepOutput(
            observations=[] if done else [{"role": "user", "content": text}],
            reward=float("yes" in action),
            done=done,
            metadata={},
        )


if "rooms" not in skyrl_gym.registry:
    skyrl_gym.register(id="rooms", entry_point=RoomsEnv)
