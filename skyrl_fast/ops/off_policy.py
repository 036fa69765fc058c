"""Corrections for sampling from another policy. Shapes: N rows, R padded, A ragged cells."""

from __future__ import annotations

import torch

from skyrl_fast import _C
from skyrl_fast.ops import _backend
from skyrl_fast.ops.reduction import RowIds, checked_offsets, native_mask, segments_of
from skyrl_fast.ops.reference import policy_loss as reference

OP = "off_policy_correction"
TIS_CAPS = {"token": 2.0, "sequence": 5.0}
SEQUENCE_MASK_BOUNDS = {"geometric": (0.99, 1.01), "product": (0.5, 2.0)}
METRIC_PREFIX = {"geometric": "geo", "product": "product"}
DELTA_SUM, RATIO_MIN, RATIO_MAX, DELTA_COUNT, RATIO_SUM, RATIO_SQ = range(6)


def off_policy_correction(
    old_logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    loss_mask: torch.Tensor,
    *,
    tis: str | None = None,
    tis_cap: float | None = None,
    sequence_mask: str | None = None,
    sequence_mask_low: float | None = None,
    sequence_mask_high: float | None = None,
    outlier_low: float | None = None,
    outlier_high: float | None = None,
    token_mask_low: float | None = None,
    token_mask_high: float | None = None,
    scope: str | None = None,
    cu_seqlens: torch.Tensor | None = None,
    trajectory_ids: RowIds | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor, dict[str, torch.Tensor]]:
    """Return token weights and a smaller mask that correct for the sampler's other policy.

    With ratio = exp(clamp(old - rollout, -20, 20)), in this order, each on the mask that the
    former left:

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
        tis, tis_cap: see above; the cap's default is SkyRL's: 2 per token, 5 per sequence.
        sequence_mask, sequence_mask_low, sequence_mask_high: see above; the bounds' defaults are
            SkyRL's: 0.99 and 1.01 for the geometric mean, 0.5 and 2 for the product.
        outlier_low, outlier_high, token_mask_low, token_mask_high: None: no such bound. A NaN
            ratio is outside any token bounds and is no outlier.
        scope: what is a sequence: "row" or "trajectory"; None: trajectory where
            `trajectory_ids` are given.
        cu_seqlens: (N + 1,) offsets of the rows' cells, for (A,) data.
        trajectory_ids: N ints or strings.
        backend: "native", "torch", or None to choose.

    Returns:
        weights: like the logprobs, float32 or float64, 0 outside the mask after step 2; None
            without `tis`.
        new_mask: 0/1 in the shape and dtype of `loss_mask`.
        metrics: 0-dimensional float64 tensors under SkyRL's names. Means, spread and extremes are
            over trained tokens, shares of sequences over those that have a trained token.

    Raises:
        ValueError: an unknown name, a missing id, or shapes that disagree.

    Example:
        >>> old, rollout = torch.zeros(1, 2), torch.tensor([[0.0, -3.0]])
        >>> off_policy_correction(old, rollout, torch.ones(1, 2), tis="token")[0]
        tensor([[1., 2.]])
    """
    for name, value, allowed in (
        ("tis", tis, (None, *TIS_CAPS)),
        ("sequence_mask", sequence_mask, (None, *SEQUENCE_MASK_BOUNDS)),
        ("scope", scope, (None, "row", "trajectory")),
    ):
        if value not in allowed:
            raise ValueError(f"{OP}: {name} must be one of {allowed}, got {value!r}")
    cu_seqlens = checked_offsets(OP, old_logprobs, cu_seqlens)
    num_rows = old_logprobs.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    dtype = torch.float64 if old_logprobs.dtype == torch.float64 else torch.float32
    old = old_logprobs.detach().to(dtype).contiguous()
    rollout = rollout_logprobs.detach().to(dtype).contiguous()
    mask = native_mask(OP, loss_mask)
    for name, cells in (("rollout_logprobs", rollout), ("loss_mask", mask)):
        if cells.shape != old.shape:
            raise ValueError(
                f"{OP}: {name} must be of shape {tuple(old.shape)}, got {tuple(cells.shape)}"
            )
    by_trajectory = scope == "trajectory" or (scope is None and trajectory_ids is not None)
    if by_trajectory:
        segment, num = segments_of(OP, "trajectory_ids", trajectory_ids, num_rows, "this scope")
        segment = segment.to(old.device)
    else:
        segment, num = torch.arange(num_rows, device=old.device), num_rows
    native = _backend.select(OP, old, rollout, mask, backend=backend) == "native"
    passes = (_NativeCells if native else _TorchCells)(old, rollout, mask, cu_seqlens)

    stats = passes.delta_stats()
    metrics = _ratio_metrics(stats)
    trained = _segment_sum(stats[:, DELTA_COUNT], segment, num) > 0
    num_trained = trained.sum().double().clamp(min=1)

    def share(of_segment: torch.Tensor) -> torch.Tensor:
        return (of_segment & trained).sum().double() / num_trained

    keep = torch.ones(num_rows, dtype=torch.bool, device=old.device)
    if outlier_low is not None or outlier_high is not None:
        highest, lowest = stats[:, RATIO_MAX], stats[:, RATIO_MIN]
        some = stats[:, DELTA_COUNT] > 0
        over = some & (highest > outlier_high) if outlier_high is not None else ~keep
        under = some & (lowest < outlier_low) if outlier_low is not None else ~keep
        over, under = (_segment_sum(x.double(), segment, num) > 0 for x in (over, under))
        keep = ~(over | under)[segment]
        metrics["outlier_seq_masked_ratio"] = share(over | under)
        metrics["outlier_seq_over_high_ratio"] = share(over)
        metrics["outlier_seq_under_low_ratio"] = share(under)

    cap = tis_cap if tis_cap is not None else TIS_CAPS.get(tis or "", 0.0)
    bounds = (token_mask_low, token_mask_high)
    new_mask, weights, sums = passes.correct_tokens(keep, bounds, cap, tis == "token")
    log_ratio, count, dropped, capped = sums.unbind(1)
    num_left = (count + dropped).sum().clamp(min=1)
    if bounds != (None, None):
        metrics["token_mask_ratio"] = dropped.sum() / num_left
    if tis == "token":
        metrics["tis_token_clip_high_ratio"] = capped.sum() / count.sum().clamp(min=1)
    log_product = _segment_sum(log_ratio, segment, num)
    if tis == "sequence":
        ratio = reference.ratio_of(log_product)
        metrics["tis_seq_clip_high_ratio"] = share(ratio > cap)
        weights = passes.spread(ratio.clamp(max=cap).to(dtype)[segment]) * new_mask
    if sequence_mask is not None:
        tokens = _segment_sum(count, segment, num).clamp(min=1)
        exponent = log_product / tokens if sequence_mask == "geometric" else log_product
        ratio = reference.ratio_of(exponent)
        low, high = SEQUENCE_MASK_BOUNDS[sequence_mask]
        over = ratio > (high if sequence_mask_high is None else sequence_mask_high)
        under = ratio < (low if sequence_mask_low is None else sequence_mask_low)
        prefix = f"{METRIC_PREFIX[sequence_mask]}_sequence_mask"
        metrics[f"{prefix}_masked_ratio"] = share(over | under)
        metrics[f"{prefix}_over_high_ratio"] = share(over)
        metrics[f"{prefix}_under_low_ratio"] = share(under)
        inside = ~(over | under)[segment]
        if not bool(inside.all()):
            new_mask = new_mask * passes.spread(inside.to(torch.uint8))
    return weights, new_mask.to(loss_mask.dtype), metrics


