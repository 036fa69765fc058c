"""Policy losses. Shapes: N rows (steps), R padded cells, A ragged cells; "cells" is (N, R) or (A,).

The formulas are in `losses.py`, next to the table of losses.

Design: docs/design/005-policy-loss.md.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from skyrl_fast.ops import _backend
from skyrl_fast.ops.policy_loss import reference
from skyrl_fast.ops.policy_loss.autograd import (
    KlPenalty,
    PolicyLoss,
    loss_and_metrics,
)
from skyrl_fast.ops.policy_loss.custom import CustomLoss, LossInputs
from skyrl_fast.ops.policy_loss.custom_call import custom_policy_loss
from skyrl_fast.ops.policy_loss.losses import (
    KERNEL_PARAMS,
    KL_ESTIMATORS,
    LOSS_CODES,
    POLICY_LOSSES,
    ClipCov,
    KlCov,
    LossSettings,
    LossSpec,
    kernel_kind,
    kernel_params,
    loss_and_settings,
    ratio_logprobs,
)
from skyrl_fast.ops.policy_loss.off_policy import off_policy_correction
from skyrl_fast.ops.policy_loss.reduction import (
    SCOPES,
    RowIds,
    SequenceScope,
    native_mask,
    offsets_of_cells,
    reduction_weights,
    sequences_of,
)

__all__ = ["PolicyLoss", "kl_penalty", "off_policy_correction", "policy_loss", "reduction_weights"]

OP = "policy_loss"
LOSS_NAMES = tuple(POLICY_LOSSES)
ON_GPU = ("native", "triton", "torch")


def policy_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor | None,
    advantages: torch.Tensor | None,
    loss_mask: torch.Tensor,
    *,
    loss: str | LossSettings | CustomLoss = "regular",
    rollout_logprobs: torch.Tensor | None = None,
    ref_logprobs: torch.Tensor | None = None,
    kl_estimator: str | None = None,
    kl_coef: float = 0.001,
    row_weights: torch.Tensor | None = None,
    reduction: str = "token_mean",
    max_seq_len: int | None = None,
    cu_seqlens: torch.Tensor | None = None,
    group_ids: RowIds | None = None,
    trajectory_ids: RowIds | None = None,
    scope: SequenceScope | None = None,
    token_weights: torch.Tensor | None = None,
    cross_entropy_weights: torch.Tensor | None = None,
    kl_weights: torch.Tensor | None = None,
    generator: torch.Generator | None = None,
    backend: str | None = None,
) -> PolicyLoss:
    """Return the loss of the current logprobs, with its gradient, and metrics to log.

    loss = sum over trained tokens of row_weight * (token_weight * policy loss
    + cross_entropy_weight * (-logprob) + kl_coef * kl_weight * KL): three streams, each with its
    weight per token. The docstring of `losses.py` has each formula and its source; the settings'
    names and defaults are SkyRL's. Masked cells do not matter (they may be NaN): their gradient
    is exactly 0; a mask of zeros gives loss 0, connected to the graph. NaN at a trained token gives
    a NaN loss, and NaN in the gradient of that token only.

    Args:
        logprobs: cells, float32; the current policy's. float64 is computed in float64. bfloat16
            and float16 are upcast first, and only their gradient is rounded back.
        old_logprobs: cells; the denominator of the ratio. None: `logprobs` themselves (ratio 1).
        advantages: cells; None only for "cross_entropy".
        loss_mask: cells of any dtype; a token is trained where it is not 0 (the value is
            not a weight: use `token_weights` for that).
        loss: one of `LOSS_NAMES`, with its defaults, its settings (`DualClip(clip_ratio_c=2.0)`),
            or a `CustomLoss`, which is computed by torch.
            `ClipCov` and `KlCov` compute the covariance over the tokens of this call, so these
            losses depend on the split into micro-batches.
        rollout_logprobs: cells; the sampler's, which take the place of `old_logprobs` in
            "rollout_is", in "dppo" where given, and in `Cispo(cispo_ratio="rollout")`.
        ref_logprobs: cells; the reference policy's, for the KL penalty.
        kl_estimator: None (no penalty), "k1", "abs", "k2" or "k3".
        kl_coef: weight of the penalty.
        row_weights: (N,) from `reduction_weights` over the full mini-batch. None: computed from
            this call's mask with `reduction`, `group_ids`, `trajectory_ids` and `max_seq_len`.
        cu_seqlens: (N + 1,) offsets of the rows' cells, for (A,) data.
        trajectory_ids: N ints or strings, the trajectory of each row.
        scope: the sequence of "gspo": "row", or "trajectory" with all its rows; None: trajectory
            where `trajectory_ids` are given. A trajectory's rows must then be in one call. The
            other losses are per token.
        token_weights: cells, from `off_policy_correction`; they weigh the policy loss, not the KL.
            A token of weight 0 has no policy loss, even where that would be NaN.
        cross_entropy_weights: cells, of the supervised tokens' -logprob (tool outputs, say).
            None: zeros. Where they are given, a token of token weight 0 is not in the policy
            stream: its old log-probability and advantage are not read, it does not count in a
            sequence's mean, in the covariance, or in the policy metrics.
        kl_weights: cells, of the KL (distillation: `ref_logprobs` are the teacher's). None: ones.
            Where they are 0, `ref_logprobs` are not read. Only with `kl_estimator`.
        generator: draws the tokens of "clip_cov".
        backend: "native", "triton" (GPUs), "torch", or None to choose.

    Returns:
        `PolicyLoss`: the loss (0-dimensional, float32, or float64 for float64 logprobs), and as
        metrics 0-dimensional float64 tensors: loss, policy_loss, kl_loss (weighted; before
        kl_coef), num_tokens; means over trained tokens: clip_ratio, clip_ratio_low,
        clip_ratio_high, chosen_ratio (dual_clip: where c took effect; clip_cov, kl_cov: selected),
        ratio_mean, approx_kl (of r - 1 - d, an estimate of KL(old || current)), kl; and ratio_max,
        ratio_min. All 0 without trained tokens. With `kl_weights` the mean kl is over the
        kl_tokens of weight other than 0; with `cross_entropy_weights` the means of the policy
        stream are over its policy_tokens, and there are cross_entropy_loss (weighted),
        cross_entropy (mean) and cross_entropy_tokens. A `CustomLoss` has its own metrics in place
        of the clip metrics.

    Raises:
        ValueError, TypeError: an unknown name, a setting out of its limits, an argument that the
            loss needs and that is missing, or shapes, dtypes or devices that do not match.
        RuntimeError: a second or a forward-mode derivative, which only backend="torch" has.

    Example:
        >>> logprobs = torch.log(torch.tensor([[0.6, 0.5]])).requires_grad_()
        >>> old = torch.log(torch.tensor([[0.4, 0.5]]))
        >>> out = policy_loss(logprobs, old, torch.ones(1, 2), torch.ones(1, 2))
        >>> out.loss  # ratios 1.5 (clipped to 1.2) and 1, token mean
        tensor(-1.1000, grad_fn=<PolicyLossBackward>)
    """
    if isinstance(loss, CustomLoss):
        built_in = None
    else:
        built_in = loss_and_settings(OP, loss)
    if kl_estimator is not None:
        _one_of(OP, "kl_estimator", kl_estimator, KL_ESTIMATORS)
        _require(kl_estimator, "ref_logprobs", ref_logprobs)
    elif kl_weights is not None:
        raise ValueError(f"{OP}: kl_weights need kl_estimator, got None")
    _one_of(OP, "scope", scope, (None, *SCOPES))
    if not isinstance(logprobs, torch.Tensor) or not logprobs.is_floating_point():
        if isinstance(logprobs, torch.Tensor):
            got = logprobs.dtype
        else:
            got = type(logprobs).__name__
        raise TypeError(f"{OP}: logprobs: expected a floating-point tensor, got {got}")
    cu_seqlens = offsets_of_cells(OP, logprobs, cu_seqlens)
    if cu_seqlens is not None:
        cu_seqlens = _backend.to_device_of(cu_seqlens, logprobs)
    if cu_seqlens is None:
        num_rows = logprobs.shape[0]
    else:
        num_rows = cu_seqlens.numel() - 1
    # 16-bit log-probabilities are widened: the ratio is the exponential of a small difference.
    if logprobs.dtype == torch.float64:
        current = logprobs
    else:
        current = logprobs.to(torch.float32)
    current = current.contiguous()
    mask = native_mask(OP, loss_mask)
    if mask.shape != current.shape:
        raise ValueError(
            f"{OP}: loss_mask: expected shape {tuple(current.shape)}, got {tuple(mask.shape)}"
        )
    chosen = _backend.select(
        OP, current, mask, backend=backend, available_on_gpu=ON_GPU, transforms=("vmap",)
    )
    # Right for a complete mini-batch only; a micro-batch is given the weights of its mini-batch.
    if row_weights is None:
        row_weights = reduction_weights(
            mask,
            reduction=reduction,
            cu_seqlens=cu_seqlens,
            group_ids=group_ids,
            trajectory_ids=trajectory_ids,
            max_seq_len=max_seq_len,
            dtype=current.dtype,
            backend="torch" if chosen == "torch" else None,
        )
    weights = row_weights.detach().to(current.device, current.dtype).contiguous()
    if weights.shape != (num_rows,):
        raise ValueError(
            f"{OP}: row_weights: expected shape ({num_rows},), got {tuple(weights.shape)}"
        )
    cells = _Cells(
        current,
        mask,
        weights,
        cu_seqlens,
        _like(current, "ref_logprobs", ref_logprobs) if kl_estimator is not None else None,
        kl_estimator,
        kl_coef,
        _like(current, "token_weights", token_weights),
        _like(current, "cross_entropy_weights", cross_entropy_weights),
        _like(current, "kl_weights", kl_weights),
    )
    if built_in is None:
        assert isinstance(loss, CustomLoss)
        sequence = _sequences_there(scope, trajectory_ids, num_rows, current)
        return _custom(cells, loss, old_logprobs, rollout_logprobs, advantages, sequence)
    # Which log-probabilities are `old` is decided here, so that a kernel knows one denominator.
    spec, settings = built_in
    old = ratio_logprobs(OP, spec, settings, old_logprobs, rollout_logprobs)
    if spec.needs_advantages:
        _require(spec.name, "advantages", advantages)
    if spec.needs_advantages:
        adv = _like(current, "advantages", advantages)
    else:
        adv = None
    sequence = None
    if spec.scope == "sequence":
        sequence = _sequences_there(scope, trajectory_ids, num_rows, current)
    old = _like(current, "old_logprobs", old)
    return _built_in(cells, spec, settings, old, adv, sequence, generator, chosen)


class _Cells(NamedTuple):
    """The inputs common to all losses."""

    current: torch.Tensor  # cells, float32 or float64
    mask: torch.Tensor
    row_weights: torch.Tensor  # (N,) like `current`
    cu_seqlens: torch.Tensor | None
    ref: torch.Tensor | None
    kl_estimator: str | None
    kl_coef: float
    token_weights: torch.Tensor | None
    cross_entropy_weights: torch.Tensor | None
    kl_weights: torch.Tensor | None

    @property
    def policy_mask(self) -> torch.Tensor:
        """The mask of the policy stream: of the tokens that count in its means."""
        if self.token_weights is None or self.cross_entropy_weights is None:
            return self.mask
        return reference.policy_stream(
            self.mask != 0, self.token_weights, self.cross_entropy_weights
        )

    def name_metrics(self, metrics: torch.Tensor) -> dict[str, torch.Tensor]:
        return reference.name_metrics(
            metrics,
            has_cross_entropy=self.cross_entropy_weights is not None,
            has_kl_weights=self.kl_weights is not None,
        )


def _built_in(
    cells: _Cells,
    spec: LossSpec,
    settings: LossSettings,
    old: torch.Tensor | None,
    adv: torch.Tensor | None,
    sequence: torch.Tensor | None,
    generator: torch.Generator | None,
    chosen: str,
) -> PolicyLoss:
    current = cells.current
    selected = None
    if isinstance(settings, (ClipCov, KlCov)):
        assert adv is not None
        _backend.break_graph("policy_loss", "which tokens clip_cov and kl_cov select")
        # By torch on every backend: one sort or draw per call.
        selected = reference.select_by_covariance(
            settings,
            current,
            current if old is None else old,
            adv,
            cells.policy_mask != 0,
            generator,
        )
    kind = kernel_kind(spec, settings)
    params = kernel_params(settings, cells.kl_coef)
    if chosen == "torch":
        total, metrics = _torch(cells, kind, params, old, adv, sequence, selected)
    else:
        use_triton = chosen == "triton"
        delta = None
        if spec.scope == "sequence":
            delta = _sequence_delta(
                current, old, cells.policy_mask, cells.cu_seqlens, sequence, use_triton
            )
        call = (
            old,
            adv,
            cells.mask,
            cells.row_weights,
            cells.cu_seqlens,
            cells.ref,
            cells.token_weights,
            cells.cross_entropy_weights,
            cells.kl_weights,
            None if selected is None else selected.view(torch.uint8),
            delta,
            LOSS_CODES[kind],
            0 if cells.kl_estimator is None else KL_ESTIMATORS[cells.kl_estimator],
            params,
            use_triton,
        )
        total, metrics = loss_and_metrics(current, call)
    return PolicyLoss(total, cells.name_metrics(metrics))


def _custom(
    cells: _Cells,
    loss: CustomLoss,
    old_logprobs: torch.Tensor | None,
    rollout_logprobs: torch.Tensor | None,
    advantages: torch.Tensor | None,
    sequence: torch.Tensor | None,
) -> PolicyLoss:
    """Return a user's loss, which gets padded cells (N, R) as N flat rows of R cells."""
    current = cells.current
    _require(loss.name, "advantages", advantages)
    # Detached, or the ratio to itself would have no gradient.
    old = current.detach() if old_logprobs is None else _like(current, "old_logprobs", old_logprobs)
    rollout = _like(current, "rollout_logprobs", rollout_logprobs)
    adv = _like(current, "advantages", advantages)
    assert old is not None and adv is not None
    num_rows = cells.row_weights.numel()
    if cells.cu_seqlens is not None:
        cu_seqlens = cells.cu_seqlens.to(current.device, torch.int64)
    else:
        cu_seqlens = torch.arange(num_rows + 1, device=current.device) * current.shape[1]
    # Each row is a sequence.
    if sequence is None:
        sequence = torch.arange(num_rows, device=current.device)
    inputs = LossInputs(
        current.reshape(-1),
        old.reshape(-1),
        _flat(rollout),
        _flat(cells.ref),
        adv.reshape(-1),
        cells.policy_mask.reshape(-1) != 0,
        cu_seqlens,
        sequence,
    )
    return custom_policy_loss(
        loss,
        inputs,
        live=cells.mask.reshape(-1) != 0,
        row_weights=cells.row_weights,
        token_weights=_flat(cells.token_weights),
        cross_entropy_weights=_flat(cells.cross_entropy_weights),
        kl_weights=_flat(cells.kl_weights),
        kl_estimator=cells.kl_estimator,
        kl_coef=cells.kl_coef,
    )


def kl_penalty(
    logprobs: torch.Tensor,
    ref_logprobs: torch.Tensor,
    *,
    estimator: str = "k3",
    loss_mask: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Return each token's estimate of KL(current || reference), with its gradient.

    With d = logprob - reference: "k1" d, "abs" |d|, "k2" d^2 / 2, "k3" exp(x) - 1 - x with x = -d
    clamped to +-20 and the result to +-10 (http://joschu.net/blog/kl-approx.html). 0 where
    masked, even for NaN.

    Args:
        logprobs: float cells of any shape; only they get a gradient.
        ref_logprobs: the same shape.
        estimator: "k1", "abs", "k2" or "k3".
        loss_mask: the same shape, or None: every cell counts.
        backend: "native", "triton" (GPUs), "torch", or None to choose.

    Returns:
        float32 (float64 for float64 logprobs) in the shape of `logprobs`.

    Raises:
        TypeError: log-probabilities that are no tensors.
        ValueError: an unknown estimator, integers, or shapes that do not match.
        RuntimeError: a second or a forward-mode derivative, which only backend="torch" has.

    Example:
        >>> kl_penalty(torch.tensor([-1.0]), torch.tensor([-2.0]), estimator="k1")
        tensor([1.])
    """
    op = "kl_penalty"
    _one_of(op, "estimator", estimator, KL_ESTIMATORS)
    for name, value in (("logprobs", logprobs), ("ref_logprobs", ref_logprobs)):
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{op}: {name}: expected a torch tensor, got {type(value).__name__}")
        if not value.is_floating_point():
            raise ValueError(f"{op}: {name}: expected a floating-point tensor, got {value.dtype}")
    if logprobs.dtype == torch.float64:
        current = logprobs
    else:
        current = logprobs.to(torch.float32)
    current = current.contiguous()
    ref = _like(current, "ref_logprobs", ref_logprobs, op)
    assert ref is not None
    if loss_mask is None:
        loss_mask = torch.ones_like(current, dtype=torch.bool)
    mask = native_mask(op, loss_mask)
    if mask.shape != current.shape:
        raise ValueError(
            f"{op}: loss_mask: expected shape {tuple(current.shape)}, got {tuple(mask.shape)}"
        )
    chosen = _backend.select(op, current, ref, mask, backend=backend, available_on_gpu=ON_GPU)
    if chosen == "torch":
        return reference.kl_penalty(current, ref, mask != 0, estimator)
    return KlPenalty.apply(current, ref, mask, KL_ESTIMATORS[estimator], chosen == "triton")


def _one_of(op: str, name: str, value: object, allowed: Any) -> None:
    if value not in allowed:
        raise ValueError(f"{op}: {name}: expected one of {tuple(allowed)}, got {value!r}")


def _require(by: str, name: str, value: object) -> None:
    if value is None:
        raise ValueError(f"{OP}: {by!r} needs {name}, got None")


def _like(
    current: torch.Tensor, name: str, value: torch.Tensor | None, op: str = OP
) -> torch.Tensor | None:
    if value is None:
        return None
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        if isinstance(value, torch.Tensor):
            got = value.dtype
        else:
            got = type(value).__name__
        raise TypeError(f"{op}: {name}: expected a floating-point tensor, got {got}")
    if value.shape != current.shape:
        raise ValueError(
            f"{op}: {name}: expected shape {tuple(current.shape)}, got {tuple(value.shape)}"
        )
    if value.device != current.device:
        raise ValueError(f"{op}: {name}: expected a tensor on {current.device}, got {value.device}")
    # A constant of the loss: only the current log-probabilities have a gradient.
    return value.detach().to(current.dtype).contiguous()


def _sequences_there(
    scope: str | None, trajectory_ids: RowIds | None, num_rows: int, current: torch.Tensor
) -> torch.Tensor | None:
    """Return `sequences_of` on the device of the log-probabilities."""
    sequence = sequences_of(OP, scope, trajectory_ids, num_rows)
    if sequence is None:
        return None
    return _backend.to_device_of(sequence, current)


def _sequence_delta(
    current: torch.Tensor,
    old: torch.Tensor | None,
    mask: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    sequence: torch.Tensor | None,
    use_triton: bool,
) -> torch.Tensor:
    """Return (N,) float64: the mean of d over the trained tokens of each row's sequence."""
    if old is None:
        denominator = current
    else:
        denominator = old
    # A constant of each token, whose gradient flows through its own log-probability.
    sums = torch.ops.skyrl_fast.delta_sums(
        current.detach(), denominator.detach(), mask, cu_seqlens, use_triton
    )
    if sequence is not None:
        # index_put_ sorts the rows on a GPU, so that sums have the same bits
        sums = torch.zeros_like(sums).index_put_((sequence,), sums, accumulate=True)[sequence]
    # 0, not NaN, for a sequence without a trained token.
    return sums[:, 0] / sums[:, 1].clamp(min=1)


def _torch(
    cells: _Cells,
    kind: str,
    params: list[float],
    old: torch.Tensor | None,
    adv: torch.Tensor | None,
    sequence: torch.Tensor | None,
    selected: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    return reference.policy_loss(
        kind,
        dict(zip((*KERNEL_PARAMS, "kl_coef"), params, strict=True)),
        cells.current.reshape(-1),
        _flat(old),
        _flat(adv),
        cells.mask.reshape(-1) != 0,
        reference.cell_row_ids(cells.current, cells.cu_seqlens),
        cells.row_weights,
        row_segments=sequence,
        ref_logprobs=_flat(cells.ref),
        kl_estimator=cells.kl_estimator,
        token_weights=_flat(cells.token_weights),
        cross_entropy_weights=_flat(cells.cross_entropy_weights),
        kl_weights=_flat(cells.kl_weights),
        selected=_flat(selected),
    )


def _flat(x: torch.Tensor | None) -> torch.Tensor | None:
    if x is None:
        return None
    return x.reshape(-1)
