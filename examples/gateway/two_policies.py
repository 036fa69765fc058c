"""The quickstart's task for two policies of one model: a planner that looks, a worker that answers.

The planner queries the database until it would answer; then the worker answers in its place, from
the same conversation. Both have the reward of the answer, and each learns from its own turns: the
planner not to stop at the wrong table, the worker to write the right comparison.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

from skyrl_fast.extras.text2sql.env import Text2SqlEnv

DATABASES = {"db_path": os.environ.get("QUICKSTART_DATABASES", "quickstart/data/databases")}
MAX_TURNS = 5


async def solve(task: Any) -> dict[str, float]:
    """Return the reward of one question.

    Args:
        task: an `AgentTask`.
    """
    tool = Text2SqlEnv(DATABASES, {**task.row, "max_turns": MAX_TURNS})
    messages = list(task.row["prompt"])
    for turn in range(1, MAX_TURNS + 1):
        text = await ask(task, "planner", messages)
        if "<sql>" not in text or turn == MAX_TURNS:
            text = await ask(task, "worker", messages)
        result = await asyncio.to_thread(tool.step, text)
        if result["done"]:
            return {"reward": result["reward"], "turns": turn}
        messages += [{"role": "assistant", "content": text}, *result["observations"]]
    raise AssertionError("unreachable: the tool ends the last turn")


async def ask(task: Any, policy: str, messages: list[dict[str, str]]) -> str:
    """Return a policy's answer, of which the next one sees what it is given as a message."""
    answer = await task.async_openai.chat.completions.create(
        model=policy,
        messages=messages,
        stop=["</sql>", "</solution>"],
        extra_body={"include_stop_str_in_output": True},
    )
    text: str = answer.choices[0].message.content
    return text
