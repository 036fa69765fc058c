"""Seeded, long-tailed rollouts for the benches, as Python lists and as flat arrays.

Legend: J trajectories, N rows (one per step), S prompt + response tokens, A response tokens.

Two sizes: "medium" (512 trajectories, about 1,600 rows and 2.0 M tokens) and "large" (4,096
trajectories, about 17,400 rows and 32.2 M tokens); "tiny" is for smoke tests. A prompt grows
turn by turn (prompt + response + observation), so long trajectories are rare and set the width.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

VOCAB_SIZE = 151_936
PAD_TOKEN_ID = 151_643
MIN_RESPONSE_TOKENS = 8
MIN_PROMPT_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Shape:
    """Parameters of a size; token counts are medians of log-normal draws."""

    num_trajectories: int
    samples_per_prompt: int
    mean_turns: float
    prompt_tokens: float
    response_tokens: float
    observation_tokens: float
    max_input_length: int
    max_generate_length: int


SHAPES = {
    "tiny": Shape(16, 4, 2.5, 40, 20, 20, 300, 60),
    "small": Shape(64, 8, 3.3, 315, 230, 70, 2902, 500),
    "medium": Shape(512, 8, 3.3, 315, 230, 70, 2902, 500),
    "large": Shape(4096, 8, 6.1, 380, 280, 150, 3551, 500),
}


@dataclass(frozen=True, slots=True)
class RolloutArrays:
    """Rows of one rollout as flat arrays; row i of trajectory j is one step.

    tokens: (S,) int32, prompt then response of each row. cu_seqlens: (N+1,) int32.
    prompt_lengths, response_lengths: (N,) int64. loss_masks: (A,) uint8. rewards, logprobs: (A,)
    float32. group_ids, trajectory_ids: (N,) int32. is_last_step: (N,) bool.
    """

    tokens: np.ndarray
    cu_seqlens: np.ndarray
    prompt_lengths: np.ndarray
    response_lengths: np.ndarray
    cu_responses: np.ndarray
    loss_masks: np.ndarray
    rewards: np.ndarray
    logprobs: np.ndarray
    group_ids: np.ndarray
    trajectory_ids: np.ndarray
    is_last_step: np.ndarray

    @property
    def num_rows(self) -> int:
        return len(self.prompt_lengths)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def prompt(self, row: int) -> np.ndarray:
        start = self.cu_seqlens[row]
        return self.tokens[start : start + self.prompt_lengths[row]]

    def response(self, row: int) -> np.ndarray:
        return self.tokens[
            self.cu_seqlens[row + 1] - self.response_lengths[row] : self.cu_seqlens[row + 1]
        ]

    def rows(self, flat: np.ndarray) -> list[np.ndarray]:
        """Return views of a response-side array, one per row."""
        return np.split(flat, self.cu_responses[1:-1])


def _lognormal(
    rng: np.random.Generator, median: float, low: int, high: int, sigma: float = 0.7
) -> int:
    return int(np.clip(rng.lognormal(np.log(median), sigma), low, high))


def _trajectory(
    rng: np.random.Generator, shape: Shape, prompt: np.ndarray
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return one agent run: (prompt, response) of every turn, ended by turns or length."""
    num_turns = rng.geometric(1 / shape.mean_turns)
    steps = []
    for _ in range(num_turns):
        if len(prompt) > shape.max_input_length:
            break
        length = _lognormal(
            rng, shape.response_tokens, MIN_RESPONSE_TOKENS, shape.max_generate_length
        )
        response = rng.integers(0, VOCAB_SIZE, length, dtype=np.int32)
        steps.append((prompt, response))
        observed = _lognormal(
            rng, shape.observation_tokens, MIN_RESPONSE_TOKENS, shape.max_input_length
        )
        observation = rng.integers(0, VOCAB_SIZE, observed, dtype=np.int32)
        prompt = np.concatenate([prompt, response, observation])
    return steps


