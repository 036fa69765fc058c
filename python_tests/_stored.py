"""Made-up trajectories and what training made of them, for tests of the store and the viewer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from skyrl_fast.batch import StepBatch
from skyrl_fast.generator_output import generator_output_from_trajectories
from skyrl_fast.rollout.trajectory import Step, Trajectory

END = 1  # the end token of WordTokenizer


class WordTokenizer:
    """Each id is a word; a space stands between two of them."""

    def __init__(self, words: Sequence[str] = ()) -> None:
        self.words = list(words)

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(self.words[i] if i < len(self.words) else f"w{i}" for i in ids)


def make_step(prompt: list[int], response: list[int], **values: Any) -> Step:
    given: dict[str, Any] = {
        "loss_mask": [1] * len(response),
        "rollout_logprobs": [-0.25 * (i + 1) for i in range(len(response))],
        "reward": 0.0,
        "stop_reason": "stop",
        "policy_version": 0,
        "text": " ".join(f"w{i}" for i in response),
        "observation": "",
        "llm_seconds": 0.5,
        "env_seconds": 0.25,
    }
    return Step(prompt_token_ids=prompt, response_ids=response, **{**given, **values})


def make_trajectory(uid: str, repetition_id: int, steps: list[Step], **values: Any) -> Trajectory:
    given: dict[str, Any] = {
        "stop_reason": steps[-1].stop_reason if steps else "length",
        "env_class": "made",
        "env_metrics": {},
        "seconds": 1.5,
    }
    return Trajectory(uid=uid, repetition_id=repetition_id, steps=steps, **{**given, **values})


def two_turns(uid: str, repetition_id: int, reward: float, **values: Any) -> Trajectory:
    """Prompt 10 11, response 20 21 end; observation 30, response 22 end. The ends are appended."""
    steps = [
        make_step([10, 11], [20, 21, END], loss_mask=[1, 1, 0], observation="look"),
        make_step([10, 11, 20, 21, END, 30], [22, END], loss_mask=[1, 0], reward=reward),
    ]
    return make_trajectory(uid, repetition_id, steps, **values)


def batch_of(trajectories: Sequence[Trajectory], *, merged: str | None = None) -> StepBatch:
    """The rows with an advantage of 1 on trajectory 0's tokens, 2 on trajectory 1's, and so on."""
    batch = StepBatch.from_generator_output(
        generator_output_from_trajectories(trajectories), step_wise=True
    )
    if merged is not None:
        batch = batch.merged(drift=merged)
    number = batch.trajectory_ids + 1
    of_tokens = torch.repeat_interleave(number, batch.response_lengths.long()).float()
    return batch.with_(advantages=of_tokens)
