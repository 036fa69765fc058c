"""linear_logprob. M rows, V vocab, H hidden."""

import math
from typing import Any

import pytest
import torch
from torch.autograd import gradcheck
from torch.utils._python_dispatch import TorchDispatchMode

from skyrl_fast.ops import _backend
from skyrl_fast.ops.logprob import linear_rows
from skyrl_fast.ops.logprob.linear import linear_logprob


def linear_case(
    dtype: torch.dtype, rows: int = 23, hidden: int = 8, vocab: int = 61
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(3)
    h = torch.randn(rows, hidden, generator=g).to(dtype)
    w = torch.randn(vocab, hidden, generator=g).to(dtype)
    mask = torch.rand(rows, generator=g) < 0.7
    return h, w, torch.randint(0, vocab, (rows,), generator=g), mask


def run_linear(
    h: torch.Tensor, w: torch.Tensor, targets: torch.Tensor, **options: object
) -> list[torch.Tensor]:
    h, w = h.clone().requires_grad_(), w.clone().requires_grad_()
    logprob, entropy = linear_logprob(h, w, targets, return_entropy=True, **options)
    weight = torch.linspace(-1, 1, targets.numel(), dtype=logprob.dtype)
    ((logprob * weight).sum() + 0.2 * (entropy * weight).sum()).backward()
    return [logprob.detach(), entropy.detach(), h.grad, w.grad]


@pytest.mark.parametrize("chunk_rows", [None, 1, 4, 16, 100])
def test_linear_equals_reference(chunk_rows, backend):
    h, w, targets, mask = linear_case(torch.float32)
    options = {"loss_mask": mask, "temperature": 0.7}
    got = run_linear(h, w, targets, chunk_rows=chunk_rows, backend=backend, **options)
    want = run_linear(h.double(), w.double(), targets, backend="torch", **options)
    for a, b in zip(got, want, strict=True):
        # Logits are sums of eight float32 products of magnitude up to 10.
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


def test_linear_bfloat16_accumulates_in_float32():
    h, w, targets, mask = linear_case(torch.bfloat16, rows=400)
    got = run_linear(h, w, targets, loss_mask=mask, chunk_rows=10)
    exact_result = run_linear(h.double(), w.double(), targets, loss_mask=mask, backend="torch")
    one_chunk = run_linear(h, w, targets, loss_mask=mask)
    assert got[0].dtype == torch.float32 and got[3].dtype == torch.bfloat16
    # The logits, of magnitude 10, are rounded to bfloat16: 2^-9 of each.
    torch.testing.assert_close(got[0].double(), exact_result[0], rtol=0, atol=0.1)
    # Only the last rounding to bfloat16 may differ; eight chunks summed in it would differ by more.
    for chunks, full in zip(got[2:], one_chunk[2:], strict=True):
        torch.testing.assert_close(chunks, full, rtol=2**-7, atol=1e-5)


def test_linear_never_reads_masked_rows(backend):
    h, w, targets, mask = linear_case(torch.float32)
    h[~mask] = math.nan
    targets[~mask] = -100
    got = run_linear(h, w, targets, loss_mask=mask, chunk_rows=4, backend=backend)
    assert torch.equal(got[0][~mask], torch.zeros(int((~mask).sum())))
    assert torch.equal(got[2][~mask], torch.zeros_like(h[~mask]))
    assert all(x.isfinite().all() for x in got)


def test_linear_all_masked_stays_connected(backend):
    h, w, targets, mask = linear_case(torch.float32)
    got = run_linear(h, w, targets, loss_mask=mask & False, backend=backend)
    assert all(torch.equal(x, torch.zeros_like(x)) for x in got)


def test_linear_keeps_leading_shape(backend):
    h, w, targets, mask = linear_case(torch.float32, rows=24)
    got = linear_logprob(
        h.view(2, 12, 8), w, targets.view(2, 12), loss_mask=mask.view(2, 12), backend=backend
    )
    want = linear_logprob(h, w, targets, loss_mask=mask, backend=backend)
    assert torch.equal(got, want.view(2, 12))


def test_linear_computes_only_required_gradients():
    h, w, targets, _ = linear_case(torch.float32)
    for chunk_rows in (None, 5):
        frozen = linear_logprob(h.requires_grad_(), w, targets, chunk_rows=chunk_rows)
        (grad,) = torch.autograd.grad(frozen.sum(), h)
        want = torch.autograd.grad(linear_logprob(h, w, targets, backend="torch").sum(), h)[0]
        torch.testing.assert_close(grad, want, rtol=1e-5, atol=1e-5)  # float32 products


def test_linear_backward_twice():
    h, w, targets, _ = linear_case(torch.float32)
    logprob = linear_logprob(h.requires_grad_(), w, targets).sum()
    (first,) = torch.autograd.grad(logprob, h, retain_graph=True)
    (second,) = torch.autograd.grad(logprob, h)
    assert torch.equal(first, second)


def test_linear_gradcheck():
    h, w, targets, mask = linear_case(torch.float64, rows=4, hidden=3, vocab=5)
    arguments = (h.requires_grad_(), w.requires_grad_())
    assert gradcheck(lambda a, b: linear_logprob(a, b, targets, loss_mask=mask), arguments)


def test_linear_never_materializes_all_logits(monkeypatch):
    h, w, targets, _ = linear_case(torch.float32, rows=64)
    shapes = []
    monkeypatch.setattr(
        _backend, "empty", lambda shape, *_: shapes.append(tuple(shape)) or torch.empty(shape)
    )
    run_linear(h, w, targets, chunk_rows=16)
    # rows forward; 8 columns of all rows backward, and the weight's gradient
    assert shapes == [(16, 61), (64 * 8,), (61, 8)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(5, 3)}, r"lm_head_weight: expected \(V, 4\)"),
        ({"weight": torch.zeros(5, 4).bfloat16()}, "lm_head_weight: expected"),
        ({"weight": torch.zeros(4)}, "V >= 1"),
        ({"targets": torch.tensor([0, 5])}, r"target_ids: expected ids in \[0, 5\)"),
        ({"targets": torch.tensor([0])}, "target_ids: expected shape"),
        ({"chunk_rows": 0}, "chunk_rows: expected at least 1"),
        ({"temperature": 0.0}, "temperature: expected a positive"),
    ],
)
def test_linear_invalid_arguments(change, message):
    arguments = {"weight": torch.zeros(5, 4), "targets": torch.tensor([0, 1])}
    arguments.update(change)
    weight, targets = arguments.pop("weight"), arguments.pop("targets")
    with pytest.raises(ValueError, match=message):
        linear_logprob(torch.zeros(2, 4), weight, targets, **arguments)


