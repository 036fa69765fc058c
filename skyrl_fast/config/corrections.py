"""Settings of what is left out or corrected before the loss; SkyRL's names and defaults."""

from __future__ import annotations

from dataclasses import dataclass

from skyrl_fast.setting import setting

MAX_KL_STEP = 0.2  # of the KL coefficient in a horizon: Ziegler et al. 2019, section 2.2


@dataclass(slots=True)
class OffPolicyCorrectionConfig:
    """What is done where the trainer's log-probabilities differ from the engine's."""

    tis_ratio_type: str | None = setting(
        None, "truncated importance sampling", choices=("token", "sequence")
    )
    token_tis_ratio_clip_high: float = setting(2.0, "cap of a token's ratio", above=0)
    sequence_tis_ratio_clip_high: float = setting(5.0, "cap of a sequence's ratio", above=0)
    sequence_mask_metric: str | None = setting(
        None, "which ratio of a sequence must keep to bounds", choices=("product", "geometric")
    )
    geo_mask_high: float = setting(1.01, "of the geometric mean", above=0)
    geo_mask_low: float = setting(0.99, "of the geometric mean", at_least=0)
    product_mask_high: float = setting(2.0, "of the product", above=0)
    product_mask_low: float = setting(0.5, "of the product", at_least=0)
    outlier_token_is_threshold_low: float | None = setting(
        None, "a token's ratio below this masks its sequence", at_least=0
    )
    outlier_token_is_threshold_high: float | None = setting(
        None, "a token's ratio above this masks its sequence", above=0
    )
    token_mask_is_threshold_low: float | None = setting(
        None, "a token with a ratio below this is masked", at_least=0
    )
    token_mask_is_threshold_high: float | None = setting(
        None, "a token with a ratio above this is masked", above=0
    )

    @property
    def enabled(self) -> bool:
        """Whether any part of it is asked for."""
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
    """What is done with groups whose trajectories all ended alike."""

    type: str | None = setting(
        None,
        "filter: sample on until the batch is full of informative groups; replace: put copies of "
        "informative groups in their place; null: train on all",
        choices=("filter", "replace"),
    )
    max_sample_batches: int = setting(
        30, "batches of prompts sampled for one step at most; -1: no limit", at_least=-1
    )
    min_replace_ratio: float = setting(
        0.3, "replace: more than this share must be informative", at_least=0, at_most=1
    )


@dataclass(slots=True)
class KlCtrlConfig:
    """The coefficient of the KL penalty in the reward; it starts at kl_loss_coef."""

    type: str = setting("fixed", "adaptive: follows kl_target", choices=("fixed", "adaptive"))
    kl_target: float = setting(0.1, "adaptive: wanted KL per token", above=0)
    horizon: int = setting(10000, "adaptive: trajectories over which it moves", at_least=1)
