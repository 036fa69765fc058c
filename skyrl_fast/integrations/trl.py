"""TRL with this package's log-probabilities and GRPO loss.

    import skyrl_fast.integrations.trl as fast
    fast.install()  # TRL's trainers use these log-probabilities; fast.uninstall() restores TRL's

N rows, R response tokens, V vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from skyrl_fast.ops.logprob.selected import selected_logprob
from skyrl_fast.ops.policy_loss.loss import policy_loss
from skyrl_fast.ops.policy_loss.losses import Gspo, LossSettings, Regular, Sapo

# TRL's loss types and their reductions; for "dapo" the caller passes the number of tokens.
REDUCTIONS = {
    "grpo": "sequence_mean",
    "sapo": "sequence_mean",
    "bnpo": "token_mean",
    "dr_grpo": "seq_mean_token_sum_norm",
    "dapo": "token_mean",
}
_original: Callable[..., torch.Tensor] | None = None


def selective_log_softmax(
    logits: torch.Tensor,
    index: torch.Tensor,
    temperature: float = 1.0,
    row_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the log-probabilities of `index`, as TRL's function of that name.

    The result has the dtype of the logits, as in TRL. Several indices per row (an additional
    dimension) are passed to TRL's own function.

    Args:
        logits: (..., V). index: (...), integers. temperature: divides the logits.
        row_mask: (...), rows with 0 are not read; their result is 0.

    Raises:
        ValueError: shapes do not match, or the temperature is not above 0.

    Example:
        >>> selective_log_softmax(torch.zeros(1, 2), torch.tensor([1]))
        tensor([-0.6931])
    """
    if index.ndim == logits.ndim:
        return _original_function()(logits, index, temperature=temperature, row_mask=row_mask)
    out = selected_logprob(logits, index, loss_mask=row_mask, temperature=temperature)
    assert isinstance(out, torch.Tensor)
    return out.to(logits.dtype)


def grpo_loss(
    per_token_logps: torch.Tensor,
    old_per_token_logps: torch.Tensor | None,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    loss_type: str = "dapo",
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    importance_sampling_level: str = "token",
    beta: float = 0.0,
    ref_per_token_logps: torch.Tensor | None = None,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    max_completion_length: int | None = None,
    num_items: torch.Tensor | float | None = None,
) -> torch.Tensor:
    """Return the loss of TRL's GRPOTrainer before gradient accumulation, with its gradient.

    Args:
        per_token_logps: (N, R). old_per_token_logps: (N, R), or None: the same, ratio 1.
        advantages: (N,) or (N, R). mask: (N, R).
        loss_type: one of `REDUCTIONS`.
        epsilon_low, epsilon_high, importance_sampling_level, beta: TRL's settings; "sequence"
            level is GSPO.
        ref_per_token_logps: (N, R), for `beta`.
        sapo_temperature_pos, sapo_temperature_neg: for "sapo".
        max_completion_length: for "dr_grpo".
        num_items: for "dapo", the tokens of the complete batch; None: those of this call.

    Raises:
        ValueError: an unknown loss type or level, or an error of `policy_loss`.
    """
    if loss_type not in REDUCTIONS:
        raise ValueError(f"grpo_loss: loss_type must be one of {list(REDUCTIONS)}, got {loss_type}")
    if importance_sampling_level not in ("token", "sequence"):
        raise ValueError(
            "grpo_loss: importance_sampling_level must be 'token' or 'sequence', got "
            f"{importance_sampling_level!r}"
        )
    loss: LossSettings = Regular(epsilon_low, epsilon_high)
    if loss_type == "sapo":
        loss = Sapo(sapo_temperature_pos, sapo_temperature_neg)
    elif importance_sampling_level == "sequence":
        loss = Gspo(epsilon_low, epsilon_high)
    wide = advantages[:, None].expand_as(mask) if advantages.dim() == 1 else advantages
    weights = None
    if loss_type == "dapo" and num_items is not None:
        count = torch.as_tensor(num_items, dtype=torch.float32).clamp(min=1.0)
        weights = (1.0 / count).expand(len(mask))
    return policy_loss(
        per_token_logps,
        old_per_token_logps,
        wide,
        mask,
        loss=loss,
        kl_estimator="k3" if beta else None,
        kl_coef=beta,
        ref_logprobs=ref_per_token_logps if beta else None,
        reduction=REDUCTIONS[loss_type],
        row_weights=weights,
        max_seq_len=max_completion_length,
    ).loss


def install() -> list[str]:
    """Replace TRL's `selective_log_softmax` wherever it is bound; return the modules.

    Raises:
        ImportError: TRL is not installed.
    """
    import trl.trainer.utils as home

    global _original
    if home.selective_log_softmax is selective_log_softmax:
        return []
    _original = home.selective_log_softmax
    return _rebind(_original, selective_log_softmax)


def uninstall() -> None:
    """Restore TRL's own function."""
    global _original
    if _original is not None:
        _rebind(selective_log_softmax, _original)
        _original = None


def _rebind(old: Callable[..., Any], new: Callable[..., Any]) -> list[str]:
    places = []
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "trl" or module is None:
            continue
        if vars(module).get("selective_log_softmax") is old:
            vars(module)["selective_log_softmax"] = new
            places.append(name)
    return places


def _original_function() -> Callable[..., torch.Tensor]:
    if _original is not None:
        return _original
    from trl.trainer.utils import selective_log_softmax as found

    return found
