"""selected_logprob and masked_logprob_loss on a GPU, and their kernels emulated on the CPU."""

import math
import re
from types import ModuleType
from typing import Any

import pytest
import torch
from _logits import assert_loss_equals, exact_loss_and_grad, loss_and_grad, loss_case, made, visited
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from skyrl_fast import _C, linear_logprob, masked_logprob_loss, selected_logprob
from skyrl_fast.ops.logprob import linear as linear_module
from skyrl_fast.ops.logprob import reference
from skyrl_fast.ops.logprob.masked_loss import TOKEN_LOSSES
from skyrl_fast.ops.policy_loss.losses import Dppo

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Float32 sums per thread, combined in float32, of logits of magnitude 15; logs in float64.
FORWARD = {"rtol": 1e-6, "atol": 4e-6}
# Gradients are at most 1 / temperature here, rounded to the dtype: half a unit in the last place,
# plus float32's 4e-6. A probability near 1 may be off by two units of the device's 2^x, 2.4e-7,
# and its gradient by that over the smallest temperature, 0.7, with more for the entropy's part.
GRADIENT = {
    torch.float32: {"rtol": 4e-6, "atol": 6e-7},
    torch.bfloat16: {"rtol": 2**-8, "atol": 6e-7},
    torch.float16: {"rtol": 2**-10, "atol": 6e-7},
}
VOCABS = [1, 2, 7, 8, 31, 32, 33, 127, 1000, 2049, 9001, 16_384]


def exact(logits: torch.Tensor, targets: torch.Tensor, **options: object) -> list[torch.Tensor]:
    return visited(logits.double(), targets, backend="torch", **options)


def compare(got: list[torch.Tensor], want: list[torch.Tensor], dtype: torch.dtype) -> None:
    for name, g, w in zip(("logprob", "entropy"), got, want, strict=False):
        torch.testing.assert_close(
            g.cpu().double(), w, **FORWARD, msg=lambda m, n=name: f"{n}: {m}"
        )
    torch.testing.assert_close(got[2].cpu().double(), want[2], **GRADIENT[dtype])


@pytest.mark.spec("logprob.formula")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("vocab", "inplace"),
    [(vocab, False) for vocab in VOCABS]
    + [
        pytest.param(vocab, True, marks=() if number % 4 == 0 else pytest.mark.slow)
        for number, vocab in enumerate(VOCABS)
    ],
)
def test_equals_reference(gpu: str, dtype: torch.dtype, vocab: int, inplace: bool) -> None:
    logits, targets = made(6, vocab, dtype)
    mask = torch.tensor([1, 1, 0, 1, 1, 0])
    options = {"loss_mask": mask.to(gpu), "temperature": 0.7}
    got = visited(logits.to(gpu), targets.to(gpu), inplace_backward=inplace, **options)
    compare(got, exact(logits, targets, loss_mask=mask, temperature=0.7), dtype)
    assert torch.equal(got[2].cpu()[mask == 0], torch.zeros(2, vocab, dtype=dtype))


