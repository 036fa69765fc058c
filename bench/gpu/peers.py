"""Alternatives from other packages, restated or imported; missing ones are reported.

Each takes logits (M, V) and targets (M,) and returns (M,) log-probabilities with their gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
import torch.nn.functional as F

from bench.baselines import logprob as baselines
from bench.baselines import policy_loss as loss_baselines

Inputs = ParamSpec("Inputs")
Output = TypeVar("Output")
Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
MaskedFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
LinearFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Cells = dict[str, torch.Tensor]  # (N, R) float32: old, advantages, scaled, mask, reference
LossFunction = Callable[[torch.Tensor, Cells], torch.Tensor]
KL_COEF = 0.001
IGNORED = -100  # a target that every peer ignores
TRL_CHUNK = 32768  # its trainer's constant, of the vocabulary


class NotInstalledError(Exception):
    """A peer's package is not installed."""


def needs(module: str, attribute: str) -> Any:
    """Return an attribute of a peer's module."""
    try:
        return getattr(__import__(module, fromlist=[attribute]), attribute)
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        raise NotInstalledError(f"{module}: {error}") from error


def compiled(function: Callable[Inputs, Output]) -> Callable[Inputs, Output]:
    """Return torch.compile of a function, for any lengths."""
    backend = compile_backend(has_gpu=torch.cuda.is_available())
    return torch.compile(function, dynamic=True, backend=backend)


def compile_backend(*, has_gpu: bool) -> str:
    """Return the backend of torch.compile.

    Without a GPU nothing is measured: the function is traced, and no C++ compiler called, which
    would take most of a rehearsal's time.
    """
    return "inductor" if has_gpu else "aot_eager"


@functools.cache
def compiled_gather() -> Function:
    """Return torch.compile of log-softmax and gather."""
    return compiled(baselines.log_softmax_gather)


