"""Cases on a batch's rows: packing, advantages, and losses of log-probabilities."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from bench.gpu import peers
from bench.gpu.case import OURS, Case, within
from skyrl_fast import group_advantage, padded_to_varlen, policy_loss

BatchShape = tuple[int, int, int]  # rows, longest prompt, longest response
ADVANTAGE_TOLERANCE = 1e-4  # sums of a row's float32 rewards in another order
LOSS_TOLERANCE = 1e-5  # float32 sums of 10^7 terms


def packing_cases(shape: BatchShape, device: str, group: str) -> Iterator[Case]:
    """Yield cases of left-padded rows to flat ones, with their positions."""
    num_rows, prompt, response = shape
    width = prompt + response
    g = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, width + 1, (num_rows,), generator=g)
    padded = torch.randn(num_rows, width, generator=g).to(device)
    mask = (torch.arange(width) >= (width - lengths)[:, None]).to(device)

    def ours() -> list[torch.Tensor]:
        varlen = padded_to_varlen(padded, lengths=lengths)
        return [varlen.values, varlen.position_ids]

    def by_mask() -> list[torch.Tensor]:
        return [padded[mask], (mask.cumsum(1) - 1)[mask]]

    def unequal() -> float:
        pairs = zip(ours(), by_mask(), strict=True)
        return within(float(sum(int((a != b).sum()) for a, b in pairs)), 0.0)

    num_bytes = 16 * int(lengths.sum())  # 4 read, 4 and 8 written
    for name, call in ((OURS, ours), ("indexed by the mask", by_mask)):
        yield Case(group, name, call, num_bytes, check=unequal)


def advantage_cases(
    shape: BatchShape,
    device: str,
    group: str,
    *,
    compute: Callable[..., torch.Tensor] = group_advantage,
) -> Iterator[Case]:
    """Yield cases of rewards to advantages in groups of eight.

    Floor: rewards and mask read, advantages written.
    """
    num_rows, _, width = shape
    g = torch.Generator(device=device).manual_seed(5)
    rewards = torch.randn(num_rows, width, generator=g, device=device)
    mask = torch.ones_like(rewards)
    ids = torch.arange(num_rows, device=device) // 8
    advantage = functools.partial(compute, rewards, ids, response_mask=mask)

    def difference() -> float:
        native, plain = (advantage(backend=backend) for backend in ("native", "torch"))
        return within(float((native - plain).abs().max()), ADVANTAGE_TOLERANCE)

    for name, backend in ((OURS, "native"), ("the same in torch", "torch")):
        call = functools.partial(advantage, backend=backend)
        yield Case(group, name, call, 3.0 * rewards.nbytes, check=difference)


def random_cells(shape: BatchShape, device: str) -> tuple[torch.Tensor, peers.Cells]:
    """Return log-probabilities and the other inputs of a loss; each row trains its right end."""
    num_rows, _, width = shape
    g = torch.Generator(device=device).manual_seed(4)
    lengths = torch.randint(1, width + 1, (num_rows, 1), generator=g, device=device)

    def near(x: torch.Tensor | float) -> torch.Tensor:
        return x + torch.randn(num_rows, width, generator=g, device=device) * 0.1

    logprobs = -near(1.0).abs()
    mask = (torch.arange(width, device=device) >= width - lengths).float()
    advantages = torch.randn(num_rows, 1, generator=g, device=device) * mask
    d = {"old": near(logprobs), "reference": near(logprobs), "mask": mask, "advantages": advantages}
    d["scaled"] = advantages / mask.sum()
    d["weights"] = torch.ones(num_rows, device=device) / mask.sum()
    return logprobs, d


def policy_loss_cases(
    shape: BatchShape,
    device: str,
    group: str,
    *,
    with_k3: bool,
    others: Mapping[str, peers.LossFunction],
) -> Iterator[Case]:
    """Yield cases of log-probabilities to PPO's loss and gradient.

    Floor: the mask read and the gradient written on all cells, the inputs read on trained ones.
    """
    logprobs, d = random_cells(shape, device)
    options: dict[str, Any] = {}
    if with_k3:
        options = {"ref_logprobs": d["reference"], "kl_estimator": "k3", "kl_coef": peers.KL_COEF}
    trained = float(d["mask"].sum())
    inputs = 3 + int(with_k3)
    floor = 8.0 * logprobs.numel() + 4 * inputs * trained

    def ours(backend: str | None, x: torch.Tensor, d: peers.Cells) -> torch.Tensor:
        cells = (x, d["old"], d["advantages"], d["mask"])
        out = policy_loss(*cells, row_weights=d["weights"], backend=backend, **options)
        assert {
            "clip_ratio",
            "ratio_max",
            "approx_kl",
        } <= out.metrics.keys()  # others compute fewer
        return out.loss

    def run(function: peers.LossFunction) -> torch.Tensor:
        leaf = logprobs.detach().requires_grad_()
        function(leaf, d).backward()
        assert leaf.grad is not None
        return leaf.grad

    contenders: dict[str, peers.LossFunction] = {
        OURS: functools.partial(ours, None),
        f"{OURS} Triton": functools.partial(ours, "triton"),
        "the same in torch": functools.partial(ours, "torch"),
    }
    exact = run(contenders["the same in torch"]) * trained

    def error(function: peers.LossFunction) -> float:
        return within(float((run(function) * trained - exact).abs().max()), LOSS_TOLERANCE)

    for name, function in (contenders | dict(others)).items():
        check = functools.partial(error, function)
        yield Case(group, name, functools.partial(run, function), floor, check=check)


Cases = Callable[[BatchShape, str, str], Iterator[Case]]
PPO: Cases = functools.partial(policy_loss_cases, with_k3=False, others=peers.PPO)
PPO_K3: Cases = functools.partial(policy_loss_cases, with_k3=True, others=peers.PPO_K3)