HEADS = {
    "bias": {"bias": True},
    "scale": {"logit_scale": 0.25},
    "scale above 1": {"logit_scale": 2.0, "bias": True},
    "cap": {"soft_cap": 5.0},
    "all": {"bias": True, "logit_scale": 1.5, "soft_cap": 7.0},
}


def run_head(
    h: torch.Tensor, w: torch.Tensor, b: torch.Tensor, targets: torch.Tensor, **options: object
) -> list[torch.Tensor]:
    """Return log-probabilities, entropies and the gradients of hidden, weight and bias."""
    h, w, b = (x.clone().requires_grad_() for x in (h, w, b))
    has_bias = options.pop("bias", False)
    logprob, entropy = linear_logprob(
        h, w, targets, bias=b if has_bias else None, return_entropy=True, **options
    )
    weight = torch.linspace(-1, 1, targets.numel(), dtype=logprob.dtype)
    ((logprob * weight).sum() + 0.2 * (entropy * weight).sum()).backward()
    return [logprob.detach(), entropy.detach(), h.grad, w.grad, *([b.grad] if has_bias else [])]


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize(
    "chunk_rows",
    [None, pytest.param(1, marks=pytest.mark.slow), 4, pytest.param(100, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("kept", [False, True])
def test_bias_scale_and_soft_cap_equal_the_reference(head, chunk_rows, kept, backend):
    h, w, targets, mask = linear_case(torch.float32)
    b = torch.linspace(-2, 2, len(w))
    options = {"loss_mask": mask, "temperature": 0.7, **HEADS[head]}
    if kept:
        sets = [sorted({t, (t + 3) % 61, (5 * t) % 61}) for t in targets.tolist()]
        options["kept_ids"] = torch.tensor([i for ids in sets for i in ids], dtype=torch.int32)
        lengths = torch.tensor([0, *map(len, sets)])
        options["cu_kept"] = lengths.cumsum(0)
    got = run_head(h, w, b, targets, chunk_rows=chunk_rows, backend=backend, **options)
    doubles = (x.double() for x in (h, w, b))
    want = run_head(*doubles, targets, backend="torch", **options)
    for a, e in zip(got, want, strict=True):
        # Logits are sums of eight float32 products of magnitude up to 10, doubled.
        torch.testing.assert_close(a.double(), e, rtol=2e-5, atol=5e-5)


@pytest.mark.spec("logprob.head")
def test_soft_cap_in_bfloat16():
    h, w, targets, mask = linear_case(torch.bfloat16, rows=200)
    b = torch.zeros(len(w), dtype=torch.bfloat16)
    options = {"loss_mask": mask, "soft_cap": 5.0}
    got = run_head(h, w, b, targets, chunk_rows=16, **options)
    doubles = (x.double() for x in (h, w, b))
    want = run_head(*doubles, targets, backend="torch", **options)
    # Logits up to 5 rounded to bfloat16, before and after the tanh: 2^-9 of each.
    torch.testing.assert_close(got[0].double(), want[0], rtol=0, atol=0.06)
    for a, e in zip(got[2:], want[2:], strict=True):
        assert float((a.double() - e).norm() / e.norm()) < 0.02


@pytest.mark.spec("logprob.head")
def test_gradcheck_with_bias_and_cap():
    h, w, targets, mask = linear_case(torch.float64, rows=4, hidden=3, vocab=5)
    arguments = [x.requires_grad_() for x in (h, w, torch.linspace(-1, 1, 5).double())]

    def call(h, w, b):
        options = {"loss_mask": mask, "soft_cap": 2.0, "logit_scale": 0.5}
        return linear_logprob(h, w, targets, bias=b, **options)

    assert gradcheck(call, arguments)


def test_rows_of_ignored_targets_are_masked(backend):
    h, w, targets, mask = linear_case(torch.float32)
    ignored = targets.masked_fill(~mask, -100)
    h[~mask] = math.nan
    got = run_linear(h, w, ignored, ignore_index=-100, backend=backend)
    want = run_linear(h, w, targets, loss_mask=mask, backend=backend)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    both = run_linear(h, w, ignored, ignore_index=-100, loss_mask=mask.float(), backend=backend)
    assert all(torch.equal(a, b) for a, b in zip(both, want, strict=True))
    with pytest.raises(ValueError, match="target_ids"):
        linear_logprob(h, w, ignored, backend=backend)


@pytest.mark.parametrize("kinds", [("float32", "float32"), ("bfloat16", "float32")])
def test_autocast_converts_operands_as_linear_does(kinds):
    h, w, targets, _ = linear_case(torch.float32)
    h, w = h.to(getattr(torch, kinds[0])), w.to(getattr(torch, kinds[1]))
    with torch.autocast("cpu", torch.bfloat16):
        got = run_linear(h, w, targets)
        logits = torch.nn.functional.linear(h, w)
    assert logits.dtype == torch.bfloat16
    want = run_linear(h.bfloat16(), w.bfloat16(), targets)
    assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(got, want, strict=True))
    assert got[2].dtype == h.dtype and got[3].dtype == w.dtype


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bias": torch.zeros(3)}, r"bias: expected \(61,\) torch.float32, got \(3,\)"),
        (
            {"bias": torch.zeros(61).double()},
            r"bias: expected \(61,\) torch.float32, got .*float64",
        ),
        ({"bias": [0.0]}, "bias: expected a torch tensor or None, got list"),
        ({"logit_scale": 0.0}, "logit_scale: expected a positive number"),
        ({"logit_scale": math.nan}, "logit_scale: expected a positive number"),
        ({"soft_cap": -1.0}, "soft_cap: expected a positive number"),
        (
            {"soft_cap": 1e9},
            "soft_cap: expected a positive number, with temperature / soft_cap from 1e-06",
        ),
    ],
)
def test_invalid_head_is_named(change, message):
    h, w, targets, _ = linear_case(torch.float32)
    with pytest.raises((ValueError, TypeError), match=message):
        linear_logprob(h, w, targets, **change)


