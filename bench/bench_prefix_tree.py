"""Forward and backward of a small model over the rows of agents, in five forms.

"padded": every row padded to the batch's longest, as SkyRL does. "packed": rows one behind another
without padding, each seeing itself alone. "merged": the same with steps joined where contexts only
grew. "prompt": the group's first prompt computed once, as PrefixGrouper does, rows apart behind it.
"skyrl_fast": prefix trees. All give the same loss and gradients, which is checked first.

On the CPU lengths are a sixteenth of the shapes' and the model is a Qwen2 of 0.2 M weights in
float32; on a GPU lengths are whole and the model has the shape of Qwen2.5-1.5B, with random
weights, in bfloat16, with peak memory in extra_info and "packed_varlen", torch's varlen flash
attention, beside "packed", which is FlexAttention.

extra_info: `tokens` that go through the model, and for ours `plan_share`, the part of a step that
building and cutting the trees takes. "counts" needs no model: tokens of whole lengths.
"""

from __future__ import annotations

import functools
import statistics
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from bench._agents import HISTORIES, SHAPES, agents
from bench.baselines.padded_rows import padded_micro_batches, varlen_attention
from skyrl_fast.batch import StepBatch
from skyrl_fast.batch.token_counts import token_counts
from skyrl_fast.ops.prefix_tree import build_prefix_tree
from skyrl_fast.train.forward_pass import MicroBatch, response_positions
from skyrl_fast.train.micro_batch import plan_micro_batches
from skyrl_fast.train.policy import Policy

transformers = pytest.importorskip("transformers")

CONTENDERS = ("padded", "packed", "merged", "prompt", "skyrl_fast")
GROUPS = {"search": 4, "agentic": 1, "sql": 1}
DIVISOR = 16
ROUNDS = {"cpu": 9, "cuda": 5}
BUDGET = {"cpu": 8192, "cuda": 32768}  # tokens of a forward pass
SMALL = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LARGE = {
    "vocab_size": 151_936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
# float32 on the CPU: other orders of sums; bfloat16 on a GPU
TOLERANCE = {"cpu": 1e-3, "cuda": 5e-2}


@functools.lru_cache(maxsize=1)
def policy(device: str) -> Policy:
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        **(SMALL if device == "cpu" else LARGE), max_position_embeddings=32768
    )
    model = transformers.Qwen2ForCausalLM(config).to(device).eval()
    if device == "cuda":
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return Policy(model, tree=True, dtype=dtype, max_tokens_per_microbatch=BUDGET[device])


def apart(batch: StepBatch) -> StepBatch:
    """Every row a group of its own, so that nothing is shared."""
    numbers = torch.arange(batch.num_rows, dtype=torch.int32)
    return batch.with_(group_ids=numbers, uids=tuple(map(str, numbers.tolist())))


def prompts_shared(batch: StepBatch) -> StepBatch:
    """Labels (as routes would be) that differ from row to row behind the group's first prompt."""
    first = np.unique(batch.group_ids.numpy(), return_index=True)[1]
    prompts = (batch.lengths - batch.response_lengths)[torch.from_numpy(first)]
    lengths = batch.lengths.long()
    row_of = torch.repeat_interleave(torch.arange(batch.num_rows), lengths)
    places = torch.arange(batch.num_tokens) - batch.cu_seqlens[row_of]
    behind = places >= prompts[batch.group_ids.long()][row_of]
    labels = torch.where(behind, row_of + 1, 0).to(torch.int32)
    return batch.with_(expert_indices=labels[:, None, None], cu_experts=batch.cu_seqlens)


def planned(contender: str, batch: StepBatch, budget: int) -> tuple[StepBatch, list[MicroBatch]]:
    """The rows that a contender trains, and its forward passes."""
    if contender == "padded":
        return batch, padded_micro_batches(batch, budget)
    if contender == "merged":
        steps = batch.with_(advantages=None, rewards=batch.advantages, reward_per_row=False)
        merged = steps.merged(rewards="token")
        batch = merged.with_(advantages=merged.rewards)
    if contender == "prompt":
        plan = plan_micro_batches(prompts_shared(batch), budget, tree=True, router_replay=True)
        return batch, [replace(m, expert_indices=None, router_padding_mask=None) for m in plan]
    rows = batch if contender == "skyrl_fast" else apart(batch)
    return batch, plan_micro_batches(rows, budget, tree=True)


