"""An agent that adds two numbers: one call of the OpenAI client."""

from __future__ import annotations

import re
from typing import Any


async def solve(task: Any) -> float:
    """Return 1 if the last number of the answer is the sum.

    Args:
        task: an `AgentTask`.
    """
    answer = await task.async_openai.chat.completions.create(
        model=task.model, messages=task.row["prompt"]
    )
    return rewarded(answer.choices[0].message.content, task.row["answer"])


def rewarded(text: str, wanted: str) -> float:
    """Return 1 if the last number of a text is the wanted one.

    Example:
        >>> rewarded("7 + 5 = 12.", "12")
        1.0
    """
    return float(re.findall(r"\d+", text)[-1:] == [wanted])
