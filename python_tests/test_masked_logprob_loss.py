"""masked_logprob_loss: the same loss and gradient as log-probabilities, then the loss."""

from __future__ import annotations

import math

import pytest
import torch

from skyrl_fast.ops.masked_logprob_loss import masked_logprob_loss
from skyrl_fast.ops.reference.logprob import selected_logprob as reference_logprob

ROWS, VOCAB = 12, 45
TOKEN_LOSSES = ["regular", "dual_clip", "cispo", "rollout_is", "importance_sampling"]


def case(dtype: torch.dtype = torch.float32, vocab: int = VOCAB) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(5)
    logits = (torch.randn(ROWS, vocab, generator=g) * 2).to(dtype)
    targets = torch.randint(0, vocab, (ROWS,), generator=g)
    logprobs = reference_logprob(logits.double(), targets)[0].float()
    return {
        "logits": logits,
        "targets": targets,
        "anchor": logprobs + torch.randn(ROWS, generator=g) * 0.5,
        "advantages": torch.randn(ROWS, generator=g) * 2,
        "reference": logprobs + torch.randn(ROWS, generator=g) * 0.2,
        "mask": torch.tensor([1, 1, 0, 1, 1, 1, 0, 1, 1, 1, 1, 0]),
        "weights": torch.rand(ROWS, generator=g),
    }


def plain_loss(
    loss: str, logprobs: torch.Tensor, anchor: torch.Tensor, advantages: torch.Tensor
) -> torch.Tensor:
    """Per-token loss by autograd, restated from the formulas of the loss's documentation."""
    ratio = (logprobs - anchor).exp()
    surrogate = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
    if loss == "regular":
        return surrogate
    if loss == "dual_clip":
        bounded = torch.minimum(surrogate, -advantages * 3.0)
        return torch.where(advantages < 0, bounded, surrogate)
    if loss == "cispo":
        return -advantages * ratio.clamp(0.8, 1.2).detach() * logprobs
    if loss == "rollout_is":
        inside = (ratio > 0.8) & (ratio < 1.2)
        return -advantages * (ratio * inside).detach() * logprobs
    assert loss == "importance_sampling"
    return -advantages * ratio


@pytest.mark.spec("6.54")
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("loss", TOKEN_LOSSES)
def test_equals_two_visits(loss, dtype, inplace):
    c = case(dtype)
    leaf = c["logits"].clone().requires_grad_()
    x = leaf * 1
    got = masked_logprob_loss(
        x,
        c["targets"],
        c["anchor"],
        c["advantages"],
        loss_mask=c["mask"],
        loss=loss,
        loss_weights=c["weights"],
        ref_logprobs=c["reference"],
        kl_estimator="k2",
        kl_coef=0.3,
        temperature=0.9,
        return_entropy=True,
        inplace=inplace,
    )
    got.loss.backward()

    exact = c["logits"].double().requires_grad_()
    keep = c["mask"] != 0
    logprobs, entropy = reference_logprob(exact, c["targets"], keep, 0.9)
    tokens = plain_loss(loss, logprobs, c["anchor"].double(), c["advantages"].double())
    tokens = tokens + 0.3 * 0.5 * (logprobs - c["reference"].double()) ** 2
    want = (tokens * c["weights"].double())[keep].sum()
    want.backward()
    # float32 log-probabilities, right to 1e-6, of ratios up to 5
    torch.testing.assert_close(got.loss.double(), want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got.logprobs.double(), logprobs.detach(), rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(got.entropy.double(), entropy.detach(), rtol=1e-6, atol=2e-6)
    rtol = {torch.float32: 2e-5, torch.bfloat16: 2**-8 + 2e-4, torch.float16: 2**-10}[dtype]
    torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=rtol, atol=1e-6)
    assert torch.equal(x.detach(), leaf.grad) == inplace


def test_by_hand():
    # two equal logits: log-probability -ln 2, the target's gradient -(1 - 1/2)
    logits = torch.zeros(1, 2, requires_grad=True)
    out = masked_logprob_loss(logits, torch.tensor([1]), None, None, loss="cross_entropy")
    out.loss.backward()
    assert out.loss.item() == pytest.approx(math.log(2))
    assert torch.equal(logits.grad, torch.tensor([[0.5, -0.5]]))


