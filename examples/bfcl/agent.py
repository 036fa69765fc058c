"""The same question through the gateway: one call of the OpenAI client, with tools."""

from __future__ import annotations

import json
from typing import Any

from examples.bfcl.bfcl_env import judged


async def solve(task: Any) -> dict[str, float]:
    """Return reward and metrics of one answer.

    Args:
        task: an `AgentTask`.
    """
    answer = await task.async_openai.chat.completions.create(
        model=task.model, messages=task.row["prompt"], tools=task.row["tools"]
    )
    tool_calls = []
    for call in answer.choices[0].message.tool_calls or []:
        arguments = json.loads(call.function.arguments)
        tool_calls.append({"function": {"name": call.function.name, "arguments": arguments}})
    return judged(task.row, tool_calls)