def _segment_sum(values: torch.Tensor, segment: torch.Tensor, num: int) -> torch.Tensor:
    return values.new_zeros(num).index_add_(0, segment, values)


def _ratio_metrics(stats: torch.Tensor) -> dict[str, torch.Tensor]:
    """Moments of the ratio over all trained tokens, merged from the rows' own."""
    count = stats[:, DELTA_COUNT]
    total = count.sum()
    mean = stats[:, RATIO_SUM].sum() / total.clamp(min=1)
    gap = stats[:, RATIO_SUM] / count.clamp(min=1) - mean
    variance = (stats[:, RATIO_SQ] + count * gap.square()).sum() / (total - 1).clamp(min=1)
    some, zero = bool(total > 0), torch.zeros_like(total)
    return {
        "is_ratio_mean": 1 + mean if some else zero,
        "is_ratio_std": variance.sqrt(),
        "is_ratio_max": stats[:, RATIO_MAX].amax() if some else zero,
        "is_ratio_min": stats[:, RATIO_MIN].amin() if some else zero,
    }


class _TorchCells:
    """The passes over cells, in plain torch."""

    def __init__(
        self,
        old: torch.Tensor,
        rollout: torch.Tensor,
        mask: torch.Tensor,
        cu_seqlens: torch.Tensor | None,
    ) -> None:
        self.old, self.rollout, self.mask, self.cu_seqlens = old, rollout, mask, cu_seqlens
        self.num_rows = old.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1

    def spread(self, row_values: torch.Tensor) -> torch.Tensor:
        """Each row's value at its cells."""
        if self.cu_seqlens is None:
            return row_values[:, None].expand(self.old.shape)
        lengths = self.cu_seqlens.diff().to(row_values.device, torch.int64)
        return torch.repeat_interleave(row_values, lengths, output_size=self.old.numel())

    def _flat(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        live = self.mask.reshape(-1) != 0
        delta = reference.masked(self.old.reshape(-1), live)
        delta = delta - reference.masked(self.rollout.reshape(-1), live)
        return delta, live, reference.row_of_cell(self.old, self.cu_seqlens)

    def delta_stats(self) -> torch.Tensor:
        return reference.delta_stats(*self._flat(), self.num_rows)

    def correct_tokens(
        self,
        keep_row: torch.Tensor,
        bounds: tuple[float | None, float | None],
        cap: float,
        with_weights: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        delta, live, row = self._flat()
        new, weights, sums = reference.correct_tokens(
            delta, live & keep_row[row], row, self.num_rows, bounds, cap
        )
        new = new.to(torch.uint8).reshape(self.old.shape)
        return new, weights.reshape(self.old.shape) if with_weights else None, sums


class _NativeCells(_TorchCells):
    """The same in one C++ pass each."""

    def delta_stats(self) -> torch.Tensor:
        return torch.ops.skyrl_fast.delta_stats(self.old, self.rollout, self.mask, self.cu_seqlens)

    def correct_tokens(
        self,
        keep_row: torch.Tensor,
        bounds: tuple[float | None, float | None],
        cap: float,
        with_weights: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        low, high = bounds
        new_mask = _backend.empty(self.old.shape, torch.uint8)
        weights = _backend.empty(self.old.shape, self.old.dtype) if with_weights else None
        sums = torch.zeros((self.num_rows, 4), dtype=torch.float64)
        _C.correct_tokens(
            self.old,
            self.rollout,
            self.mask,
            self.cu_seqlens,
            keep_row.view(torch.uint8),
            bounds != (None, None),
            -torch.inf if low is None else low,
            torch.inf if high is None else high,
            cap,
            new_mask,
            weights,
            sums,
            _backend.num_threads(),
        )
        return new_mask, weights, sums