@given(
    vocab=st.integers(1, 700),
    outer=st.integers(1, 3),
    inner=st.integers(0, 4),
    start=st.integers(0, 9),
    gap=st.integers(0, 9),
    dtype=st.sampled_from(DTYPES),
    order=st.integers(0, 4),
    seed=st.integers(0, 2**20),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_strides_and_alignments(
    emulated_gpu: ModuleType,
    vocab: int,
    outer: int,
    inner: int,
    start: int,
    gap: int,
    dtype: torch.dtype,
    order: int,
    seed: int,
) -> None:
    """Rows at any offset, with NaN before, between and after them; threads in any order."""
    emulated_gpu.set_order(order)
    values, targets = made(outer * inner, vocab, dtype, seed)
    memory = torch.full((start + outer * (inner + 1) * (vocab + gap),), math.nan, dtype=dtype)
    logits = memory.as_strided(
        (outer, inner, vocab), ((inner + 1) * (vocab + gap), vocab + gap, 1), start
    )
    logits.copy_(values.view(outer, inner, vocab))
    untouched = memory.isnan()
    targets = targets.view(outer, inner)
    want = exact(values.view(outer, inner, vocab), targets)
    leaf = logits.detach().requires_grad_()
    logprob, entropy = selected_logprob(leaf, targets, return_entropy=True)
    weight = torch.linspace(-1, 1, targets.numel()).view(targets.shape)
    loss = (logprob * weight).sum() + 0.3 * (entropy * weight.flip(0)).sum()
    (fresh,) = torch.autograd.grad(loss, leaf)
    compare([logprob.detach(), entropy.detach(), fresh], want, dtype)

    leaf = logits.detach().requires_grad_()
    logprob, entropy = selected_logprob(leaf, targets, return_entropy=True, inplace_backward=True)
    ((logprob * weight).sum() + 0.3 * (entropy * weight.flip(0)).sum()).backward()
    assert torch.equal(logits, fresh)
    assert torch.equal(memory.isnan(), untouched)


def test_offsets_beyond_32_bits(gpu: str) -> None:
    """Rows 2^30 elements apart; the memory between them is never touched."""
    stride, vocab = 2**30 + 3, 1000
    memory = torch.empty(2 * stride + vocab, dtype=torch.bfloat16, device=gpu)
    logits = memory.as_strided((3, vocab), (stride, 1))
    values, targets = made(3, vocab, torch.bfloat16)
    logits.copy_(values)
    got = selected_logprob(logits.requires_grad_(), targets.to(gpu), inplace_backward=True)
    got.sum().backward()
    want = values.double().requires_grad_()
    expected = selected_logprob(want, targets, backend="torch")
    expected.sum().backward()
    torch.testing.assert_close(got.detach().cpu().double(), expected.detach(), **FORWARD)
    got_rows = logits.detach().cpu().double()
    torch.testing.assert_close(got_rows, want.grad, **GRADIENT[torch.bfloat16])


HOSTILE = {
    "-inf beside numbers": [[1.0, -math.inf, 2.0], [-math.inf, 0.5, -math.inf]],
    "large": [[3e4, -3e4, 2.9e4], [-3e4, -3e4, -3e4]],
    "equal": [[2.5, 2.5, 2.5], [0.0, 0.0, 0.0]],
}


@pytest.mark.spec("logprob.non-finite")
@pytest.mark.parametrize("name", list(HOSTILE))
@pytest.mark.parametrize("vocab", [3, 8 * 3, 1500])
def test_hostile_values(gpu: str, name: str, vocab: int) -> None:
    logits = torch.tensor(HOSTILE[name]).repeat(1, vocab // 3)
    targets = torch.tensor([2, 1])
    got = visited(logits.to(gpu), targets.to(gpu))
    compare(got, exact(logits, targets), torch.float32)


@pytest.mark.spec("logprob.non-finite")
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_inf_give_nan(gpu: str, value: float) -> None:
    logits = torch.zeros(3, 40, device=gpu)
    logits[1, 17] = value
    got, entropy = selected_logprob(logits, torch.tensor([0, 5, 1]).to(gpu), return_entropy=True)
    assert got.isnan().tolist() == [False, True, False]
    assert entropy.isnan().tolist() == [False, True, False]


def test_all_minus_inf_gives_nan(gpu: str) -> None:
    logits = torch.full((1, 40), -math.inf, device=gpu)
    assert selected_logprob(logits, torch.tensor([3]).to(gpu)).isnan().all()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_infinite_and_nan_logits_anywhere(gpu: str, dtype: torch.dtype, fused: bool) -> None:
    """Maxima are taken of pairs of 16-bit logits and of several vectors at once."""
    vocab, places = 9001, (0, 1, 17, 4096, 8999, 9000)
    logits, _ = made(4 + 2 * len(places), vocab, dtype)
    logits[0, :4500] = -math.inf
    logits[1, 2500:] = -math.inf
    logits[2] = -math.inf
    logits[2, 5000] = 1.5
    logits[3, ::2] = -math.inf
    for i, place in enumerate(places):
        logits[4 + 2 * i, place] = math.nan
        logits[5 + 2 * i, place] = math.inf
    targets = torch.full((len(logits),), 5001)
    targets[1], targets[2] = 77, 5000
    leaf = logits.to(gpu, copy=True).requires_grad_()
    if fused:
        out = masked_logprob_loss(
            leaf, targets.to(gpu), None, None, loss="cross_entropy", return_entropy=True,
            row_weights=torch.ones(len(logits), device=gpu), backend="native",
        )  # fmt: skip
        got = [out.logprobs, out.entropy]
        out.loss.backward()
        grad = -leaf.grad
    else:
        got = list(selected_logprob(leaf, targets.to(gpu), return_entropy=True, backend="native"))
        got[0].sum().backward()
        grad = leaf.grad
    assert all(g[4:].isnan().all() for g in got) and grad[4:].isnan().all()
    exact_leaf = logits[:4].double().requires_grad_()
    want = selected_logprob(exact_leaf, targets[:4], return_entropy=True, backend="torch")
    want[0].sum().backward()
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g[:4].detach().cpu().double(), w.detach(), **FORWARD)
    torch.testing.assert_close(grad[:4].cpu().double(), exact_leaf.grad, **GRADIENT[dtype])


@pytest.mark.spec("logprob.masked-rows")
def test_masked_rows_are_not_read(gpu: str) -> None:
    logits = torch.zeros(3, 64, device=gpu)
    logits[1] = math.nan
    mask = torch.tensor([1, 0, 1]).to(gpu)
    got = selected_logprob(logits, torch.tensor([0, -100, 1]).to(gpu), loss_mask=mask)
    torch.testing.assert_close(got.cpu(), torch.tensor([-4.1588831, 0.0, -4.1588831]))


@pytest.mark.spec("logprob.gpu-no-sync")
def test_target_out_of_range_gives_nan(gpu: str) -> None:
    logits = torch.zeros(3, 8, device=gpu)
    got = selected_logprob(logits, torch.tensor([8, 1, -1]).to(gpu))
    assert got.isnan().tolist() == [True, False, True]


def test_no_rows(gpu: str) -> None:
    logits = torch.zeros(0, 8, device=gpu, requires_grad=True)
    selected_logprob(logits, torch.zeros(0, dtype=torch.int64, device=gpu)).sum().backward()
    assert logits.grad.shape == (0, 8)


def test_rows_without_gradient_are_not_read(gpu: str) -> None:
    logits, targets = made(4, 300, torch.float32)
    leaf = logits.to(gpu).requires_grad_()
    x = leaf * 1
    got = selected_logprob(x, targets.to(gpu), inplace_backward=True)
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(x):
        x[2] = math.nan  # after the forward pass: only the backward pass could read it
    (got * torch.tensor([1.0, -1.0, 0.0, 2.0]).to(gpu)).sum().backward()
    assert leaf.grad.isfinite().all() and not leaf.grad[2].any()


# --- masked_logprob_loss -------------------------------------------------------------------------

LOSSES = [*TOKEN_LOSSES, Dppo(dppo_type="binary_kl")]


def both_paths(case: dict[str, torch.Tensor], device: str, **options: object) -> list[torch.Tensor]:
    """Loss, log-probabilities, entropy and gradient, in place."""
    out, grad = loss_and_grad(case, device, **options)
    assert out.entropy is not None
    return [t.detach().cpu().double() for t in (out.loss, out.logprobs, out.entropy, grad)]


@pytest.mark.spec("logprob.fused-metrics")
@pytest.mark.parametrize("kl", [None, "k1", "abs", "k2", "k3"])
@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_equals_the_reference(gpu: str, loss: str, kl: str | None) -> None:
    case = loss_case(129)
    case["token_weights"] = torch.tensor([1.0, 0.5, 0.0, 2.0, 1.0])
    options = {"loss": loss, "kl_estimator": kl, "kl_coef": 0.3}
    got = loss_and_grad(case, gpu, **options)
    # the loss carries the log-probability's 4e-6 through ratios of up to 3
    assert_loss_equals(got, exact_loss_and_grad(case, **options), rtol=3e-5, atol=6e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [1, 7, 8, 9, 31, 300])
def test_rows_are_scaled_at_any_alignment(
    emulated_gpu: ModuleType, vocab: int, dtype: torch.dtype
) -> None:
    wide = made(5, vocab + 3, dtype)[0]
    for begin in range(4):
        rows = wide.clone()
        emulated_gpu.scale_rows_cuda(rows[:, begin : begin + vocab], torch.tensor([0.3]), 0)
        want = wide.clone()
        want[:, begin : begin + vocab] = (want[:, begin : begin + vocab].float() * 0.3).to(dtype)
        assert torch.equal(rows, want)


# (vocab, dtype, compute capability) -> vectors, threads, cluster: each way to process a row. None
# with float16, whose gradient is computed in the backward.
PLANS = [
    (33, torch.bfloat16, 9, (8, 32, 1)),
    (16_384, torch.bfloat16, 9, (8, 256, 1)),
    (16_400, torch.bfloat16, 9, (8, 160, 2)),
    (32_000, torch.float32, 9, (8, 256, 4)),
    (131_081, torch.bfloat16, 9, (8, 288, 8)),
    (140_000, torch.float32, 9, (16, 288, 8)),
    (200_003, torch.bfloat16, 9, (16, 224, 8)),
    (262_144, torch.float32, 9, (16, 512, 8)),
    (16_400, torch.bfloat16, 8, (8, 288, 1)),
    (25_001, torch.bfloat16, 8, (16, 224, 1)),
    (40_001, torch.bfloat16, 8, (16, 320, 1)),
    (66_001, torch.bfloat16, 8, (0, 512, 1)),
]


@pytest.mark.spec("logprob.fused-loss")
@pytest.mark.parametrize(("vocab", "dtype", "major", "plan"), PLANS)
def test_every_kernel_plan(
    emulated_gpu: ModuleType,
    vocab: int,
    dtype: torch.dtype,
    major: int,
    plan: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert emulated_gpu.plan_visit(vocab, dtype.itemsize, major) == plan
    emulated_gpu.set_compute_major(major)
    visit = _C.masked_logprob_loss_cuda
    launched: list[tuple[int, ...]] = []

    def record(*arguments: Any) -> None:
        visit(*arguments)
        launched.append(emulated_gpu.last_launch())

    monkeypatch.setattr(_C, "masked_logprob_loss_cuda", record)
    rows = 2
    case = loss_case(vocab, dtype, rows=rows)
    got = both_paths(case, "cpu", loss="regular", kl_estimator="k3")
    cluster = plan[-1]
    assert launched == [(rows * cluster, 1, cluster)]
    exact_case = case | {"logits": case["logits"].double()}
    want = plain_ppo(exact_case)
    torch.testing.assert_close(got[1], want[0], **FORWARD)
    torch.testing.assert_close(got[2], want[1], **FORWARD)
    tolerance = GRADIENT[dtype] | {"atol": 3e-6}
    torch.testing.assert_close(got[3], want[2], **tolerance)


def plain_ppo(case: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Log-probability, entropy and the gradient of half the loss, by autograd in float64."""
    leaf = case["logits"].clone().requires_grad_()
    logprob, entropy = reference.selected_logprob(leaf, case["target_ids"], case["loss_mask"], 0.9)
    adv = case["advantages"].double()
    ratio = (logprob - case["old_logprobs"].double()).exp()
    tokens = torch.maximum(-adv * ratio, -adv * ratio.clamp(0.8, 1.2))
    x = case["ref_logprobs"].double() - logprob
    tokens = tokens + 0.001 * (x.exp() - x - 1)
    (0.5 * (tokens * case["row_weights"].double())[case["loss_mask"]].sum()).backward()
    return [logprob.detach(), entropy.detach(), leaf.grad]


@pytest.mark.gpu
def test_plan_matches_the_compiled_architecture() -> None:
    """Code compiled from PTX of an older architecture has no clusters on any device."""
    if _C.cuda_archs is None:
        pytest.skip("the CUDA kernels are not compiled in")
    compiled = {int(re.findall(r"\d+", name)[0]) // 10 for name in _C.cuda_archs.split(",")}
    device = torch.cuda.get_device_capability()[0]
    assert _C.visit_code_major() == max(major for major in compiled if major <= device)


@pytest.mark.gpu
def test_loss_of_more_rows_than_float32_counts() -> None:
    """A row's number comes from its block's; %clusterid is computed in float32."""
    rows = 2**24 + 9
    logits = torch.zeros(rows, 4, device="cuda")
    logits[:, 1] = torch.arange(rows, device="cuda") % 3
    targets = torch.ones(rows, dtype=torch.long, device="cuda")
    loss = masked_logprob_loss(logits, targets, None, None, loss="cross_entropy", backend="native")
    want = torch.log_softmax(logits[-9:].double(), 1)[:, 1]
    torch.testing.assert_close(loss.logprobs[-9:].double(), want, **FORWARD)


@given(vocab=st.integers(1, 400_000), item_size=st.sampled_from([2, 4]), major=st.integers(8, 12))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_plans_cover_the_entire_row(
    cuda_on_cpu: ModuleType, vocab: int, item_size: int, major: int
) -> None:
    vectors, threads, cluster = cuda_on_cpu.plan_visit(vocab, item_size, major)
    most_vectors = vocab * item_size // 16  # if the row is 16-byte aligned
    assert vectors == 0 or vectors * threads * cluster >= most_vectors
    assert threads % 32 == 0 and 32 <= threads <= 512
    assert cluster in ((1, 2, 4, 8) if major >= 9 else (1,))
    if major >= 9 and vocab * item_size <= 512 << 10:
        assert vectors > 0  # rows of 262,144 bfloat16 logits are read once


# Registers of a multiprocessor, and of a thread that holds so many vectors: by the kernel's launch
# bounds, which the compiler keeps without spilling.
REGISTERS, EACH = 65_536, {8: 64, 16: 96}


@pytest.mark.spec("gpu.rows-overlap")
@pytest.mark.parametrize(
    ("vocab", "item_size", "blocks"),
    [
        *((32_000, 2, 4), (128_256, 2, 4), (151_936, 2, 3), (196_608, 2, 2), (262_144, 2, 2)),
        *((32_000, 4, 4), (128_256, 4, 2), (151_936, 4, 2), (163_840, 4, 2), (262_144, 4, 1)),
    ],
)
def test_rows_that_a_multiprocessor_holds(
    cuda_on_cpu: ModuleType, vocab: int, item_size: int, blocks: int
) -> None:
    vectors, threads, _ = cuda_on_cpu.plan_visit(vocab, item_size, 9)
    assert REGISTERS // (EACH[vectors] * threads) == blocks


@pytest.mark.spec("logprob.determinism")
@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("vocab", [1000, 40_001])
def test_thread_order_does_not_change_the_result(
    emulated_gpu: ModuleType, order: int, vocab: int
) -> None:
    logits, targets = made(3, vocab, torch.bfloat16)
    case = loss_case(vocab, torch.bfloat16, rows=3)
    results = []
    for o in (0, order):
        emulated_gpu.set_order(o)
        results.append([*visited(logits, targets), *both_paths(case, "cpu")])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_row_result_does_not_depend_on_other_rows(gpu: str) -> None:
    """20,000 is a multiple of 8: all rows are 16-byte aligned, alone and in a batch."""
    logits, targets = made(5, 20_000, torch.bfloat16)
    case = loss_case(20_000, torch.bfloat16)
    complete = selected_logprob(logits.to(gpu), targets.to(gpu), return_entropy=True)
    whole_loss = both_paths(case, gpu)
    for rows in (slice(2, 3), slice(3, 5)):
        part = selected_logprob(logits[rows].to(gpu), targets[rows].to(gpu), return_entropy=True)
        assert all(torch.equal(a[rows], b) for a, b in zip(complete, part, strict=True))
        part_loss = both_paths({name: value[rows] for name, value in case.items()}, gpu)
        for a, b in zip(whole_loss[1:], part_loss[1:], strict=True):
            assert torch.equal(a[rows], b)


def test_loss_without_gradient_reads_once_and_writes_no_gradient(gpu: str) -> None:
    case = {name: value.to(gpu) for name, value in loss_case(500, torch.bfloat16).items()}
    before = case["logits"].clone()
    with torch.no_grad():
        out = masked_logprob_loss(**case, kl_estimator="k3", temperature=0.9, inplace_backward=True)
    assert torch.equal(case["logits"], before)
    want = reference.selected_logprob(
        before.cpu().double(), case["target_ids"].cpu(), case["loss_mask"].cpu(), 0.9
    )[0]
    torch.testing.assert_close(out.logprobs.cpu().double(), want, **FORWARD)


def test_masked_and_clipped_rows_of_the_loss(gpu: str) -> None:
    case = {name: value.to(gpu) for name, value in loss_case(500, torch.bfloat16).items()}
    case["logits"][1] = math.nan  # masked
    case["target_ids"][1] = -100
    case["advantages"][3] = 0.0
    leaf = case.pop("logits").requires_grad_()
    masked_logprob_loss(leaf, **case).loss.backward()
    assert leaf.grad.isfinite().all()
    assert not leaf.grad[1].any() and not leaf.grad[3].any() and leaf.grad[0].any()


def test_default_weight_is_the_token_mean(gpu: str) -> None:
    logits, targets = made(4, 50, torch.float32)
    mask = torch.tensor([1, 0, 1, 1]).to(gpu)
    out = masked_logprob_loss(
        logits.to(gpu), targets.to(gpu), None, None, loss="cross_entropy", loss_mask=mask
    )
    torch.testing.assert_close(out.loss, -out.logprobs.sum() / 3, rtol=1e-6, atol=0)


# --- linear_logprob ------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_rows", [None, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear(gpu: str, dtype: torch.dtype, chunk_rows: int | None) -> None:
    g = torch.Generator().manual_seed(3)
    hidden = torch.randn(7, 16, generator=g).to(dtype)
    weight = torch.randn(50, 16, generator=g).to(dtype)
    targets = torch.randint(0, 50, (7,), generator=g)
    mask = torch.tensor([1, 1, 0, 1, 1, 0, 1])

    def run(device: str, kind: torch.dtype, **options: object) -> list[torch.Tensor]:
        h = hidden.detach().clone().to(device, kind).requires_grad_()
        w = weight.detach().clone().to(device, kind).requires_grad_()
        logprob, entropy = linear_logprob(
            h, w, targets.to(device), loss_mask=mask.to(device), return_entropy=True, **options
        )
        (logprob.sum() + 0.1 * entropy.sum()).backward()
        return [t.detach().cpu().double() for t in (logprob, entropy, h.grad, w.grad)]

    got = run(gpu, dtype, chunk_rows=chunk_rows)
    want = run("cpu", torch.float64, backend="torch")
    # bfloat16: logits of magnitude 10 are rounded to 2^-6, gradients of several rows are summed
    tolerance = (
        {"rtol": 2e-5, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.15}
    )
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, **tolerance)


# --- kept sets -----------------------------------------------------------------------------------


KEPT_SIZES = (1, 2, 31, 33, 1000, 9001, 0, 7)


def kept_case(
    dtype: torch.dtype, vocab: int = 9001
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return logits, targets, and kept ids that contain the targets."""
    g = torch.Generator().manual_seed(0)
    logits = (torch.randn(8, vocab, generator=g) * 4).to(dtype)
    sets = [torch.randperm(vocab, generator=g)[:size].sort().values for size in KEPT_SIZES]
    targets = torch.tensor([int(s[len(s) // 2]) if len(s) else 7 for s in sets])
    cu = torch.tensor([0, *map(len, sets)]).cumsum(0)
    return logits, targets, {"kept_ids": torch.cat(sets).int(), "cu_kept": cu}


@pytest.mark.spec("logprob.kept-sets")
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("start", [0, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_kept_sets(gpu: str, dtype: torch.dtype, start: int, inplace: bool) -> None:
    """Rows at any alignment; NaN where nothing is kept is not read."""
    logits, targets, kept = kept_case(dtype)
    want = exact(logits, targets, temperature=0.7, **kept)
    memory = torch.full((start + 8 * 9002,), math.nan, dtype=dtype, device=gpu)
    rows = memory.as_strided((8, 9001), (9002, 1), start)
    cu, outside = kept["cu_kept"].tolist(), torch.ones(8, 9001, dtype=torch.bool)
    for row, size in enumerate(KEPT_SIZES):
        ids = kept["kept_ids"][cu[row] : cu[row + 1]].long() if size else torch.arange(9001)
        rows[row, ids.to(gpu)] = logits[row, ids].to(gpu)
        outside[row, ids] = False
    moved = {name: value.to(gpu) for name, value in kept.items()}
    leaf = rows.detach().requires_grad_()
    logprob, entropy = selected_logprob(
        *(leaf, targets.to(gpu)),
        temperature=0.7,
        return_entropy=True,
        inplace_backward=inplace,
        **moved,
    )
    weight = torch.linspace(-1, 1, 8, device=gpu)
    loss = (logprob * weight).sum() + 0.3 * (entropy * weight.flip(0)).sum()
    (grad,) = torch.autograd.grad(loss, leaf)
    compare([logprob.detach(), entropy.detach(), grad], want, dtype)
    assert not grad.cpu()[outside].any()


KEPT_IN_LOSS = [
    pytest.param(
        vocab, dtype, major,
        # In the default run each dtype in one block, and each of the other two ways once.
        marks=() if vocab == 9001 or (dtype == torch.float32) == (major == 8)
        else pytest.mark.slow,
    )
    for vocab in (9001, 70_000)
    for dtype in (torch.float32, torch.bfloat16)
    for major in (8, 9)
]  # fmt: skip


@pytest.mark.parametrize(("vocab", "dtype", "major"), KEPT_IN_LOSS)
def test_kept_sets_in_the_fused_loss(
    emulated_gpu: ModuleType, vocab: int, dtype: torch.dtype, major: int
) -> None:
    """Rows in registers of one block, of a cluster, and read twice; in place."""
    emulated_gpu.set_compute_major(major)
    logits, targets, kept = kept_case(dtype, vocab)
    advantages = torch.linspace(-1, 1, 8)
    advantages[3] = 0  # no gradient: only zeros are written

    def run(values: torch.Tensor, **options: object) -> list[torch.Tensor]:
        leaf = values.detach().clone().requires_grad_()
        out = masked_logprob_loss(
            leaf * 1, targets, None, advantages, temperature=0.7, return_entropy=True, **kept,
            **options,
        )  # fmt: skip
        out.loss.backward()
        return [out.logprobs, out.entropy, leaf.grad]

    want = run(logits.double(), backend="torch")
    compare(run(logits), want, dtype)
    compare(run(logits, inplace_backward=True), want, dtype)


@pytest.mark.parametrize("kept_ids", [[1, 9], [-1, 3], [3, 3], [3, 1], [1, 2]])
def test_wrong_sets_give_nan(
    gpu: str, kept_ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing waits for the device: no error, and nothing outside the row is read."""
    logits = torch.zeros(2, 5, device=gpu)
    options = {
        "kept_ids": torch.tensor([*kept_ids, 0, 3], dtype=torch.int32, device=gpu),
        "cu_kept": torch.tensor([0, 2, 4], device=gpu),
    }
    targets = torch.tensor([3, 3], device=gpu)
    got = selected_logprob(logits, targets, **options)
    assert got.isnan().tolist() == [True, False]
    got = masked_logprob_loss(logits, targets, None, torch.ones(2, device=gpu), **options)
    assert got.logprobs.isnan().tolist() == [True, False] and got.loss.isnan()
    head = torch.eye(5, device=gpu)
    got = linear_logprob(head[:2], head, targets, **options)
    assert got.isnan().tolist() == [True, False]
    monkeypatch.setattr(linear_module, "MIN_VOCAB_PER_ID", 1)
    monkeypatch.setattr(linear_module, "ROWS_PER_GATHERED", {4: 1e-9})  # over a part of the head
    got = linear_logprob(head[:2], head, targets, **options)
    assert got.isnan().tolist() == [True, False]


# --- tests that need a device --------------------------------------------------------------------


@pytest.mark.gpu
def test_result_is_deterministic_across_streams() -> None:
    logits = torch.randn(64, 32_000, device="cuda", dtype=torch.bfloat16)
    targets = torch.randint(0, 32_000, (64,), device="cuda")
    want = selected_logprob(logits, targets)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        got = [selected_logprob(logits, targets) for _ in range(20)]
    stream.synchronize()
    assert all(torch.equal(want, g) for g in got)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [32_000, 151_936, 262_144])
def test_loss_is_deterministic_over_twenty_runs(vocab: int) -> None:
    case = {n: v.cuda() for n, v in loss_case(vocab, torch.bfloat16, rows=300).items()}
    results = []
    for _ in range(20):
        leaf = case["logits"].clone().requires_grad_()
        rest = {n: v for n, v in case.items() if n != "logits"}
        out = masked_logprob_loss(leaf, **rest, kl_estimator="k3")
        out.loss.backward()
        results.append((out.loss.detach(), out.logprobs, leaf.grad))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.gpu
def test_cuda_graph() -> None:
    logits, targets = made(16, 5000, torch.bfloat16)
    static, targets = logits.cuda(), targets.cuda()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        selected_logprob(static, targets)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = selected_logprob(static, targets)
    other, _ = made(16, 5000, torch.bfloat16, seed=9)
    static.copy_(other)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, selected_logprob(other.cuda(), targets))


@pytest.mark.gpu
def test_cuda_graph_of_a_loss() -> None:
    """Loss, metrics and gradient, captured together."""
    case = {name: value.cuda() for name, value in loss_case(5000, torch.bfloat16, rows=16).items()}
    logits = case.pop("logits").requires_grad_()

    def step() -> list[torch.Tensor]:
        out = masked_logprob_loss(logits, **case, kl_estimator="k3", return_entropy=True)
        (grad,) = torch.autograd.grad(2 * out.loss, logits)
        return [out.loss.detach(), grad, *out.metrics.values()]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        logits.copy_(made(16, 5000, torch.bfloat16, seed=9)[0])
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))


@pytest.mark.gpu
def test_compile_fullgraph() -> None:
    logits, targets = made(16, 5000, torch.bfloat16)
    compiled = torch.compile(lambda x, t: selected_logprob(x, t).sum(), fullgraph=True)
    leaf = logits.cuda().requires_grad_()
    compiled(leaf, targets.cuda()).backward()
    plain = logits.cuda().requires_grad_()
    selected_logprob(plain, targets.cuda()).sum().backward()
    assert torch.equal(leaf.grad, plain.grad)


@pytest.mark.gpu
def test_second_device() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    logits, targets = made(8, 1000, torch.float32)
    got = selected_logprob(logits.to("cuda:1"), targets.to("cuda:1"))
    torch.testing.assert_close(got.cpu(), selected_logprob(logits, targets), **FORWARD)


@pytest.mark.gpu
def test_no_device_synchronization() -> None:
    case = {n: v.cuda() for n, v in loss_case(500, torch.bfloat16).items()}
    leaf = case.pop("logits").requires_grad_()
    torch.cuda.set_sync_debug_mode("error")
    try:
        masked_logprob_loss(leaf, **case).loss.backward()
        selected_logprob(leaf, case["target_ids"], loss_mask=case["loss_mask"]).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
