"""Corrections for sampling from another policy. Shapes: N rows, R padded, A ragged cells.

Design: docs/design/005-policy-loss.md.
"""

from __future__ import annotations

import math

import torch

from skyrl_fast import _C
from skyrl_fast.ops import _backend
from skyrl_fast.ops.policy_loss import reference_off_policy as reference
from skyrl_fast.ops.policy_loss.reduction import (
    RowIds,
    SequenceScope,
    native_mask,
    offsets_of_cells,
    sequences_of,
)
from skyrl_fast.ops.policy_loss.reference import cell_row_ids

OP = "off_policy_correction"
# SkyRL's defaults.
TIS_CAPS = {"token": 2.0, "sequence": 5.0}
SEQUENCE_MASK_BOUNDS = {"geometric": (0.99, 1.01), "product": (0.5, 2.0)}
TIS_KINDS = {None: 0, "token": 1, "sequence": 2}
SEQUENCE_MASK_KINDS = {None: 0, "geometric": 1, "product": 2}
# The metrics that the kernel writes, in its order, and the rule that each belongs to.
NATIVE_METRICS = (
    ("is_ratio_mean", "ratio"),
    ("is_ratio_std", "ratio"),
    ("is_ratio_max", "ratio"),
    ("is_ratio_min", "ratio"),
    ("outlier_seq_masked_ratio", "outlier"),
    ("outlier_seq_over_high_ratio", "outlier"),
    ("outlier_seq_under_low_ratio", "outlier"),
    ("token_mask_ratio", "token_mask"),
    ("tis_token_clip_high_ratio", "tis_token"),
    ("tis_seq_clip_high_ratio", "tis_sequence"),
    ("{}_sequence_mask_masked_ratio", "sequence_mask"),
    ("{}_sequence_mask_over_high_ratio", "sequence_mask"),
    ("{}_sequence_mask_under_low_ratio", "sequence_mask"),
)


