"""Forward and backward of a small model over agent rows, in the layouts of `_tree_steps`.

Lengths are a sixteenth of the shapes' and the model is a Qwen2 of 0.2 M weights in float32; full
lengths and a large model are in `bench.gpu`. First all layouts are checked to give the same loss
and gradients.

extra_info: `tokens` processed by the model; for ours also `as_trees`, the share of its forward
passes that are of trees, and `plan_share`, the fraction of a step spent on planning them. "counts"
needs no model: tokens at full lengths.
"""

from __future__ import annotations

import functools
import statistics
import time
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from bench._agents import HISTORIES, SHAPES, agents
from bench._tree_steps import (
    CONTENDERS,
    SMALL,
    SMALL_DIVISOR,
    batch_of,
    gradient,
    planned,
    policy,
    step,
)
from skyrl_fast.batch.token_counts import token_counts
from skyrl_fast.ops.prefix_tree.tree import build_prefix_tree
from skyrl_fast.train.model.micro_batch import plan_micro_batches
from skyrl_fast.train.model.packed_rows import pack_rows
from skyrl_fast.train.model.policy import Policy

ROUNDS = 9
BUDGET = 8192  # tokens of a forward pass
TOLERANCE = 1e-3  # float32: different orders of summation


@functools.cache
def small_policy(tree: bool | None = None) -> Policy:
    return policy(SMALL, "cpu", torch.float32, BUDGET, tree=tree)


@functools.cache
def wanted(shape: str, history: str) -> tuple[float, torch.Tensor]:
    loss, _ = step("packed", small_policy(), batch_of(shape, history, SMALL_DIVISOR))
    return loss, gradient(small_policy())


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("contender", CONTENDERS)
def test_forward_backward(benchmark: Any, contender: str, shape: str, history: str) -> None:
    benchmark.group = f"agents {shape} {history}, forward + backward"
    batch, model = batch_of(shape, history, SMALL_DIVISOR), small_policy()
    loss, grads = wanted(shape, history)
    own_loss, tokens = step(contender, model, batch)
    assert abs(own_loss - loss) <= TOLERANCE * abs(loss)
    assert float((gradient(model) - grads).norm() / grads.norm()) <= TOLERANCE
    benchmark.extra_info["tokens"] = tokens
    benchmark.pedantic(step, (contender, model, batch), rounds=ROUNDS, warmup_rounds=0)
    if contender == "skyrl_fast":
        _, plan = planned(contender, batch, model)
        benchmark.extra_info["as_trees"] = sum(m.tree is not None for m in plan) / len(plan)
        seconds = []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            planned(contender, batch, model)
            seconds.append(time.perf_counter() - start)
        benchmark.extra_info["plan_share"] = (
            statistics.median(seconds) / benchmark.stats.stats.median
        )


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("contender", ["padded", "packed"])
def test_kept_trajectories(benchmark: Any, contender: str, shape: str, history: str) -> None:
    """Time sequences of losses that look at all rows of a trajectory, with and without padding."""
    benchmark.group = f"agents {shape} {history}, sequences of complete trajectories"
    batch = batch_of(shape, history, SMALL_DIVISOR)
    plan = list(plan_micro_batches(batch, BUDGET // SMALL_DIVISOR, keep_trajectories=True))

    def train(model: Policy) -> torch.Tensor:
        model.model.zero_grad(set_to_none=True)
        for micro in plan:
            model.logprobs(micro)[0].sum().backward()
        return gradient(model)

    padded, packed = small_policy(), small_policy(tree=False)  # a backbone for trees packs no rows
    difference = train(padded) - train(packed)
    assert float(difference.norm() / gradient(padded).norm()) <= TOLERANCE
    benchmark.extra_info["padded"] = sum(micro.input_ids.numel() for micro in plan)
    rows = [pack_rows(packed.backbone, micro) for micro in plan]
    benchmark.extra_info["packed"] = sum(
        (micro if one is None else one).input_ids.numel()
        for micro, one in zip(plan, rows, strict=True)
    )
    model = padded if contender == "padded" else packed
    benchmark.pedantic(train, (model,), rounds=ROUNDS, warmup_rounds=0)


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("shape", SHAPES)
def test_counts(benchmark: Any, shape: str, history: str) -> None:
    """Time counting, which costs as much as building a tree, and record the tokens of training."""
    benchmark.group = f"agents {shape} {history}, token counts"
    batch = agents(shape, history, num_groups=16)
    counts = token_counts(batch)
    cells = batch.num_rows * int(batch.lengths.max())
    benchmark.extra_info.update(padded=cells, rows=counts.rows, merged=counts.merged)
    benchmark.extra_info.update(tree=counts.tree)
    benchmark.pedantic(token_counts, (batch,), rounds=5, warmup_rounds=1)


@pytest.mark.parametrize("contender", ["skyrl_fast", "plain_python", "floor_copy"])
def test_build(benchmark: Any, contender: str) -> None:
    """Time the tree only; "plain_python" is a trie of dicts, "floor_copy" a copy of the tokens."""
    benchmark.group = "prefix tree, agentic stripped, 4 prompts"
    batch = agents("agentic", "stripped", num_groups=4)
    arguments = (batch.tokens, batch.cu_seqlens, batch.group_ids)
    rounds = 9
    if contender == "floor_copy":
        benchmark.pedantic(batch.tokens.clone, rounds=rounds, warmup_rounds=1)
        return
    plain = contender == "plain_python"
    backend = "torch" if plain else None
    benchmark.pedantic(
        build_prefix_tree, arguments, {"backend": backend}, rounds=1 if plain else rounds
    )
    benchmark.extra_info["ns_per_token"] = benchmark.stats.stats.min / batch.num_tokens * 1e9
