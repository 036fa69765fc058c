"""Advantages of every built-in estimator (sections 5 and 9)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from reference.filters import groups_of
from reference.rows import Row

EPSILON = 1e-6
LEAST_VARIANCE = 1e-8
TOKEN_LEVEL = ("gae", "reinforce++")
TURN_LEVEL = ("turn_level_returns", "turn_level_group", "gigpo")
CONTEXT_LEVEL = ("context_level_group",)
WITHOUT_GROUPS = ("gae", "reinforce++", "turn_level_returns")


@dataclass(slots=True)
class Advantages:
    """Of each row and each of its response tokens.

    Args:
        returns: what the critic learns.
    """

    values: list[list[float]]
    returns: list[list[float]]


def reads_all_rewards(estimator: str) -> bool:
    return estimator in TOKEN_LEVEL + TURN_LEVEL + CONTEXT_LEVEL


def compute_advantages(
    rows: Sequence[Row], config: Any, values: Sequence[Sequence[float]] | None = None
) -> Advantages:
    """Return the advantages of rows whose rewards and masks are final.

    Args:
        values: of each row and each response token, by the critic.
    """
    algorithm = config.trainer.algorithm
    name = algorithm.advantage_estimator
    alone: set[str] = set()
    if name in TOKEN_LEVEL:
        result = _token_level(rows, algorithm, values)
    else:
        of_row = _of_parts(rows, config) if name == "gdpo" else _of_rows(rows, config)
        if name not in WITHOUT_GROUPS and config.generator.n_samples_per_prompt > 1:
            alone = {group[0].uid for group in groups_of(rows) if has_no_baseline(group)}
        spread = [
            [value * trained for trained in row.mask]
            for row, value in zip(rows, of_row, strict=True)
        ]
        result = Advantages(spread, spread)
    if name in TOKEN_LEVEL or algorithm.advantage_batch_normalize:
        compared = [row.uid not in alone for row in rows]
        result = Advantages(_whitened(rows, result.values, compared), result.returns)
    for row, values_of_row in zip(rows, result.values, strict=True):
        if row.uid in alone:
            values_of_row[:] = [0.0] * len(values_of_row)
    return result


def has_no_baseline(rows: Sequence[Row]) -> bool:
    """Return whether one trajectory of a group is left."""
    return len({row.trajectory for row in rows if not row.is_placeholder}) == 1


def _of_rows(rows: Sequence[Row], config: Any) -> list[float]:
    """Return the advantage of each row; 0 of placeholders."""
    algorithm = config.trainer.algorithm
    name = algorithm.advantage_estimator
    if name == "grpo" and not algorithm.grpo_norm_by_std:
        name = "dr_grpo"
    acted = [row for row in rows if not row.is_placeholder]
    of_row: dict[int, float] = {}
    for group in groups_of(acted):
        trajectories = [list(own) for _, own in groupby(group, key=lambda row: row.trajectory)]
        if name in TURN_LEVEL:
            values = _with_summaries(name, trajectories, algorithm)
        elif name in CONTEXT_LEVEL:
            values = _of_contexts(trajectories, algorithm)
        else:
            scores = _COMPARISONS[name]([own[-1].reward for own in trajectories])
            values = [[score] * len(own) for score, own in zip(scores, trajectories, strict=True)]
        for own, given in zip(trajectories, values, strict=True):
            of_row |= {id(row): value for row, value in zip(own, given, strict=True)}
    return [of_row.get(id(row), 0.0) for row in rows]


def _of_parts(rows: Sequence[Row], config: Any) -> list[float]:
    """Return GDPO's advantage of each row; 0 of placeholders, and of what is compared with none."""
    acted = [row for row in rows if not row.is_placeholder]
    totals: dict[tuple[str, int], float] = {}
    for group in groups_of(acted):
        last = {row.trajectory: row for row in group}
        if len(last) == 1:
            continue
        totals |= dict.fromkeys(last, 0.0)
        for name, weight in config.trainer.algorithm.gdpo_weights.items():
            scores = [
                row.reward if name == "reward" else row.reported.get(name, 0.0)
                for row in last.values()
            ]
            for trajectory, value in zip(last, _grpo(scores), strict=True):
                totals[trajectory] += weight * value
    if not totals:
        return [0.0] * len(rows)
    mean = _mean(list(totals.values()))
    scale = _std(list(totals.values())) + EPSILON
    return [
        (totals[row.trajectory] - mean) / scale if row.trajectory in totals else 0.0 for row in rows
    ]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _std(values: Sequence[float]) -> float:
    mean = _mean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _grpo(scores: Sequence[float]) -> list[float]:
    if len(scores) == 1:
        return [scores[0] / (1 + EPSILON)]
    return [(score - _mean(scores)) / (_std(scores) + EPSILON) for score in scores]