def step(contender: str, model: Policy, batch: StepBatch) -> tuple[float, int]:
    """Plan, forward and backward; the loss, and the tokens that went through the model."""
    rows, plan = planned(contender, batch, model.max_tokens_per_microbatch)
    model.model.zero_grad(set_to_none=True)
    assert rows.advantages is not None
    total, loss = int(rows.loss_mask.sum()), 0.0
    for micro in plan:
        values, _ = model.logprobs(micro)
        weights = rows.advantages[response_positions(rows, micro)].to(values.device)
        part = -(values * weights).sum() / total
        part.backward()
        loss += float(part.detach())
    return loss, sum(micro.input_ids.numel() for micro in plan)


def gradient(model: Policy) -> torch.Tensor:
    return torch.cat([p.grad.flatten().cpu() for p in model.model.parameters()])


@functools.lru_cache(maxsize=1)
def wanted(shape: str, history: str, device: str) -> tuple[float, torch.Tensor]:
    model = policy(device)
    loss, _ = step("packed", model, batch_of(shape, history, device))
    return loss, gradient(model)


def batch_of(shape: str, history: str, device: str) -> StepBatch:
    divisor = DIVISOR if device == "cpu" else 1
    return agents(shape, history, num_groups=GROUPS[shape], divisor=divisor)


def run(benchmark: Any, contender: str, shape: str, history: str, device: str) -> None:
    batch, model = batch_of(shape, history, device), policy(device)
    loss, grads = wanted(shape, history, device)
    name = "packed" if contender == "packed_varlen" else contender
    with varlen_attention(model) if contender == "packed_varlen" else _nothing():
        own_loss, tokens = step(name, model, batch)
        error = float((gradient(model) - grads).norm() / grads.norm())
        assert abs(own_loss - loss) <= TOLERANCE[device] * abs(loss)
        assert error <= TOLERANCE[device], error
        benchmark.extra_info["tokens"] = tokens

        def timed() -> None:
            step(name, model, batch)
            if device == "cuda":
                torch.cuda.synchronize()

        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        benchmark.pedantic(timed, rounds=ROUNDS[device], warmup_rounds=0)
    if device == "cuda":
        benchmark.extra_info["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    if contender == "skyrl_fast":
        seconds = []
        for _ in range(ROUNDS[device]):
            start = time.perf_counter()
            planned(contender, batch, model.max_tokens_per_microbatch)
            seconds.append(time.perf_counter() - start)
        benchmark.extra_info["plan_share"] = (
            statistics.median(seconds) / benchmark.stats.stats.median
        )


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("contender", CONTENDERS)
def test_forward_backward(benchmark: Any, contender: str, shape: str, history: str) -> None:
    benchmark.group = f"agents {shape} {history}, forward + backward"
    run(benchmark, contender, shape, history, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("contender", (*CONTENDERS[:2], "packed_varlen", *CONTENDERS[2:]))
def test_forward_backward_gpu(benchmark: Any, contender: str, shape: str, history: str) -> None:
    benchmark.group = f"agents {shape} {history}, Qwen2.5-1.5B's shape, GPU"
    run(benchmark, contender, shape, history, "cuda")


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("shape", SHAPES)
def test_counts(benchmark: Any, shape: str, history: str) -> None:
    """Counting costs what building a tree costs, and says what training would."""
    benchmark.group = f"agents {shape} {history}, token counts"
    batch = agents(shape, history, num_groups=16)
    counts = token_counts(batch)
    cells = batch.num_rows * int(batch.lengths.max())
    benchmark.extra_info.update(padded=cells, rows=counts.rows, merged=counts.merged)
    benchmark.extra_info.update(tree=counts.tree)
    benchmark.pedantic(token_counts, (batch,), rounds=5, warmup_rounds=1)


@pytest.mark.parametrize("contender", ["skyrl_fast", "plain_python", "floor_copy"])
def test_build(benchmark: Any, contender: str) -> None:
    """The tree alone; "plain_python" is a trie of dicts, "floor_copy" a copy of the tokens."""
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


class _nothing:  # noqa: N801 - a context
    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...
