"""Logits, log-probabilities and losses on them, for tests on every backend."""

import torch

from skyrl_fast import PolicyLoss, masked_logprob_loss, selected_logprob
from skyrl_fast.ops.logprob import reference

LOSS_TEMPERATURE = 0.9


def made(
    rows: int, vocab: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits of magnitude 15 at most, and a target per row."""
    g = torch.Generator().manual_seed(seed + vocab)
    logits = (torch.randn(rows, vocab, generator=g) * 4).to(dtype)
    return logits, torch.randint(0, vocab, (rows,), generator=g)


def visited(logits: torch.Tensor, targets: torch.Tensor, **options: object) -> list[torch.Tensor]:
    """Return log-probability, entropy, and the gradient of a fixed combination of both."""
    leaf = logits.detach().clone().requires_grad_()
    logprob, entropy = selected_logprob(leaf * 1, targets, return_entropy=True, **options)
    weight = torch.linspace(-1, 1, targets.numel(), dtype=logprob.dtype, device=logits.device)
    weight = weight.view(targets.shape)
    ((logprob * weight).sum() + 0.3 * (entropy * weight.flip(0)).sum()).backward()
    return [logprob.detach(), entropy.detach(), leaf.grad]


def loss_case(
    vocab: int, dtype: torch.dtype = torch.float32, rows: int = 5, seed: int = 7
) -> dict[str, torch.Tensor]:
    """Return arguments of masked_logprob_loss: a third of the rows masked, ratios up to 3."""
    logits, targets = made(rows, vocab, dtype, seed - 7)
    g = torch.Generator().manual_seed(seed)
    logprobs = reference.selected_logprob(logits.double(), targets, None, LOSS_TEMPERATURE)[0]

    def moved() -> torch.Tensor:
        return logprobs.float() + torch.randn(rows, generator=g) * 0.3

    old = moved()
    return {
        "logits": logits,
        "target_ids": targets,
        "old_logprobs": old,
        "rollout_logprobs": old,
        "advantages": torch.randn(rows, generator=g),
        "loss_mask": torch.arange(rows) % 3 != 1,
        "row_weights": torch.rand(rows, generator=g),
        "ref_logprobs": moved(),
    }


def loss_and_grad(
    case: dict[str, torch.Tensor], device: str, **options: object
) -> tuple[PolicyLoss, torch.Tensor]:
    """Return the result, and the gradient of half the loss, in place if the backend can."""
    moved = {name: value.to(device) for name, value in case.items()}
    leaf = moved.pop("logits").clone().requires_grad_()
    out = masked_logprob_loss(
        leaf * 1,
        return_entropy=True,
        temperature=LOSS_TEMPERATURE,
        inplace_backward=True,
        **moved,
        **options,
    )
    (out.loss * 0.5).backward()
    assert leaf.grad is not None
    return out, leaf.grad


def exact_loss_and_grad(
    case: dict[str, torch.Tensor], **options: object
) -> tuple[PolicyLoss, torch.Tensor]:
    """Return the same, computed by the reference in float64."""
    wide = {n: v.double() if v.is_floating_point() else v for n, v in case.items()}
    return loss_and_grad(wide, "cpu", backend="torch", **options)


def assert_loss_equals(
    got: tuple[PolicyLoss, torch.Tensor],
    want: tuple[PolicyLoss, torch.Tensor],
    *,
    rtol: float,
    atol: float,
) -> None:
    """Assert that loss, log-probabilities, entropy, metrics and gradient are close."""
    (a, a_grad), (b, b_grad) = got, want
    assert a.metrics.keys() == b.metrics.keys() and a.entropy is not None
    pairs = {"gradient": (a_grad, b_grad)} | {
        name: (getattr(a, name), getattr(b, name)) for name in ("loss", "logprobs", "entropy")
    }
    pairs |= {name: (a.metrics[name], value) for name, value in b.metrics.items()}
    for name, (x, y) in pairs.items():
        x, y = x.detach().cpu().double(), y.detach().cpu().double()
        torch.testing.assert_close(x, y, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
