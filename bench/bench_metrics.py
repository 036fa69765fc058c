"""Rollout and reward metrics of one batch of generator output, with rewards per token.

Contenders: SkyRL 0.3.0's own functions where `skyrl` can be imported, the same loops restated, and
ours, with the batch built from the lists and with the one that the trainer has. SkyRL's rollout
metrics count rows, ours trajectories and rows, so only metrics with equal definitions are compared.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable
from typing import Any

import pytest

from bench import _data
from bench.baselines import metrics as restated
from skyrl_fast.batch import StepBatch
from skyrl_fast.train.metrics.rewards import reward_metrics
from skyrl_fast.train.metrics.rollouts import Reports, rollout_metrics

SIZES = ("medium", "large")
CONTENDERS = ("skyrl", "skyrl_restated", "skyrl_fast_lists", "skyrl_fast_batch")
ROUNDS = {"medium": 15, "large": 5}

Metrics = tuple[dict[str, float], dict[str, float]]


@functools.lru_cache(maxsize=1)
def rollouts(size: str) -> tuple[dict[str, Any], StepBatch]:
    """Return the output without its uids, which are in `trajectory_ids`, and its batch."""
    output = {k: v for k, v in _data.generator_output(size).items() if k != "uids"}
    return output, StepBatch.from_generator_output(output)


def skyrl(size: str) -> Callable[[], Metrics] | None:
    """SkyRL's own functions, or None where the package cannot be imported."""
    import typing_extensions

    typing.TypedDict = typing_extensions.TypedDict  # SkyRL needs it on Python 3.11
    try:
        from loguru import logger
        from skyrl.train.generators import utils as peer
    except ImportError:
        return None
    logger.disable("skyrl")
    output, uids = rollouts(size)[0], _data.generator_output(size)["uids"]

    def run() -> Metrics:
        rows = peer.get_rollout_metrics(
            output["response_ids"], output["rewards"], loss_masks=output["loss_masks"]
        )
        last = restated.last_rows({**output, "uids": uids})
        found = dict(peer.get_metrics_from_generator_output(last, last["uids"]))
        found["avg_raw_reward"] = found.pop("avg_score")
        return {"avg": rows["generate/avg_num_tokens"]}, found

    return run


def skyrl_restated(size: str) -> Callable[[], Metrics]:
    """The same loops."""
    output, uids = rollouts(size)[0], _data.generator_output(size)["uids"]

    def run() -> Metrics:
        last = restated.last_rows({**output, "uids": uids})
        return restated.rollout_metrics(output), restated.reward_metrics(last, last["uids"])

    return run


def ours(size: str, from_batch: bool) -> Callable[[], Metrics]:
    """Our functions, on the lists or on the batch."""
    output, known = rollouts(size)
    n = _data.SHAPES[size].samples_per_prompt

    def run() -> Metrics:
        batch = known if from_batch else StepBatch.from_generator_output(output)
        rows = rollout_metrics(batch, Reports(None, None, {}, None))
        rewards = reward_metrics(batch, samples_per_prompt=n)
        found = {name.removeprefix("reward/"): value for name, value in rewards.items()}
        found["pass_at_n"] = found.pop(f"avg_pass_at_{n}")
        return {"avg": rows["generate/per_turn/avg_response_length"]}, found

    return run


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("contender", CONTENDERS)
def test_metrics(benchmark: Any, contender: str, size: str) -> None:
    if contender == "skyrl":
        run = skyrl(size)
        if run is None:
            pytest.skip("skyrl cannot be imported here")
    elif contender == "skyrl_restated":
        run = skyrl_restated(size)
    else:
        run = ours(size, from_batch=contender.endswith("batch"))
    got, want = run(), skyrl_restated(size)()
    assert got[0]["avg"] == pytest.approx(want[0]["avg"])
    assert got[1] == pytest.approx(want[1])
    benchmark.group = f"metrics {size} 1T"
    benchmark.extra_info["rows"] = _data.describe(size)["rows"]
    benchmark.pedantic(run, rounds=ROUNDS[size], warmup_rounds=1)
