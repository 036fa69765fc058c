"""Cases on logits: log-probabilities, their gradients, and losses.

Floors, with L the bytes of the logits: forward L; forward and backward L read twice and written
once, or read once and written once where the loss is known in the same pass; for untrained rows
only the gradient's zeros are written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

import torch

from bench.gpu import peers
from bench.gpu.case import OURS, Case, within
from skyrl_fast import masked_logprob_loss, selected_logprob

TRAINED_SHARE = 0.3
CHECKED_TOKENS = 64  # compared with float64 before timing
LOGPROB_TOLERANCE = 0.07  # of peers that compute in bfloat16
GRADIENT_TOLERANCE = 0.02  # the same, per token


@dataclass(frozen=True, slots=True)
class Logits:
    """Logits, restored for every contender, and the other inputs, one per token."""

    master: torch.Tensor
    work: torch.Tensor  # passed to contenders, which may overwrite them with gradients
    targets: torch.Tensor
    mask: torch.Tensor  # trained tokens where not all are
    old_logprobs: torch.Tensor
    advantages: torch.Tensor  # all equal: Liger's GRPO has one per sequence
    weights: torch.Tensor

    @classmethod
    def random(cls, tokens: int, vocab: int, device: str, dtype: torch.dtype) -> Logits:
        """Return logits of a high-entropy model."""
        g = torch.Generator(device=device).manual_seed(1)
        master = torch.randn(tokens, vocab, generator=g, device=device, dtype=dtype) * 3
        targets = torch.randint(0, vocab, (tokens,), generator=g, device=device)
        old_logprobs = selected_logprob(master, targets).float()
        old_logprobs += torch.randn(tokens, generator=g, device=device) * 0.1
        return cls(
            master,
            torch.empty_like(master),
            targets,
            torch.rand(tokens, generator=g, device=device) < TRAINED_SHARE,
            old_logprobs,
            torch.ones(tokens, device=device),
            torch.full((tokens,), 1.0 / tokens, device=device),
        )

    def first(self, count: int) -> Logits:
        """Return the part of the first tokens, in the same memory."""
        return Logits(*(getattr(self, f.name)[:count] for f in fields(self)))

    @property
    def num_bytes(self) -> int:
        """L."""
        return self.master.nbytes

    def refill(self) -> None:
        """Restore the logits after a gradient was written over them."""
        self.work.copy_(self.master)

    def leaf(self) -> torch.Tensor:
        """Return the logits as a leaf that requires grad, without a copy."""
        return self.work.detach().requires_grad_()

    def exact_gradient(self) -> torch.Tensor:
        """Return the float64 gradient of the weighted log-probabilities' sum."""
        gradient = -self.master.double().softmax(1)
        gradient[torch.arange(len(gradient), device=gradient.device), self.targets] += 1
        return gradient * self.weights[:, None]


def logprob_error(function: peers.Function, x: Logits) -> float:
    """Return the largest error of log-probabilities against float64."""
    part = x.first(CHECKED_TOKENS)
    with torch.no_grad():
        got = function(part.master, part.targets).double()
    exact = part.master.double().log_softmax(1).gather(1, part.targets[:, None]).squeeze(1)
    return within(float((got - exact).abs().max()), LOGPROB_TOLERANCE)


def gradient_error(run: Callable[[Logits], torch.Tensor], x: Logits, exact: torch.Tensor) -> float:
    """Return the largest error of a gradient of logits, as a share of a token's weight."""
    part = x.first(CHECKED_TOKENS)
    part.refill()
    error = float((run(part)[: len(exact)].double() - exact).abs().max() / x.weights[0])
    return within(error, GRADIENT_TOLERANCE)


