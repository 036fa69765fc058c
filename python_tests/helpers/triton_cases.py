"""The Triton kernels against the references. `test_triton.py` runs this file in Triton's
interpreter on the CPU; on a GPU it is run as it is: pytest python_tests/helpers/triton_cases.py.
"""

import itertools
import math
import os

import pytest
import torch
from _logits import assert_loss_equals, exact_loss_and_grad, loss_and_grad, loss_case, made, visited

from skyrl_fast import linear_logprob, masked_logprob_loss, selected_logprob
from skyrl_fast.integrations.skyrl.logprobs import logprobs_from_logits
from skyrl_fast.ops import _backend
from skyrl_fast.ops.logprob.masked_loss import TOKEN_LOSSES
from skyrl_fast.ops.policy_loss.losses import Dppo, LossSettings

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="no GPU, and TRITON_INTERPRET not set"
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FORWARD = {"rtol": 1e-6, "atol": 4e-6}  # float32 sums of logits of magnitude 15
GRADIENT = {  # half a unit in the last place of the dtype, plus float32's 4e-6
    torch.float32: {"rtol": 5e-6, "atol": 3e-7},
    # the interpreter truncates where a device rounds
    torch.bfloat16: {"rtol": 2**-7 if INTERPRETED else 2**-8, "atol": 3e-7},
    torch.float16: {"rtol": 2**-10, "atol": 2**-23},
}


SELECTED = list(itertools.product([1, 7, 32, 33, 1000, 9001], DTYPES, [False, True]))


def in_default_run(vocab: int, dtype: torch.dtype, inplace: bool) -> bool:
    """Return whether it is: every size in float32, the others where a block is not full."""
    return inplace == (dtype != torch.float32) and (dtype == torch.float32 or vocab in (33, 9001))


@pytest.mark.parametrize(
    ("vocab", "dtype", "inplace"),
    [
        pytest.param(*case, marks=() if in_default_run(*case) else pytest.mark.slow)
        for case in SELECTED
    ],
)
def test_selected_logprob(vocab: int, dtype: torch.dtype, inplace: bool) -> None:
    logits, targets = made(5, vocab, dtype)
    mask = torch.tensor([1, 0, 1, 1, 1])
    got = visited(
        logits.to(DEVICE),
        targets.to(DEVICE),
        loss_mask=mask.to(DEVICE),
        temperature=0.7,
        inplace_backward=inplace,
        backend="triton",
    )
    want = visited(logits.double(), targets, loss_mask=mask, temperature=0.7, backend="torch")
    for g, w, close in zip(got, want, (FORWARD, FORWARD, GRADIENT[dtype]), strict=True):
        torch.testing.assert_close(g.cpu().double(), w, **close)


def test_rows_in_two_strides() -> None:
    full = torch.randn(2, 6, 101, generator=torch.Generator().manual_seed(1))
    logits = full.to(DEVICE)[:, :-1, 1:]
    targets = torch.randint(0, 100, (2, 5))
    got = selected_logprob(logits, targets.to(DEVICE), backend="triton")
    want = selected_logprob(full[:, :-1, 1:].double(), targets, backend="torch")
    torch.testing.assert_close(got.cpu().double(), want, **FORWARD)


@pytest.mark.parametrize("order", ["rising", "falling"])
def test_maximum_is_found_early_or_late(order: str) -> None:
    row = torch.linspace(-80, 80, 9001)
    row = row if order == "rising" else row.flip(0)
    got = selected_logprob(
        row[None].to(DEVICE), torch.tensor([500], device=DEVICE), return_entropy=True,
        backend="triton",
    )  # fmt: skip
    want = selected_logprob(
        row[None].double(), torch.tensor([500]), return_entropy=True, backend="torch"
    )
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g.cpu().double(), w, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_inf_give_nan(value: float) -> None:
    logits = torch.zeros(2, 9001)
    logits[1, 5000] = value
    got = selected_logprob(logits.to(DEVICE), torch.tensor([1, 2], device=DEVICE), backend="triton")
    assert got.isnan().tolist() == [False, True]


