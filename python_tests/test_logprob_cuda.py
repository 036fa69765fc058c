"""selected_logprob on a GPU, held to the float64 reference: docs/spec.md section 6."""

from __future__ import annotations

import pytest
import torch

from skyrl_fast import selected_logprob
from skyrl_fast.ops.reference import logprob as reference

pytestmark = pytest.mark.gpu

# Forward error is that of float32 sums over the vocabulary; gradients are rounded to the dtype.
FORWARD_TOLERANCE = 2e-5
GRADIENT_TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


@pytest.mark.parametrize("dtype", list(GRADIENT_TOLERANCE))
@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 1000, 32001, 151_936])
@pytest.mark.parametrize("inplace", [False, True])
def test_forward_and_backward(dtype: torch.dtype, vocab: int, inplace: bool) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(9, vocab, generator=generator) * 4).to(dtype)
    targets = torch.randint(0, vocab, (9,), generator=generator)
    mask = torch.tensor([1, 1, 0, 1, 1, 1, 0, 1, 1])
    exact = logits.double().requires_grad_()
    want, want_entropy = reference.selected_logprob(exact, targets, mask, 0.7)
    (want.sum() + 0.3 * want_entropy.sum()).backward()

    leaf = logits.cuda().requires_grad_()
    got, entropy = selected_logprob(
        leaf * 1,
        targets.cuda(),
        mask=mask.cuda(),
        temperature=0.7,
        return_entropy=True,
        inplace_backward=inplace,
    )
    (got.sum() + 0.3 * entropy.sum()).backward()
    torch.testing.assert_close(got.cpu().double(), want.detach(), atol=FORWARD_TOLERANCE, rtol=1e-5)
    torch.testing.assert_close(entropy.cpu().double(), want_entropy.detach(), atol=1e-4, rtol=1e-4)
    tolerance = GRADIENT_TOLERANCE[dtype]
    torch.testing.assert_close(leaf.grad.cpu().double(), exact.grad, atol=tolerance, rtol=tolerance)


def test_masked_rows_are_not_read() -> None:
    logits = torch.zeros(3, 64, device="cuda")
    logits[1] = float("nan")
    got = selected_logprob(
        logits, torch.tensor([0, -100, 1]).cuda(), mask=torch.tensor([1, 0, 1]).cuda()
    )
    torch.testing.assert_close(got.cpu(), torch.tensor([-4.1588831, 0.0, -4.1588831]))


def test_rows_with_two_strides_and_a_misaligned_start() -> None:
    whole = torch.randn(2, 6, 101, device="cuda")
    logits = whole[:, :-1, 1:]
    targets = torch.randint(0, 100, (2, 5), device="cuda")
    got = selected_logprob(logits, targets)
    want = logits.double().log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1)
    torch.testing.assert_close(got.double(), want, atol=FORWARD_TOLERANCE, rtol=1e-5)


def test_a_target_out_of_range_is_nan() -> None:
    got = selected_logprob(torch.zeros(2, 8, device="cuda"), torch.tensor([8, 1]).cuda())
    assert got.isnan().tolist() == [True, False]


def test_same_bits_on_another_stream_and_again() -> None:
    logits = torch.randn(64, 32_000, device="cuda", dtype=torch.bfloat16)
    targets = torch.randint(0, 32_000, (64,), device="cuda")
    want = selected_logprob(logits, targets)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        got = [selected_logprob(logits, targets) for _ in range(20)]
    stream.synchronize()
    assert all(torch.equal(want, g) for g in got)
