"""A question of the leaderboard as an environment: one answer, judged by the leaderboard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from examples.bfcl.checker import shared_checker
from skyrl_fast import Action, Env, EnvStep


class Bfcl(Env):
    """The reward is 1 if the leaderboard's checker accepts the calls of the answer.

    The metric `called` is 1 where the engine's parser found a call.
    """

    def __init__(self, row: Mapping[str, Any]) -> None:
        self._row = row

    def step(self, action: Action) -> EnvStep:
        return EnvStep(judged(self._row, action.tool_calls), done=True)


def judged(row: Mapping[str, Any], tool_calls: list[dict[str, Any]]) -> dict[str, float]:
    """Return reward and metrics of an answer.

    Args:
        row: of the data.
        tool_calls: `{"function": {"name", "arguments"}}`, each, with a mapping of arguments.
    """
    calls = []
    for call in tool_calls:
        function = call["function"]
        calls.append({function["name"]: dict(function["arguments"])})
    if not calls:
        return {"reward": 0.0, "called": 0.0}
    said = shared_checker().check(row, calls)
    return {"reward": float(said["valid"]), "called": 1.0}
