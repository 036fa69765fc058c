"""What others offer for the same work, restated or imported. A peer that is not installed says so.

Each takes logits (M, V) and targets (M,) and returns (M,) log-probabilities with their gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from bench.baselines import logprob as baselines
from bench.baselines import policy_loss as loss_baselines

Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Cells = dict[str, torch.Tensor]  # (N, R) float32: old, advantages, scaled, mask, reference
LossFunction = Callable[[torch.Tensor, Cells], torch.Tensor]
KL_COEF = 0.001


class NotInstalledError(Exception):
    """A peer's package is not here."""


def needs(module: str, attribute: str) -> Any:
    """Return an attribute of a peer's module."""
    try:
        return getattr(__import__(module, fromlist=[attribute]), attribute)
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        raise NotInstalledError(f"{module}: {error}") from error


@functools.cache
def compiled_gather() -> Function:
    """Return torch.compile of log-softmax and gather."""
    return torch.compile(baselines.log_softmax_gather, dynamic=True)


@functools.cache
def compiled_logsumexp() -> Function:
    """Return torch.compile of gather minus logsumexp in float32."""

    def logprob(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = logits.float()
        return x.gather(1, targets[:, None]).squeeze(1) - x.logsumexp(1)

    return torch.compile(logprob, dynamic=True)


def trl_selective(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """TRL's selective_log_softmax."""
    return needs("trl.trainer.utils", "selective_log_softmax")(logits, targets)


def trl_kernel(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """TRL's Triton kernel of log-probability and entropy."""
    return needs("trl.kernels.logprob_entropy", "logprob_entropy")(logits, targets)[0]


def verl_logprobs(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """verl's choice among its formulations."""
    return needs("verl.utils.torch_functional", "logprobs_from_logits")(logits, targets)


def flash_attention(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """flash-attn's Triton cross entropy, with its gradient in place."""
    loss = needs("flash_attn.ops.triton.cross_entropy", "cross_entropy_loss")
    return -loss(logits, targets, inplace_backward=True)[0]


def quack(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """QuACK's cross entropy."""
    return -needs("quack.cross_entropy", "cross_entropy")(logits, targets, reduction="none")


def liger(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Liger's cross entropy."""
    loss = needs("liger_kernel.transformers.functional", "liger_cross_entropy")
    return -loss(logits, targets, reduction="none")


LOGPROB: dict[str, Function] = {
    "torch.compile gather": lambda x, t: compiled_gather()(x, t),
    "torch.compile logsumexp": lambda x, t: compiled_logsumexp()(x, t),
    "F.cross_entropy": lambda x, t: -F.cross_entropy(x, t, reduction="none"),
    "SkyRL formulation": baselines.logsumexp_rows,
    "TRL selective_log_softmax": trl_selective,
    "TRL Triton": trl_kernel,
    "verl": verl_logprobs,
    "flash-attn": flash_attention,
    "QuACK": quack,
    "Liger": liger,
}


def liger_grpo(
    logits: torch.Tensor, targets: torch.Tensor, cells: dict[str, torch.Tensor]
) -> torch.Tensor:
    """Liger's GRPO loss on logits (1, M + 1, V); the last position predicts nothing."""
    loss = needs("liger_kernel.ops.grpo_loss", "GrpoLossFunction")
    whole = logits.unsqueeze(0)
    losses, *_ = loss.apply(
        *(whole, cells["anchor_logprobs"][None, :-1], None, targets[None, :-1]),
        *(cells["advantages"][:1], cells["loss_mask"][None, :-1].int(), 1.0, 0.0, 0.2, 0.2, True),
    )
    return losses.sum()


def liger_linear(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Liger's fused linear cross entropy, the sum."""
    loss = needs("liger_kernel.transformers.functional", "liger_fused_linear_cross_entropy")
    return loss(hidden, weight, targets, reduction="sum")


def quack_linear(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """QuACK's chunked linear cross entropy, the sum."""
    loss = needs("quack.linear_cross_entropy", "chunked_linear_cross_entropy")
    return loss(hidden, weight, targets, reduction="sum")


def torch_linear(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Whole logits by torch, the sum."""
    return F.cross_entropy((hidden @ weight.T).float(), targets, reduction="sum")


LINEAR = {"torch whole logits": torch_linear, "Liger": liger_linear, "QuACK": quack_linear}


# --- policy losses: PPO's clip by token mean, of log-probabilities and cells ----------------------


def skyrl_ppo(logprobs: torch.Tensor, d: Cells) -> torch.Tensor:
    """SkyRL's formulation, which waits for its clip ratio."""
    return loss_baselines.ppo_loss(logprobs, d["old"], d["scaled"], d["mask"])[0]


def trl_ppo(logprobs: torch.Tensor, d: Cells) -> torch.Tensor:
    """TRL's formulation."""
    return loss_baselines.trl_loss(logprobs, d["old"], d["advantages"], d["mask"])


def trl_ppo_k3(logprobs: torch.Tensor, d: Cells) -> torch.Tensor:
    """TRL's formulation with its KL penalty."""
    cells = (d["old"], d["advantages"], d["mask"], d["reference"])
    return loss_baselines.trl_loss(logprobs, *cells, beta=KL_COEF)


def verl_ppo(logprobs: torch.Tensor, d: Cells) -> torch.Tensor:
    """verl's loss, its second clip out of reach."""
    loss = needs("verl.trainer.ppo.core_algos", "compute_policy_loss")
    cells = (logprobs, d["advantages"], d["mask"])
    return loss(d["old"], *cells, cliprange=0.2, clip_ratio_c=1e9)[0]


@functools.cache
def compiled_ppo(with_kl: bool) -> LossFunction:
    """Return torch.compile of TRL's formulation, which waits for nothing."""
    return torch.compile(trl_ppo_k3 if with_kl else trl_ppo, dynamic=True)


PPO: dict[str, LossFunction] = {
    "SkyRL formulation": skyrl_ppo,
    "TRL formulation": trl_ppo,
    "verl": verl_ppo,
    "torch.compile TRL formulation": lambda x, d: compiled_ppo(False)(x, d),
}
PPO_K3: dict[str, LossFunction] = {
    "TRL formulation": trl_ppo_k3,
    "torch.compile TRL formulation": lambda x, d: compiled_ppo(True)(x, d),
}
