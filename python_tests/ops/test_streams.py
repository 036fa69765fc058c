"""Losses as sums of streams: policy loss, cross-entropy and KL, each with its weight per token."""

import math
from types import ModuleType
from typing import Any

import pytest
import torch
from _losses import IDS, NAN, VARIANTS, batch

from skyrl_fast import masked_logprob_loss, policy_loss, register_policy_loss
from skyrl_fast.ops.logprob.masked_loss import TOKEN_LOSSES
from skyrl_fast.ops.policy_loss.custom import find_policy_loss
from skyrl_fast.ops.policy_loss.losses import LossSettings
from skyrl_fast.ops.policy_loss.reduction import reduction_weights

CLOSE = {"rtol": 2e-5, "atol": 2e-6}  # ratios are exp of float32 differences


def streams(shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Return a batch with weights, and NaN in what a stream without weight must not read."""
    d = batch(shape, torch.float64)
    g = torch.Generator().manual_seed(9)
    for name in ("token_weights", "cross_entropy_weights", "kl_weights"):
        d[name] = torch.rand(shape, generator=g, dtype=torch.float64) * 2
        d[name][torch.rand(shape, generator=g) < 0.4] = 0
    for name in ("old", "advantages", "rollout"):
        d[name][d["token_weights"] == 0] = NAN
    d["ref"][d["kl_weights"] == 0] = NAN
    return {name: x if x.dtype == torch.bool else x.float().double() for name, x in d.items()}


def run(
    d: dict[str, torch.Tensor], dtype: torch.dtype, **options: Any
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    d = {name: x if x.dtype == torch.bool else x.to(dtype) for name, x in d.items()}
    leaf = d["logprobs"].clone().requires_grad_()
    names = ("token_weights", "cross_entropy_weights", "kl_weights")
    out = policy_loss(
        leaf, d["old"], d["advantages"], d["mask"], rollout_logprobs=d["rollout"],
        ref_logprobs=d["ref"], kl_coef=0.3, generator=torch.Generator().manual_seed(0),
        **{"kl_estimator": "k3"} | {name: d[name] for name in names} | options,
    )  # fmt: skip
    out.loss.backward()
    assert leaf.grad is not None
    return out.loss.detach(), leaf.grad, out.metrics


@pytest.mark.spec("loss.streams")
def test_by_hand(backend):
    """One row: a policy token, a supervised one, one of both with KL, and a masked one."""
    logprobs = torch.tensor([[-1.0, -2.0, -3.0, NAN]], requires_grad=True)
    out = policy_loss(
        logprobs,
        torch.tensor([[-1.0, NAN, -3.0, NAN]]),
        torch.tensor([[2.0, NAN, -1.0, NAN]]),
        torch.tensor([[1, 1, 1, 0]]),
        loss="importance_sampling",
        ref_logprobs=torch.tensor([[NAN, NAN, -3.5, NAN]]),
        kl_estimator="k2",
        kl_coef=0.1,
        row_weights=torch.tensor([0.5]),
        token_weights=torch.tensor([[1.0, 0.0, 3.0, NAN]]),
        cross_entropy_weights=torch.tensor([[0.0, 4.0, 1.0, NAN]]),
        kl_weights=torch.tensor([[0.0, 0.0, 2.0, NAN]]),
        backend=backend,
    )
    out.loss.backward()
    # policy -2 and 3 * 1; cross-entropy 4 * 2 and 3; KL 0.1 * 2 * 0.5^2 / 2
    want = {
        "loss": 0.5 * (1 + 11 + 0.025), "policy_loss": 0.5, "num_tokens": 3, "policy_tokens": 2,
        "cross_entropy_loss": 5.5, "cross_entropy": 2.5, "cross_entropy_tokens": 2,
        "kl_loss": 0.125, "kl": 0.125, "kl_tokens": 1, "ratio_mean": 1, "approx_kl": 0,
    }  # fmt: skip
    for name, value in want.items():
        assert math.isclose(out.metrics[name], value, rel_tol=1e-6, abs_tol=1e-7), name
    gradient = [[-1.0, -2.0, 0.5 * (3 - 1 + 0.1 * 2 * 0.5), 0.0]]
    torch.testing.assert_close(logprobs.grad, torch.tensor(gradient), rtol=1e-6, atol=0)


@pytest.mark.spec("loss.streams")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1), (3, 33), (4, 1100)])
@pytest.mark.parametrize("loss", VARIANTS, ids=IDS)
def test_equals_float64(loss: str | LossSettings, shape: tuple[int, int], dtype: torch.dtype):
    """Value, gradient and metrics of mixed streams; nothing turns NaN."""
    d = streams(shape)
    options = {"loss": loss, "reduction": "sequence_mean"}
    if getattr(loss, "clip_ratio", 0) and dtype == torch.float32:
        options["loss"] = "regular"  # draws among other tokens where a float32 ratio is clipped
    want = run(d, torch.float64, backend="torch", **options)
    got = run(d, dtype, **options)
    close = CLOSE if dtype == torch.float32 else {"rtol": 1e-10, "atol": 1e-12}
    assert want[0].isfinite() and want[1].isfinite().all()
    torch.testing.assert_close(got[0].double(), want[0], **close)
    torch.testing.assert_close(got[1].double(), want[1], **close)
    for name, value in want[2].items():
        torch.testing.assert_close(got[2][name], value.double(), msg=name, **close)


@pytest.mark.parametrize("loss", ["regular", "gspo", "cross_entropy"])
def test_emulated_cuda(emulated_gpu: ModuleType, loss: str):
    d = streams((4, 1100))
    want = run(d, torch.float64, loss=loss, backend="torch")
    for dtype, close in ((torch.float32, CLOSE), (torch.float64, {"rtol": 1e-10, "atol": 1e-12})):
        got = run(d, dtype, loss=loss, backend="native")
        torch.testing.assert_close(got[0].double(), want[0], **close)
        torch.testing.assert_close(got[1].double(), want[1], **close)
        for name, value in want[2].items():
            torch.testing.assert_close(got[2][name], value, msg=name, **close)


def test_supervised_tokens_do_not_count_in_a_sequences_mean(backend):
    """gspo's ratio is that of the policy tokens alone."""
    d = {name: x[:, :6] for name, x in streams((3, 8)).items()}
    d["mask"][:] = True
    d["token_weights"][:] = torch.tensor([1.0, 1, 0, 1, 0, 1])
    d["old"] = torch.where(d["token_weights"] == 0, NAN, d["logprobs"] - 0.1)
    d["advantages"] = torch.where(d["token_weights"] == 0, NAN, torch.ones(()).double())
    out = run(d, torch.float32, loss="gspo", backend=backend)[2]
    assert math.isclose(out["ratio_max"], math.exp(0.1), rel_tol=1e-6)
    assert math.isclose(out["ratio_min"], math.exp(0.1), rel_tol=1e-6)


def test_custom_losses_get_the_policy_stream():
    @register_policy_loss("streams-test")
    def reinforce(inputs):
        assert not inputs.old_logprobs[inputs.loss_mask].isnan().any()
        return -inputs.advantages * inputs.logprobs

    d = streams((3, 33))
    loss, grad, metrics = run(d, torch.float32, loss=find_policy_loss("streams-test"))
    assert loss.isfinite() and grad.isfinite().all()
    assert metrics["policy_tokens"] < metrics["num_tokens"]


def test_without_the_new_weights_nothing_changes(backend):
    """Weights of zeros and ones give the loss without them, and its metrics."""
    d = batch((5, 40))
    d = {n: x for n, x in d.items()} | {"token_weights": torch.ones(5, 40)}
    zeros = {"cross_entropy_weights": torch.zeros(5, 40), "kl_weights": torch.ones(5, 40)}
    none = dict.fromkeys(zeros)
    got = run(d | zeros, torch.float32, backend=backend, **zeros)
    want = run(d | zeros, torch.float32, backend=backend, **none)
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1], want[1], rtol=1e-6, atol=1e-9)  # products in another order
    assert not {"policy_tokens", "kl_tokens", "cross_entropy"} & want[2].keys()
    for name, value in want[2].items():
        torch.testing.assert_close(got[2][name], value, rtol=1e-7, atol=0, msg=name)


