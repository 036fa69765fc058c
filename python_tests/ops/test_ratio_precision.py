"""Ratios keep float32's relative accuracy however small they are, in every loss and backend."""

import math
from collections.abc import Iterator

import pytest
import torch

from skyrl_fast import (
    _C,
    RolloutIs,
    masked_logprob_loss,
    off_policy_correction,
    policy_loss,
    selected_logprob,
)
from skyrl_fast.ops.policy_loss.losses import POLICY_LOSSES

# Differences are exact in float32: both log-probabilities are multiples of 2^-8.
DELTAS = torch.cat([torch.arange(-60 * 4, 20 * 4 + 1) / 4, torch.arange(-64, 65) / 256])
OLD = torch.tensor(-24.0)
RELATIVE = 1e-6
# These choose tokens by covariance, over all tokens of the call.
TOKEN_LOSSES = [n for n, spec in POLICY_LOSSES.items() if spec.scope != "mini_batch"]


@pytest.fixture(params=["baseline", "avx2", "avx512"])
def simd_level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set of this CPU."""
    best = _C.simd_level()
    try:
        _C.set_simd_level(request.param)
    except ValueError:
        pytest.skip(f"this CPU or build lacks {request.param}")
    yield request.param
    _C.set_simd_level(best)


def gradients(
    loss: str, advantage: float, dtype: torch.dtype, device: str = "cpu", **options: object
) -> torch.Tensor:
    """Return d loss / d logprob of each token, each in a row of its own."""
    old = OLD.expand(DELTAS.shape).to(device, dtype)
    logprobs = (old + DELTAS.to(device)).requires_grad_()
    cells = [t[:, None] for t in (logprobs, old, torch.full_like(old, advantage))]
    mask, weights = torch.ones_like(cells[1]), torch.ones(len(DELTAS), device=device)
    given = {"rollout_logprobs": cells[1], "row_weights": weights} | options
    policy_loss(*cells, mask, loss=loss, **given).loss.backward()
    assert logprobs.grad is not None
    return logprobs.grad.cpu().double()


@pytest.mark.spec("loss.ratio")
@pytest.mark.parametrize("advantage", [1.5, -0.75])
@pytest.mark.parametrize("loss", TOKEN_LOSSES)
def test_gradients_are_those_of_exact_ratios(loss: str, advantage: float, simd_level: str) -> None:
    exact = gradients(loss, advantage, torch.float64, backend="torch")
    for dtype in (torch.float32, torch.float64):
        made = gradients(loss, advantage, dtype)
        # sapo's gate multiplies the ratio's error by tau * (ratio - 1) in its exponent; where that
        # is much, the gradient is nearly 0.
        atol = 1e-9 if loss == "sapo" else 0.0
        torch.testing.assert_close(made, exact, rtol=RELATIVE, atol=atol)


@pytest.mark.parametrize("loss", TOKEN_LOSSES)
def test_gradients_on_a_gpu_are_those_of_exact_ratios(loss: str, gpu: str) -> None:
    exact = gradients(loss, -0.75, torch.float64, backend="torch")
    made = gradients(loss, -0.75, torch.float32, gpu)
    torch.testing.assert_close(made, exact, rtol=RELATIVE, atol=1e-9 if loss == "sapo" else 0.0)


def test_ratios_that_are_reported_are_exact(simd_level: str) -> None:
    for delta in DELTAS.tolist():
        old = OLD.view(1, 1)
        metrics = policy_loss(old + delta, old, torch.ones(1, 1), torch.ones(1, 1)).metrics
        exact = float(torch.tensor(delta, dtype=torch.float64).clamp(-20, 20).exp())
        assert float(metrics["ratio_min"]) == pytest.approx(exact, rel=RELATIVE, abs=0)
        assert float(metrics["ratio_max"]) == pytest.approx(exact, rel=RELATIVE, abs=0)


@pytest.mark.parametrize("delta", [-60, -20, -7, -0.125, 0, 0.125, 7, 20])
def test_ratios_over_kept_sets(delta: float) -> None:
    """Two kept ids of equal logits among larger ones: log-probability -ln 2 on any backend."""
    logits = torch.tensor([[50.0, 3.0, 80.0, 3.0]])
    targets = torch.tensor([3])
    kept = {"kept_ids": torch.tensor([1, 3], dtype=torch.int32), "cu_kept": torch.tensor([0, 2])}
    logprobs = selected_logprob(logits, targets, **kept)
    old, one = logprobs - delta, torch.ones(1)
    exact = float((logprobs - old).double().clamp(-20, 20).exp())
    fused = masked_logprob_loss(logits, targets, old, one, **kept).metrics
    separate = policy_loss(logprobs[None], old[None], one[None], one[None]).metrics
    for metrics in (fused, separate):
        assert float(metrics["ratio_min"]) == pytest.approx(exact, rel=RELATIVE, abs=0)
    assert float(logprobs) == pytest.approx(-math.log(2), rel=1e-7)


@pytest.mark.parametrize("kind", ["token", "sequence"])
def test_weights_of_the_correction_are_exact(kind: str, simd_level: str) -> None:
    rollout = OLD.expand(len(DELTAS), 1)
    weights, _, _ = off_policy_correction(
        rollout + DELTAS[:, None], rollout, torch.ones(len(DELTAS), 1), tis_ratio_type=kind,
        tis_cap=1e9,
    )  # fmt: skip
    exact = DELTAS.double().clamp(-20, 20).exp()
    assert weights is not None
    torch.testing.assert_close(weights[:, 0].double(), exact, rtol=RELATIVE, atol=0.0)


def test_a_bound_of_zero_keeps_the_smallest_ratio() -> None:
    one = torch.ones(1, 1)
    rollout = torch.zeros(1, 1)
    logprobs = torch.full((1, 1), -60.0, requires_grad=True)
    result = policy_loss(
        logprobs, None, one, one, loss=RolloutIs(eps_clip_low=1.0), rollout_logprobs=rollout
    )
    result.loss.backward()
    assert float(result.metrics["clip_ratio"]) == 0.0
    assert logprobs.grad is not None and float(logprobs.grad) < 0.0
