"""TRL's GRPOTrainer with the loss of `policy_loss`. N rows, R response tokens."""

from __future__ import annotations

import functools
from typing import Any

import torch

from skyrl_fast.integrations.trl.loss import (
    REDUCTIONS,
    SEQUENCE_LEVEL,
    grpo_loss,
    vespo_weights,
)
from skyrl_fast.integrations.trl.switch import COUNTS, GRPO_LOSS


class FastGRPOLoss:
    """Mixin that computes a GRPOTrainer's loss and gradient in one pass, with TRL's metrics.

    Settings that it does not know (entropy masks and bonuses, off-policy masks, `delta`) are left
    to TRL's own loss; `skyrl_fast.integrations.trl.report()` counts and explains these calls.

    Example:
        class Trainer(FastGRPOLoss, MyGRPOTrainer): ...
    """

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        trainer: Any = self
        counts = COUNTS[GRPO_LOSS]
        counts.calls += 1
        reason = _refusal(trainer, inputs)
        if reason:
            counts.hand_back(reason)
            loss: torch.Tensor = super()._compute_loss(model, inputs)  # type: ignore[misc]
            return loss
        mask = inputs["completion_mask"]
        if "tool_mask" in inputs:
            mask = mask * inputs["tool_mask"]
        names = ("prompt", "completion")
        logps, entropies, _ = trainer._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs[f"{name}_ids"] for name in names], dim=1),
            torch.cat([inputs[f"{name}_mask"] for name in names], dim=1),
            mask.shape[1],
            compute_entropy=True,
            **{name: inputs[name] for name in VISION if name in inputs},
        )
        args = trainer.args
        corrected = trainer.use_vllm and trainer.vllm_importance_sampling_correction
        corrected = corrected or trainer.loss_type == "vespo"
        training = trainer.model.training
        accumulated = trainer.current_gradient_accumulation_steps if training else 1.0
        num_items = None
        if REDUCTIONS[trainer.loss_type] == "tokens":
            num_items = (
                inputs["num_items_in_batch"].clamp(min=1.0) / trainer.accelerator.num_processes
            )
            num_items = num_items * (accumulated / args.steps_per_generation if training else 1.0)
            accumulated = 1.0
        old = inputs.get("old_per_token_logps")
        if corrected:
            importance_sampling_ratio = inputs.get("importance_sampling_ratio")
        else:
            importance_sampling_ratio = None
        if trainer.beta:
            ref_per_token_logps = inputs["ref_per_token_logps"]
        else:
            ref_per_token_logps = None
        result = grpo_loss(
            logps,
            old,
            inputs["advantages"],
            mask,
            loss_type=trainer.loss_type,
            epsilon_low=trainer.epsilon_low,
            epsilon_high=trainer.epsilon_high,
            importance_sampling_level=trainer.importance_sampling_level,
            importance_sampling_ratio=importance_sampling_ratio,
            beta=trainer.beta,
            ref_per_token_logps=ref_per_token_logps,
            max_completion_length=trainer.max_completion_length,
            num_items=num_items,
            **{name: getattr(args, name) for name in SHAPES},
        )
        with torch.no_grad():
            _log(trainer, logps, old, entropies, mask, inputs)
        return result.loss / accumulated


VISION = (
    "pixel_values",
    "image_grid_thw",
    "num_images",
    "pixel_attention_mask",
    "spatial_shapes",
    "num_tiles",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)
SHAPES = (
    "sapo_temperature_pos",
    "sapo_temperature_neg",
    "vespo_k_pos",
    "vespo_lambda_pos",
    "vespo_k_neg",
    "vespo_lambda_neg",
)