def _dr_grpo(scores: Sequence[float]) -> list[float]:
    if len(scores) == 1:
        return list(scores)
    return [score - _mean(scores) for score in scores]


def _rloo(scores: Sequence[float]) -> list[float]:
    count = len(scores)
    if count == 1:
        return [0.0]
    return [(score - _mean(scores)) * count / (count - 1) for score in scores]


def _maxrl(scores: Sequence[float]) -> list[float]:
    if len(scores) == 1:
        return list(scores)
    mean = _mean(scores)
    return [(score - mean) / (mean + EPSILON) for score in scores]


_COMPARISONS: dict[str, Callable[[Sequence[float]], list[float]]] = {
    "grpo": _grpo,
    "dr_grpo": _dr_grpo,
    "rloo": _rloo,
    "maxrl": _maxrl,
}


def _with_summaries(
    name: str, trajectories: Sequence[Sequence[Row]], algorithm: Any
) -> list[list[float]]:
    """Return the turns' advantages; a summary has that of the turn after it, or else before it."""
    turns: list[list[Row]] = []
    turn_of_rows: list[list[int]] = []
    for own in trajectories:
        is_turn = [not any(row.is_summary) for row in own]
        if not any(is_turn):
            is_turn = [True] * len(own)
        kept = [row for row, counts in zip(own, is_turn, strict=True) if counts]
        numbers = [min(sum(is_turn[:place]), len(kept) - 1) for place in range(len(own))]
        rewards = [0.0] * len(kept)
        for row, number in zip(own, numbers, strict=True):
            rewards[number] += row.reward
        turns.append(
            [
                replace(row, rewards=[], leading=0.0, trailing=reward)
                for row, reward in zip(kept, rewards, strict=True)
            ]
        )
        turn_of_rows.append(numbers)
    values = _turn_level(name, turns, algorithm)
    return [
        [of_turns[number] for number in numbers]
        for of_turns, numbers in zip(values, turn_of_rows, strict=True)
    ]


def _of_contexts(trajectories: Sequence[Sequence[Row]], algorithm: Any) -> list[list[float]]:
    """Return the contexts' advantages, of each row that of its context."""
    returns = []
    for own in trajectories:
        rewards: dict[int, float] = {}
        latest = 0  # the context that has begun last
        for row in own:
            latest = max(latest, row.context)
            rewards[latest] = rewards.get(latest, 0.0) + row.reward
        in_order = [rewards[number] for number in sorted(rewards)]
        returns.append(_returns(in_order, algorithm.gamma))
    values = _above_the_others(returns, algorithm.turn_level_baseline)
    result = []
    for own, of_contexts in zip(trajectories, values, strict=True):
        numbers = sorted({row.context for row in own})
        result.append([of_contexts[numbers.index(row.context)] for row in own])
    return result


def _turn_level(
    name: str, trajectories: Sequence[Sequence[Row]], algorithm: Any
) -> list[list[float]]:
    returns = [_returns([row.reward for row in own], algorithm.gamma) for own in trajectories]
    if name == "turn_level_returns":
        return returns
    if name == "turn_level_group":
        return _above_the_others(returns, algorithm.turn_level_baseline)
    return _gigpo(trajectories, returns, algorithm)


def _returns(rewards: Sequence[float], gamma: float) -> list[float]:
    returns: list[float] = []
    after = 0.0
    for reward in reversed(rewards):
        after = reward + gamma * after
        returns.insert(0, after)
    return returns


