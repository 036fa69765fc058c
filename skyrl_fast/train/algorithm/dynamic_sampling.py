"""Dynamic sampling: batches of informative groups only. G groups of a batch.

A group whose trajectories all have the same outcome has zero advantages. "filter" (DAPO,
arXiv:2503.14476, section 3.2) keeps sampling until there are enough informative groups; "replace"
(POLARIS) substitutes copies of informative groups. Groups are judged by the outcomes of their
trajectories and kept or dropped as a unit, whatever their number of rows.

Design: docs/design/012-filters-and-scope.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from skyrl_fast.config import DynamicSamplingConfig
from skyrl_fast.errors import RunError
from skyrl_fast.rollout.trajectory import Trajectory
from skyrl_fast.train.algorithm.sequence_scope import Sequences, group_spread
from skyrl_fast.train.algorithm.training_rows import GroupRows, SampledRows, join_groups


class DynamicSamplingError(RunError):
    """The limit of sampled batches was reached with too few informative groups."""


def informative_groups(units: Sequences, *, tolerance: float = 0.0) -> np.ndarray:
    """Return (G,) bool: groups whose outcomes differ, and groups of one.

    Args:
        units: sequences of complete groups. If each row is a sequence, all rows are compared, as
            in SkyRL.
        tolerance: largest difference between outcomes that count as equal.
    """
    # Trajectories without a trained token are not compared: a success next to a failed
    # trajectory's placeholder is not informative.
    groups = group_spread(units)
    return (groups.sizes == 1) | (groups.spread > tolerance)


def replacement_groups(informative: np.ndarray, *, random: np.random.Generator) -> list[int]:
    """Return G group numbers: informative groups stay, the others are replaced by informative ones.

    No group is used as a replacement twice before each has been used once.

    Args:
        informative: (G,) bool, at least one True.

    Example:
        >>> replacement_groups(np.array([True, False]), random=np.random.default_rng(0))
        [0, 0]
    """
    good = np.flatnonzero(informative)
    places = np.flatnonzero(~informative)
    rounds = -(-len(places) // len(good))
    # All informative groups once before any is used twice; the empty head is for no replacement at
    # all.
    drawn = np.concatenate([good[:0], *(random.permutation(good) for _ in range(rounds))])
    chosen = np.arange(len(informative))
    chosen[places] = drawn[: len(places)]
    return chosen.tolist()


class SampledGroup(NamedTuple):
    """The trajectories of a group, and the location of their rows, if these were built."""

    trajectories: list[Trajectory]
    rows: GroupRows | None


def _has_failed(trajectory: Trajectory) -> bool:
    return trajectory.failure is not None


class GroupSampling:
    """Collects the groups of one training step, batch of prompts by batch of prompts."""

    def __init__(
        self,
        config: DynamicSamplingConfig,
        num_groups: int,
        random: np.random.Generator,
        *,
        sums_rewards: bool = False,
    ) -> None:
        self.sampled: list[Trajectory] = []
        self._config = config
        self._wanted = num_groups
        self._random = random
        self._sums_rewards = sums_rewards
        self._kept: dict[str, SampledGroup] = {}
        self._counts: Counter[str] = Counter()

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    @property
    def kept_uids(self) -> set[str]:
        return set(self._kept)

    def add(
        self,
        trajectories: Sequence[Trajectory],
        informative: Collection[str],
        rows: SampledRows | None = None,
    ) -> bool:
        """Add complete groups; return whether the batch is full.

        Args:
            trajectories: adjacent per group; a full batch of groups, or as many as are missing.
            informative: uids of the informative groups among them.

        Raises:
            DynamicSamplingError: too few groups at the limit of sampled batches.
        """
        groups: dict[str, SampledGroup] = {}
        for trajectory in trajectories:
            if trajectory.uid not in groups:
                if rows is None:
                    place = None
                else:
                    place = GroupRows(rows, len(groups))
                groups[trajectory.uid] = SampledGroup([], place)
            groups[trajectory.uid].trajectories.append(trajectory)
        self.sampled.extend(trajectories)
        self._counts["num_batches"] += 1
        self._counts["num_groups_sampled"] += len(groups)
        self._counts["num_groups_uninformative"] += len(groups) - len(informative)
        if self._config.type is None:
            self._kept = groups
        elif self._config.type == "filter":
            self._filter(groups, informative)
        else:
            self._replace(groups, informative)
        # Without dynamic sampling the batch is full by definition.
        if len(self._kept) == self._wanted or self._config.type is None:
            return True
        # Counted in groups, because a batch of prompts may be as small as what is missing.
        limit = self._config.max_sample_batches
        if 0 < limit * self._wanted <= self._counts["num_groups_sampled"]:
            raise DynamicSamplingError(self._too_few(limit))
        return False

    def trajectories(self) -> list[Trajectory]:
        """Return the trajectories to train on, group after group; copies have their own uid."""
        return [t for group in self._kept.values() for t in group.trajectories]

    def rows(self) -> SampledRows | None:
        """Return the rows of these trajectories; None unless all were built when judging."""
        places = {}
        for uid, group in self._kept.items():
            if group.rows is not None:
                places[uid] = group.rows
        if places and len(places) == len(self._kept):
            return join_groups(places)
        return None

    def metrics(self) -> dict[str, float]:
        """Return counts of sampled and dropped groups, and of failures, dropped groups included."""
        failed = {"generate/failed_trajectories": float(sum(_has_failed(t) for t in self.sampled))}
        if self._config.type is None:
            return failed
        rewards = [t.outcome(sums_rewards=self._sums_rewards) for t in self.sampled if t.has_acted]
        names = (
            "num_batches",
            "num_groups_sampled",
            "num_groups_uninformative",
            "num_groups_unused",
            "num_groups_replaced",
        )
        return {
            **failed,
            **{f"dynamic_sampling/{name}": float(self._counts[name]) for name in names},
            "dynamic_sampling/avg_raw_reward": float(np.mean(rewards)) if rewards else 0.0,
        }

    def shortfall(self) -> str:
        informative = self._counts["num_groups_sampled"] - self._counts["num_groups_uninformative"]
        return (
            f"{informative} of {self._counts['num_groups_sampled']} sampled groups are "
            f"informative, for a batch of {self._wanted}"
        )

    def _filter(self, groups: dict[str, SampledGroup], informative: Collection[str]) -> None:
        for uid, group in groups.items():
            if uid not in informative:
                continue
            if len(self._kept) < self._wanted:
                self._kept[uid] = group
            else:
                self._counts["num_groups_unused"] += 1

    def _replace(self, groups: dict[str, SampledGroup], informative: Collection[str]) -> None:
        if len(informative) <= self._config.min_replace_ratio * len(groups):
            return  # too few informative groups: the batch is dropped
        uids = list(groups)
        good = np.array([uid in informative for uid in uids])
        copies: Counter[str] = Counter()
        for place, source in enumerate(replacement_groups(good, random=self._random)):
            uid = uids[source]
            if place == source:
                self._kept[uid] = groups[uid]
                continue
            copies[uid] += 1
            self._counts["num_groups_replaced"] += 1
            # A copy is a group of its own: under the same uid its trajectories would be compared
            # with those of the original.
            name = f"{uid}+{copies[uid]}"
            trajectories = [replace(t, uid=name) for t in groups[uid].trajectories]
            self._kept[name] = SampledGroup(trajectories, groups[uid].rows)

    def _too_few(self, limit: int) -> str:
        kind = self._config.type
        share = self._config.min_replace_ratio
        if kind == "filter":
            need = ""
        else:
            need = f" (replace needs more than {share:g} of one batch)"
        return (
            f"dynamic sampling ({kind}): after {limit} batches of prompts {self.shortfall()}{need}."
            " The prompts are too easy or too hard for this policy: change the data, or raise "
            "trainer.algorithm.dynamic_sampling.max_sample_batches"
        )
