"""A trajectory as the plain values of its line: first what a person reads, then the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import numpy as np

from skyrl_fast.rollout.trajectory import Step, Trajectory
from skyrl_fast.trajectory_store.lines import plain, rounded
from skyrl_fast.trajectory_store.token_text import TokenText
from skyrl_fast.trajectory_store.trained import TrainedStep

FORMAT = 1
_SECOND_DECIMALS = 4


def trajectory_record(
    trajectory: Trajectory,
    text: TokenText,
    *,
    phase: str,
    step: int,
    trained: Sequence[TrainedStep] = (),
    trainer_version: int | None = None,
) -> dict[str, Any]:
    """Return the line's values; docs/spec.md, section 14, names each.

    Args:
        text: decodes tokens.
        phase: "train" or "eval".
        step: number of the training batch, or of the step after which was evaluated.
        trained: one per step; empty for an evaluation and for a trajectory that became a stub.
        trainer_version: weight updates behind the policy that was trained; None: it was not.
    """
    steps = trajectory.steps
    contexts = _contexts(steps)
    texts = [text.ends(own.response_ids) for own in steps]
    oldest = min((own.policy_version for own in steps), default=None)
    staleness = None
    if trainer_version is not None and oldest is not None:
        staleness = trainer_version - oldest
    evaluated = phase == "eval"
    values = [
        _token_values(own, trained[number] if trained else None, evaluated)
        for number, own in enumerate(steps)
    ]
    return {
        "format": FORMAT,
        "phase": phase,
        "step": step,
        "uid": trajectory.uid,
        "repetition_id": trajectory.repetition_id,
        "env_class": trajectory.env_class,
        "data_source": trajectory.data_source or "",
        "reward": plain(total_reward(trajectory)),
        "advantage": _advantage(trained),
        "stop_reason": trajectory.stop_reason,
        "failure": trajectory.failure or "",
        "filtered": _filtered(steps, trained),
        "policy_version": oldest,
        "staleness": staleness,
        "seconds": round(trajectory.seconds, _SECOND_DECIMALS),
        "env_metrics": _metrics(trajectory),
        "turns": [
            {
                "context": text.decode(own.prompt_token_ids[shared:]),
                "response": words,
                "observation": own.observation,
                "reward": plain(float(own.reward)),
                "stop_reason": own.stop_reason,
                "prompt_tokens": len(own.prompt_token_ids),
                "response_tokens": len(own.response_ids),
                "trained_tokens": 0 if evaluated else sum(value["loss_mask"]),
                "policy_version": own.policy_version,
                "llm_seconds": round(own.llm_seconds, _SECOND_DECIMALS),
                "env_seconds": round(own.env_seconds, _SECOND_DECIMALS),
            }
            for own, shared, (words, _), value in zip(steps, contexts, texts, values, strict=True)
        ],
        "tokens": [
            {
                "prompt_shared": shared,
                "prompt_token_ids": list(own.prompt_token_ids[shared:]),
                "response_ids": list(own.response_ids),
                "response_ends": ends,
                **value,
            }
            for own, shared, (_, ends), value in zip(steps, contexts, texts, values, strict=True)
        ],
    }


def _metrics(trajectory: Trajectory) -> Any:
    """What the environment reported; of what holds itself, say, or has no text, that it was so."""
    try:
        return plain(trajectory.env_metrics)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        return {"unreadable": type(error).__name__}


def total_reward(trajectory: Trajectory) -> float:
    """Return the outcome: the last step's reward; 0 without steps."""
    return float(trajectory.steps[-1].reward) if trajectory.steps else 0.0


def _contexts(steps: Sequence[Step]) -> list[int]:
    """How many tokens each prompt has in common with the prompt and response before it."""
    result: list[int] = []
    before: list[int] = []
    for step in steps:
        prompt = list(step.prompt_token_ids)
        if prompt[: len(before)] == before:  # the usual case, compared in one go
            result.append(len(before))
        else:
            pairs = zip(prompt, before, strict=False)
            result.append(sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)))
        before = prompt + list(step.response_ids)
    return result


def _token_values(step: Step, own: TrainedStep | None, evaluated: bool) -> dict[str, list[Any]]:
    """Lists per response token; those that nobody made are empty."""
    mask = list(step.loss_mask) if evaluated else [0] * len(step.response_ids)
    return {
        "loss_mask": mask if own is None else own.loss_mask.tolist(),
        "policy_versions": list(step.token_versions or []),
        "rollout_logprobs": rounded(step.rollout_logprobs or []),
        "trainer_logprobs": [] if own is None else _unless_empty(own.trainer_logprobs),
        "advantages": [] if own is None else _unless_empty(own.advantages),
    }


def _unless_empty(values: np.ndarray) -> list[float | None]:
    numbers = rounded(values)
    return [] if numbers.count(None) == len(numbers) else numbers


def _advantage(trained: Sequence[TrainedStep]) -> float | None:
    """The first response token's of the last step: all of them have it, or it is where it ends."""
    if not trained or not len(trained[-1].advantages):
        return None
    return rounded(trained[-1].advantages[:1])[0]


def _filtered(steps: Sequence[Step], trained: Sequence[TrainedStep]) -> bool:
    """Whether a filter took sampled tokens out of training."""
    return any(
        sum(step.loss_mask) > int(own.loss_mask.sum())
        for step, own in zip(steps, trained, strict=False)
    )