def _refusal(trainer: Any, inputs: dict[str, Any]) -> str:
    kind = trainer.loss_type
    level = trainer.importance_sampling_level
    conditions = {
        f"loss_type {kind!r}": kind not in REDUCTIONS,
        f"importance_sampling_level {level!r} with {kind!r}": level == "sequence"
        and kind not in SEQUENCE_LEVEL,
        "advantages per token at level 'sequence'": level == "sequence"
        and inputs["advantages"].dim() != 1,
        "cispo with epsilon_high below 1": kind == "cispo" and trainer.epsilon_high < 1,
        "top_entropy_quantile": trainer.top_entropy_quantile < 1.0,
        "off_policy_mask_threshold": trainer.off_policy_mask_threshold is not None,
        "an entropy bonus": trainer._entropy_bonus_enabled,
        "a router loss": trainer.aux_loss_enabled,
        "delta": trainer.args.delta is not None,
        "use_bias_correction_kl": bool(trainer.beta and trainer.args.use_bias_correction_kl),
    }
    return next((name for name, holds in conditions.items() if holds), "")


def _log(
    trainer: Any,
    logps: torch.Tensor,
    old: torch.Tensor | None,
    entropies: torch.Tensor,
    mask: torch.Tensor,
    inputs: dict[str, Any],
) -> None:
    """Add TRL's metrics of this call: means over all processes' tokens."""
    accelerator = trainer.accelerator
    found = trainer._metrics["train" if trainer.model.training else "eval"]

    def mean(values: torch.Tensor) -> float:
        """Over tokens, or over rows of (N, 1) values."""
        if values.shape[1] > 1:
            weights = mask
        else:
            weights = torch.ones_like(values)
        sums = torch.stack([(values * weights).sum(), weights.sum().float()])
        total, count = accelerator.reduce(sums, reduction="sum").tolist()
        return total / max(count, 1.0)

    def per_row(values: torch.Tensor) -> torch.Tensor:
        """Means of all processes' rows, without those that have no token."""
        if values.shape[1] == 1:
            rows = values[:, 0]
        else:
            rows = (values * mask).sum(1) / mask.sum(1)
        rows = accelerator.gather(rows)
        return rows[~rows.isnan()]

    found["entropy"].append(mean(entropies))
    if trainer.beta:
        difference = inputs["ref_per_token_logps"] - logps
        found["kl"].append(mean(difference.exp() - difference - 1))
    if old is None:
        log_ratio = torch.zeros_like(logps)
    else:
        log_ratio = logps - old
    if trainer.importance_sampling_level == "sequence":
        counts = mask.sum(-1, keepdim=True).clamp(min=1.0)
        log_ratio = (log_ratio * mask).sum(-1, keepdim=True) / counts
    ratio = log_ratio.exp()
    advantages = inputs["advantages"]
    if advantages.dim() == 1:
        advantages = advantages[:, None]
    high = (ratio > 1 + trainer.epsilon_high) & (advantages > 0)
    if trainer.loss_type == "cispo":
        high = (ratio > trainer.epsilon_high) & (advantages > 0)
        found["cispo_clip_ratio"].append(mean(high.float()))
    elif trainer.loss_type == "vespo":
        args = trainer.args
        sampler = inputs.get("importance_sampling_ratio")
        shapes = (
            (args.vespo_k_pos, args.vespo_lambda_pos),
            (args.vespo_k_neg, args.vespo_lambda_neg),
        )
        weights = vespo_weights(logps, old, advantages, mask, sampler, shapes)
        found["vespo/phi_seq_mean"].append(mean(weights))
    elif trainer.loss_type in SEQUENCE_LEVEL:
        low = (ratio < 1 - trainer.epsilon_low) & (advantages < 0)
        for name, values in (("low", low), ("high", high), ("region", low | high)):
            found[f"clip_ratio/{name}_mean"].append(mean(values.float()))
        lows = per_row(low.float())
        highs = per_row(high.float())
        nan = float("nan")
        found["clip_ratio/low_min"].append(lows.min().item() if len(lows) else nan)
        found["clip_ratio/high_max"].append(highs.max().item() if len(highs) else nan)


@functools.cache
def grpo_trainer() -> type:
    from trl import GRPOTrainer

    return type("GRPOTrainer", (FastGRPOLoss, GRPOTrainer), {"__doc__": GRPOTrainer.__doc__})
