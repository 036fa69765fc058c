"""What the page loads of a trajectory: its head, and its texts and tokens in items.

The head has the turns with their numbers, and addresses instead of texts and tokens. An item is a
slice of a text, or the tokens of a slice of a response; it is loaded when it is read.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from skyrl_fast.trajectory_store.forest import forest
from skyrl_fast.trajectory_store.reader import StoredStep, StoredTrajectory
from skyrl_fast.viewer.columns import SIGNIFICANT_DIGITS
from skyrl_fast.viewer.script import ListScripts, literal

ITEM_CHARACTERS = 30_000  # length of a text, and of the tokens of an item
ITEM_TOKENS = 3000
MAX_METRICS = 40  # environment metrics shown
METRIC_CHARACTERS = 400  # length of a name or a value
STOP_REASON_CHARACTERS = 100
PREVIEW_CHARACTERS = 160  # length of the last response in the list of the group
_NUMBERS = (
    "reward",
    "prompt_tokens",
    "response_tokens",
    "trained_tokens",
    "policy_version",
    "llm_seconds",
    "env_seconds",
)
_OTHER_TEXTS = ("request", "response")  # texts of a call that is no turn


def write_details(
    trajectory: StoredTrajectory, record: Mapping[str, Any], items: ListScripts
) -> dict[str, Any]:
    """Append a trajectory's texts and tokens to the items, and return its head.

    Each text and each response has a list of addresses in its head: script, place, and the number
    of characters or tokens.
    """
    turns = [
        {
            "context": [(literal(text), len(text)) for text in _slices(step.turn["context"])],
            "tokens": [(literal(item), len(item["ids"])) for item in _token_items(step, tokens)],
            "observation": [
                (literal(text), len(text)) for text in _slices(step.turn["observation"])
            ],
        }
        for step, tokens in zip(trajectory.steps, record["tokens"], strict=True)
    ]
    others = [
        {name: [(literal(t), len(t)) for t in _slices(call[name])] for name in _OTHER_TEXTS}
        for call in trajectory.other_calls
    ]
    items.keep_together(
        sum(len(item) + 1 for turn in turns for part in turn.values() for item, _ in part)
    )
    return {
        "failure": trajectory.entry.failure,
        "failure_trace": trajectory.failure_trace[:ITEM_CHARACTERS].rstrip(),
        "env_metrics": _shown_metrics(trajectory.env_metrics),
        "turns": [
            {
                **{name: step.turn[name] for name in _NUMBERS},
                "stop_reason": step.turn["stop_reason"][:STOP_REASON_CHARACTERS],
                "policy": step.turn.get("policy") or "",
                "prompt_shared": tokens["prompt_shared"],
                "call": step.turn.get("kind", "act"),
                "kind": place.kind,
                "parent": place.parent,
                **{
                    name: [(*items.add(item), count) for item, count in part]
                    for name, part in turn.items()
                },
            }
            for step, tokens, turn, place in zip(
                trajectory.steps, record["tokens"], turns, forest(trajectory.steps), strict=True
            )
        ],
        "other_calls": [
            {
                **{name: call[name] for name in ("before_step", "seconds")},
                "model": call["model"][:METRIC_CHARACTERS],
                **{
                    name: [(*items.add(item), count) for item, count in part]
                    for name, part in texts.items()
                },
            }
            for call, texts in zip(trajectory.other_calls, others, strict=True)
        ],
    }


def preview(trajectory: StoredTrajectory) -> str:
    """Return the start of the last response in one line; one character more than is shown."""
    if not trajectory.steps:
        return ""
    text = trajectory.steps[-1].turn["response"][: 4 * PREVIEW_CHARACTERS]
    return " ".join(text.split())[: PREVIEW_CHARACTERS + 1]


def _slices(text: str) -> list[str]:
    result: list[str] = []
    for at in range(0, len(text), ITEM_CHARACTERS):
        result.append(text[at : at + ITEM_CHARACTERS])
    return result


def _token_items(step: StoredStep, tokens: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the tokens of a response, in items of bounded numbers of tokens and characters."""
    lists = {
        "ids": step.response_ids,
        "pieces": step.pieces,
        "mask": step.loss_mask.tolist(),
        "engine": round_list(step.rollout_logprobs),
        "trainer": round_list(step.trainer_logprobs),
        "advantages": round_list(step.advantages),
        "versions": tokens["policy_versions"],
    }
    for start, end in _token_ranges(tokens["response_ends"]):
        yield {name: values[start:end] for name, values in lists.items()}


def _token_ranges(ends: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the ranges of tokens of the items; `ends` are characters up to each token's end."""
    start = 0
    while start < len(ends):
        characters = (ends[start - 1] if start else 0) + ITEM_CHARACTERS
        within = bisect_right(ends, characters, lo=start)
        end = max(start + 1, min(start + ITEM_TOKENS, within))
        yield start, end
        start = end


def round_list(values: np.ndarray) -> list[float | None]:
    """Return (A,) values rounded to SIGNIFICANT_DIGITS, None for NaN; empty if all are NaN."""
    missing = np.isnan(values)
    if missing.all():
        return []
    exact = values.astype(np.float64)
    magnitude = np.abs(np.where(missing | (exact == 0), 1.0, exact))
    digits = SIGNIFICANT_DIGITS - 1 - np.floor(np.log10(magnitude))  # decimals, or zeros if < 0
    scale = 10.0 ** np.abs(digits)
    numbers = np.where(
        digits >= 0, np.round(exact * scale) / scale, np.round(exact / scale) * scale
    ).tolist()
    if missing.any():
        return [None if absent else x for x, absent in zip(numbers, missing.tolist(), strict=True)]
    return numbers


def _shown_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the environment metrics that the page shows, long names and values cut."""
    shown: dict[str, Any] = {}
    for name, value in list(metrics.items())[:MAX_METRICS]:
        if isinstance(value, str):
            text = value
        else:
            text = json.dumps(value)
        short = len(text) <= METRIC_CHARACTERS
        shown[name[:METRIC_CHARACTERS]] = value if short else text[: METRIC_CHARACTERS + 1]
    return shown
