"""The table of features: complete, consistent, and the only place that refuses pairs."""

from collections.abc import Mapping
from itertools import combinations
from typing import Any

import pytest
from _features import BASE, EXAMPLES

import skyrl_fast
from skyrl_fast.config import check_config
from skyrl_fast.config.features import FEATURES, check_features
from skyrl_fast.config.parse import as_config
from skyrl_fast.setting import ConfigError

skyrl_fast.register_policy_loss("registered_here")(lambda inputs: -inputs.logprobs)


def _settings_of(*names: str) -> dict[str, Any] | None:
    """Return settings that turn on these features and the first of each one's needs.

    None if two of them want different values of one setting.
    """
    settings: dict[str, Any] = dict(BASE)
    pending = list(names)
    done: set[str] = set()
    while pending:
        name = pending.pop()
        if name in done:
            continue
        done.add(name)
        for key, value in EXAMPLES[name].items():
            if settings.setdefault(key, value) != value:
                return None
        pending += [need.any_of[0] for need in FEATURES[name].needs]
    return settings


def _error_of(check: Any, settings: Mapping[str, Any]) -> str | None:
    try:
        check(as_config(settings))
    except ConfigError as error:
        return str(error)
    return None


def test_names_are_known_and_each_pair_is_listed_once() -> None:
    assert list(EXAMPLES) == list(FEATURES)
    refused = []
    for feature in FEATURES.values():
        for need in feature.needs:
            assert set(need.any_of) <= FEATURES.keys(), feature.name
        refused += [frozenset((feature.name, other)) for other in feature.excludes]
    assert len(refused) == len(set(refused))
    assert set().union(*refused) <= FEATURES.keys()


def test_default_settings_have_rows_of_steps_alone() -> None:
    config = as_config(BASE)
    active = [name for name, feature in FEATURES.items() if feature.is_on(config)]
    assert active == ["rows of steps"]


@pytest.mark.parametrize("name", FEATURES)
def test_each_feature_is_turned_on_by_its_setting_and_runs(name: str) -> None:
    settings = _settings_of(name)
    assert settings is not None
    assert FEATURES[name].is_on(as_config(settings))
    if name == "observation loss":  # the one that the default form of rows excludes
        settings["trainer.rows"] = "merged"
    assert _error_of(check_config, settings) is None


@pytest.mark.parametrize(
    ("feature", "need"),
    [
        pytest.param(feature.name, need, id=f"{feature.name} needs {need.any_of[0]}")
        for feature in FEATURES.values()
        for need in feature.needs
    ],
)
def test_a_missing_need_is_named_with_its_reason(feature: str, need: Any) -> None:
    error = _error_of(check_config, {**BASE, **EXAMPLES[feature]})
    assert error is not None
    wanted = FEATURES[need.any_of[0]]
    assert error.startswith(f"{wanted.setting}: expected {wanted.on}"), error
    assert f", as {need.reason}, got " in error


def test_every_pair_is_refused_by_the_table_or_not_at_all() -> None:
    refused = 0
    accepted = 0
    for first, second in combinations(FEATURES, 2):
        settings = _settings_of(first, second)
        if settings is None:
            continue
        listed = second in FEATURES[first].excludes or first in FEATURES[second].excludes
        error = _error_of(check_config, settings)
        assert error == _error_of(check_features, settings), (first, second)
        if listed:
            assert error is not None, (first, second)
        if error is None:
            accepted += 1
        else:
            refused += 1
    assert accepted + refused > 1_200
    assert refused > 90


def test_an_error_names_settings_that_were_written() -> None:
    settings = {
        **BASE,
        "trainer.fully_async.enabled": True,
        "generator.inference_engine.enable_sleep_mode": True,
    }
    assert _error_of(check_config, settings) == (
        "generator.inference_engine.enable_sleep_mode: expected null or false with "
        "trainer.fully_async.enabled=true, as the engine generates during updates, got true"
    )


def test_an_error_names_both_settings_the_reason_and_what_came() -> None:
    settings = {
        **BASE,
        "trainer.policy.model.lora.rank": 4,
        "trainer.policy.model.lora.policies": ["a", "b"],
        "trainer.algorithm.advantage_estimator": "gae",
        "trainer.critic.model.path": "critic",
    }
    assert _error_of(check_config, settings) == (
        "trainer.policy.model.lora.policies: expected [] with trainer.critic.model.path=critic, as "
        "a critic values one policy, got ['a', 'b']"
    )
    settings = {
        **BASE,
        "trainer.algorithm.old_logprobs": "rollout",
        "trainer.algorithm.off_policy_correction.geo_mask_high": 1.5,
        "trainer.algorithm.off_policy_correction.sequence_mask_metric": "geometric",
    }
    error = _error_of(check_config, settings)
    assert error is not None
    assert error.endswith(", got sequence_mask_metric=geometric, geo_mask_high=1.5")
