"""Which micro-batches a rank takes: the same number for each, with as little waiting as may be.

Collectives tie the ranks together in every forward and backward pass, so a round of micro-batches
takes as long as its largest one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from skyrl_fast.train.model.forward_pass import MicroBatch
from skyrl_fast.train.parallel.ranks import Ranks

SLACK = (1.0, 1.1, 1.25, 1.5)  # of a budget that would fill all rounds: sequences do not divide


def own_micro_batches(
    plan: Callable[[int], list[MicroBatch]],
    token_budget: int,
    ranks: Ranks,
    *,
    divisible: bool = True,
) -> list[MicroBatch]:
    """Return this rank's part of a plan; some may be idle, without a token to train.

    Args:
        plan: the same on all ranks; returns micro-batches of at most so many tokens.
        token_budget: most that a rank takes at once.
        divisible: False: the plan for the budget stands, because a smaller one would change losses.
    """
    if ranks.size == 1:
        return plan(token_budget)
    return _deal(_shortest(plan, token_budget, ranks.size, divisible), ranks.size)[ranks.rank]


def _shortest(
    plan: Callable[[int], list[MicroBatch]], token_budget: int, size: int, divisible: bool
) -> list[MicroBatch]:
    """The plan whose rounds take least together: few tokens often need a smaller budget."""
    plans = [plan(token_budget)]
    total = sum(micro.input_ids.numel() for micro in plans[0])
    rounds = -(-len(plans[0]) // size)
    if divisible and total:
        budgets = {min(token_budget, int(slack * total / (rounds * size)) + 1) for slack in SLACK}
        plans += [plan(budget) for budget in sorted(budgets)]
    return min(plans, key=lambda micros: _waiting(_deal(micros, size)))


def _waiting(dealt: list[list[MicroBatch]]) -> int:
    return sum(max(m.input_ids.numel() for m in turn) for turn in zip(*dealt, strict=True))


def _deal(micros: list[MicroBatch], size: int) -> list[list[MicroBatch]]:
    """Return each rank's, as many for each: the largest are dealt first, so a round's are alike."""
    order = sorted(micros, key=lambda micro: -micro.input_ids.numel())
    order += [_idle(micros[0])] * (-len(order) % size) if micros else []
    return [order[rank::size] for rank in range(size)]


def _idle(like: MicroBatch) -> MicroBatch:
    """A pass over one token that trains nothing."""
    nothing = torch.zeros(0, dtype=torch.int64)
    routes, mask = like.expert_indices, like.router_padding_mask
    return MicroBatch(
        input_ids=torch.zeros((1, 1), dtype=torch.int64),
        hidden_index=nothing,
        target_ids=nothing,
        response_index=nothing,
        rows=nothing,
        expert_indices=None if routes is None else routes.new_zeros((1, 1, *routes.shape[2:])),
        router_padding_mask=None if mask is None else torch.ones((1, 1), dtype=torch.bool),
    )
