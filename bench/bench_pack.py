"""Rows to a padded batch with data-parallel padding rows, compared with SkyRL and memory floors.

Bytes written per batch of N rows: N T (8 + 8) + N R (8 + 4 + 4 + 4), the sequences and attention
mask, then response mask, rewards, loss masks, logprobs. "copy" copies as many bytes between mapped
pages, the floor for arrays; "fill" writes them, the floor for any input.

"skyrl" is the package's own code (skipped where it is not installed); "restated" does the same work
by NumPy slices, which is several times faster, and is the stronger baseline. Both run with
malloc's defaults ("default") and "warm": with the garbage collector off and malloc set to keep its
pages, for which a process needs MALLOC_TOP_PAD_ and MALLOC_MMAP_THRESHOLD_ set.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import _data
from bench.baselines import pack as baselines
from skyrl_fast import (
    convert_prompts_responses_to_batch_tensors,
    pack_steps,
    padded_to_varlen,
    padding_metadata,
    varlen_to_padded,
)

DP_SIZE = 64
ROUNDS = 9
FIELDS = ("prompt_token_ids", "response_ids", "rewards", "loss_masks", "rollout_logprobs")
NAMES = ("sequences", "attention_mask", "response_mask", "rewards", "loss_mask", "logprobs")
WARM = {"MALLOC_MMAP_THRESHOLD_": str(8 << 30), "MALLOC_TOP_PAD_": str(4 << 30)}


@pytest.fixture(params=["medium", "large"])
def size(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def lists(size: str) -> list[Any]:
    output = _data.generator_output(size)
    return [output[name] for name in FIELDS]


def arrays(size: str) -> list[Any]:
    data = _data.rollout_arrays(size)
    rows = range(data.num_rows)
    response_side = [(x, data.cu_responses) for x in (data.rewards, data.loss_masks, data.logprobs)]
    return [[data.prompt(i) for i in rows], [data.response(i) for i in rows], *response_side]


def metadata_of(size: str) -> dict[str, Any]:
    output = _data.generator_output(size)
    return {"uids": output["uids"], "is_last_step": output["is_last_step"]}


def pad_size_of(size: str) -> int:
    return -_data.rollout_arrays(size).num_rows % DP_SIZE


def ours(fields: list[Any], size: str) -> tuple[Any, ...]:
    pad_size = pad_size_of(size)
    tensors = convert_prompts_responses_to_batch_tensors(
        _data.PAD_TOKEN_ID, *fields, pad_size=pad_size
    )
    return tensors, padding_metadata(metadata_of(size), pad_size)


def peer(fields: list[Any], size: str, name: str) -> Any:
    convert, pad = baselines.restated_convert, baselines.restated_pad
    if name == "skyrl":
        convert, pad = baselines.skyrl_convert()[0], baselines.skyrl_pad()[0]
    out = convert(SimpleNamespace(pad_token_id=_data.PAD_TOKEN_ID), *fields)
    return pad(dict(zip(NAMES, out, strict=False)), metadata_of(size), pad_size_of(size))


def batch_bytes(size: str) -> int:
    shape = _data.describe(size)
    rows = shape["rows"] + pad_size_of(size)
    return rows * (shape["T"] * 16 + shape["R"] * 20)


def timed(
    benchmark: Any,
    function: Callable[..., Any],
    *args: Any,
    size: str,
    num_bytes: int = 0,
    rounds: int = ROUNDS,
) -> None:
    benchmark.pedantic(function, args=args, rounds=rounds, warmup_rounds=1)
    seconds = benchmark.stats.stats.min
    num_bytes = num_bytes or batch_bytes(size)
    benchmark.extra_info["ns_per_token"] = seconds / _data.rollout_arrays(size).num_tokens * 1e9
    benchmark.extra_info["bytes_written"] = num_bytes
    benchmark.extra_info["gb_per_s"] = num_bytes / seconds / 1e9


@pytest.mark.parametrize("contender", ["skyrl_fast", "skyrl_fast_from_arrays"])
def test_convert_and_pad(benchmark: Any, size: str, threads: int, contender: str) -> None:
    benchmark.group = f"convert and pad {size} {threads}T"
    fields = lists(size) if contender == "skyrl_fast" else arrays(size)
    small = [rows[:7] for rows in lists(size)]
    wanted = baselines.restated_convert(SimpleNamespace(pad_token_id=1), *small)
    got = convert_prompts_responses_to_batch_tensors(1, *small)
    assert all(torch.equal(a, b) for a, b in zip(got[:6], wanted[:6], strict=True))
    timed(benchmark, ours, fields, size, size=size)


@pytest.mark.parametrize("contender", ["skyrl", "restated"])
@pytest.mark.parametrize("pages", ["default", "warm"])
def test_peer_convert_and_pad(benchmark: Any, size: str, pages: str, contender: str) -> None:
    benchmark.group = f"convert and pad {size} 1T"
    name = contender
    if name == "skyrl" and baselines.skyrl_convert()[1] != "skyrl":
        pytest.skip("SkyRL is not installed")
    warm = all(os.environ.get(variable) == value for variable, value in WARM.items())
    if warm != (pages == "warm"):
        settings = " ".join(f"{variable}={value}" for variable, value in WARM.items())
        pytest.skip(f"warm pages need {settings}; default pages need them unset")
    if pages == "warm":
        gc.disable()
    try:
        rounds = 2 if name == "skyrl" else ROUNDS  # half a minute each at large
        timed(benchmark, peer, lists(size), size, name, size=size, rounds=rounds)
    finally:
        gc.enable()


@pytest.mark.parametrize("contender", ["copy_floor", "fill_floor"])
def test_floor(benchmark: Any, size: str, threads: int, contender: str) -> None:
    benchmark.group = f"convert and pad {size} {threads}T"
    out = torch.zeros(batch_bytes(size) // 8, dtype=torch.int64)
    source = torch.zeros_like(out) if contender == "copy_floor" else None
    function = (lambda: out.copy_(source)) if contender == "copy_floor" else (lambda: out.fill_(1))
    timed(benchmark, function, size=size)


def test_pack(benchmark: Any, size: str, threads: int) -> None:
    benchmark.group = f"pack to flat int32 {size} {threads}T"
    prompts, responses, *_ = lists(size)
    num_bytes = 4 * _data.rollout_arrays(size).num_tokens
    fields = {"prompts": prompts, "responses": responses}
    timed(benchmark, pack_steps, fields, size=size, num_bytes=num_bytes)


@pytest.mark.parametrize("direction", ["padded_to_varlen", "varlen_to_padded"])
def test_varlen(benchmark: Any, size: str, threads: int, direction: str) -> None:
    benchmark.group = f"{direction} {size} {threads}T"
    out = convert_prompts_responses_to_batch_tensors(_data.PAD_TOKEN_ID, *arrays(size))
    varlen = padded_to_varlen(out[0], out[1])
    assert torch.equal(varlen.values, torch.from_numpy(_data.rollout_arrays(size).tokens).long())
    if direction == "padded_to_varlen":
        num_bytes = 16 * len(varlen.values)  # tokens and positions
        timed(benchmark, padded_to_varlen, out[0], out[1], size=size, num_bytes=num_bytes)
        return
    args = (varlen.values, varlen.cu_seqlens)
    timed(benchmark, varlen_to_padded, *args, size=size, num_bytes=out[0].nbytes)
