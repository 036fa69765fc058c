"""masked_logprob_loss: the same loss and gradient as log-probabilities, then the loss."""

import math
from types import ModuleType

import pytest
import torch
from _logits import assert_loss_equals, exact_loss_and_grad, loss_and_grad
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from skyrl_fast.ops.logprob.masked_loss import TOKEN_LOSSES as ALL_LOSSES
from skyrl_fast.ops.logprob.masked_loss import masked_logprob_loss
from skyrl_fast.ops.logprob.masked_loss_autograd import LossCall
from skyrl_fast.ops.logprob.reference import selected_logprob as reference_logprob
from skyrl_fast.ops.policy_loss.loss import policy_loss
from skyrl_fast.ops.policy_loss.losses import Cispo

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
        "old": logprobs + torch.randn(ROWS, generator=g) * 0.5,
        "advantages": torch.randn(ROWS, generator=g) * 2,
        "reference": logprobs + torch.randn(ROWS, generator=g) * 0.2,
        "mask": torch.tensor([1, 1, 0, 1, 1, 1, 0, 1, 1, 1, 1, 0]),
        "weights": torch.rand(ROWS, generator=g),
    }


def plain_loss(
    loss: str, logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor
) -> torch.Tensor:
    """Per-token loss by autograd, restated from the formulas of the loss's documentation."""
    ratio = (logprobs - old).exp()
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


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("loss", TOKEN_LOSSES)
def test_equals_logprob_then_loss(loss, dtype, inplace):
    c = case(dtype)
    leaf = c["logits"].clone().requires_grad_()
    x = leaf * 1
    got = masked_logprob_loss(
        x,
        c["targets"],
        c["old"],
        c["advantages"],
        loss_mask=c["mask"],
        loss=Cispo(0.2, 0.2) if loss == "cispo" else loss,
        rollout_logprobs=c["old"],
        row_weights=c["weights"],
        ref_logprobs=c["reference"],
        kl_estimator="k2",
        kl_coef=0.3,
        temperature=0.9,
        return_entropy=True,
        inplace_backward=inplace,
    )
    got.loss.backward()

    exact = c["logits"].double().requires_grad_()
    keep = c["mask"] != 0
    logprobs, entropy = reference_logprob(exact, c["targets"], keep, 0.9)
    tokens = plain_loss(loss, logprobs, c["old"].double(), c["advantages"].double())
    tokens = tokens + 0.3 * 0.5 * (logprobs - c["reference"].double()) ** 2
    want = (tokens * c["weights"].double())[keep].sum()
    want.backward()
    # float32 log-probabilities, exact to 1e-6, with ratios up to 5
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


LN2 = math.log(2)


@pytest.mark.spec("logprob.fused-metrics")
def test_metrics_by_hand(backend):
    """Log-probability -ln 2; ratios 2 (clipped, A > 0) and 1/2 (clipped, A < 0); a masked row."""
    out = masked_logprob_loss(
        torch.tensor([[3.0, 3.0], [0.0, 0.0], [math.nan, 0.0]]),
        torch.tensor([0, 1, 0]),
        torch.tensor([-2 * LN2, 0.0, math.nan]),
        torch.tensor([1.0, -1.0, 5.0]),
        loss_mask=torch.tensor([1, 1, 0]),
        row_weights=torch.tensor([0.25, 1.0, 9.0]),
        token_weights=torch.tensor([2.0, 0.5, 9.0]),
        ref_logprobs=torch.tensor([-2 * LN2, -2 * LN2, math.nan]),
        kl_estimator="k1",
        kl_coef=0.1,
        return_entropy=True,
        backend=backend,
    )
    policy = 0.25 * 2 * -1.2 + 1 * 0.5 * 0.8
    want = {
        "loss": policy + 0.1 * 1.25 * LN2,
        "policy_loss": policy,
        "kl_loss": 1.25 * LN2,
        "num_tokens": 2,
        "clip_ratio": 1,
        "clip_ratio_low": 0.5,
        "clip_ratio_high": 0.5,
        "chosen_ratio": 0,
        "ratio_mean": 1.25,
        "ratio_max": 2,
        "ratio_min": 0.5,
        "approx_kl": (2 - 1 - LN2 + 0.5 - 1 + LN2) / 2,
        "kl": LN2,
        "entropy": LN2,
    }
    assert {name: value.item() for name, value in out.metrics.items()} == pytest.approx(want)
    assert out.loss.item() == pytest.approx(want["loss"])


