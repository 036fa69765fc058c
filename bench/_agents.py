"""Seeded agent steps of three shapes, with histories that only grow or are stripped."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from skyrl_fast.batch import StepBatch

HISTORIES = ("append", "stripped")
THOUGHT_SHARE = 2 / 3  # of a response; not in later prompts of stripped histories


@dataclass(frozen=True, slots=True)
class Agents:
    """One shape of agent; lengths in tokens, drawn around their means up to their limits."""

    samples: int
    most_turns: int
    prompt: int
    most_prompt: int
    response: int
    observation: int


SHAPES = {
    "search": Agents(5, 4, 200, 300, 60, 250),
    "agentic": Agents(8, 16, 1000, 1500, 150, 150),
    "sql": Agents(8, 6, 4500, 6000, 150, 100),
}


@functools.lru_cache(maxsize=4)
def agents(
    shape: str, history: str, *, num_groups: int, divisor: int = 1, vocabulary: int = 1024
) -> StepBatch:
    """Return a batch of steps with random advantages.

    Args:
        shape: a name of `SHAPES`.
        history: "append": a prompt holds all tokens before it; "stripped": without the thoughts.
        num_groups: prompts.
        divisor: divides all lengths.
        vocabulary: upper bound of ids.
    """
    rng = np.random.default_rng(0)
    agent = SHAPES[shape]
    output: dict[str, list[Any]] = {
        name: [] for name in ("prompt_token_ids", "response_ids", "trajectory_ids", "is_last_step")
    }

    def words(mean: int, most: int) -> list[int]:
        length = int(np.clip(rng.lognormal(np.log(mean), 0.4), mean / 3, most)) // divisor
        return rng.integers(0, vocabulary, max(1, length)).tolist()

    for group in range(num_groups):
        prompt = words(agent.prompt, agent.most_prompt)
        for sample in range(agent.samples):
            context = prompt
            turns = int(rng.integers(max(1, agent.most_turns // 2), agent.most_turns + 1))
            for turn in range(turns):
                response = words(agent.response, 4 * agent.response)
                output["prompt_token_ids"].append(context)
                output["response_ids"].append(response)
                output["trajectory_ids"].append((f"p{group}", sample))
                output["is_last_step"].append(turn == turns - 1)
                thought = int(len(response) * THOUGHT_SHARE) if history == "stripped" else 0
                observation = words(agent.observation, 4 * agent.observation)
                context = context + response[thought:] + observation
    lengths = [len(response) for response in output["response_ids"]]
    columns: dict[str, Any] = {
        **output,
        "loss_masks": [[1] * n for n in lengths],
        "rewards": [0.0] * len(lengths),
        "rollout_logprobs": [[-1.0] * n for n in lengths],
    }
    batch = StepBatch.from_generator_output(columns, step_wise=True)
    return batch.with_(advantages=torch.from_numpy(rng.standard_normal(sum(lengths))).float())
