"""Environments of the package verifiers (0.1) as agents at the gateway.

Such an environment calls the model itself, by an OpenAI client, and scores its rollout.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skyrl_fast.gateway.agents.task import AgentTask
from skyrl_fast.rollout.chat_messages import plain_value

INPUT = "verifiers_input"  # column with the JSON of an example


@dataclass(frozen=True, slots=True)
class VerifiersAgent:
    """An agent for `agent.function`: each task is one rollout of the environment.

    Its reward and metrics are those of the environment's rubric. A rubric that compares the
    rollouts of a group cannot be used.

    Args:
        env: a `verifiers.Environment`.

    Example:
        # words.py, used with agent.function=words.py:agent
        env = verifiers.load_environment("wordle")
        agent = VerifiersAgent(env)
        rows = agent.rows(1000)
        # skyrl_fast.train_agent(config, agent="words.py:agent", prompts=rows)
    """

    env: Any

    def rows(self, number: int = -1, *, evaluation: bool = False) -> list[dict[str, Any]]:
        """Return the examples of the environment's dataset as rows.

        Args:
            number: number of examples, from the first; -1: all.
            evaluation: take those of the evaluation's dataset.
        """
        if evaluation:
            read = self.env.get_eval_dataset
        else:
            read = self.env.get_dataset
        data = read(n=number)
        return [_row(example) for example in data]

    async def __call__(self, task: AgentTask) -> dict[str, float]:
        """Return the reward and the metrics of one rollout.

        Raises:
            RuntimeError: the environment failed.
        """
        from verifiers.clients import OpenAIChatCompletionsClient

        example = json.loads(task.row[INPUT])
        client = OpenAIChatCompletionsClient(task.async_openai)
        output = await self.env.run_rollout(example, client, task.model, sampling_args={})
        if output["error"] is not None:
            raise RuntimeError(f"verifiers: {output['error']}")
        scores = {}
        for name, value in (output["metrics"] or {}).items():
            if value is not None:
                scores[name] = float(value)
        scores["reward"] = float(output["reward"])
        return scores


def _row(example: Mapping[str, Any]) -> dict[str, Any]:
    """Return an example as a row; its prompt is for people, the environment reads its input."""
    messages = example["prompt"]
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    shown = []
    for message in messages:
        content = message.get("content") or ""
        shown.append({"role": message["role"], "content": content})
    text = json.dumps(plain_value(example), default=str)
    return {"prompt": shown, INPUT: text}