def test_token_mean_is_the_default():
    c = case()
    mask = c["mask"]
    got = masked_logprob_loss(
        c["logits"], c["targets"], None, None, loss_mask=mask, loss="cross_entropy"
    )
    want = -(got.logprobs * mask).sum() / mask.sum()
    torch.testing.assert_close(got.loss, want, rtol=1e-6, atol=0)  # order of a float sum


def test_token_weights_leave_the_kl_alone():
    c = case()
    got = masked_logprob_loss(
        c["logits"],
        c["targets"],
        c["anchor"],
        c["advantages"],
        loss_weights=c["weights"],
        token_weights=torch.zeros(ROWS),
        ref_logprobs=c["reference"],
        kl_estimator="k1",
        kl_coef=2.0,
    )
    want = 2.0 * (c["weights"] * (got.logprobs - c["reference"])).sum()
    torch.testing.assert_close(got.loss, want, rtol=1e-5, atol=1e-6)  # order of a float sum


def test_masked_rows_are_never_read_and_clipped_ones_get_zeros():
    c = case()
    c["logits"][c["mask"] == 0] = math.nan
    c["targets"][c["mask"] == 0] = -100
    c["advantages"][3] = 0.0
    c["anchor"][c["mask"] == 0] = math.nan
    leaf = c["logits"].requires_grad_()
    out = masked_logprob_loss(leaf, c["targets"], c["anchor"], c["advantages"], loss_mask=c["mask"])
    out.loss.backward()
    assert out.loss.isfinite() and leaf.grad.isfinite().all()
    assert not leaf.grad[3].any() and not leaf.grad[c["mask"] == 0].any()


def test_all_masked_and_empty():
    for rows in (0, 3):
        logits = torch.full((rows, 4), math.nan, requires_grad=True)
        targets, zeros = torch.full((rows,), -100), torch.zeros(rows)
        out = masked_logprob_loss(logits, targets, zeros, zeros, loss_mask=zeros)
        out.loss.backward()
        assert out.loss.item() == 0.0
        assert torch.equal(logits.grad, torch.zeros(rows, 4))


def test_the_gradient_scales_with_the_loss():
    c = case()
    grads = []
    for scale in (1.0, -2.5):
        leaf = c["logits"].clone().requires_grad_()
        out = masked_logprob_loss(leaf, c["targets"], c["anchor"], c["advantages"])
        (out.loss * scale).backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(grads[1], grads[0] * -2.5)


def test_no_gradient_is_made_without_one_wanted():
    c = case()
    before = c["logits"].clone()
    with torch.no_grad():
        masked_logprob_loss(
            c["logits"].requires_grad_(), c["targets"], c["anchor"], c["advantages"], inplace=True
        )
    assert torch.equal(c["logits"].detach(), before)


def test_in_place_is_noticed_by_other_readers():
    leaf = torch.randn(2, 5, requires_grad=True)
    x = leaf * 1
    other = (x * x).sum()
    masked_logprob_loss(x, torch.tensor([0, 1]), None, None, loss="cross_entropy", inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


def test_a_second_backward_is_refused():
    logits = torch.zeros(1, 3, requires_grad=True)
    loss = masked_logprob_loss(logits, torch.tensor([0]), None, None, loss="cross_entropy").loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward"):
        loss.backward()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss": "gspo"}, "whole sequence or batch"),
        ({"loss": "clip_cov"}, "whole sequence or batch"),
        ({"loss": "ppo"}, "loss must be one of"),
        ({"kl_estimator": "k9"}, "kl_estimator must be one of"),
        ({"kl_estimator": "k3"}, "needs ref_logprobs"),
        ({"advantages": None}, "needs advantages"),
        ({"advantages": torch.zeros(3)}, "advantages must be of shape"),
        ({"loss_weights": torch.zeros(1)}, "loss_weights must be of shape"),
        ({"target_ids": torch.tensor([0, 5])}, r"target_ids must be in \[0, 5\)"),
        ({"logits": torch.zeros(2, 5).double()}, "float32, bfloat16 or float16"),
        ({"temperature": 0.0}, "temperature must be positive"),
    ],
)
def test_bad_arguments(change, message):
    arguments = {
        "logits": torch.zeros(2, 5),
        "target_ids": torch.tensor([0, 1]),
        "anchor_logprobs": torch.zeros(2),
        "advantages": torch.zeros(2),
    }
    with pytest.raises(ValueError, match=message):
        masked_logprob_loss(**(arguments | change))
