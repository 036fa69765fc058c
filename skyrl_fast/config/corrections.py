"""Settings of corrections and sampling before the loss; SkyRL's names and defaults."""

from __future__ import annotations

from dataclasses import dataclass

from skyrl_fast.setting import setting

MAX_KL_STEP = 0.2  # largest relative change per horizon: Ziegler et al. 2019, section 2.2


@dataclass(slots=True)
class OffPolicyCorrectionConfig:
    """Correction for differences between the trainer's and the engine's log-probabilities."""

    tis_ratio_type: str | None = setting(
        None, "level of truncated importance sampling; null: none", choices=("token", "sequence")
    )
    token_tis_ratio_clip_high: float = setting(
        2.0, "cap of the importance ratio per token", above=0
    )
    sequence_tis_ratio_clip_high: float = setting(
        5.0, "cap of the importance ratio per sequence", above=0
    )
    sequence_mask_metric: str | None = setting(
        None,
        "sequence ratio whose bounds mask sequences; null: no mask",
        choices=("product", "geometric"),
    )
    geo_mask_high: float = setting(1.01, "upper bound of the geometric mean", above=0)
    geo_mask_low: float = setting(0.99, "lower bound of the geometric mean", at_least=0)
    product_mask_high: float = setting(2.0, "upper bound of the product", above=0)
    product_mask_low: float = setting(0.5, "lower bound of the product", at_least=0)
    outlier_token_is_threshold_low: float | None = setting(
        None, "token ratio below which the token's sequence is masked; null: none", at_least=0
    )
    outlier_token_is_threshold_high: float | None = setting(
        None, "token ratio above which the token's sequence is masked; null: none", above=0
    )
    token_mask_is_threshold_low: float | None = setting(
        None, "token ratio below which the token is masked; null: none", at_least=0
    )
    token_mask_is_threshold_high: float | None = setting(
        None, "token ratio above which the token is masked; null: none", above=0
    )

    @property
    def enabled(self) -> bool:
        bounds = (
            self.outlier_token_is_threshold_low,
            self.outlier_token_is_threshold_high,
            self.token_mask_is_threshold_low,
            self.token_mask_is_threshold_high,
        )
        named = (self.tis_ratio_type, self.sequence_mask_metric)
        return any(value is not None for value in (*named, *bounds))


@dataclass(slots=True)
class DynamicSamplingConfig:
    """Handling of groups whose trajectories all have the same outcome."""

    type: str | None = setting(
        None,
        "handling of uninformative groups. filter: keep sampling until the batch is full of "
        "informative ones; replace: substitute copies of informative ones; null: train on all",
        choices=("filter", "replace"),
    )
    max_sample_batches: int = setting(
        30, "maximum batches of prompts sampled for one step; -1: no limit", at_least=-1
    )
    min_replace_ratio: float = setting(
        0.3,
        "with replace: share of informative groups that a batch must exceed",
        at_least=0,
        at_most=1,
    )


@dataclass(slots=True)
class KlCtrlConfig:
    """Coefficient of the KL penalty in the reward; its initial value is kl_loss_coef."""

    type: str = setting(
        "fixed",
        "coefficient of the KL in the reward: constant, or adapted to kl_target",
        choices=("fixed", "adaptive"),
    )
    kl_target: float = setting(0.1, "with adaptive: target KL per token", above=0)
    horizon: int = setting(
        10000, "with adaptive: trajectories over which the coefficient adapts", at_least=1
    )
