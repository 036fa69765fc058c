"""The quickstart's task for an agent that knows nothing of training: a loop on the OpenAI client.

The database tool, with its sandbox and its judge, is the environment's of the quickstart; the
conversation is the agent's.
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
        answer = await task.async_openai.chat.completions.create(
            model=task.model,
            messages=messages,
            stop=["</sql>", "</solution>"],
            extra_body={"include_stop_str_in_output": True},
        )
        text = answer.choices[0].message.content
        result = await asyncio.to_thread(tool.step, text)
        if result["done"]:
            return {"reward": result["reward"], "turns": turn}
        messages += [{"role": "assistant", "content": text}, *result["observations"]]
    raise AssertionError("unreachable: the tool ends the last turn")