@st.composite
def calls(draw):
    """Draw arguments of any loss on a few rows, with random masks and weights."""
    rows, vocab = draw(st.integers(0, 6)), draw(st.integers(1, 40))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    new = lambda: torch.randn(rows, generator=g)  # noqa: E731
    logits = torch.randn(rows, vocab, generator=g) * 3
    targets = torch.randint(0, vocab, (rows,), generator=g)
    logprobs = reference_logprob(logits.double(), targets)[0].float()
    loss, kl = draw(st.sampled_from(ALL_LOSSES)), draw(st.sampled_from([None, "k1", "k2", "k3"]))
    old = logprobs + 0.4 * new()
    case = {
        "logits": logits,
        "target_ids": targets,
        "old_logprobs": old,
        "rollout_logprobs": old,
        "advantages": new(),
        "loss_mask": torch.rand(rows, generator=g) < draw(st.sampled_from([0.0, 0.5, 1.0])),
    }
    if kl is not None:
        case["ref_logprobs"] = logprobs + 0.4 * new()
    if draw(st.booleans()):
        case["row_weights"] = new().abs()
    if draw(st.booleans()):
        case["token_weights"] = new().clamp(min=0)  # half of them 0
    options = {"loss": loss, "kl_estimator": kl, "kl_coef": draw(st.sampled_from([0.0, 0.5]))}
    return case, options


@given(call=calls())
def test_random_arguments_equal_the_reference(call):
    case, options = call
    got = loss_and_grad(case, "cpu", backend="native", **options)
    # float32 log-probabilities, exact to 1e-6, with ratios and gradients up to 5
    assert_loss_equals(got, exact_loss_and_grad(case, **options), rtol=2e-5, atol=1e-5)


@given(call=calls(), order=st.integers(0, 3))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_arguments_on_an_emulated_gpu_equal_the_reference(
    emulated_gpu: ModuleType, call: tuple, order: int
):
    emulated_gpu.set_order(order)
    test_random_arguments_equal_the_reference.hypothesis.inner_test(call)


def test_metrics_equal_those_of_policy_loss():
    c = case()
    out = masked_logprob_loss(
        c["logits"],
        c["targets"],
        c["old"],
        c["advantages"],
        loss_mask=c["mask"],
        ref_logprobs=c["reference"],
        kl_estimator="k3",
    )
    column = {name: c[name][:, None] for name in ("old", "advantages", "mask", "reference")}
    loss, metrics = policy_loss(
        out.logprobs[:, None],
        column["old"],
        column["advantages"],
        column["mask"],
        ref_logprobs=column["reference"],
        kl_estimator="k3",
    )[:2]
    assert torch.equal(out.loss, loss) and out.metrics == metrics


def test_gradcheck():
    c = case(torch.float64, vocab=4)
    arguments = [c[name].double() for name in ("old", "advantages")]

    def loss(x: torch.Tensor) -> torch.Tensor:
        return masked_logprob_loss(
            x,
            c["targets"],
            *arguments,
            loss_mask=c["mask"],
            ref_logprobs=c["reference"].double(),
            kl_estimator="k3",
        ).loss

    assert torch.autograd.gradcheck(loss, c["logits"].requires_grad_())