def gradient_of(leaf: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    """Return the loss's gradient at the leaf."""
    loss.backward()
    assert leaf.grad is not None
    return leaf.grad


def forward_cases(x: Logits, group: str) -> Iterator[Case]:
    """Log-probabilities without a gradient."""

    def run(function: peers.Function) -> None:
        with torch.no_grad():
            function(x.master, x.targets)

    ours = {
        OURS: selected_logprob,
        f"{OURS} + entropy": lambda a, t: selected_logprob(a, t, return_entropy=True)[0],
        f"{OURS} Triton": lambda a, t: selected_logprob(a, t, backend="triton"),
    }
    for name, function in (ours | peers.LOGPROB).items():
        call = functools.partial(run, function)
        check = functools.partial(logprob_error, function, x)
        yield Case(group, name, call, x.num_bytes, check=check)


def backward_cases(x: Logits, group: str) -> Iterator[Case]:
    """Forward and backward; gradients in place where the contender can."""

    def run(function: peers.Function, x: Logits) -> torch.Tensor:
        leaf = x.leaf()
        return gradient_of(leaf, (function(leaf, x.targets) * x.weights).sum())

    in_place = functools.partial(selected_logprob, inplace_backward=True)
    ours = {OURS: in_place, f"{OURS} Triton": functools.partial(in_place, backend="triton")}
    exact = x.first(CHECKED_TOKENS).exact_gradient()
    for name, function in (ours | peers.LOGPROB).items():
        call = functools.partial(run, function)
        check = functools.partial(gradient_error, call, x, exact)
        yield Case(group, name, functools.partial(call, x), 3 * x.num_bytes, x.refill, check)


def trained_cases(x: Logits, group: str) -> Iterator[Case]:
    """Yield the same with part of the rows trained; every peer also with a gather of those rows."""

    def masked(function: peers.MaskedFunction, x: Logits) -> torch.Tensor:
        leaf = x.leaf()
        logprob = function(leaf, x.targets, x.mask)
        return gradient_of(leaf, (logprob * x.weights * x.mask).sum())

    def on_all_rows(function: peers.Function, x: Logits) -> torch.Tensor:
        return masked(lambda leaf, targets, _: function(leaf, targets), x)

    def gathered(function: peers.Function, x: Logits) -> torch.Tensor:
        leaf, trained = x.leaf(), x.mask.nonzero().squeeze(1)
        logprob = function(leaf[trained], x.targets[trained])
        return gradient_of(leaf, (logprob * x.weights[trained]).sum())

    def ours(logits: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return selected_logprob(logits, targets, loss_mask=mask, inplace_backward=True)

    runs = {OURS: functools.partial(masked, ours)}
    for name, function in peers.LOGPROB.items():
        runs[name] = functools.partial(on_all_rows, function)
        runs[f"{name} + gather"] = functools.partial(gathered, function)
    runs |= {name: functools.partial(masked, function) for name, function in peers.MASKED.items()}
    floor = (2 * TRAINED_SHARE + 1) * x.num_bytes
    part = x.first(CHECKED_TOKENS)
    exact = part.exact_gradient() * part.mask[:, None]
    for name, run in runs.items():
        check = functools.partial(gradient_error, run, x, exact)
        yield Case(group, name, functools.partial(run, x), floor, x.refill, check)


def loss_cases(x: Logits, group: str) -> Iterator[Case]:
    """Logits to PPO's loss and its gradient."""

    def cells(x: Logits) -> dict[str, torch.Tensor]:
        return {
            "old_logprobs": x.old_logprobs,
            "advantages": x.advantages,
            "loss_mask": x.mask,
            "row_weights": x.weights,
        }

    def ours(backend: str | None, x: Logits) -> torch.Tensor:
        leaf = x.leaf()
        out = masked_logprob_loss(
            leaf, x.targets, **cells(x), inplace_backward=True, backend=backend
        )
        return gradient_of(leaf, out.loss)

    def two_visits(x: Logits) -> torch.Tensor:
        leaf = x.leaf()
        logprob = selected_logprob(leaf, x.targets, loss_mask=x.mask, inplace_backward=True)
        ratio = (logprob - x.old_logprobs).exp()
        clipped = ratio.clamp(0.8, 1.2)
        tokens = torch.maximum(-x.advantages * ratio, -x.advantages * clipped)
        return gradient_of(leaf, (tokens * x.weights * x.mask).sum())

    def liger(x: Logits) -> torch.Tensor:
        leaf = x.leaf()
        return gradient_of(leaf, peers.liger_grpo(leaf, x.targets, cells(x)))

    part = x.first(CHECKED_TOKENS)
    leaf = part.master.double().requires_grad_()
    out = masked_logprob_loss(leaf, part.targets, **cells(part), backend="torch")
    exact = gradient_of(leaf, out.loss)[:-1]  # Liger's last token predicts nothing
    runs = {
        OURS: functools.partial(ours, None),
        f"{OURS} Triton": functools.partial(ours, "triton"),
        f"{OURS} in two passes": two_visits,
        "Liger GRPO": liger,
    }
    floor = (TRAINED_SHARE + 1) * x.num_bytes
    for name, run in runs.items():
        check = functools.partial(gradient_error, run, x, exact)
        yield Case(group, name, functools.partial(run, x), floor, x.refill, check)
