"""The table of policy losses and their settings.

A loss's settings are a dataclass, with SkyRL's names and defaults. `policy_loss(loss=Sapo(2.0))`
takes one, a name stands for the class with its defaults, and the configuration's sections
(`trainer.algorithm.sapo`) are the same classes.

Formulas, with A the advantage, d = logprob - old_logprob, r = exp(clamp(d, -20, 20)) and sg() a
value without gradient (each is summed over trained tokens with the weight of its row):

regular              -min(r A, clip(r, 1-low, 1+high) A)              PPO, arXiv:1707.06347
dual_clip            the same, at most -c A where A < 0               arXiv:1912.09729
gspo                 regular, with d the sequence's mean of d         arXiv:2507.18071 (GSPO-token)
cispo                -sg(clip(r, 1-low, 1+high)) A logprob            arXiv:2506.13585
rollout_is           -sg(r inside (1-low, 1+high), else 0) A logprob  d to the sampler
clip_cov, kl_cov     regular without, or -r A with |d| on, the tokens
                     of high covariance of A and logprob              arXiv:2505.22617
sapo                 -A sigmoid(tau (r - 1)) 4 / tau                  arXiv:2511.20347
dppo                 -r A, 0 where the probability moved too far      arXiv:2602.04879
cross_entropy        -logprob
importance_sampling  -r A

Design: docs/design/005-policy-loss.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal

from skyrl_fast.setting import limit_error, setting

if TYPE_CHECKING:  # the settings name losses, and are checked before torch is imported
    import torch

LossScope = Literal["token", "sequence", "mini_batch"]
RatioTo = Literal["old", "rollout", "rollout_where_given", "nothing"]

# Kernel arguments in the order of csrc/policy_loss/loss_params_bind.h; `kl_coef` follows.
KERNEL_PARAMS = (
    "clip_low",
    "clip_high",
    "clip_ratio_c",
    "tau_pos",
    "tau_neg",
    "delta_low",
    "delta_high",
    "ppo_kl_coef",
)
KL_ESTIMATORS = {"k1": 1, "abs": 2, "k2": 3, "k3": 4}  # KlKind of csrc/policy_loss/token_loss.h
UNUSED = 1.0  # passed to a kernel for a number that its loss does not read


# Settings have no slots: torch.compile reads those of a frozen class since 2.9 only.
@dataclass(frozen=True)
class LossSettings:
    """The hyper-parameters of one loss."""

    @property
    def variant(self) -> str | None:
        """Name of the kernel's variant of the loss; None where there is only one."""
        return None

    def kernel_params(self) -> dict[str, float]:
        """Return the numbers that the loss reads, keyed by their names in `KERNEL_PARAMS`."""
        return {}


@dataclass(frozen=True)
class Regular(LossSettings):
    """Settings of regular, PPO's loss: the clip range of the ratio."""

    eps_clip_low: float = setting(0.2, "lower bound of the ratio: 1 - this", at_least=0)
    eps_clip_high: float = setting(0.2, "upper bound of the ratio: 1 + this", at_least=0)

    def kernel_params(self) -> dict[str, float]:
        return clip_range(self.eps_clip_low, self.eps_clip_high)


@dataclass(frozen=True)
class DualClip(Regular):
    """Settings of dual_clip: PPO's clip range, and the bound for negative advantages."""

    clip_ratio_c: float = setting(3.0, "second clip", above=1)

    def kernel_params(self) -> dict[str, float]:
        low_and_high = clip_range(self.eps_clip_low, self.eps_clip_high)
        return {**low_and_high, "clip_ratio_c": self.clip_ratio_c}


@dataclass(frozen=True)
class Gspo(Regular):
    """Settings of gspo: the clip range of the sequence's mean ratio."""


@dataclass(frozen=True)
class Cispo(LossSettings):
    """Settings of cispo: the clip range of the ratio, and its denominator."""

    cispo_eps_clip_low: float = setting(1.0, "lower bound of the ratio: 1 - this", at_least=0)
    cispo_eps_clip_high: float = setting(4.0, "upper bound of the ratio: 1 + this", at_least=0)
    cispo_ratio: str = setting(
        "old",
        "denominator of the ratio: old_logprobs, or the engine's log-probabilities, which requires "
        "off_policy_correction.tis_ratio_type=null",
        choices=("old", "rollout"),
    )

    def kernel_params(self) -> dict[str, float]:
        return clip_range(self.cispo_eps_clip_low, self.cispo_eps_clip_high)


