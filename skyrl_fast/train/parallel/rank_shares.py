"""Distribution of micro-batches over ranks: the same number each, balanced to minimise idle time.

Collectives synchronise the ranks in every forward and backward pass, so a round of micro-batches
takes as long as its largest one. Rank 0 plans them, and sends each rank the rows of its own
(docs/design/020-several-gpus.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from skyrl_fast.batch import StepBatch
from skyrl_fast.train.model.forward_pass import MicroBatch, positions_from, response_positions
from skyrl_fast.train.model.micro_batch import MicroBatches
from skyrl_fast.train.parallel.per_rank import PerRank
from skyrl_fast.train.parallel.ranks import Ranks

SLACK = (1.0, 1.1, 1.25, 1.5)  # times the budget that fills all rounds: rows are indivisible


@dataclass(frozen=True, slots=True)
class Share:
    """The passes of a rank, and the rows that they visit.

    Args:
        passes: equally many on each rank; some may be idle, without a trained token.
        rows: (n,) int64, the numbers of their batch's rows in the full batch; None: it is that.
        starts: (n,) int64, each row's first response token in the full batch; None with `rows`.
    """

    passes: MicroBatches
    rows: torch.Tensor | None = None
    starts: torch.Tensor | None = None

    @classmethod
    def of(cls, passes: MicroBatches) -> Share:
        """Return the share of passes of a batch, with a copy of the rows that they visit."""
        starts = passes.batch.cu_responses.to(torch.int64)
        alone, rows = passes.alone()
        return cls(alone, rows, starts[rows])

    @property
    def batch(self) -> StepBatch:
        """The rows that the passes visit, or with one rank those of the full batch."""
        return self.passes.batch

    def of_rows(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values of this batch's rows, from those of the full batch's."""
        return values if self.rows is None else values[self.rows]

    def rows_of(self, micro: MicroBatch) -> torch.Tensor:
        """Return a pass's rows by their numbers in the full batch."""
        return micro.rows if self.rows is None else self.rows[micro.rows]

    def positions_of(self, micro: MicroBatch) -> torch.Tensor:
        """Return (M,) `response_positions` of a pass in the full batch."""
        if self.starts is None:
            return response_positions(self.batch, micro)
        return positions_from(self.starts[micro.rows], self.batch, micro)


def share_passes(
    plan: Callable[[int], MicroBatches],
    token_budget: int,
    ranks: Ranks,
    *,
    divisible: bool = True,
) -> PerRank[Share]:
    """Plan the passes of a batch, on rank 0 alone; return the share of each rank.

    Args:
        plan, token_budget, divisible: see `deal_passes`.
    """
    dealt = deal_passes(plan, token_budget, ranks, divisible=divisible)
    if ranks.size == 1:
        return PerRank(lambda _: Share(dealt[0]))
    return PerRank(lambda number: Share.of(dealt[number]))


def deal_passes(
    plan: Callable[[int], MicroBatches],
    token_budget: int,
    ranks: Ranks,
    *,
    divisible: bool = True,
) -> list[MicroBatches]:
    """Return the micro-batches of each rank, some of them idle; sharers of sequences have the same.

    Args:
        plan: returns micro-batches of at most the given tokens.
        token_budget: most tokens of a micro-batch on a rank; ranks that share it hold a part each.
        divisible: False: use the plan for this budget, as a smaller one would change the loss.
    """
    if ranks.size == 1:
        return [plan(token_budget)]
    shared = ranks.sequence.size
    number = ranks.size // shared
    shortest = _shortest(plan, token_budget * shared, number, divisible)
    return [shortest.choose(places) for places in _deal(shortest.num_tokens, number)]


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
