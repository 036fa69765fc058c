"""Distribution of micro-batches over ranks: the same number each, balanced to minimise idle time.

Collectives synchronise the ranks in every forward and backward pass, so a round of micro-batches
takes as long as its largest one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from skyrl_fast.train.model.forward_pass import MicroBatch
from skyrl_fast.train.parallel.ranks import Ranks

SLACK = (1.0, 1.1, 1.25, 1.5)  # times the budget that fills all rounds: rows are indivisible


def local_micro_batches(
    plan: Callable[[int], list[MicroBatch]],
    token_budget: int,
    ranks: Ranks,
    *,
    divisible: bool = True,
) -> list[MicroBatch]:
    """Return this rank's micro-batches of a plan; some may be idle, without a trained token.

    Args:
        plan: the same on all ranks; returns micro-batches of at most the given tokens.
        token_budget: most tokens of a micro-batch on a rank; ranks that share it hold a part each.
        divisible: False: use the plan for this budget, as a smaller one would change the loss.
    """
    if ranks.size == 1:
        return plan(token_budget)
    shared = ranks.sequence.size
    number = ranks.size // shared
    shortest = _shortest(plan, token_budget * shared, number, divisible)
    return _deal(shortest, number)[ranks.rank // shared]


def _shortest(
    plan: Callable[[int], list[MicroBatch]], token_budget: int, size: int, divisible: bool
) -> list[MicroBatch]:
    """Return the plan with the least total time; a few tokens often need a smaller budget."""
    plans = [plan(token_budget)]
    total = sum(micro.input_ids.numel() for micro in plans[0])
    rounds = -(-len(plans[0]) // size)
    if divisible and total:
        budgets = {min(token_budget, int(slack * total / (rounds * size)) + 1) for slack in SLACK}
        plans += [plan(budget) for budget in sorted(budgets)]
    return min(plans, key=lambda micros: _total_time(_deal(micros, size)))


def _total_time(dealt: list[list[MicroBatch]]) -> int:
    """Return the tokens of the largest micro-batch of each round, summed."""
    return sum(max(m.input_ids.numel() for m in group) for group in zip(*dealt, strict=True))


def _deal(micros: list[MicroBatch], size: int) -> list[list[MicroBatch]]:
    """Return equally many micro-batches per rank, largest first: those of a round are similar."""
    order = sorted(micros, key=lambda micro: -micro.input_ids.numel())
    order += [_idle(micros[0])] * (-len(order) % size) if micros else []
    return [order[rank::size] for rank in range(size)]


def _idle(like: MicroBatch) -> MicroBatch:
    """Return a micro-batch of one untrained token, with routes if `like` has them."""
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
