"""What the algorithm's settings choose: policy loss and advantage estimator, with settings."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from skyrl_fast.config.settings import AlgorithmConfig
from skyrl_fast.ops.custom_loss import CustomLoss, find_policy_loss
from skyrl_fast.ops.estimators import EstimatorSpec, find_advantage_estimator
from skyrl_fast.ops.losses import LossSettings, LossSpec, ratio_to_rollout


def policy_loss_spec(algorithm: AlgorithmConfig) -> LossSpec | CustomLoss:
    """Return what is true of the chosen loss.

    Raises:
        ValueError: there is no loss of that name.
    """
    return find_policy_loss(algorithm.policy_loss_type)


def policy_loss_settings(algorithm: AlgorithmConfig) -> LossSettings | CustomLoss:
    """Return the chosen loss, for `policy_loss(loss=...)`.

    A hyper-parameter is taken from the section of the loss's name, else from the algorithm's.
    """
    spec = policy_loss_spec(algorithm)
    if isinstance(spec, CustomLoss):
        return replace(spec, settings=dict(algorithm.policy_loss_kwargs))
    section = getattr(algorithm, spec.name, None)

    def value(name: str) -> Any:
        return getattr(section if hasattr(section, name) else algorithm, name)

    return spec.settings(**{item.name: value(item.name) for item in fields(spec.settings)})


def is_ratio_to_rollout(algorithm: AlgorithmConfig) -> bool:
    """Return whether the loss's ratio is to the policy that sampled, whatever the old one is."""
    spec, settings = policy_loss_spec(algorithm), policy_loss_settings(algorithm)
    if isinstance(spec, CustomLoss) or isinstance(settings, CustomLoss):
        return False
    return ratio_to_rollout(spec, settings)


def estimator_spec(algorithm: AlgorithmConfig) -> EstimatorSpec:
    """Return what is true of the chosen advantage estimator.

    Raises:
        ValueError: there is no estimator of that name.
    """
    return find_advantage_estimator(algorithm.advantage_estimator)


def estimator_settings(algorithm: AlgorithmConfig) -> dict[str, Any]:
    """Return the keyword arguments of the chosen advantage estimator."""
    spec = estimator_spec(algorithm)
    named = {argument: getattr(algorithm, key) for argument, key in spec.settings.items()}
    return named | algorithm.advantage_estimator_kwargs
