"""SkyRL's metrics of generator outputs. N rows, A response tokens of all rows.

SkyRL's own function computes them. The rewards and masks, which it would read token by token, are
read here in one pass, and passed to it as one number per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from skyrl_fast.batch.row_index import dense_ids
from skyrl_fast.integrations.skyrl.replacement import (
    ORIGINALS,
    replaces,
    require,
)
from skyrl_fast.ops.pack.steps import pack_steps

ROLLOUT = "get_rollout_metrics"
REWARD = "get_metrics_from_generator_output"


@replaces(ROLLOUT)
def get_rollout_metrics(
    responses: list[list[int]],
    rewards: list[float] | list[list[float]],
    env_metrics: list[dict[str, Any]] | None = None,
    env_classes: list[str] | None = None,
    loss_masks: list[list[int]] | None = None,
    trajectory_completion_times: list[float] | None = None,
    **times: Any,
) -> dict[str, Any]:
    """Return the metrics of the rows, as SkyRL's function of that name, which computes most.

    Args:
        env_metrics, env_classes, trajectory_completion_times: N each, or None.
        times: `trajectory_time_splits`, in versions that have it.
    """
    original = ORIGINALS.require(ROLLOUT)
    if loss_masks is None:
        masks = None
    else:
        masks = flat(loss_masks, "loss masks", torch.uint8)
    metrics = original(
        [range(len(response)) for response in responses],  # only their lengths are read
        _row_rewards(rewards, np.sum),
        env_metrics,
        env_classes,
        trajectory_completion_times=trajectory_completion_times,
        **times,
    )
    if masks is not None:
        metrics.update(_measure_trained(*masks))
    return metrics


@replaces(REWARD)
def get_metrics_from_generator_output(generator_output: Any, uids: Sequence[str]) -> Any:
    """Return mean reward, pass@n and mean positive reward; `uids`: N, the prompt of each row."""
    rewards = generator_output["rewards"]
    original = ORIGINALS.require(REWARD)
    require(set(map(type, rewards)) == {list}, "rewards that are one per row")
    values, offsets = flat(rewards, "rewards", torch.float32)
    filled = np.diff(offsets) > 0
    require(bool(filled.all()), "a row without rewards")
    # If all rewards of a row but the last are 0, the row's sum is its last reward.
    is_set = values != 0
    in_row = np.add.reduceat(is_set, offsets[:-1])
    is_last_set = is_set[offsets[1:] - 1]
    others = in_row - is_last_set
    if others.any():
        short = []
        for row, count in zip(rewards, others.tolist(), strict=True):
            short.append(row if count else row[-1:])
        return original({"rewards": short}, uids)
    last = [row[-1] for row in rewards]
    require(set(map(type, last)) <= {float, int}, "rewards of unsupported type")
    prompts = dense_ids(uids[: len(last)])
    require(len(prompts) == len(last), "wrong number of uids")
    scores = np.array(last, dtype=np.float64) + 0.0  # SkyRL's sums start from 0: -0.0 is 0.0
    passed = np.unique(prompts[scores > 0])
    return ORIGINALS.namespace(REWARD)["MetricsOutput"](
        avg_score=float(np.mean(scores)),
        pass_at_n=len(passed) / (int(prompts.max()) + 1),
        mean_positive_reward=float(np.mean(np.maximum(scores, 0.0))),
    )


def flat(rows: Any, what: str, dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Return (A,) values of all rows, and their (N + 1,) offsets."""
    is_listed = isinstance(rows, list) and set(map(type, rows)) <= {list}
    require(is_listed, f"{what} of unsupported type")
    packed = pack_steps({"rows": rows}, dtypes={"rows": dtype})["rows"]
    offsets = packed.cu_seqlens.numpy()
    return packed.values.numpy(), offsets.astype(np.int64)


def _row_rewards(rewards: Any, add: Any) -> list[float]:
    """Return N sums, each bit-identical to the result of `add` for the row."""
    kinds = set(map(type, rewards))
    if not kinds <= {list}:
        require(list not in kinds, "a mixture of rewards")
        return rewards
    values, offsets = flat(rewards, "rewards", torch.float32)
    places = np.flatnonzero(values)
    row_of = np.searchsorted(offsets, places, side="right") - 1
    counts = np.bincount(row_of, minlength=len(rewards))
    sums: list[float] = [0.0] * len(rewards)
    in_row = places - offsets[row_of]
    for row, place in zip(row_of.tolist(), in_row.tolist(), strict=True):
        if counts[row] == 1:
            sums[row] = float(rewards[row][place])
    for row in np.flatnonzero(counts > 1).tolist():
        sums[row] = float(add(rewards[row]))
    return sums


def _measure_trained(masks: np.ndarray, offsets: np.ndarray) -> dict[str, Any]:
    """Return the metrics of trained tokens: per row, and per turn (a run of trained tokens)."""
    require(int(masks.max(initial=0)) <= 1, "loss masks that are not 0 and 1")
    trained = masks != 0
    begins = trained.copy()
    ends = trained.copy()
    begins[1:] &= ~trained[:-1]
    ends[:-1] &= ~trained[1:]
    is_filled = np.diff(offsets) > 0
    first = offsets[:-1][is_filled]
    begins[first] = trained[first]
    last = offsets[1:][is_filled] - 1
    ends[last] = trained[last]
    first_of_turn = np.flatnonzero(begins)
    per_turn = np.flatnonzero(ends) - first_of_turn + 1
    row_of_turn = np.searchsorted(offsets, first_of_turn, side="right") - 1
    sums = np.bincount(row_of_turn, per_turn, len(offsets) - 1)
    per_row = sums.astype(np.int64)
    metrics = {
        "generate/avg_assistant_tokens": np.mean(per_row).item(),
        "generate/min_assistant_tokens": np.min(per_row).item(),
        "generate/max_assistant_tokens": np.max(per_row).item(),
        "generate/std_assistant_tokens": np.std(per_row).item(),
    }
    if per_turn.size:
        metrics["generate/tokens_per_turn_mean"] = np.mean(per_turn).item()
        metrics["generate/tokens_per_turn_std"] = np.std(per_turn).item()
        metrics["generate/tokens_per_turn_max"] = np.max(per_turn).item()
    return metrics