def off_policy_correction(
    old_logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    loss_mask: torch.Tensor,
    *,
    tis_ratio_type: str | None = None,
    tis_cap: float | None = None,
    sequence_mask: str | None = None,
    sequence_mask_low: float | None = None,
    sequence_mask_high: float | None = None,
    outlier_low: float | None = None,
    outlier_high: float | None = None,
    token_mask_low: float | None = None,
    token_mask_high: float | None = None,
    scope: SequenceScope | None = None,
    cu_seqlens: torch.Tensor | None = None,
    trajectory_ids: RowIds | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor, dict[str, torch.Tensor]]:
    """Return token weights and a smaller mask that correct for a sampler with another policy.

    With ratio = exp(clamp(old - rollout, -20, 20)), in this order, each on the mask left by the
    previous rule:

    1. outliers: a sequence with a token whose ratio is over `outlier_high` or under `outlier_low`
       is dropped;
    2. token mask: tokens with a ratio outside [`token_mask_low`, `token_mask_high`] are dropped;
    3. truncated importance sampling (Yao et al. 2025): "token" weighs a token by min(ratio, cap),
       "sequence" by min(product of the sequence's ratios, cap);
    4. sequence mask: a sequence whose "product" of ratios, or "geometric" mean of them, is outside
       its bounds is dropped.

    Args:
        old_logprobs, rollout_logprobs: (N, R) or (A,) floats; trainer's and sampler's.
        loss_mask: the same shape; a token is trained where it is not 0.
        tis_ratio_type, tis_cap: see above; the cap's default is SkyRL's: 2 per token, 5 per
            sequence.
        sequence_mask, sequence_mask_low, sequence_mask_high: see above; the bounds' defaults are
            SkyRL's: 0.99 and 1.01 for the geometric mean, 0.5 and 2 for the product.
        outlier_low, outlier_high, token_mask_low, token_mask_high: None: no such bound. A NaN
            ratio is outside any token bounds and is no outlier.
        scope: what is a sequence in outliers, TIS "sequence" and the sequence mask: "row", or
            "trajectory" with all its rows; None: trajectory where `trajectory_ids` are given.
        cu_seqlens: (N + 1,) offsets of the rows' cells, for (A,) data.
        trajectory_ids: N ints or strings; a trajectory's rows need not be adjacent.
        backend: "native", "torch", or None to choose.

    Returns:
        weights: like the logprobs, float32 or float64, 0 outside `new_mask`; None without
            `tis_ratio_type`.
        new_mask: 0/1 in the shape and dtype of `loss_mask`; `loss_mask` itself where no rule masks.
        metrics: 0-dimensional float64 tensors under SkyRL's names. Means, spread and extremes are
            over trained tokens, shares of sequences over those with a trained token.

    Raises:
        ValueError: an unknown name, a cap or bound that is NaN or negative, a low bound above the
            high one, missing ids, or shapes that do not match.

    Example:
        >>> old, rollout = torch.zeros(1, 2), torch.tensor([[0.0, -3.0]])
        >>> off_policy_correction(old, rollout, torch.ones(1, 2), tis_ratio_type="token")[0]
        tensor([[1., 2.]])
    """
    for name, value, allowed in (
        ("tis_ratio_type", tis_ratio_type, TIS_KINDS),
        ("sequence_mask", sequence_mask, SEQUENCE_MASK_KINDS),
    ):
        if value not in allowed:
            raise ValueError(f"{OP}: {name}: expected one of {tuple(allowed)}, got {value!r}")
    low, high = SEQUENCE_MASK_BOUNDS.get(sequence_mask or "", (0.0, 0.0))
    if tis_cap is None:
        cap = TIS_CAPS.get(tis_ratio_type or "", 0.0)
    else:
        cap = tis_cap
    if sequence_mask_low is None:
        mask_low = low
    else:
        mask_low = sequence_mask_low
    if sequence_mask_high is None:
        mask_high = high
    else:
        mask_high = sequence_mask_high
    rules = reference.Rules(
        outlier_low=outlier_low,
        outlier_high=outlier_high,
        token_low=token_mask_low,
        token_high=token_mask_high,
        tis=tis_ratio_type,
        cap=cap,
        sequence_mask=sequence_mask,
        mask_low=mask_low,
        mask_high=mask_high,
    )
    _check_bounds(rules)
    cu_seqlens = offsets_of_cells(OP, old_logprobs, cu_seqlens)
    if cu_seqlens is None:
        num_rows = old_logprobs.shape[0]
    else:
        num_rows = cu_seqlens.numel() - 1
    # 16-bit log-probabilities are widened: the ratio is the exponential of a small difference.
    if old_logprobs.dtype == torch.float64:
        dtype = torch.float64
    else:
        dtype = torch.float32
    old = old_logprobs.detach().to(dtype).contiguous()
    rollout = rollout_logprobs.detach().to(dtype).contiguous()
    mask = native_mask(OP, loss_mask)
    for name, cells in (("rollout_logprobs", rollout), ("loss_mask", mask)):
        if cells.shape != old.shape:
            raise ValueError(
                f"{OP}: {name}: expected shape {tuple(old.shape)}, got {tuple(cells.shape)}"
            )
    sequence = sequences_of(OP, scope, trajectory_ids, num_rows)
    if _backend.select(OP, old, rollout, mask, backend=backend) == "native":
        weights, new_mask, metrics = _native(rules, old, rollout, mask, cu_seqlens, sequence)
    else:
        weights, new_mask, metrics = _torch(rules, old, rollout, mask, cu_seqlens, sequence)
    if new_mask is None:
        return weights, loss_mask, metrics
    return weights, new_mask.to(loss_mask.dtype), metrics