@functools.lru_cache(maxsize=1)
def rollout_arrays(size: str, seed: int = 0) -> RolloutArrays:
    """Return rollouts of the named size as flat arrays."""
    shape = SHAPES[size]
    rng = np.random.default_rng(seed)
    tokens: list[np.ndarray] = []
    rows: list[tuple[int, int, int, int, bool]] = []
    for j in range(shape.num_trajectories):
        if j % shape.samples_per_prompt == 0:
            high = shape.max_input_length // 2
            length = _lognormal(rng, shape.prompt_tokens, MIN_PROMPT_TOKENS, high)
            prompt = rng.integers(0, VOCAB_SIZE, length, dtype=np.int32)
        steps = _trajectory(rng, shape, prompt)
        for k, step in enumerate(steps):
            tokens.extend(step)
            group = j // shape.samples_per_prompt
            rows.append((len(step[0]), len(step[1]), group, j, k == len(steps) - 1))
    table = np.array(rows, dtype=np.int64)
    prompt_lengths, response_lengths = table[:, 0].copy(), table[:, 1].copy()
    cu_seqlens = np.concatenate([[0], np.cumsum(prompt_lengths + response_lengths)]).astype(
        np.int32
    )
    cu_responses = np.concatenate([[0], np.cumsum(response_lengths)]).astype(np.int32)
    num_actions = int(cu_responses[-1])
    is_last_step = table[:, 4].astype(bool)
    rewards = np.zeros(num_actions, dtype=np.float32)
    rewards[cu_responses[1:][is_last_step] - 1] = rng.random(is_last_step.sum()) < 0.4
    loss_masks = np.ones(num_actions, dtype=np.uint8)
    # An EOS appended to about one row in ten was not sampled, so it is not trained.
    appended = rng.random(len(rows)) < 0.1
    loss_masks[cu_responses[1:][appended] - 1] = 0
    return RolloutArrays(
        tokens=np.concatenate(tokens),
        cu_seqlens=cu_seqlens,
        prompt_lengths=prompt_lengths,
        response_lengths=response_lengths,
        cu_responses=cu_responses,
        loss_masks=loss_masks,
        rewards=rewards,
        logprobs=-rng.exponential(0.5, num_actions).astype(np.float32),
        group_ids=table[:, 2].astype(np.int32),
        trajectory_ids=table[:, 3].astype(np.int32),
        is_last_step=is_last_step,
    )


@functools.lru_cache(maxsize=1)
def generator_output(size: str, seed: int = 0) -> dict[str, Any]:
    """Return the same rollouts in a generator's format: Python lists of ints and floats.

    As in a real run, the ids of a growing context are shared objects: a turn's prompt list holds
    the int objects of the previous turn's prompt and response, and new objects for new tokens.
    """
    arrays = rollout_arrays(size, seed)
    prompts: list[list[int]] = []
    responses: list[list[int]] = []
    history: list[int] = []
    for row in range(arrays.num_rows):
        prompt = arrays.prompt(row)
        first_step = row == 0 or arrays.is_last_step[row - 1]
        history = prompt.tolist() if first_step else history + prompt[len(history) :].tolist()
        response = arrays.response(row).tolist()
        prompts.append(history)
        responses.append(response)
        history = history + response
    samples = SHAPES[size].samples_per_prompt
    groups = arrays.group_ids.tolist()
    num_rows = arrays.num_rows
    return {
        "prompt_token_ids": prompts,
        "response_ids": responses,
        "rewards": [row.tolist() for row in arrays.rows(arrays.rewards)],
        "loss_masks": [row.tolist() for row in arrays.rows(arrays.loss_masks)],
        "rollout_logprobs": [row.tolist() for row in arrays.rows(arrays.logprobs)],
        "stop_reasons": ["stop"] * num_rows,
        "trajectory_ids": [
            (f"prompt{group}", j % samples)
            for group, j in zip(groups, arrays.trajectory_ids.tolist(), strict=True)
        ],
        "is_last_step": arrays.is_last_step.tolist(),
        "rollout_metrics": {},
        "env_metrics": [{} for _ in range(num_rows)],
        "uids": [f"prompt{group}" for group in groups],
    }


def describe(size: str, seed: int = 0) -> dict[str, int]:
    """Return the counts of a size: trajectories, rows, tokens, T, R, response tokens."""
    arrays = rollout_arrays(size, seed)
    return {
        "trajectories": int(arrays.is_last_step.sum()),
        "rows": arrays.num_rows,
        "tokens": arrays.num_tokens,
        "T": int((arrays.prompt_lengths + arrays.response_lengths).max()),
        "R": int(arrays.response_lengths.max()),
        "response_tokens": int(arrays.cu_responses[-1]),
    }
