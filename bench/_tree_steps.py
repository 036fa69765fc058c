"""One training step over agent rows, in equivalent layouts.

"padded": every row padded to the batch's longest, as SkyRL does. "packed": rows end to end
without padding, each attending only to itself. "merged": the same with steps joined where contexts
only grew; "joined": these as sequences. "prompt": the group's first prompt computed once, as
PrefixGrouper does, with separate
rows after it. "sequences": ours without trees, as `trainer.row_layout=sequence` has them. "tree":
a prefix tree per pass. "skyrl_fast": what `trainer.row_layout=auto` chooses. All give the same loss
and gradients.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from bench._agents import agents
from bench.baselines.padded_rows import padded_micro_batches
from skyrl_fast.batch import StepBatch
from skyrl_fast.train.model.forward_pass import MicroBatch, response_positions
from skyrl_fast.train.model.loading import checkpoint_gradients
from skyrl_fast.train.model.micro_batch import plan_micro_batches
from skyrl_fast.train.model.policy import Policy

CONTENDERS = ("padded", "packed", "merged", "prompt", "sequences", "tree", "skyrl_fast")
GROUPS = {"search": 4, "agentic": 1, "sql": 1}
# A Qwen2 of 0.2 M weights for lengths divided by 16; the shape of Qwen2.5-1.5B for full lengths.
SMALL = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SMALL_DIVISOR = 16
LARGE = {
    "vocab_size": 151_936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}


def policy(
    sizes: dict[str, Any],
    device: str,
    dtype: torch.dtype,
    budget: int,
    *,
    tree: bool | None = None,
    kind: str = "qwen2",
) -> Policy:
    """Return a model of a type with random weights, for passes of at most `budget` tokens."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**sizes, max_position_embeddings=32768)
    model = AutoModelForCausalLM.from_config(config).to(device).eval()
    if device == "cuda":
        checkpoint_gradients(model)
        model.train()
    return Policy(model, tree=tree, dtype=dtype, max_tokens_per_microbatch=budget)


def batch_of(shape: str, history: str, divisor: int) -> StepBatch:
    """Return the rows of a few groups of agents."""
    return agents(shape, history, num_groups=GROUPS[shape], divisor=divisor)


def separated(batch: StepBatch, *, after_prompts: bool = False) -> StepBatch:
    """Return labels (like routes) that differ between rows, so that these share no node.

    Args:
        after_prompts: the rows of a group share its first prompt.
    """
    row_of = torch.repeat_interleave(torch.arange(batch.num_rows), batch.lengths.long())
    labels = row_of
    if after_prompts:
        first = np.unique(batch.group_ids.numpy(), return_index=True)[1]
        prompts = (batch.lengths - batch.response_lengths)[torch.from_numpy(first)]
        groups = batch.group_ids.long()[row_of]
        places = torch.arange(batch.num_tokens) - batch.cu_seqlens[row_of]
        labels = torch.where(places >= prompts[groups], row_of, -1 - groups)
    return batch.with_(
        expert_indices=labels.to(torch.int32)[:, None, None], cu_experts=batch.cu_seqlens
    )


def planned(
    contender: str, batch: StepBatch, model: Policy
) -> tuple[StepBatch, Iterable[MicroBatch]]:
    """Return the rows that a contender trains, and its forward passes."""
    budget = model.max_tokens_per_microbatch
    if contender == "padded":
        return batch, padded_micro_batches(batch, budget)
    if contender in ("merged", "joined"):
        steps = batch.with_(advantages=None, rewards=batch.advantages, reward_per_row=False)
        merged = steps.merged(rewards="token")
        batch = merged.with_(advantages=merged.rewards)
    if contender in ("packed", "merged", "prompt"):
        rows = separated(batch, after_prompts=contender == "prompt")
        plan = plan_micro_batches(rows, budget, tree=True, router_replay=True)
        return batch, [replace(m, expert_indices=None, router_padding_mask=None) for m in plan]
    if contender in ("sequences", "joined"):
        return batch, plan_micro_batches(batch, budget)
    if contender == "skyrl_fast":
        tree, costs = model.tree, model.layout_costs
        return batch, plan_micro_batches(batch, budget, tree=tree, costs=costs)
    return batch, plan_micro_batches(batch, budget, tree=True)


def step(contender: str, model: Policy, batch: StepBatch) -> tuple[float, int]:
    """Run plan, forward and backward; return the loss and the tokens processed by the model."""
    rows, plan = planned(contender, batch, model)
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
    """Return all gradients as one vector, on their device."""
    return torch.cat([p.grad.flatten() for p in model.model.parameters()])
