"""Inputs of policy losses, and losses and penalties with their gradients."""

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from skyrl_fast.ops.policy_loss.loss import LOSS_NAMES, kl_penalty, policy_loss
from skyrl_fast.ops.policy_loss.losses import Cispo, ClipCov, Dppo, KlCov, LossSettings

NAN = float("nan")
F32 = dict(rtol=2e-5, atol=2e-6)  # ratios are exp of float32 differences, up to e^3 here
F64 = dict(rtol=1e-10, atol=1e-12)
VARIANTS: list[str | LossSettings] = [
    *(name for name in LOSS_NAMES if name not in ("dppo", "clip_cov", "kl_cov")),
    ClipCov(clip_ratio=0.2, clip_cov_lb=-5.0, clip_cov_ub=5.0),
    KlCov(kl_cov_frac=0.3, ppo_kl_coef=0.7),
    Cispo(cispo_ratio="rollout", cispo_eps_clip_low=0.3, cispo_eps_clip_high=0.4),
    Dppo(delta_low=0.05, delta_high=0.05),
    Dppo(dppo_type="binary_kl", delta_low=0.01, delta_high=0.01),
]
IDS = [loss if isinstance(loss, str) else loss.variant or type(loss).__name__ for loss in VARIANTS]


def loss_and_grad(
    logprobs: torch.Tensor, *args: Any, seed: int = 0, **kw: Any
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    x = logprobs.clone().requires_grad_()
    generator = torch.Generator().manual_seed(seed)
    loss, metrics = policy_loss(x, *args, generator=generator, **kw)[:2]
    loss.backward()
    assert x.grad is not None
    return loss.detach(), x.grad, metrics


def batch(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> dict:
    g = torch.Generator().manual_seed(seed)
    new = lambda: torch.randn(shape, generator=g, dtype=torch.float64)  # noqa: E731
    logprobs = -new().abs()
    data = {
        "logprobs": logprobs,
        "old": logprobs + 0.4 * new(),
        "advantages": new(),
        "rollout": logprobs + 0.4 * new(),
        "ref": logprobs + 0.4 * new(),
    }
    data = {k: v.to(dtype) for k, v in data.items()}
    data["mask"] = torch.rand(shape, generator=g) < 0.6
    return data


def penalty_and_grad(
    data: dict[str, torch.Tensor], device: str, estimator: str, backend: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the KL penalty of each token, and the gradient of its product with fixed factors."""
    d = {name: value.to(device, copy=True) for name, value in data.items()}
    x = d["logprobs"].requires_grad_()
    kl = kl_penalty(x, d["ref"], estimator=estimator, loss_mask=d["mask"], backend=backend)
    (grad,) = torch.autograd.grad((kl * d["old"]).sum(), x)
    return kl.detach().cpu(), grad.cpu()


class Waits(TorchFunctionMode):
    """Counts what makes the CPU wait for a GPU: reads of a tensor's numbers."""

    NAMES = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__float__", "__int__")

    def __init__(self) -> None:
        self.count = 0

    def __torch_function__(
        self, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += getattr(func, "__name__", "") in self.NAMES
        return func(*args, **(kwargs or {}))
