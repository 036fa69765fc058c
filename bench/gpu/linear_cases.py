"""Cases on hidden states: the sum of negative log-probabilities, and its gradients.

Rates count three matrix products forward and backward (one forward) of the trained rows, for every
contender.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from bench.gpu import peers
from bench.gpu.case import OURS, Case, within
from bench.gpu.logit_cases import CHECKED_TOKENS, TRAINED_SHARE
from skyrl_fast import linear_logprob

SAVED = f"{OURS}, logits saved"
ALL_LOGITS = 1 << 62  # bytes
TOLERANCE = 0.03  # of norms, for peers that compute in bfloat16


@dataclass(frozen=True, slots=True)
class Head:
    """Hidden states, the head's weight, and the target tokens."""

    hidden: torch.Tensor  # (M, H)
    targets: torch.Tensor  # (M,)
    mask: torch.Tensor  # (M,), trained tokens where not all are
    weight: torch.Tensor  # (V, H)

    @classmethod
    def random(cls, tokens: int, width: int, vocab: int, device: str, dtype: torch.dtype) -> Head:
        """Return a head whose logits have a variance of one."""
        g = torch.Generator(device=device).manual_seed(2)
        hidden = torch.randn(tokens, width, generator=g, device=device, dtype=dtype)
        weight = torch.randn(vocab, width, generator=g, device=device, dtype=dtype) * width**-0.5
        targets = torch.randint(0, vocab, (tokens,), generator=g, device=device)
        mask = torch.rand(tokens, generator=g, device=device) < TRAINED_SHARE
        return cls(hidden, targets, mask, weight)

    def first(self, count: int) -> Head:
        """Return the part of the first tokens, in the same memory."""
        of_tokens = (getattr(self, f.name)[:count] for f in fields(self)[:-1])
        return Head(*of_tokens, self.weight)

    @property
    def flops(self) -> float:
        """Of one product of all tokens."""
        return 2.0 * len(self.hidden) * self.weight.numel()

    def exact_gradients(self, trained: torch.Tensor) -> list[torch.Tensor]:
        """Return the gradients of hidden states and weight in float64."""
        h, w = (x.double().requires_grad_() for x in (self.hidden, self.weight))
        logprob = (h @ w.T).log_softmax(1).gather(1, self.targets[:, None]).squeeze(1)
        return list(torch.autograd.grad(-(logprob * trained).sum(), (h, w)))


Run = Callable[[torch.Tensor, torch.Tensor, Head], torch.Tensor]  # of leaves, to the sum


def gradients(run: Run, head: Head) -> list[torch.Tensor]:
    """Return the gradients of hidden states and weight."""
    h, w = head.hidden.detach().requires_grad_(), head.weight.detach().requires_grad_()
    run(h, w, head).backward()
    assert h.grad is not None and w.grad is not None
    return [h.grad, w.grad]


def gradients_error(run: Run, head: Head, exact: list[torch.Tensor]) -> float:
    """Return the larger error of the two gradients, by their norms."""
    pairs = zip(gradients(run, head.first(CHECKED_TOKENS)), exact, strict=True)
    return within(max(float((a.double() - b).norm() / b.norm()) for a, b in pairs), TOLERANCE)


def ours(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, **options: Any
) -> torch.Tensor:
    """Compute the same as the functions of peers.LINEAR."""
    return -linear_logprob(hidden, weight, targets, **options).sum()


ours_saved = functools.partial(ours, saved_logits_bytes=ALL_LOGITS)


def on_all(function: peers.LinearFunction) -> Run:
    """Return a run of all tokens."""
    return lambda hidden, weight, head: function(hidden, weight, head.targets)


def on_gathered(function: peers.LinearFunction) -> Run:
    """Return a run of the trained tokens, gathered."""

    def run(hidden: torch.Tensor, weight: torch.Tensor, head: Head) -> torch.Tensor:
        rows = head.mask.nonzero().squeeze(1)
        return function(hidden[rows], weight, head.targets[rows])

    return run


def ours_on_trained(
    hidden: torch.Tensor, weight: torch.Tensor, head: Head, **options: Any
) -> torch.Tensor:
    """Run on the trained tokens, which the op selects itself."""
    return ours(hidden, weight, head.targets, loss_mask=head.mask, **options)


def gradient_cases(
    head: Head, group: str, runs: Mapping[str, Run], trained: torch.Tensor, share: float
) -> Iterator[Case]:
    """Forward and backward."""
    exact = head.first(CHECKED_TOKENS).exact_gradients(trained[:CHECKED_TOKENS])
    details = {"flops": 3 * head.flops * share}
    for name, run in runs.items():
        call = functools.partial(gradients, run, head)
        check = functools.partial(gradients_error, run, head, exact)
        yield Case(group, name, call, 0.0, check=check, details=details)


def whole_cases(head: Head, group: str) -> Iterator[Case]:
    """All tokens trained."""
    functions = {OURS: ours, SAVED: ours_saved} | peers.LINEAR
    runs = {name: on_all(function) for name, function in functions.items()}
    yield from gradient_cases(head, group, runs, torch.ones_like(head.mask), 1.0)


def trained_cases(head: Head, group: str) -> Iterator[Case]:
    """Part of the tokens trained; peers gather them."""
    gathered = {f"{name} + gather": on_gathered(f) for name, f in peers.LINEAR.items()}
    saved = functools.partial(ours_on_trained, saved_logits_bytes=ALL_LOGITS)
    runs = {OURS: ours_on_trained, SAVED: saved} | gathered
    yield from gradient_cases(head, group, runs, head.mask, TRAINED_SHARE)


def forward_cases(head: Head, group: str) -> Iterator[Case]:
    """All tokens, without a gradient."""

    def run(function: peers.LinearFunction) -> None:
        with torch.no_grad():
            function(head.hidden, head.weight, head.targets)

    for name, function in ({OURS: ours} | peers.LINEAR).items():
        call = functools.partial(run, function)
        yield Case(group, name, call, 0.0, details={"flops": head.flops})