@functools.cache
def compiled_logsumexp() -> Function:
    """Return torch.compile of gather minus logsumexp in float32."""

    def logprob(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = logits.float()
        return x.gather(1, targets[:, None]).squeeze(1) - x.logsumexp(1)

    return compiled(logprob)


def trl(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """TRL's Triton kernel, which also computes the entropy."""
    return trl_masked(logits, targets, None)


def trl_masked(
    logits: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """The same with TRL's mask of rows."""
    name = "selective_log_softmax_and_entropy"
    return needs("trl.kernels.logprob_entropy", name)(logits, targets, row_mask=mask)[0]


def verl_logprobs(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """verl's choice: flash-attn's kernel if installed, else SkyRL's formulation."""
    return needs("verl.utils.torch_functional", "logprobs_from_logits")(logits, targets)


def flash_attention(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """flash-attn's Triton cross entropy, with its gradient in place."""
    loss = needs("flash_attn.ops.triton.cross_entropy", "cross_entropy_loss")
    return -loss(logits, targets, inplace_backward=True)[0]


def quack(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """QuACK's cross entropy, with its gradient in place."""
    loss = needs("quack.cross_entropy", "cross_entropy")
    return -loss(logits, targets, reduction="none", inplace_backward=True)


def liger(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Liger's cross entropy, which writes its gradient over the logits in the forward."""
    loss = needs("liger_kernel.transformers.functional", "liger_cross_entropy")
    return -loss(logits, targets, reduction="none")


def ignoring(function: Function) -> MaskedFunction:
    """Return a cross entropy whose targets mark the ignored rows."""

    def logprob(logits: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return function(logits, targets.masked_fill(~mask, IGNORED))

    return logprob


LOGPROB: dict[str, Function] = {
    "torch.compile gather": lambda x, t: compiled_gather()(x, t),
    "torch.compile logsumexp": lambda x, t: compiled_logsumexp()(x, t),
    "F.cross_entropy": lambda x, t: -F.cross_entropy(x, t, reduction="none"),
    "SkyRL formulation": baselines.logsumexp_rows,
    "TRL": trl,
    "verl": verl_logprobs,
    "flash-attn": flash_attention,
    "QuACK": quack,
    "Liger": liger,
}
# Peers that skip rows themselves, so that no gather is needed.
MASKED: dict[str, MaskedFunction] = {
    "TRL, masked": trl_masked,
    "flash-attn, targets ignored": ignoring(flash_attention),
    "QuACK, targets ignored": ignoring(quack),
    "Liger, targets ignored": ignoring(liger),
}


def liger_grpo(logits: torch.Tensor, targets: torch.Tensor, cells: Cells) -> torch.Tensor:
    """Liger's GRPO loss on logits (1, M + 1, V); the last position predicts nothing.

    It takes one advantage per sequence.
    """
    loss = needs("liger_kernel.ops.grpo_loss", "GrpoLossFunction")
    mask = cells["loss_mask"][None, :-1].int()
    losses, *_ = loss.apply(
        *(logits.unsqueeze(0), cells["old_logprobs"][None, :-1], None, targets[None, :-1]),
        *(cells["advantages"][:1], mask, 1.0, 0.0, 0.2, 0.2, True, "grpo", None, False),
    )
    return (losses * cells["row_weights"][None, :-1] * mask).sum()


# --- hidden states and the head's weight to the sum of negative log-probabilities -----------------


def liger_linear(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Liger's fused linear cross entropy, with gradients computed in the forward."""
    loss = needs("liger_kernel.transformers.functional", "liger_fused_linear_cross_entropy")
    return loss(hidden, weight, targets, reduction="sum")


def liger_scaled(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Liger's fused linear scaled cross entropy, with a separate kernel for Hopper."""
    name = "LigerFusedLinearScaledCrossEntropyFunction"
    return (
        needs("liger_kernel.ops.fused_linear_scaled_cross_entropy", name)
        .apply(hidden, weight, targets)
        .sum()
    )


def trl_linear(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """TRL's log-probabilities from hidden states, in chunks of its trainer's size."""
    function = needs("trl.kernels.chunked_logprob", "ChunkedLogProbFunction")
    arguments = (hidden, weight, None, targets, 1.0, TRL_CHUNK, None, 1.0, ())
    return -function.apply(*arguments)[0].sum()


def quack_linear(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """QuACK's chunked linear cross entropy."""
    loss = needs("quack.linear_cross_entropy", "chunked_linear_cross_entropy")
    return loss(hidden, weight, targets, reduction="sum")


def cut_linear(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cut cross-entropy, without its filter of small gradients."""
    loss = needs("cut_cross_entropy", "linear_cross_entropy")
    return loss(hidden, weight, targets, reduction="sum", filter_eps=None)


def torch_linear(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Full logits by torch."""
    return F.cross_entropy((hidden @ weight.T).float(), targets, reduction="sum")


def torch_fused_linear(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """torch's fused op, if available."""
    loss = needs("torch.nn.functional", "linear_cross_entropy")
    return loss(hidden, weight, targets, reduction="sum")


LINEAR: dict[str, LinearFunction] = {
    "torch full logits": torch_linear,
    "torch F.linear_cross_entropy": torch_fused_linear,
    "TRL chunked": trl_linear,
    "Liger": liger_linear,
    "Liger scaled": liger_scaled,
    "QuACK": quack_linear,
    "cut cross-entropy": cut_linear,
}


# --- policy losses: PPO's clip by token mean, of log-probabilities and cells ----------------------


def skyrl_ppo(logprobs: torch.Tensor, d: Cells) -> torch.Tensor:
    """SkyRL's formulation, which synchronizes for its clip ratio."""
    return loss_baselines.ppo_loss(logprobs, d["old"], d["scaled"], d["mask"])[0]


def trl_ppo(logprobs: torch.Tensor, d: Cells) -> torch.Tensor:
    """TRL's formulation."""
    return loss_baselines.trl_loss(logprobs, d["old"], d["advantages"], d["mask"])


def trl_ppo_k3(logprobs: torch.Tensor, d: Cells) -> torch.Tensor:
    """TRL's formulation with its KL penalty."""
    cells = (d["old"], d["advantages"], d["mask"], d["reference"])
    return loss_baselines.trl_loss(logprobs, *cells, beta=KL_COEF)


def verl_ppo(logprobs: torch.Tensor, d: Cells) -> torch.Tensor:
    """verl's loss, with its second clip disabled."""
    loss = needs("verl.trainer.ppo.core_algos", "compute_policy_loss")
    cells = (logprobs, d["advantages"], d["mask"])
    return loss(d["old"], *cells, cliprange=0.2, clip_ratio_c=1e9)[0]


@functools.cache
def compiled_ppo(with_kl: bool) -> LossFunction:
    """Return torch.compile of TRL's formulation, which does not synchronize."""
    return compiled(trl_ppo_k3 if with_kl else trl_ppo)


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