def test_minus_inf_masked_rows_and_bad_targets() -> None:
    logits = torch.zeros(4, 9001)
    logits[0, :8000] = -math.inf
    logits[1] = math.nan
    logits[3] = -math.inf
    targets, mask = torch.tensor([8500, -100, 9001, 0]), torch.tensor([1, 0, 1, 1])
    got = selected_logprob(
        logits.to(DEVICE), targets.to(DEVICE), loss_mask=mask.to(DEVICE), backend="triton"
    ).cpu()
    torch.testing.assert_close(got[0], torch.tensor(-math.log(1001)), rtol=1e-6, atol=0)
    assert got[1] == 0 and got[2].isnan() and got[3].isnan()


LOSSES = [*TOKEN_LOSSES, Dppo(dppo_type="binary_kl")]
PENALTIES = (None, "k1", "abs", "k2", "k3")
# In the default run each loss has one penalty, and each penalty two losses or more.
PAIRS = [
    pytest.param(loss, kl, marks=() if n % 5 == k else pytest.mark.slow)
    for n, loss in enumerate(LOSSES)
    for k, kl in enumerate(PENALTIES)
]


@pytest.mark.parametrize(("loss", "kl"), PAIRS)
def test_masked_loss_equals_the_reference(loss: str | LossSettings, kl: str | None) -> None:
    case = loss_case(200, rows=8)
    case["token_weights"] = torch.tensor([1.0, 0.5, 0.0, 1, 1, 1, 2, 1])
    options = {"loss": loss, "kl_estimator": kl, "kl_coef": 0.3}
    got = loss_and_grad(case, DEVICE, backend="triton", **options)
    # log-probabilities exact to 4e-6, with ratios up to 3
    assert_loss_equals(got, exact_loss_and_grad(case, **options), rtol=3e-5, atol=6e-6)