@dataclass(frozen=True)
class RolloutIs(Regular):
    """Settings of rollout_is: the range of the ratio to the sampler."""


@dataclass(frozen=True)
class ClipCovSelection(LossSettings):
    """Settings of clip_cov: the selection of dropped tokens."""

    clip_ratio: float = setting(0.0002, "share of tokens that are dropped", at_least=0, at_most=1)
    clip_cov_lb: float = setting(1.0, "lower bound of the covariance of dropped tokens")
    clip_cov_ub: float = setting(5.0, "upper bound of the covariance of dropped tokens")


@dataclass(frozen=True)
class ClipCov(ClipCovSelection):
    """Settings of clip_cov: the selection of dropped tokens, and the clip range of the others."""

    eps_clip_low: float = setting(0.2, "lower bound of the ratio: 1 - this", at_least=0)
    eps_clip_high: float = setting(0.2, "upper bound of the ratio: 1 + this", at_least=0)

    def kernel_params(self) -> dict[str, float]:
        return clip_range(self.eps_clip_low, self.eps_clip_high)


@dataclass(frozen=True)
class KlCov(LossSettings):
    """Settings of kl_cov: the selection of penalised tokens, and their penalty."""

    kl_cov_frac: float = setting(0.2, "share of tokens that are penalised", at_least=0, at_most=1)
    ppo_kl_coef: float = setting(
        1.0, "weight of the distance from the old log-probabilities", at_least=0, finite=True
    )

    def kernel_params(self) -> dict[str, float]:
        return {"ppo_kl_coef": self.ppo_kl_coef}


@dataclass(frozen=True)
class Sapo(LossSettings):
    """Settings of sapo: the temperatures of its gate."""

    tau_pos: float = setting(
        1.0, "steepness of the gate where the advantage is positive", above=0, finite=True
    )
    tau_neg: float = setting(1.05, "steepness of the gate elsewhere", above=0, finite=True)

    def kernel_params(self) -> dict[str, float]:
        return {"tau_pos": self.tau_pos, "tau_neg": self.tau_neg}


@dataclass(frozen=True)
class Dppo(LossSettings):
    """Settings of dppo: how far a token's probability may move."""

    dppo_type: str = setting(
        "binary_tv", "distance between the probabilities", choices=("binary_tv", "binary_kl")
    )
    delta_low: float = setting(0.2, "largest distance where the advantage is negative", at_least=0)
    delta_high: float = setting(0.2, "largest distance where the advantage is positive", at_least=0)

    @property
    def variant(self) -> str:
        return {"binary_tv": "dppo_tv", "binary_kl": "dppo_kl"}[self.dppo_type]

    def kernel_params(self) -> dict[str, float]:
        return {"delta_low": self.delta_low, "delta_high": self.delta_high}


@dataclass(frozen=True)
class CrossEntropy(LossSettings):
    """Settings of cross_entropy: none."""


@dataclass(frozen=True)
class ImportanceSampling(LossSettings):
    """Settings of importance_sampling: none."""


@dataclass(frozen=True, slots=True)
class LossSpec:
    """The properties of one loss.

    Args:
        name: in `policy_loss` and `trainer.algorithm.policy_loss_type`.
        codes: the LossKind of each variant (csrc/policy_loss/token_loss.h); the only variant of a
            loss has the loss's name.
        scope: what must be computed together: single tokens, all tokens of a sequence, or all of a
            mini-batch.
        ratio_to: the log-probabilities in the denominator of the ratio.
        zero_where_advantage_is_zero: whether value and gradient vanish with the advantage.
        jumps_at_old: whether the gradient jumps where a log-probability equals the old one, so that
            rounding decides it where the two come from passes of the same weights.
    """

    name: str
    settings: type[LossSettings]
    codes: Mapping[str, int]
    scope: LossScope = "token"
    ratio_to: RatioTo = "old"
    zero_where_advantage_is_zero: bool = True
    jumps_at_old: bool = False

    @property
    def needs_advantages(self) -> bool:
        """Whether the loss reads advantages: all do that have a ratio."""
        return self.ratio_to != "nothing"


