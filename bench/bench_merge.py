"""Steps joined where contexts only grew: lists to lists, lists to tensors, tensors to tensors.

"skyrl" is SkyRL's own function (skipped where the package is not installed); into tensors its
conversion follows. "restated" is the same greedy merge in plain Python without checks and metrics.
Ours returns a `StepBatch` of flat arrays ("skyrl_fast") and, as SkyRL's conversion does, padded
tensors ("skyrl_fast_padded"). "skyrl_fast_fresh": every id is a separate object, as after a
pickle, and not shared between a turn's prompt and the previous turn. "warm": freed memory stays
mapped and the garbage collector is off; lists are as slow as the pages that they are written to.

Floors: "floor_compare" compares every row's prompt with the previous row, 4 bytes per token and
side; "floor_copy" also writes the merged rows (4 + 4 + 4 + 1 bytes per token and response token).
"""

from __future__ import annotations

import functools
import gc
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import _data
from bench.baselines.merge import FIELDS, load_skyrl, restated_merge
from bench.baselines.pack import restated_convert
from bench.baselines.pipeline import warm_pages
from skyrl_fast import merge_stepwise_output
from skyrl_fast.batch import StepBatch

SIZES = ("medium", "large")
ROUNDS = {"tiny": 3, "medium": 9, "large": 3}
LIST_CONTENDERS = (
    "skyrl_fast",
    "skyrl_fast_warm",
    "skyrl",
    "skyrl_warm",
    "restated",
    "skyrl_fast_fresh",
)
TOKENIZER = SimpleNamespace(pad_token_id=_data.PAD_TOKEN_ID)


@functools.lru_cache(maxsize=1)
def rollouts(size: str, fresh: bool = False) -> dict[str, Any]:
    output = {k: v for k, v in _data.generator_output(size).items() if k != "uids"}
    return pickle.loads(pickle.dumps(output)) if fresh else output


@functools.lru_cache(maxsize=1)
def merged_lists(size: str) -> dict[str, Any]:
    return restated_merge(rollouts(size))


def prepared(output: dict[str, Any], trajectory_id: type) -> dict[str, Any]:
    ids = [trajectory_id(*pair) for pair in output["trajectory_ids"]]
    return {**output, "trajectory_ids": ids, "env_metrics": None}


def converted(merged: dict[str, Any], convert: Callable[..., Any] = restated_convert) -> Any:
    order = ("prompt_token_ids", "response_ids", "rewards", "loss_masks", "rollout_logprobs")
    return convert(TOKENIZER, *(merged[name] for name in order))


def direct(output: dict[str, Any]) -> StepBatch:
    return StepBatch.from_generator_output(output, step_wise=True, merge="fork")


def padded(output: dict[str, Any]) -> Any:
    return direct(output).padded(_data.PAD_TOKEN_ID)


def timed(benchmark: Any, size: str, function: Callable[..., Any], *args: Any) -> None:
    benchmark.pedantic(function, args=args, rounds=ROUNDS[size], warmup_rounds=1)
    tokens = _data.rollout_arrays(size).num_tokens
    benchmark.extra_info["ns_per_token"] = benchmark.stats.stats.min / tokens * 1e9


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("contender", LIST_CONTENDERS)
def test_lists(benchmark: Any, contender: str, size: str) -> None:
    benchmark.group = f"merge lists to lists {size} 1T"
    output = rollouts(size, contender == "skyrl_fast_fresh")
    function: Callable[..., Any] = merge_stepwise_output
    if contender == "restated":
        function = restated_merge
    elif contender in ("skyrl", "skyrl_warm"):
        function, output = _skyrl(output)
    merged = function(output)
    assert all(merged[field] == merged_lists(size)[field] for field in FIELDS)
    del merged
    _run(benchmark, contender, size, function, output)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "contender",
    [
        "skyrl_fast",
        "skyrl_fast_padded",
        "skyrl",
        "skyrl_warm",
        "restated_numpy",
        "skyrl_fast_fresh",
    ],
)
def test_tensors(benchmark: Any, contender: str, size: str, threads: int) -> None:
    benchmark.group = f"merge lists to tensors {size} {threads}T"
    output = rollouts(size, contender == "skyrl_fast_fresh")
    function: Callable[..., Any] = direct
    if contender == "skyrl_fast_padded":
        function = padded
    elif contender == "restated_numpy":
        function = lambda rows: converted(restated_merge(rows))  # noqa: E731
    elif contender.startswith("skyrl") and contender != "skyrl_fast":
        merge, output = _skyrl(output)
        convert = load_skyrl()[1]  # type: ignore[index]
        function = lambda rows: converted(merge(rows), convert)  # noqa: E731
    wanted = converted(merged_lists(size))[0]
    got = function(output)
    sequences = padded(output).sequences if isinstance(got, StepBatch) else got
    sequences = getattr(sequences, "sequences", sequences)
    sequences = sequences[0] if isinstance(sequences, tuple) else sequences
    assert torch.equal(sequences, wanted)
    del got, sequences, wanted
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        _run(benchmark, contender, size, function, output)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("contender", ["skyrl_fast", "floor_compare", "floor_copy"])
def test_flat(benchmark: Any, contender: str, size: str, threads: int) -> None:
    benchmark.group = f"merge tensors to tensors {size} {threads}T"
    steps = StepBatch.from_generator_output(rollouts(size), step_wise=True)
    function: Callable[..., Any] = steps.merged
    if contender != "skyrl_fast":
        function = _floor(steps, with_copy=contender == "floor_copy")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        timed(benchmark, size, function)
    finally:
        torch.set_num_threads(before)


def _skyrl(output: dict[str, Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    skyrl = load_skyrl()
    if skyrl is None:
        pytest.skip("SkyRL is not installed")
    merge, _, trajectory_id = skyrl
    return merge, prepared(output, trajectory_id)


def _run(
    benchmark: Any, contender: str, size: str, function: Callable[..., Any], output: dict[str, Any]
) -> None:
    gc.collect()
    if contender.endswith("warm"):
        with warm_pages():
            timed(benchmark, size, function, output)
    else:
        timed(benchmark, size, function, output)


def _floor(steps: StepBatch, *, with_copy: bool) -> Callable[[], None]:
    merged = steps.merged()
    half = steps.num_tokens - merged.num_tokens  # tokens that are compared, each with another one
    left, right = steps.tokens[:half].clone(), steps.tokens[:half].clone()
    names = ("tokens", "loss_mask", "rewards", "rollout_logprobs")
    columns = [getattr(merged, name) for name in names]
    targets = [column.clone() for column in columns]

    def run() -> None:
        assert torch.equal(left, right)
        if with_copy:
            for target, column in zip(targets, columns, strict=True):
                target.copy_(column)

    return run
