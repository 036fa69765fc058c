"""SkyRL's merge of step-wise output: its own function where installed, and the same restated."""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import Any

from bench.baselines.pack import skyrl_convert

FIELDS = ("prompt_token_ids", "response_ids", "loss_masks", "rewards", "rollout_logprobs")


def load_skyrl() -> tuple[Callable[..., Any], Callable[..., Any], type] | None:
    """Return SkyRL's merge, its conversion and its id type; None where it is not installed."""
    import typing_extensions

    typing.TypedDict = typing_extensions.TypedDict  # SkyRL needs it on Python 3.11
    try:
        from loguru import logger
        from skyrl.train.generators.base import TrajectoryID
        from skyrl.train.generators.utils import merge_stepwise_output
    except ImportError:
        return None
    logger.disable("skyrl")
    return merge_stepwise_output, skyrl_convert()[0], TrajectoryID


def restated_merge(output: dict[str, Any]) -> dict[str, Any]:
    """Merge lists in plain Python, without SkyRL's checks and metrics; faster than SkyRL's."""
    merged: dict[str, list[Any]] = {field: [] for field in FIELDS}
    last: list[bool] = []
    previous = None
    for i, prompt in enumerate(output["prompt_token_ids"]):
        response = output["response_ids"][i]
        same = previous is not None and output["trajectory_ids"][i] == previous
        previous = merged["prompt_token_ids"][-1] + merged["response_ids"][-1] if same else []
        if same and prompt[: len(previous)] == previous:
            delta = prompt[len(previous) :]
            merged["response_ids"][-1] += delta + response
            for field in FIELDS[2:]:
                merged[field][-1] += [0] * len(delta) + output[field][i]
            last[-1] = output["is_last_step"][i]
        else:
            for field in FIELDS:
                merged[field].append(list(output[field][i]))
            last.append(output["is_last_step"][i])
        previous = output["trajectory_ids"][i]
    return {**merged, "is_last_step": last}