def fused(
    logits: torch.Tensor, d: dict[str, torch.Tensor], **options: Any
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    leaf = logits.clone().requires_grad_()
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    d = {n: x if x.dtype == torch.bool else x.to(dtype) for n, x in d.items()}
    names = ("token_weights", "cross_entropy_weights", "kl_weights")
    out = masked_logprob_loss(
        leaf * 1, torch.arange(6) % 5, d["old"], d["advantages"], d["mask"],
        rollout_logprobs=d["rollout"], ref_logprobs=d["ref"], kl_estimator="k3", kl_coef=0.3,
        **{name: d[name] for name in names}, **options,
    )  # fmt: skip
    out.loss.backward()
    assert leaf.grad is not None
    return out.loss.detach(), leaf.grad, out.metrics


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("loss", TOKEN_LOSSES)
def test_fused_loss(gpu: str, loss: str, inplace: bool):
    d = {name: x[0] for name, x in streams((1, 6)).items()}
    d["mask"][:5] = True
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(4))
    want = fused(logits.double(), d, loss=loss, backend="torch")
    got = fused(logits, d, loss=loss, inplace_backward=inplace, backend="native")
    torch.testing.assert_close(got[0].double(), want[0], **CLOSE)
    torch.testing.assert_close(got[1].double(), want[1], **CLOSE)
    for name, value in want[2].items():
        torch.testing.assert_close(got[2][name], value.double(), msg=name, **CLOSE)


