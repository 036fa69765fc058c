"""Policy loss and advantage estimator chosen by the settings, with their arguments."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

from skyrl_fast.config.settings import AlgorithmConfig, Config
from skyrl_fast.ops.advantage.estimators import (
    ADVANTAGE_ESTIMATORS,
    EstimatorSpec,
    find_advantage_estimator,
)
from skyrl_fast.ops.policy_loss.custom import CustomLoss, find_policy_loss
from skyrl_fast.ops.policy_loss.losses import LossSettings, LossSpec, ratio_to_rollout
from skyrl_fast.registry import check_settings
from skyrl_fast.setting import ConfigError


def policy_loss_spec(algorithm: AlgorithmConfig) -> LossSpec | CustomLoss:
    """Return the spec of the chosen loss; ValueError if there is none of that name."""
    return find_policy_loss(algorithm.policy_loss_type)


def policy_loss_settings(algorithm: AlgorithmConfig) -> LossSettings | CustomLoss:
    """Return the chosen loss, for `policy_loss(loss=...)`.

    A hyper-parameter is read from the section named after the loss, else from `algorithm`.
    """
    spec = policy_loss_spec(algorithm)
    if isinstance(spec, CustomLoss):
        return replace(spec, settings=dict(algorithm.policy_loss_kwargs))
    section = getattr(algorithm, spec.name, None)

    def value(name: str) -> Any:
        return getattr(section if hasattr(section, name) else algorithm, name)

    return spec.settings(**{item.name: value(item.name) for item in fields(spec.settings)})


def is_ratio_to_rollout(algorithm: AlgorithmConfig) -> bool:
    """Return whether the ratio's denominator is the sampling policy, whatever `old_logprobs` is."""
    spec = policy_loss_spec(algorithm)
    settings = policy_loss_settings(algorithm)
    if isinstance(spec, CustomLoss) or isinstance(settings, CustomLoss):
        return False
    return ratio_to_rollout(spec, settings)


def estimator_spec(algorithm: AlgorithmConfig) -> EstimatorSpec:
    """Return the spec of the chosen estimator; ValueError if there is none of that name."""
    return find_advantage_estimator(algorithm.advantage_estimator)


def sums_rewards(config: Config) -> bool:
    """Return whether an outcome is the sum of a trajectory's rewards, not its last step's reward.

    So it is for estimators that read the rewards of all steps, and with one row per trajectory.
    """
    is_outcome = estimator_spec(config.trainer.algorithm).level == "outcome"
    return not is_outcome or config.trainer.rows == "trajectory"


def estimator_settings(algorithm: AlgorithmConfig) -> dict[str, Any]:
    """Return the keyword arguments of the chosen advantage estimator."""
    spec = estimator_spec(algorithm)
    named = {}
    for argument, key in spec.settings.items():
        named[argument] = getattr(algorithm, key)
    return named | algorithm.advantage_estimator_kwargs


def check_policy_loss(algorithm: AlgorithmConfig) -> None:
    """Raise ConfigError unless the loss exists and accepts its settings."""
    key = "trainer.algorithm.policy_loss"
    try:
        loss = policy_loss_spec(algorithm)
    except ValueError as error:
        raise ConfigError(f"{key}_type: {error}") from error.__cause__
    if not isinstance(loss, CustomLoss):
        if algorithm.policy_loss_kwargs:
            raise ConfigError(
                f"{key}_kwargs: expected none with policy_loss_type={loss.name}, which has its own "
                f"settings, got {algorithm.policy_loss_kwargs}"
            )
        return
    try:
        check_settings(algorithm.policy_loss_type, loss.function, algorithm.policy_loss_kwargs)
    except ValueError as error:
        raise ConfigError(f"{key}_kwargs: {error}") from None


def check_estimator(algorithm: AlgorithmConfig) -> None:
    """Raise ConfigError unless the estimator exists and accepts its settings."""
    key = "trainer.algorithm.advantage_estimator"
    kwargs = algorithm.advantage_estimator_kwargs
    try:
        spec = estimator_spec(algorithm)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from error.__cause__
    for name, weight in algorithm.gdpo_weights.items():
        is_number = isinstance(weight, float | int) and not isinstance(weight, bool)
        if not is_number or not 0 < abs(weight) < math.inf:
            raise ConfigError(
                f"trainer.algorithm.gdpo_weights.{name}: expected a finite number other than 0, "
                f"got {weight}"
            )
    if spec.name in ADVANTAGE_ESTIMATORS:
        if kwargs:
            raise ConfigError(
                f"{key}_kwargs: expected none with advantage_estimator={spec.name}, which has its "
                f"own settings, got {kwargs}"
            )
        return
    try:
        check_settings(algorithm.advantage_estimator, spec.function, estimator_settings(algorithm))
    except ValueError as error:
        raise ConfigError(f"{key}_kwargs: {error}") from None