def test_opcheck(gpu):
    c = {name: value.to(gpu) for name, value in case(torch.bfloat16).items()}
    params = [0.8, 1.2, 3.0, 1.0, 1.05, 0.2, 0.2, 0.0, 0.1]
    op = torch.ops.skyrl_fast.masked_logprob_loss.default
    mask = c["mask"].to(torch.uint8)
    for with_grad in (False, True):
        call = LossCall(
            c["targets"], mask, None, None, 0.9, 0, 4, params, c["old"], c["advantages"],
            c["reference"], None, None, None, c["weights"], with_grad, False,
        )  # fmt: skip
        torch.library.opcheck(op, (c["logits"], *call, with_grad))


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("shape", [(ROWS,), (2, ROWS // 2)])
def test_compile_fullgraph(gpu, shape, inplace):
    c = {name: value.to(gpu) for name, value in case(torch.bfloat16).items()}
    c = {name: value.view(shape + value.shape[1:]) for name, value in c.items()}

    def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = masked_logprob_loss(
            x * 1,
            c["targets"],
            c["old"],
            c["advantages"],
            loss_mask=c["mask"],
            row_weights=c["weights"],
            ref_logprobs=c["reference"],
            kl_estimator="k3",
            return_entropy=True,
            inplace_backward=inplace,
        )
        return (2 * out.loss, out.logprobs, out.entropy, *out.metrics.values())

    results = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        leaf = c["logits"].clone().requires_grad_()
        loss, *rest = function(leaf)
        loss.backward()
        results.append([loss.detach(), *rest, leaf.grad])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert results[0][-1].any()


def test_compile_without_a_gradient(gpu):
    c = {name: value.to(gpu) for name, value in case().items()}

    def step(x: torch.Tensor) -> torch.Tensor:
        return masked_logprob_loss(x, c["targets"], c["old"], c["advantages"]).loss

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(c["logits"]), step(c["logits"]))


def test_token_mean_is_the_default():
    c = case()
    mask = c["mask"]
    got = masked_logprob_loss(
        c["logits"], c["targets"], None, None, loss_mask=mask, loss="cross_entropy"
    )
    want = -(got.logprobs * mask).sum() / mask.sum()
    torch.testing.assert_close(got.loss, want, rtol=1e-6, atol=0)  # order of a float sum


def test_token_weights_do_not_apply_to_the_kl():
    c = case()
    got = masked_logprob_loss(
        c["logits"],
        c["targets"],
        c["old"],
        c["advantages"],
        row_weights=c["weights"],
        token_weights=torch.zeros(ROWS),
        ref_logprobs=c["reference"],
        kl_estimator="k1",
        kl_coef=2.0,
    )
    want = 2.0 * (c["weights"] * (got.logprobs - c["reference"])).sum()
    torch.testing.assert_close(got.loss, want, rtol=1e-5, atol=1e-6)  # order of a float sum


def test_masked_rows_are_never_read_and_clipped_rows_have_zero_gradient():
    c = case()
    c["logits"][c["mask"] == 0] = math.nan
    c["targets"][c["mask"] == 0] = -100
    c["advantages"][3] = 0.0
    c["old"][c["mask"] == 0] = math.nan
    leaf = c["logits"].requires_grad_()
    out = masked_logprob_loss(leaf, c["targets"], c["old"], c["advantages"], loss_mask=c["mask"])
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


def test_gradient_scales_with_the_loss():
    c = case()
    grads = []
    for scale in (1.0, -2.5):
        leaf = c["logits"].clone().requires_grad_()
        out = masked_logprob_loss(leaf, c["targets"], c["old"], c["advantages"])
        (out.loss * scale).backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(grads[1], grads[0] * -2.5)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
def test_float16_gradient_is_rounded_after_the_scale_of_the_loss(inplace, compiled):
    base, targets, scale = torch.randn(4, 300).half(), torch.arange(4), 65536.0  # GradScaler's
    weights = torch.full((4,), 2.0**-17)  # of a mini-batch of 131,072 tokens
    wide = base.double().requires_grad_()
    (-wide.log_softmax(-1).diagonal() * weights * scale).sum().backward()
    leaf = base.clone().requires_grad_()

    def loss(x):
        return masked_logprob_loss(
            x * 1, targets, None, torch.ones(4), row_weights=weights, inplace_backward=inplace
        ).loss

    run = torch.compile(loss, fullgraph=True, backend="aot_eager") if compiled else loss
    (run(leaf) * scale).backward()
    # One unit in the last place.
    torch.testing.assert_close(leaf.grad.double(), wide.grad, rtol=2**-10, atol=2**-24)


def test_no_gradient_is_computed_unless_required():
    c = case()
    before = c["logits"].clone()
    with torch.no_grad():
        masked_logprob_loss(
            c["logits"].requires_grad_(),
            c["targets"],
            c["old"],
            c["advantages"],
            inplace_backward=True,
        )
    assert torch.equal(c["logits"].detach(), before)


def test_in_place_backward_raises_for_other_uses_of_the_logits():
    leaf = torch.randn(2, 5, requires_grad=True)
    x = leaf * 1
    other = (x * x).sum()
    masked_logprob_loss(
        x, torch.tensor([0, 1]), None, None, loss="cross_entropy", inplace_backward=True
    )
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


def test_second_backward_is_refused():
    logits = torch.zeros(1, 3, requires_grad=True)
    loss = masked_logprob_loss(logits, torch.tensor([0]), None, None, loss="cross_entropy").loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward"):
        loss.backward()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss": "gspo"}, "full sequence or batch"),
        ({"loss": "clip_cov"}, "full sequence or batch"),
        ({"loss": "ppo"}, "loss: expected one of"),
        ({"kl_estimator": "k9"}, "kl_estimator: expected one of"),
        ({"kl_estimator": "k3"}, "needs ref_logprobs"),
        ({"advantages": None}, "needs advantages"),
        ({"advantages": torch.zeros(3)}, "advantages: expected shape"),
        ({"row_weights": torch.zeros(1)}, "row_weights: expected shape"),
        (
            {"target_ids": torch.tensor([0, 5])},
            r"masked_logprob_loss: target_ids: expected ids in \[0, 5\)",
        ),
        ({"logits": torch.zeros(2, 5).int()}, "float32, bfloat16, float16 or float64"),
        ({"temperature": 0.0}, "temperature: expected a positive"),
    ],
)
def test_invalid_arguments(change, message):
    arguments = {
        "logits": torch.zeros(2, 5),
        "target_ids": torch.tensor([0, 1]),
        "old_logprobs": torch.zeros(2),
        "advantages": torch.zeros(2),
    }
    with pytest.raises(ValueError, match=message):
        masked_logprob_loss(**(arguments | change))