@pytest.mark.slow  # as the native backend does it, by the same operator
def test_masked_loss_compile_fullgraph() -> None:
    case = {name: value.to(DEVICE) for name, value in loss_case(40).items()}
    logits = case.pop("logits")

    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = masked_logprob_loss(x, **case, backend="triton")
        return out.loss, out.metrics["clip_ratio"]

    results = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        leaf = logits.clone().requires_grad_()
        loss, clip_ratio = function(leaf)
        (3 * loss).backward()
        results.append((loss.detach(), clip_ratio, leaf.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_masked_loss_without_gradient() -> None:
    logits, targets = made(3, 100, torch.bfloat16)
    with torch.no_grad():
        out = masked_logprob_loss(
            logits.to(DEVICE), targets.to(DEVICE), None, None, loss="cross_entropy",
            backend="triton",
        )  # fmt: skip
    want = -selected_logprob(logits.double(), targets, backend="torch").mean()
    torch.testing.assert_close(out.loss.cpu().double(), want, rtol=1e-5, atol=0)


def test_linear_logprob() -> None:
    g = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(7, 16, generator=g), torch.randn(50, 16, generator=g)
    targets = torch.randint(0, 50, (7,), generator=g)
    results = []
    for device, backend in ((DEVICE, "triton"), ("cpu", "torch")):
        h = hidden.to(device, copy=True).requires_grad_()
        w = weight.to(device, copy=True).requires_grad_()
        linear_logprob(h, w, targets.to(device), chunk_rows=3, backend=backend).sum().backward()
        results.append((h.grad.cpu(), w.grad.cpu()))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)  # sums of 50 and 7 products


def test_no_rows() -> None:
    logits = torch.zeros(0, 8, device=DEVICE, requires_grad=True)
    targets = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    selected_logprob(logits, targets, backend="triton").sum().backward()
    assert logits.grad.shape == (0, 8)


KEPT_SIZES = (1, 2, 31, 33, 5000, 9001, 0, 7)


def kept_case(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(0)
    logits = (torch.randn(8, 9001, generator=g) * 4).to(dtype)
    sets = [torch.randperm(9001, generator=g)[:size].sort().values for size in KEPT_SIZES]
    targets = torch.tensor([int(s[len(s) // 2]) if len(s) else 7 for s in sets])
    cu = torch.tensor([0, *KEPT_SIZES]).cumsum(0)
    return logits, targets, {"kept_ids": torch.cat(sets).int(), "cu_kept": cu}


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_kept_sets(dtype: torch.dtype, inplace: bool) -> None:
    logits, targets, kept = kept_case(dtype)
    mask = torch.tensor([1, 1, 0, 1, 1, 1, 1, 1])
    moved = {name: value.to(DEVICE) for name, value in kept.items()}
    options = {"temperature": 0.7, "inplace_backward": inplace, "backend": "triton"}
    got = visited(
        logits.to(DEVICE), targets.to(DEVICE), loss_mask=mask.to(DEVICE), **moved, **options
    )
    want = visited(
        logits.double(), targets, loss_mask=mask, temperature=0.7, backend="torch", **kept
    )
    for g, w, close in zip(got, want, (FORWARD, FORWARD, GRADIENT[dtype]), strict=True):
        torch.testing.assert_close(g.cpu().double(), w, **close)


def stream_case(device: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Tokens of one stream, of several, and of none; NaN where a stream does not read."""
    g = torch.Generator().manual_seed(1)
    weights = {
        "token_weights": [1.0, 0.0, 2.0, 0.0, 1.0, 0.5, 0.0, 1.0],
        "cross_entropy_weights": [0.0, 1.0, 0.5, 0.0, 0.0, 0.0, 2.0, 1.0],
        "kl_weights": [1.0, 0.0, 0.0, 2.0, 1.0, 0.5, 1.0, 0.0],
    }
    case = {name: torch.tensor(value) for name, value in weights.items()}
    for name in ("old_logprobs", "advantages", "ref_logprobs"):
        case[name] = torch.randn(8, generator=g) - 2.0
        of = "kl_weights" if name == "ref_logprobs" else "token_weights"
        case[name][case[of] == 0] = math.nan
    return {name: value.to(device, dtype) for name, value in case.items()}


@pytest.mark.parametrize("loss", ["regular", "cispo", "cross_entropy"])
@pytest.mark.parametrize("with_sets", [False, True])
def test_streams_of_the_fused_loss(with_sets: bool, loss: str) -> None:
    logits, targets, kept = kept_case(torch.float32)

    def run(device: str, dtype: torch.dtype, backend: str) -> list[torch.Tensor]:
        leaf = logits.to(device, dtype, copy=True).requires_grad_()
        sets = {n: v.to(device) for n, v in kept.items()} if with_sets else {}
        out = masked_logprob_loss(
            leaf, targets.to(device), loss=loss, kl_estimator="k3", kl_coef=0.3, backend=backend,
            **stream_case(device, dtype), **sets,
        )  # fmt: skip
        out.loss.backward()
        metrics = torch.stack([out.metrics[name] for name in sorted(out.metrics)])
        return [x.detach().cpu().double() for x in (out.loss, metrics, leaf.grad)]

    got = run(DEVICE, torch.float32, "triton")
    want = run("cpu", torch.float64, "torch")
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-5, atol=4e-6)


@pytest.mark.spec("dropin.compat")
@pytest.mark.parametrize("dtype", DTYPES)
def test_skyrl_drop_in_takes_triton_where_no_kernel_is_compiled(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(_backend, "_usable", lambda *arguments: ("triton", "torch"))
    monkeypatch.setattr(_backend, "on_gpu", lambda tensor: True)
    logits, targets = made(6, 301, dtype)
    leaf = logits.to(DEVICE).requires_grad_()
    rows = (leaf * 1).view(2, 3, 301)
    got = logprobs_from_logits(rows, targets.view(2, 3).to(DEVICE))
    exact = logits.detach().double().requires_grad_()
    want = selected_logprob(exact, targets, backend="torch")
    torch.testing.assert_close(
        got.cpu().view(-1), want.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=4e-6
    )
    got.sum().backward()
    want.sum().backward()
    torch.testing.assert_close(leaf.grad.cpu().double(), exact.grad, **GRADIENT[dtype])
    assert torch.equal(rows.detach().view(-1, 301), leaf.grad)  # over the logits, as SkyRL's