def _check_bounds(rules: reference.Rules) -> None:
    """Refuse settings made in code that mean nothing; those of a run are checked when it starts."""
    bounds = {
        "tis_cap": (None, rules.cap),
        "outlier": (rules.outlier_low, rules.outlier_high),
        "token_mask": (rules.token_low, rules.token_high),
        "sequence_mask": (rules.mask_low, rules.mask_high),
    }
    for name, (low, high) in bounds.items():
        for value in (low, high):
            if value is not None and not value >= 0:
                raise ValueError(f"{OP}: {name}: expected a number of at least 0, got {value}")
        if low is not None and high is not None and low > high:
            raise ValueError(
                f"{OP}: {name}_low: expected at most {name}_high, got {low} and {high}"
            )


def _torch(
    rules: reference.Rules,
    old: torch.Tensor,
    rollout: torch.Tensor,
    mask: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    sequence: torch.Tensor | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, dict[str, torch.Tensor]]:
    row = cell_row_ids(old, cu_seqlens)
    if cu_seqlens is None:
        num_rows = old.shape[0]
    else:
        num_rows = cu_seqlens.numel() - 1
    if sequence is None:
        cell_sequences = row
    else:
        cell_sequences = sequence.to(old.device)[row]
    live = mask.reshape(-1) != 0
    weights, keep, metrics = reference.off_policy_correction(
        rules, old.reshape(-1), rollout.reshape(-1), live, cell_sequences, num_rows
    )
    if weights is None:
        shaped = None
    else:
        shaped = weights.reshape(old.shape)
    return shaped, keep.reshape(old.shape) if rules.can_mask else None, metrics


def _native(
    rules: reference.Rules,
    old: torch.Tensor,
    rollout: torch.Tensor,
    mask: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    sequence: torch.Tensor | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, dict[str, torch.Tensor]]:
    starts, order = _rows_by_sequence(sequence)
    if rules.can_mask:
        new_mask = _backend.empty(mask.shape, mask.dtype)
    else:
        new_mask = None
    if rules.tis is not None:
        weights = _backend.empty(old.shape, old.dtype)
    else:
        weights = None
    metrics = torch.empty(len(NATIVE_METRICS), dtype=torch.float64, device="cpu")
    _C.off_policy_correction(
        old,
        rollout,
        mask,
        cu_seqlens,
        starts,
        order,
        rules.has_outlier_rule,
        rules.has_token_mask,
        TIS_KINDS[rules.tis],
        SEQUENCE_MASK_KINDS[rules.sequence_mask],
        [
            # A bound that is not set is out of reach.
            -math.inf if rules.outlier_low is None else rules.outlier_low,
            math.inf if rules.outlier_high is None else rules.outlier_high,
            -math.inf if rules.token_low is None else rules.token_low,
            math.inf if rules.token_high is None else rules.token_high,
            rules.cap,
            rules.mask_low,
            rules.mask_high,
        ],
        new_mask,
        weights,
        metrics,
        _backend.num_threads(),
    )
    applied = {"ratio", f"tis_{rules.tis}"}
    if rules.has_outlier_rule:
        applied |= {"outlier"}
    else:
        applied |= set()
    if rules.has_token_mask:
        applied |= {"token_mask"}
    else:
        applied |= set()
    if rules.sequence_mask is not None:
        applied |= {"sequence_mask"}
    else:
        applied |= set()
    if rules.sequence_mask == "geometric":
        prefix = "geo"
    else:
        prefix = "product"
    entries = zip(NATIVE_METRICS, metrics.unbind(), strict=True)
    named = {}
    for (name, rule), value in entries:
        if rule in applied:
            named[name.format(prefix)] = value
    return weights, new_mask, named


def _rows_by_sequence(
    sequence: torch.Tensor | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the offsets of the sequences' rows, and the rows' order unless already sorted."""
    if sequence is None:
        return None, None
    counts = torch.bincount(sequence)
    starts = torch.zeros(counts.numel() + 1, dtype=torch.int64, device=counts.device)
    torch.cumsum(counts, 0, out=starts[1:])
    # Rows of a sequence are mostly adjacent: then none are sorted. Stable, as sums have the bits of
    # their order.
    in_order = bool((sequence.diff() >= 0).all())
    return starts, None if in_order else torch.argsort(sequence, stable=True)
