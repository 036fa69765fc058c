"""Settings of single policy losses (`ops/policy_loss.py`); SkyRL's names and defaults."""

from __future__ import annotations

from dataclasses import dataclass

from skyrl_fast.config.field import setting


@dataclass(slots=True)
class SapoConfig:
    """Of sapo: how steep its gate is."""

    tau_pos: float = setting(1.0, "where the advantage is positive", above=0)
    tau_neg: float = setting(1.05, "where it is not", above=0)


@dataclass(slots=True)
class ClipCovConfig:
    """Of clip_cov: which tokens are left out."""

    clip_ratio: float = setting(0.0002, "share of the tokens", at_least=0, at_most=1)
    clip_cov_lb: float = setting(1.0, "their covariance is above this")
    clip_cov_ub: float = setting(5.0, "and below this")


@dataclass(slots=True)
class KlCovConfig:
    """Of kl_cov: which tokens are held back, and how strongly."""

    kl_cov_frac: float = setting(0.2, "share of the tokens", at_least=0, at_most=1)
    ppo_kl_coef: float = setting(1.0, "weight of their distance from the anchor", at_least=0)


@dataclass(slots=True)
class CispoConfig:
    """Of cispo: bounds of the ratio, and what it is taken against."""

    cispo_eps_clip_low: float = setting(1.0, "ratio taken as 1 - this at least", at_least=0)
    cispo_eps_clip_high: float = setting(4.0, "ratio taken as 1 + this at most", at_least=0)
    cispo_anchor: str = setting(
        "old",
        "old_logprobs, or the engine's: then off_policy_correction.tis_ratio_type must be null",
        choices=("old", "rollout"),
    )


@dataclass(slots=True)
class DppoConfig:
    """Of dppo: how far a token's probability may move."""

    dppo_type: str = setting("binary_tv", "its measure", choices=("binary_tv", "binary_kl"))
    delta_low: float = setting(0.2, "where the advantage is negative", at_least=0)
    delta_high: float = setting(0.2, "where it is positive", at_least=0)
