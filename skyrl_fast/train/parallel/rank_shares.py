"""Distribution of micro-batches over ranks: the same number each, balanced to minimise idle time.

Collectives synchronise the ranks in every forward and backward pass, so a round of micro-batches
takes as long as its largest one.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from skyrl_fast.train.model.micro_batch import MicroBatches
from skyrl_fast.train.parallel.ranks import Ranks

SLACK = (1.0, 1.1, 1.25, 1.5)  # times the budget that fills all rounds: rows are indivisible


def local_micro_batches(
    plan: Callable[[int], MicroBatches],
    token_budget: int,
    ranks: Ranks,
    *,
    divisible: bool = True,
) -> MicroBatches:
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
    return shortest.choose(_deal(shortest.num_tokens, number)[ranks.rank // shared])


def _shortest(
    plan: Callable[[int], MicroBatches], token_budget: int, size: int, divisible: bool
) -> MicroBatches:
    """Return the plan with the least total time; a few tokens often need a smaller budget."""
    plans = [plan(token_budget)]
    total = int(plans[0].num_tokens.sum())
    rounds = -(-len(plans[0]) // size)
    if divisible and total:
        budgets = set()
        for slack in SLACK:
            budgets.add(min(token_budget, int(slack * total / (rounds * size)) + 1))
        plans += [plan(budget) for budget in sorted(budgets)]
    # Ties go to the first plan, which has the fewest passes.
    return min(plans, key=lambda micros: _total_time(micros.num_tokens, size))


def _total_time(num_tokens: np.ndarray, size: int) -> int:
    """Return the tokens of the largest micro-batch of each round, the first one, summed."""
    return int(num_tokens[_deal(num_tokens, size)[0]].sum())


def _deal(num_tokens: np.ndarray, size: int) -> np.ndarray:
    """Return (size, rounds) micro-batches of each rank, largest first; -1 is an idle one."""
    order = np.argsort(-num_tokens, kind="stable")
    return np.concatenate([order, np.full(-len(order) % size, -1)]).reshape(-1, size).T