@pytest.mark.parametrize("chunk_rows", [None, 5])
def test_metrics_see_the_logits_of_every_chunk(chunk_rows):
    h, w, targets, mask = linear_case(torch.float32)
    options = {"temperature": 0.7, "soft_cap": 5.0, "logit_scale": 2.0}
    seen = []

    def note(start: int, values: torch.Tensor, divisor: float) -> None:
        assert start == sum(len(chunk) for chunk in seen)
        seen.append((values / divisor).clone())

    linear_logprob(h, w, targets, loss_mask=mask, chunk_rows=chunk_rows, on_logits=note, **options)
    want = 5.0 * torch.tanh(h[mask] @ w.T * 2.0 / 5.0) / 0.7
    torch.testing.assert_close(torch.cat(seen), want, rtol=1e-5, atol=1e-5)  # float32 products
    for change in ({"backend": "torch"}, {"kept_ids": torch.zeros(0, dtype=torch.int32)}):
        if "kept_ids" in change:
            change["cu_kept"] = torch.zeros(len(h) + 1, dtype=torch.int64)
        with pytest.raises(ValueError, match="on_logits needs a kernel and no kept sets"):
            linear_logprob(h, w, targets, loss_mask=mask, on_logits=note, **change)


class Products(TorchDispatchMode):
    """Count matrix products of M x H x V."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.multiplied = size, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Run one operation, counted if it is a product."""
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "addmm_"):
            a, b = args[-2:]
            self.multiplied += a.shape[0] * a.shape[1] * b.shape[1]
        return func(*args, **(kwargs or {}))

    @property
    def number(self) -> float:
        """Of products of all rows, the hidden size and the vocabulary."""
        return self.multiplied / self.size


