"""Groups for each training step, taken from those in flight.

Design: docs/design/018-asynchronous.md.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from skyrl_fast.config import Config, sums_rewards
from skyrl_fast.rollout.failures import FailureWatch, log_failures
from skyrl_fast.rollout.trajectory import Trajectory
from skyrl_fast.train.algorithm.dynamic_sampling import DynamicSamplingError, GroupSampling
from skyrl_fast.train.algorithm.training_rows import SampledRows
from skyrl_fast.train.flow.group_flow import GroupFlow, ReadyGroup

logger = logging.getLogger(__name__)

Judged = tuple[SampledRows, set[str]]  # rows before the filters, uids of informative groups
Judge = Callable[[Sequence[Trajectory]], Awaitable[Judged]]
Wait = Callable[[Any], Awaitable[list[ReadyGroup] | None]]


class BatchSource:
    """Takes groups from the flow until the batch of a step is full."""

    def __init__(self, config: Config, failures: FailureWatch) -> None:
        settings = config.trainer
        self._dynamic = settings.algorithm.dynamic_sampling
        self._sums_rewards = sums_rewards(config)
        self._seed = settings.seed
        self._wanted = settings.train_batch_size
        self._per_batch = settings.train_batch_size * config.generator.n_samples_per_prompt
        # With staleness 0, full batches of prompts are sampled until there are enough groups.
        # Otherwise each dropped group is replaced by the next one that is ready.
        self._asynchronous = config.max_staleness > 0
        self._full_batches = not self._asynchronous or self._dynamic.type == "replace"
        self._failures = failures
        self._unseen: list[Trajectory] = []

    async def next(
        self, flow: GroupFlow, step: int, *, wait: Wait, judge: Judge
    ) -> tuple[GroupSampling, dict[str, float]] | None:
        """Return the step's groups and staleness metrics; None if the data ran out first.

        Raises:
            DynamicSamplingError: the data ran out before the first step, or the limit of sampled
                batches was reached.
        """
        # A seed of the step alone: a resumed run draws the same replacements.
        random = np.random.default_rng((self._seed, step))
        sampling = GroupSampling(
            self._dynamic, self._wanted, random, sums_rewards=self._sums_rewards
        )
        ages: Counter[int] = Counter()
        while True:
            if self._full_batches:
                missing = self._wanted
            else:
                missing = self._wanted - sampling.num_kept
            ready = await wait(flow.take(missing))
            if ready is None and step == 0:
                self._failures.end()  # the likelier reason
                raise DynamicSamplingError(
                    "the prompts of all epochs are used up without a training step: "
                    f"{sampling.shortfall()}. The prompts are too few, or too easy or too hard for "
                    "this policy: change the data, or raise trainer.epochs"
                )
            if ready is None:
                logger.warning(
                    "the prompts of all epochs are used up; incomplete last batch dropped: %s",
                    sampling.shortfall(),
                )
                return None
            trajectories = [t for group in ready for t in group.trajectories]
            self._look_for_failures(trajectories)
            rows = None
            informative = set[str]()
            if self._dynamic.type is not None:
                rows, informative = await judge(trajectories)
            full = sampling.add(trajectories, informative, rows)
            kept = sampling.kept_uids
            if self._dynamic.type != "replace" or not kept:
                # A group that is replaced by a copy keeps its place in the queue: each batch must
                # free exactly as many places as it has, or later groups could exceed the bound.
                flow.drop([g.group.name for g in ready if g.group.name not in kept])
            ages.update(g.staleness for g in ready if g.group.name in kept)
            if full:
                return sampling, staleness_metrics(ages) if self._asynchronous else {}

    def _look_for_failures(self, trajectories: Sequence[Trajectory]) -> None:
        """Log failures batch by batch; end a run in which everything fails."""
        self._unseen += trajectories
        if len(self._unseen) >= self._per_batch:
            batch = self._unseen
            self._unseen = []
            log_failures(batch)
            self._failures.see(batch)


def staleness_metrics(ages: Counter[int]) -> dict[str, float]:
    """Return mean, maximum and counts of policy versions between each group's start and its batch.

    Example:
        >>> staleness_metrics(Counter({0: 1, 1: 3}))["async/staleness_mean"]
        0.75
    """
    total = sum(ages.values())
    if not total:
        return {}
    return {
        "async/staleness_mean": sum(age * number for age, number in ages.items()) / total,
        "async/staleness_max": float(max(ages)),
        **{f"async/num_groups_of_staleness_{age}": float(ages[age]) for age in sorted(ages)},
    }


def token_staleness(trajectories: Sequence[Trajectory], version: int) -> dict[str, float]:
    """Return mean and maximum of versions between each token's sampling and `version`."""
    ages = np.array(
        [version - v for t in trajectories for step in t.steps for v in step.versions], np.int64
    )
    mixed = sum(step.token_versions is not None for t in trajectories for step in t.steps)
    if not len(ages):
        return {}
    return {
        "async/token_staleness_mean": float(ages.mean()),
        "async/token_staleness_max": float(ages.max()),
        "async/num_steps_of_several_versions": float(mixed),
    }