def _above_the_others(returns: Sequence[Sequence[float]], baseline: str) -> list[list[float]]:
    if len(returns) == 1:
        return [[0.0] * len(returns[0])]
    result = []
    for index, own in enumerate(returns):
        others = [other for place, other in enumerate(returns) if place != index]
        advantages = []
        for turn, value in enumerate(own):
            if baseline == "episode":
                compared = [other[0] for other in others]
            else:
                compared = [other[turn] if turn < len(other) else 0.0 for other in others]
            advantages.append(value - _mean(compared))
        result.append(advantages)
    return result


def _gigpo(
    trajectories: Sequence[Sequence[Row]], returns: Sequence[Sequence[float]], algorithm: Any
) -> list[list[float]]:
    compare = _grpo if algorithm.grpo_norm_by_std else _dr_grpo
    episodes = compare([math.fsum(row.reward for row in own) for own in trajectories])
    visits: dict[str, list[float]] = defaultdict(list)
    for own, values in zip(trajectories, returns, strict=True):
        for row, value in zip(own, values, strict=True):
            visits[row.state].append(value)

    def of_step(row: Row, value: float) -> float:
        others = visits[row.state]
        if len(others) == 1:
            return 0.0
        scale = _std(others) + EPSILON if algorithm.grpo_norm_by_std else 1.0
        return (value - _mean(others)) / scale

    return [
        [
            episode + algorithm.step_advantage_w * of_step(row, value)
            for row, value in zip(own, values, strict=True)
        ]
        for episode, own, values in zip(episodes, trajectories, returns, strict=True)
    ]


@dataclass(slots=True)
class _TimeStep:
    """A trained token: of a row, at a place in its response."""

    row: int
    token: int
    reward: float = 0.0


def _token_level(
    rows: Sequence[Row], algorithm: Any, values: Sequence[Sequence[float]] | None
) -> Advantages:
    advantages = [[0.0] * len(row.response) for row in rows]
    returns = [[0.0] * len(row.response) for row in rows]
    places = list(enumerate(rows))
    for _, numbered in groupby(places, key=lambda place: place[1].trajectory):
        chain = _time_steps(list(numbered))
        next_value = next_advantage = 0.0
        for step in reversed(chain):
            if algorithm.advantage_estimator == "gae":
                assert values is not None
                value = values[step.row][step.token]
                trace = algorithm.gamma * algorithm.lambd
            else:
                value = 0.0
                trace = algorithm.gamma
            delta = step.reward + algorithm.gamma * next_value - value
            advantage = delta + trace * next_advantage
            advantages[step.row][step.token] = advantage
            returns[step.row][step.token] = advantage + value
            next_value = value
            next_advantage = advantage
    return Advantages(advantages, returns)


def _time_steps(numbered: Sequence[tuple[int, Row]]) -> list[_TimeStep]:
    """Return the trained tokens of a trajectory; a reward belongs to the one before it."""
    chain: list[_TimeStep] = []

    def add(reward: float) -> None:
        if chain:
            chain[-1].reward += reward

    for number, row in numbered:
        add(row.leading)
        for token, (trained, reward) in enumerate(zip(row.mask, row.rewards, strict=True)):
            if trained:
                chain.append(_TimeStep(number, token))
            add(reward)
        add(row.trailing)
    return chain


def _whitened(
    rows: Sequence[Row], values: Sequence[Sequence[float]], compared: Sequence[bool]
) -> list[list[float]]:
    """Return the values with mean 0 and variance 1 over the trained tokens of the rows compared."""
    trained = [
        value
        for row, own, is_compared in zip(rows, values, compared, strict=True)
        for is_trained, value in zip(row.mask, own, strict=True)
        if is_trained and is_compared
    ]
    if not trained:
        return [list(own) for own in values]
    mean = _mean(trained)
    variance = math.fsum((value - mean) ** 2 for value in trained) / len(trained)
    scale = math.sqrt(max(variance, LEAST_VARIANCE))
    return [
        [
            (value - mean) / scale * is_trained
            for is_trained, value in zip(row.mask, own, strict=True)
        ]
        for row, own in zip(rows, values, strict=True)
    ]
