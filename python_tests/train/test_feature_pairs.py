"""Pairs and triples of features of a training step: refused by the table, or as the reference."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations

import pytest
from _compared import compare
from _covering import Case, Level, covering_array, tuples_of, with_implied
from _step_features import (
    FACTORS,
    NOT_COVERED,
    Chooser,
    Settings,
    StepModels,
    config_of,
    custom_loss_of,
    error_of,
    features_of,
    is_allowed,
    is_refused,
    levels,
    num_prompts_of,
    refusing_pairs,
    variants,
    variants_of,
    write_step_models,
)
from hypothesis import assume, given
from hypothesis import strategies as st

from skyrl_fast.config.features import FEATURES

SEED = 5
SHARDS = 4  # tests, so that several processes share the cases
BATCHES = (1, 1, 2)  # of the cases in turn


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> StepModels:
    return write_step_models(tmp_path_factory.mktemp("models"))


@cache
def array(strength: int, *, of_variants: bool = False) -> list[Case]:
    factors = variants() if of_variants else levels()
    refused = with_implied(factors, is_refused)
    return covering_array(factors, refused, is_allowed, strength=strength, rng=random.Random(SEED))


def alone() -> list[Case]:
    """Return a case for each level, with the first levels of all other factors.

    In a case of an array most features are on: what two of them do without the others is not there.
    """
    first = {name: own[0] for name, own in levels().items()}
    cases = [{**first, name: value} for name, own in levels().items() for value in own[1:]]
    return [first, *(case for case in cases if is_allowed(case))]


@dataclass(slots=True)
class Report:
    """What the cases of an array have compared."""

    cases: int = 0
    values: int = 0
    gradients: int = 0
    undecided: int = 0
    failures: list[str] = field(default_factory=list)

    def run(self, cases: Sequence[tuple[int, Settings]], models: StepModels) -> None:
        for number, settings in cases:
            error = error_of(settings)
            if error is not None:
                self.failures.append(f"case {number} {settings}: {error}")
                continue
            config = config_of(settings, models)
            found = compare(
                config,
                models.folders,
                random.Random(number),
                num_prompts=num_prompts_of(config, BATCHES[number % len(BATCHES)]),
                custom=custom_loss_of(settings),
            )
            self.cases += 1
            self.values += found.values
            self.gradients += found.gradients
            self.undecided += found.undecided
            if found.differences:
                first = "; ".join(map(str, found.differences[:3]))
                self.failures.append(f"case {number} {settings}: {first}")


def with_settings(cases: Sequence[Case]) -> list[tuple[int, Settings]]:
    """Return the number and the settings of each case."""
    chooser = Chooser(random.Random(SEED))
    return [(number, chooser.settings_of(case)) for number, case in enumerate(cases)]


def test_features_are_covered_or_named_with_a_reason() -> None:
    covered = frozenset[str]().union(
        *(features_of((name, value)) for name, values in FACTORS.items() for value in values)
    )
    assert covered.isdisjoint(NOT_COVERED)
    assert covered | NOT_COVERED.keys() == FEATURES.keys()
    assert all(NOT_COVERED.values())


def test_the_array_has_every_pair_that_is_not_refused() -> None:
    refused = with_implied(levels(), is_refused)
    pairs = [pair for pair in tuples_of(levels(), 2) if not refused(*pair)]
    found = {pair for case in array(2) for pair in combinations(case.items(), 2)}
    names = {frozenset(pair) for pair in found}
    assert len(pairs) > 1_000
    assert all(frozenset(pair) in names for pair in pairs)


def test_refused_pairs_are_refused_for_the_pair_of_features_that_they_have() -> None:
    refused = [pair for pair in tuples_of(levels(), 2) if is_refused(*pair)]
    assert len(refused) > 20
    for one, other in refused:
        pairs = refusing_pairs(one, other)
        reasons = [
            FEATURES[first].excludes.get(second) or FEATURES[second].excludes[first]
            for first, second in pairs
        ]
        for first, second in pairs:
            settings = {**_variant_with(one, first), **_variant_with(other, second)}
            error = error_of(settings)
            assert error is not None, (one, other)
            assert any(reason in error for reason in reasons), (one, other, error)


def _variant_with(level: Level, feature: str) -> dict[str, object]:
    """Return the settings of a level that turn the feature on."""
    for settings in variants_of(level):
        if FEATURES[feature].is_on(config_of(settings, None)):
            return dict(settings)
    raise AssertionError(f"{level} has no {feature}")


@pytest.mark.parametrize("shard", range(SHARDS))
def test_pairs_equal_the_reference(
    shard: int, models: StepModels, capsys: pytest.CaptureFixture[str]
) -> None:
    report = Report()
    cases = [*array(2), *alone()]
    report.run(with_settings(cases)[shard::SHARDS], models)
    pairs = list(tuples_of(levels(), 2))
    is_left_out = with_implied(levels(), is_refused)
    refused = sum(is_left_out(*pair) for pair in pairs)
    with capsys.disabled():
        print(
            f"\nfeatures {len(FEATURES) - len(NOT_COVERED)} of {len(FEATURES)}, "
            f"pairs {len(pairs)}, refused {refused}, cases {report.cases} of {len(cases)}, "
            f"values {report.values}, gradients {report.gradients}, "
            f"differing cases {len(report.failures)}"
        )
    assert not report.failures, "\n".join(report.failures)
    assert report.cases > 10
    assert report.undecided < report.cases / 10


@pytest.mark.slow
@pytest.mark.timeout(1200)  # the first makes the array
@pytest.mark.parametrize("shard", range(SHARDS))
def test_triples_equal_the_reference(shard: int, models: StepModels) -> None:
    report = Report()
    report.run(with_settings(array(3))[shard::SHARDS], models)
    assert not report.failures, "\n".join(report.failures)
    assert report.cases > 50
    assert report.undecided < report.cases / 5


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(SHARDS))
def test_pairs_of_values_equal_the_reference(shard: int, models: StepModels) -> None:
    report = Report()
    report.run(with_settings(array(2, of_variants=True))[shard::SHARDS], models)
    assert not report.failures, "\n".join(report.failures)


@st.composite
def joint_settings(draw: st.DrawFn) -> Settings:
    """Draw a variant of a level of each factor, of which no pair is refused."""
    factors = variants()
    refused = with_implied(factors, is_refused)
    case: Case = {}
    for name in draw(st.permutations(list(factors))):
        possible = [
            value
            for value in factors[name]
            if not any(refused((name, value), level) for level in case.items())
        ]
        assume(possible)
        case[name] = draw(st.sampled_from(possible))
    settings: dict[str, object] = {}
    for level in case.items():
        settings |= variants_of(level)[0]
    assume(error_of(settings) is None)
    return settings


@pytest.mark.slow
@given(settings=joint_settings(), seed=st.integers(0, 2**32))
def test_joint_settings_equal_the_reference(
    settings: Settings, seed: int, models: StepModels
) -> None:
    report = Report()
    report.run([(seed, settings)], models)
    assert not report.failures, report.failures[0]


def test_a_case_is_the_same_in_every_run() -> None:
    refused = with_implied(levels(), is_refused)
    again = covering_array(levels(), refused, is_allowed, strength=2, rng=random.Random(SEED))
    assert again == array(2)