@pytest.mark.spec("logprob.saved-logits")
@pytest.mark.usefixtures("emulated_gpu")
@pytest.mark.parametrize("rows", [1, 33, 257])
def test_saved_logits_spare_a_product(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, whose chunks have 128 rows here."""
    monkeypatch.setattr(linear_rows, "GPU_CHUNK_BYTES", 1)
    h, w, targets, _ = linear_case(torch.float32, rows=rows)
    want = run_linear(h.double(), w.double(), targets, backend="torch")
    row_bytes, size = 61 * 4, rows * 61 * 8
    for saved, products in ((0, 4), (rows * row_bytes - 1, 4), (rows * row_bytes, 3)):
        with Products(size) as counted:
            got = run_linear(h, w, targets, saved_logits_bytes=saved)
        assert counted.number == (products if rows > 128 else 3)
        for a, b in zip(got, want, strict=True):
            # logits are sums of eight float32 products of magnitude up to 10, gradients of 257 rows
            torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=2e-5)


@pytest.mark.spec("logprob.saved-logits")
@pytest.mark.usefixtures("emulated_gpu")
def test_nothing_is_saved_without_a_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_rows, "GPU_CHUNK_BYTES", 1)
    h, w, targets, _ = linear_case(torch.float32, rows=257)
    shapes: list[tuple[int, ...]] = []
    monkeypatch.setattr(
        _backend, "empty", lambda shape, *_: shapes.append(tuple(shape)) or torch.empty(shape)
    )
    linear_logprob(h, w, targets, saved_logits_bytes=1 << 40)
    with torch.no_grad():
        linear_logprob(h.requires_grad_(), w, targets, saved_logits_bytes=1 << 40)
    linear_logprob(h, w, targets, saved_logits_bytes=1 << 40)
    assert shapes == [(128, 61), (128, 61), (257, 61)]