def test_wrong_weights_are_refused(backend):
    d = batch((2, 3))
    cells = (d["logprobs"], d["old"], d["advantages"], d["mask"])
    with pytest.raises(ValueError, match="kl_weights need kl_estimator"):
        policy_loss(*cells, kl_weights=d["old"], backend=backend)
    with pytest.raises(ValueError, match=r"cross_entropy_weights: expected shape \(2, 3\)"):
        policy_loss(*cells, cross_entropy_weights=d["old"][0], backend=backend)
    with pytest.raises(ValueError, match=r"kl_weights: expected shape \(2,\)"):
        masked_logprob_loss(
            torch.zeros(2, 4), torch.zeros(2).long(), None, torch.ones(2), backend=backend,
            kl_weights=torch.ones(3), kl_estimator="k1", ref_logprobs=torch.ones(2),
        )  # fmt: skip


def test_float64_inputs_have_float64_row_weights(backend):
    """1 / 3 in float32 is off by 3e-8, and so was the loss."""
    logprobs = torch.full((1, 3), -1.0, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(1, 3)
    out = policy_loss(logprobs, None, None, mask, loss="cross_entropy", backend=backend)
    out.loss.backward()
    assert math.isclose(out.loss, 1.0, rel_tol=1e-15)
    assert torch.equal(logprobs.grad, torch.full((1, 3), -1 / 3, dtype=torch.float64))
    weights = reduction_weights(mask, reduction="token_mean", dtype=torch.float64)
    assert weights.item() == 1 / 3


@pytest.mark.parametrize("fused", [False, True], ids=["policy_loss", "masked_logprob_loss"])
def test_given_float64_row_weights_stay_float64(fused, backend):
    g = torch.Generator().manual_seed(2)
    logits = torch.randn(6, 5, generator=g, dtype=torch.float64).requires_grad_()
    targets = torch.randint(0, 5, (6,), generator=g)
    advantages = torch.randn(6, generator=g, dtype=torch.float64)
    old = torch.full((6,), -1.6, dtype=torch.float64)
    weights = torch.tensor([1 / 3, 1 / 7, 1 / 11], dtype=torch.float64)
    cu_seqlens = torch.tensor([0, 1, 3, 6], dtype=torch.int32)
    options = {"row_weights": weights, "cu_seqlens": cu_seqlens, "backend": backend}
    current = logits.log_softmax(-1)[torch.arange(6), targets]
    if fused:
        out = masked_logprob_loss(logits, targets, old, advantages, **options)
    else:
        out = policy_loss(current, old, advantages, torch.ones(6), **options)
    ratio = (current - old).exp()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    want = -(surrogate * weights.repeat_interleave(torch.tensor([1, 2, 3]))).sum()
    assert abs(float(out.loss.detach() - want.detach())) <= 1e-12
    got = torch.autograd.grad(out.loss, logits, retain_graph=True)[0]
    exact = torch.autograd.grad(want, logits)[0]
    assert float((got - exact).abs().max()) <= 1e-12
