"""An environment of reasoning-gym whose answer is the last number of a reply."""

from __future__ import annotations

import re

from skyrl_fast.adapters.reasoning_gym_env import ReasoningGymEnv


class LastNumber(ReasoningGymEnv):
    """A question whose answer is the last number of the reply: small models put none in marks."""

    def read_answer(self, text: str) -> str | None:
        """Return the last number of a text, with its sign; None: it has none.

        Example:
            >>> LastNumber.read_answer(env, "3 - 12 = -9.")
            '-9'
        """
        numbers: list[str] = re.findall(r"-?\d+", text)
        return numbers[-1] if numbers else None
