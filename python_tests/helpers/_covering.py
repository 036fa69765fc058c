"""Covering arrays: cases in which all pairs (or triples) of levels meet, chosen greedily."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, product

Level = tuple[str, str]  # a factor and one of its values
Case = dict[str, str]
ATTEMPTS = 40


class UncoveredError(AssertionError):
    """Levels that no allowed case has together, though no pair of them is refused."""


def tuples_of(factors: Mapping[str, Sequence[str]], strength: int) -> Iterator[tuple[Level, ...]]:
    """Yield all combinations of levels of `strength` different factors."""
    for names in combinations(factors, strength):
        for values in product(*(factors[name] for name in names)):
            yield tuple(zip(names, values, strict=True))


def with_implied(
    factors: Mapping[str, Sequence[str]], is_refused: Callable[[Level, Level], bool]
) -> Callable[[Level, Level], bool]:
    """Return the same, true as well of two levels with which no level of a third factor goes."""
    refused = {frozenset(pair) for pair in tuples_of(factors, 2) if is_refused(pair[0], pair[1])}

    def is_impossible(pair: tuple[Level, ...]) -> bool:
        own = {name for name, _ in pair}
        return any(
            all(
                any(frozenset(((name, value), level)) in refused for level in pair)
                for value in values
            )
            for name, values in factors.items()
            if name not in own
        )

    while True:
        implied = {
            frozenset(pair)
            for pair in tuples_of(factors, 2)
            if frozenset(pair) not in refused and is_impossible(pair)
        }
        if not implied:
            return lambda one, other: frozenset((one, other)) in refused
        refused |= implied


def covering_array(
    factors: Mapping[str, Sequence[str]],
    is_refused: Callable[[Level, Level], bool],
    is_allowed: Callable[[Case], bool],
    *,
    strength: int,
    rng: random.Random,
) -> list[Case]:
    """Return cases that contain each combination of levels of which no pair is refused.

    Args:
        is_refused: whether two levels cannot be combined; see `with_implied`.
        is_allowed: whether a complete case runs.
    """
    pending = {
        found: None
        for found in tuples_of(factors, strength)
        if not any(is_refused(*pair) for pair in combinations(found, 2))
    }
    cases: list[Case] = []
    while pending:
        wanted = next(iter(pending))
        case = _case_with(wanted, pending, factors, is_refused, is_allowed, strength, rng)
        cases.append(case)
        for names in combinations(factors, strength):
            pending.pop(tuple((name, case[name]) for name in names), None)
    return cases


def _case_with(
    wanted: tuple[Level, ...],
    pending: Mapping[tuple[Level, ...], None],
    factors: Mapping[str, Sequence[str]],
    is_refused: Callable[[Level, Level], bool],
    is_allowed: Callable[[Case], bool],
    strength: int,
    rng: random.Random,
) -> Case:
    order = list(factors)
    for _ in range(ATTEMPTS):
        rng.shuffle(order)
        case = dict(wanted)
        for name in order:
            if name in case:
                continue
            values = [
                value
                for value in factors[name]
                if not any(is_refused((name, value), level) for level in case.items())
            ]
            if not values:
                break
            rng.shuffle(values)
            case[name] = max(
                values, key=lambda value: _num_new(case, (name, value), pending, factors, strength)
            )
        if len(case) == len(factors) and is_allowed(case):
            return case
    raise UncoveredError(f"no case has {wanted}")


def _num_new(
    case: Case,
    level: Level,
    pending: Mapping[tuple[Level, ...], None],
    factors: Mapping[str, Sequence[str]],
    strength: int,
) -> int:
    """Return how many pending combinations a level adds to a case."""
    order = {name: place for place, name in enumerate(factors)}
    count = 0
    for others in combinations(case.items(), strength - 1):
        found = sorted((*others, level), key=lambda one: order[one[0]])
        count += tuple(found) in pending
    return count
