"""The Triton kernels against the references. `test_triton.py` runs this file in Triton's
interpreter on the CPU; on a GPU it is run as it is: pytest python_tests/triton_cases.py.
"""

from __future__ import annotations

import math
import os

import pytest
import torch

from skyrl_fast import linear_logprob, masked_logprob_loss, selected_logprob

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="no GPU, and TRITON_INTERPRET not set"
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FORWARD = {"rtol": 1e-6, "atol": 4e-6}  # float32 sums of logits of magnitude 15
GRADIENT = {  # half a unit in the last place of the dtype, beside float32's 4e-6
    torch.float32: {"rtol": 5e-6, "atol": 3e-7},
    # the interpreter cuts off what a device rounds
    torch.bfloat16: {"rtol": 2**-7 if INTERPRETED else 2**-8, "atol": 3e-7},
    torch.float16: {"rtol": 2**-10, "atol": 2**-23},
}


def made(rows: int, vocab: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(rows, vocab, generator=g) * 4).to(dtype)
    return logits, torch.randint(0, vocab, (rows,), generator=g)


def visited(logits: torch.Tensor, targets: torch.Tensor, **options: object) -> list[torch.Tensor]:
    leaf = logits.detach().clone().requires_grad_()
    logprob, entropy = selected_logprob(leaf * 1, targets, return_entropy=True, **options)
    weight = torch.linspace(-1, 1, targets.numel(), dtype=logprob.dtype, device=logits.device)
    ((logprob * weight).sum() + 0.3 * (entropy * weight.flip(0)).sum()).backward()
    return [t.detach().cpu().double() for t in (logprob, entropy, leaf.grad)]


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 7, 32, 33, 1000, 9001])
def test_selected_logprob(vocab: int, dtype: torch.dtype, inplace: bool) -> None:
    logits, targets = made(5, vocab, dtype)
    mask = torch.tensor([1, 0, 1, 1, 1])
    got = visited(
        logits.to(DEVICE),
        targets.to(DEVICE),
        mask=mask.to(DEVICE),
        temperature=0.7,
        inplace_backward=inplace,
        backend="triton",
    )
    want = visited(logits.double(), targets, mask=mask, temperature=0.7, backend="torch")
    torch.testing.assert_close(got[0], want[0], **FORWARD)
    torch.testing.assert_close(got[1], want[1], **FORWARD)
    torch.testing.assert_close(got[2], want[2], **GRADIENT[dtype])


def test_rows_in_two_strides() -> None:
    whole = torch.randn(2, 6, 101, generator=torch.Generator().manual_seed(1))
    logits = whole.to(DEVICE)[:, :-1, 1:]
    targets = torch.randint(0, 100, (2, 5))
    got = selected_logprob(logits, targets.to(DEVICE), backend="triton")
    want = selected_logprob(whole[:, :-1, 1:].double(), targets, backend="torch")
    torch.testing.assert_close(got.cpu().double(), want, **FORWARD)


@pytest.mark.parametrize("order", ["rising", "falling"])
def test_the_maximum_turns_up_late_or_early(order: str) -> None:
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
        logits.to(DEVICE), targets.to(DEVICE), mask=mask.to(DEVICE), backend="triton"
    ).cpu()
    torch.testing.assert_close(got[0], torch.tensor(-math.log(1001)), rtol=1e-6, atol=0)
    assert got[1] == 0 and got[2].isnan() and got[3].isnan()


LOSSES = ["regular", "dual_clip", "cispo", "rollout_is", "sapo", "dppo_tv", "dppo_kl"]
LOSSES += ["cross_entropy", "importance_sampling"]


@pytest.mark.parametrize("kl", [None, "k1", "abs", "k2", "k3"])
@pytest.mark.parametrize("loss", LOSSES)
def test_masked_loss_equals_the_native_kernel(loss: str, kl: str | None) -> None:
    rows, vocab = 8, 200
    logits, targets = made(rows, vocab)
    g = torch.Generator().manual_seed(3)
    anchor = selected_logprob(logits, targets, temperature=0.9) + torch.randn(rows, generator=g)
    cells = {
        "anchor_logprobs": anchor,
        "advantages": torch.randn(rows, generator=g) * 2,
        "loss_mask": torch.arange(rows) % 4 != 1,
        "loss_weights": torch.rand(rows, generator=g),
        "token_weights": torch.tensor([1.0, 0.5, 0.0, 1, 1, 1, 2, 1]),
        "ref_logprobs": anchor + torch.randn(rows, generator=g) * 0.5 if kl else None,
    }
    results = []
    for device, backend in ((DEVICE, "triton"), ("cpu", "native")):
        moved = {n: None if v is None else v.to(device) for n, v in cells.items()}
        leaf = logits.to(device, copy=True).requires_grad_()
        out = masked_logprob_loss(
            leaf * 1, targets.to(device), loss=loss, kl_estimator=kl, kl_coef=0.3, temperature=0.9,
            return_entropy=True, inplace=True, backend=backend, **moved,
        )  # fmt: skip
        (2 * out.loss).backward()
        assert out.entropy is not None
        results.append([t.detach().cpu() for t in (out.loss, out.logprobs, out.entropy, leaf.grad)])
    for got, want in zip(*results, strict=True):
        # log-probabilities right to 4e-6, through ratios of up to 20
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


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