POLICY_LOSSES: dict[str, LossSpec] = {
    spec.name: spec
    for spec in (
        LossSpec("regular", Regular, {"regular": 0}),
        LossSpec("dual_clip", DualClip, {"dual_clip": 1}),
        LossSpec("gspo", Gspo, {"gspo": 2}, scope="sequence"),
        LossSpec("cispo", Cispo, {"cispo": 3}),
        LossSpec("rollout_is", RolloutIs, {"rollout_is": 4}, ratio_to="rollout"),
        # A token without an advantage counts in the means of the covariance.
        LossSpec(
            "clip_cov",
            ClipCov,
            {"clip_cov": 5},
            scope="mini_batch",
            zero_where_advantage_is_zero=False,
        ),
        # Nor does the penalty depend on the advantage.
        LossSpec(
            "kl_cov",
            KlCov,
            {"kl_cov": 6},
            scope="mini_batch",
            zero_where_advantage_is_zero=False,
            jumps_at_old=True,
        ),
        LossSpec("sapo", Sapo, {"sapo": 7}),
        LossSpec("dppo", Dppo, {"dppo_tv": 8, "dppo_kl": 9}, ratio_to="rollout_where_given"),
        LossSpec(
            "cross_entropy",
            CrossEntropy,
            {"cross_entropy": 10},
            ratio_to="nothing",
            zero_where_advantage_is_zero=False,
        ),
        LossSpec("importance_sampling", ImportanceSampling, {"importance_sampling": 11}),
    )
}
LOSS_CODES: dict[str, int] = {
    k: v for spec in POLICY_LOSSES.values() for k, v in spec.codes.items()
}
# By exact class: Gspo and RolloutIs have Regular's fields, and only the class tells them apart.
_SPEC_BY_CLASS = {spec.settings: spec for spec in POLICY_LOSSES.values()}
# Settings are frozen, so one instance serves every call.
_DEFAULTS = {spec.name: spec.settings() for spec in POLICY_LOSSES.values()}


def clip_range(eps_low: float, eps_high: float) -> dict[str, float]:
    return {"clip_low": 1.0 - eps_low, "clip_high": 1.0 + eps_high}


def loss_and_settings(op: str, loss: str | LossSettings) -> tuple[LossSpec, LossSettings]:
    """Return the spec of a loss, and its settings with their limits checked."""
    if isinstance(loss, str) and loss in POLICY_LOSSES:
        return POLICY_LOSSES[loss], _DEFAULTS[loss]
    if isinstance(loss, str):
        spec = None
    else:
        spec = _SPEC_BY_CLASS.get(type(loss))
    if spec is None or isinstance(loss, str):
        raise ValueError(
            f"{op}: loss: expected one of {tuple(POLICY_LOSSES)} or the settings of one, got "
            f"{loss!r}"
        )
    # Settings made in code have not passed the configuration's checks.
    for item in fields(loss):
        wrong = limit_error(item.metadata, getattr(loss, item.name))
        if wrong is not None:
            raise ValueError(f"{op}: {type(loss).__name__}.{item.name}: {wrong}")
    return spec, loss


def kernel_kind(spec: LossSpec, settings: LossSettings) -> str:
    """Return the name of the kernel's variant, a key of `LOSS_CODES`."""
    return settings.variant or spec.name


def kernel_params(settings: LossSettings, kl_coef: float) -> list[float]:
    """Return the numbers of `KERNEL_PARAMS`, then `kl_coef`."""
    given = settings.kernel_params()
    return [float(given.get(name, UNUSED)) for name in KERNEL_PARAMS] + [float(kl_coef)]


def ratio_to_rollout(spec: LossSpec, settings: LossSettings) -> bool:
    if isinstance(settings, Cispo):
        return settings.cispo_ratio == "rollout"
    return spec.ratio_to in ("rollout", "rollout_where_given")


def ratio_logprobs(
    op: str,
    spec: LossSpec,
    settings: LossSettings,
    old_logprobs: torch.Tensor | None,
    rollout_logprobs: torch.Tensor | None,
) -> torch.Tensor | None:
    """Return the log-probabilities in the denominator of the ratio; None: the current ones."""
    if spec.ratio_to == "nothing":
        return None
    if not ratio_to_rollout(spec, settings):
        return old_logprobs
    if rollout_logprobs is None:
        if spec.ratio_to == "rollout_where_given":
            return old_logprobs
        raise ValueError(f"{op}: {spec.name!r} needs rollout_logprobs, got None")
    return rollout_logprobs
