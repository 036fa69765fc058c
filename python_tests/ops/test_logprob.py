"""selected_logprob. M rows, V vocab."""

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck

from skyrl_fast import _C
from skyrl_fast.ops.logprob.masked_loss import masked_logprob_loss
from skyrl_fast.ops.logprob.selected import selected_logprob

# Sums in float32 lanes and an exponential exact to 2e-7, of logits of magnitude 10.
FORWARD_TOLERANCE = {"rtol": 1e-6, "atol": 2e-6}
# Gradients are at most 1 here, and rounded to the logits' dtype: half a unit in the last place.
GRADIENT_TOLERANCE = {
    torch.float32: {"rtol": 3e-6, "atol": 1e-7},
    torch.bfloat16: {"rtol": 2**-8 + 2e-4, "atol": 1e-7},  # and an exponential exact to 1e-4
    torch.float16: {"rtol": 2**-10, "atol": 2**-24},  # float16 ends at 2^-24
}
VOCABS = (1, 2, 7, 16, 31, 32, 33, 64, 127, 128, 129, 1000, 9001)


def available_levels() -> list[str]:
    best = _C.simd_level()
    levels = ["baseline", "avx2", "avx512"]
    return levels[: levels.index(best) + 1]


@pytest.fixture(params=available_levels())
def simd(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _C.simd_level()
    _C.set_simd_level(request.param)
    yield request.param
    _C.set_simd_level(before)


def made(
    vocab: int, dtype: torch.dtype = torch.float32, rows: int = 6, seed: int = 0, scale: float = 3.0
) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed + vocab)
    logits = (torch.randn(rows, vocab, generator=g) * scale).to(dtype)
    return logits, torch.randint(0, vocab, (rows,), generator=g)


def both(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, **options: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return log-probability, entropy, and the gradient of a fixed combination of both."""
    leaf = logits.detach().clone().requires_grad_()
    logprob, entropy = selected_logprob(
        leaf, targets, temperature=temperature, return_entropy=True, **options
    )
    weight = torch.linspace(-1, 1, targets.numel(), dtype=logprob.dtype).view(targets.shape)
    ((logprob * weight).sum() + 0.3 * (entropy * weight.flip(0)).sum()).backward()
    return logprob.detach(), entropy.detach(), leaf.grad


def exact(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return both(logits.double(), targets, temperature, backend="torch")


# --- cases by hand -------------------------------------------------------------------------------


HAND_CASES = [
    # logits, target, temperature, log-probability, entropy
    ([0.0, 0.0], 1, 1.0, -math.log(2), math.log(2)),
    ([5.0, 5.0, 5.0, 5.0], 0, 3.0, -math.log(4), math.log(4)),
    ([7.0], 0, 1.0, 0.0, 0.0),
    ([0.0, math.log(3.0)], 1, 1.0, math.log(0.75), 0.562335),
    ([0.0, 2 * math.log(3.0)], 1, 2.0, math.log(0.75), 0.562335),
    ([0.0, math.log(3.0), -math.inf], 0, 1.0, math.log(0.25), 0.562335),
    ([0.0, math.log(3.0), -math.inf], 2, 1.0, -math.inf, 0.562335),
    ([1000.0, 0.0], 0, 1.0, 0.0, 0.0),
    ([1000.0, 0.0], 1, 1.0, -1000.0, 0.0),
]


@pytest.mark.parametrize(("logits", "target", "temperature", "logprob", "entropy"), HAND_CASES)
def test_hand_cases(logits, target, temperature, logprob, entropy, backend, simd):
    got = selected_logprob(
        torch.tensor([logits]),
        torch.tensor([target]),
        temperature=temperature,
        return_entropy=True,
        backend=backend,
    )
    want = (torch.tensor([logprob]), torch.tensor([entropy]))
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)  # the hand values have 6 digits


def test_gradient_by_hand(backend, simd):
    logits = torch.tensor([[0.0, math.log(3.0)]], requires_grad=True)
    selected_logprob(logits, torch.tensor([0]), temperature=0.5, backend=backend).backward()
    # softmax(2x) = (0.1, 0.9); (onehot - p) / temperature
    torch.testing.assert_close(logits.grad, torch.tensor([[1.8, -1.8]]), rtol=1e-6, atol=0)


# --- every level and dtype equals the float64 reference ----------------------------------------


@pytest.mark.spec("logprob.formula")
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equals_reference(vocab, dtype, simd):
    logits, targets = made(vocab, dtype)
    got, want = both(logits, targets, 0.7), exact(logits, targets, 0.7)
    torch.testing.assert_close(got[0], want[0].float(), **FORWARD_TOLERANCE)
    torch.testing.assert_close(got[1], want[1].float(), **FORWARD_TOLERANCE)
    torch.testing.assert_close(got[2].double(), want[2], **GRADIENT_TOLERANCE[dtype])


@given(
    vocab=st.integers(1, 700),
    rows=st.integers(0, 9),
    seed=st.integers(0, 2**20),
    scale=st.sampled_from([0.0, 0.1, 3.0, 30.0]),
    shift=st.sampled_from([0.0, -1000.0, 500.0]),
    temperature=st.sampled_from([0.05, 0.7, 1.0, 3.0]),
    level=st.sampled_from(available_levels()),
    masked=st.booleans(),
)
def test_any_sizes(vocab, rows, seed, scale, shift, temperature, level, masked):
    logits, targets = made(vocab, rows=rows, seed=seed, scale=scale)
    logits = logits + shift
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, generator=g) < 0.5 if masked else None
    before = _C.simd_level()
    _C.set_simd_level(level)
    try:
        got = both(logits, targets, temperature, loss_mask=mask)
    finally:
        _C.set_simd_level(before)
    want = both(logits.double(), targets, temperature, loss_mask=mask, backend="torch")
    # The exponent's scale log2(e) / temperature is a float: relative 6e-8 of differences of logits
    # over the temperature, which reach 200 / 0.05.
    torch.testing.assert_close(got[0], want[0].float(), rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(got[1], want[1].float(), rtol=1e-6, atol=2e-5)
    bound = 1e-5 / temperature
    torch.testing.assert_close(got[2].double(), want[2], rtol=1e-3, atol=bound)


@pytest.mark.parametrize("order", ["rising", "falling", "one"])
def test_running_maximum_is_rescaled(order, simd):
    """Sums are rescaled whenever a larger logit is found."""
    x = torch.linspace(-80, 80, 3001)
    row = {"rising": x, "falling": x.flip(0), "one": torch.full((3001,), 2.5)}[order]
    targets = torch.tensor([1500])
    got, want = both(row[None], targets, 1.0), exact(row[None], targets, 1.0)
    torch.testing.assert_close(got[0], want[0].float(), **FORWARD_TOLERANCE)
    torch.testing.assert_close(got[1], want[1].float(), **FORWARD_TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_vocab(dtype, simd):
    logits, targets = made(151_936, dtype, rows=2)
    got, want = both(logits, targets, 1.0), exact(logits, targets, 1.0)
    torch.testing.assert_close(got[0], want[0].float(), **FORWARD_TOLERANCE)
    torch.testing.assert_close(got[1], want[1].float(), **FORWARD_TOLERANCE)
    torch.testing.assert_close(got[2].double(), want[2], **GRADIENT_TOLERANCE[dtype])


@pytest.mark.spec("logprob.determinism")
def test_result_is_deterministic_for_any_number_of_threads():
    logits, targets = made(40_000, rows=40)
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(both(logits, targets, 1.0))
    torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


# --- rows: masks, layouts, counts --------------------------------------------------------------


@pytest.mark.spec("logprob.masked-rows")
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.uint8, torch.int64, torch.float32])
def test_masked_rows_are_never_read(mask_dtype, backend, simd):
    logits, targets = made(50)
    mask = torch.tensor([1, 0, 1, 0, 0, 1])
    poisoned = logits.clone()
    poisoned[mask == 0] = math.nan
    targets = torch.where(mask == 0, -100, targets)
    got = both(poisoned, targets, 1.0, loss_mask=mask.to(mask_dtype), backend=backend)
    keep = mask != 0
    want = selected_logprob(logits[keep], targets[keep], return_entropy=True)
    assert torch.equal(got[0][~keep], torch.zeros(3))
    assert torch.equal(got[1][~keep], torch.zeros(3))
    assert torch.equal(got[2][~keep], torch.zeros(3, 50))
    torch.testing.assert_close((got[0][keep], got[1][keep]), want, **FORWARD_TOLERANCE)
    assert got[2][keep].isfinite().all()


def test_all_rows_masked_stays_connected(backend):
    logits = torch.full((3, 5), math.nan, requires_grad=True)
    targets = torch.full((3,), -100)
    selected_logprob(logits, targets, loss_mask=torch.zeros(3), backend=backend).sum().backward()
    assert torch.equal(logits.grad, torch.zeros(3, 5))


@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (2, 3, 4)])
def test_leading_shapes(shape, backend):
    logits, targets = made(11, rows=math.prod(shape))
    got = selected_logprob(logits.view(*shape, 11), targets.view(shape), backend=backend)
    assert got.shape == shape
    assert torch.equal(got.view(-1), selected_logprob(logits, targets, backend=backend))


def test_no_rows(backend):
    logits = torch.zeros(0, 5, requires_grad=True)
    got = selected_logprob(logits, torch.zeros(0, dtype=torch.int64), backend=backend)
    got.sum().backward()
    assert got.shape == (0,) and logits.grad.shape == (0, 5)


@pytest.mark.parametrize("inplace", [False, True])
def test_strided_rows(inplace):
    """All but the last position, a column slice, every second row: no copy is made of them."""
    complete = torch.randn(3, 5, 40)
    for view in (lambda x: x[:, :-1], lambda x: x[..., 3:20], lambda x: x[:, ::2]):
        part = view(complete)
        targets = torch.randint(0, part.shape[-1], part.shape[:-1])
        leaf, dense = complete.clone().requires_grad_(), part.contiguous().requires_grad_()
        got = selected_logprob(view(leaf * 1), targets, inplace_backward=inplace)
        want = selected_logprob(dense, targets)
        assert torch.equal(got, want)
        got.sum().backward()
        want.sum().backward()
        assert torch.equal(view(leaf.grad), dense.grad)
        assert leaf.grad.abs().sum() == pytest.approx(dense.grad.abs().sum().item(), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_misaligned_rows(dtype, simd):
    """Rows whose first element is at any multiple of the item size."""
    for offset in range(5):
        buffer = torch.randn(2 * 131 + offset).to(dtype)
        logits = buffer[offset:].view(2, 131)
        targets = torch.tensor([0, 130])
        got = both(logits, targets, 1.0, inplace_backward=True)
        want = exact(logits, targets, 1.0)
        torch.testing.assert_close(got[0], want[0].float(), **FORWARD_TOLERANCE)
        torch.testing.assert_close(got[2].double(), want[2], **GRADIENT_TOLERANCE[dtype])


def test_offsets_beyond_32_bits():
    """A row that starts after 2^31 elements; the pages in between are never touched."""
    stride = 2**31 + 8
    buffer = torch.empty(stride + 16, dtype=torch.float16)
    rows = buffer.as_strided((2, 16), (stride, 1))
    rows.copy_(torch.randn(2, 16))
    targets = torch.tensor([3, 5])
    got = selected_logprob(rows, targets)
    torch.testing.assert_close(got, selected_logprob(rows.clone(), targets), rtol=0, atol=0)


# --- extreme values ------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [3, 40, 300])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", [0, -1])
def test_nan_and_infinity_give_nan(vocab, bad, where, backend, simd):
    logits, targets = made(vocab, rows=2)
    logits[0, where] = bad
    logprob, entropy, grad = both(logits, targets * 0 + 1, 1.0, backend=backend)
    assert logprob[0].isnan() and entropy[0].isnan() and grad[0].isnan().any()
    assert logprob[1].isfinite() and entropy[1].isfinite() and grad[1].isfinite().all()


@pytest.mark.parametrize("vocab", [3, 40, 300])
def test_row_of_minus_infinity_gives_nan(vocab, backend, simd):
    logits = torch.full((1, vocab), -math.inf)
    got = selected_logprob(logits, torch.tensor([0]), return_entropy=True, backend=backend)
    assert got[0].isnan().all() and got[1].isnan().all()


@pytest.mark.parametrize("allowed", [(0,), (299,), (5, 130, 299)])
def test_minus_infinity_logits_have_probability_zero(allowed, backend, simd):
    """Logits of -inf have probability 0, gradient 0, and leave the entropy finite."""
    full, _ = made(300, rows=1)
    logits = torch.full_like(full, -math.inf)
    logits[:, list(allowed)] = full[:, list(allowed)]
    got = both(logits, torch.tensor([allowed[-1]]), 1.0, backend=backend)
    index = torch.tensor([len(allowed) - 1])
    want = both(full[:, list(allowed)], index, 1.0, backend=backend)
    torch.testing.assert_close(got[:2], want[:2], **FORWARD_TOLERANCE)
    torch.testing.assert_close(got[2][:, list(allowed)], want[2], rtol=1e-5, atol=1e-6)
    assert got[2].abs().sum() == pytest.approx(got[2][:, list(allowed)].abs().sum().item())


def odd_rows(vocab: int) -> torch.Tensor:
    """Return rows that leave the usual range of exponents: ties, new maxima, wide spreads, gaps."""
    g = torch.Generator().manual_seed(vocab)
    ramp = torch.linspace(0.0, 1.0, vocab)
    noise = torch.randn(vocab, generator=g)
    some, most = (torch.rand(vocab, generator=g) < share for share in (0.1, 0.9))
    late = torch.full((vocab,), -math.inf)
    late[-2:] = noise[-2:]
    low = torch.full((vocab,), -60.0)  # the maximum is last, far above all others
    low[-1] = 40.0
    return torch.stack(
        [
            torch.zeros(vocab),
            torch.full((vocab,), 7.3),
            90.0 * ramp - 45.0,
            45.0 - 90.0 * ramp,
            300.0 * noise,
            3.0 * noise - 1000.0,
            (3.0 * noise).masked_fill(some, -math.inf),
            (3.0 * noise).masked_fill(most, -math.inf).index_fill(0, torch.tensor([0]), 1.0),
            late,
            low,
        ]
    )


@pytest.mark.parametrize("vocab", [40, pytest.param(333, marks=pytest.mark.slow), 9001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.2])
def test_rows_outside_the_usual_range(vocab, dtype, temperature, simd):
    logits = odd_rows(vocab).to(dtype)
    targets = torch.where(logits.isinf(), -math.inf, logits).argmax(1)
    for chosen in (targets, targets.roll(1)):
        got = both(logits, chosen, temperature, backend="native")
        want = exact(logits, chosen, temperature)
        finite = want[0].isfinite()
        assert torch.equal(got[0].isfinite(), finite)
        # one float's step at 45 / 0.2 is 1.5e-5
        torch.testing.assert_close(
            got[0][finite].double(), want[0][finite], rtol=2e-6, atol=2e-5 / temperature
        )
        torch.testing.assert_close(got[1].double(), want[1], rtol=2e-6, atol=2e-5 / temperature)


def test_zero_upstream_gradient_gives_zero_even_for_nan():
    logits = torch.full((1, 8), math.nan, requires_grad=True)
    (selected_logprob(logits, torch.tensor([0])) * 0.0).nansum().backward()
    assert torch.equal(logits.grad, torch.zeros(1, 8))


def test_half_conversions_round_like_torch(simd):
    """Gradients of every magnitude down to subnormals, against torch's rounding of float32 ones."""
    logits = torch.linspace(-20, 0, 4001)[None]
    for dtype in (torch.float16, torch.bfloat16):
        rounded = logits.to(dtype)
        targets = torch.tensor([7])
        got = both(rounded, targets, 1.0)[2]
        want = both(rounded.float(), targets, 1.0)[2].to(dtype)
        # One unit in the last place, rarely: before rounding they differ by up to 1e-4,
        # a fortieth of bfloat16's unit, a tenth of that for float16.
        torch.testing.assert_close(got, want, rtol=2**-7, atol=2**-24)
        assert (got != want).float().mean() < 0.025


# --- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [-1, -100, 5, 2**40])
def test_target_out_of_range(target, backend):
    with pytest.raises(ValueError, match=r"target_ids: expected ids in \[0, 5\).*row 1"):
        selected_logprob(torch.zeros(2, 5), torch.tensor([0, target]), backend=backend)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(2, 5, dtype=torch.int64)}, "logits: expected float32"),
        ({"logits": torch.zeros(5, 2).T}, "expected a contiguous last dimension"),
        ({"logits": torch.zeros(2, 0)}, "V >= 1"),
        ({"target_ids": torch.zeros(3, dtype=torch.int64)}, "target_ids: expected shape"),
        ({"target_ids": torch.zeros(2)}, "target_ids: expected integers"),
        ({"loss_mask": torch.ones(3)}, "mask: expected shape"),
        ({"temperature": 0.0}, "temperature: expected a positive"),
        ({"temperature": -1.0}, "temperature: expected a positive"),
        ({"temperature": math.nan}, "temperature: expected a positive"),
        ({"temperature": math.inf}, "temperature: expected a positive"),
        ({"temperature": 1e-300}, "temperature: expected .* from 1e-06 to 1e\\+30, got 1e-300"),
        ({"temperature": 1e300}, "temperature: expected .* from 1e-06 to 1e\\+30, got 1e\\+300"),
        ({"backend": "fpga"}, "backend: expected one of"),
        ({"logits": torch.zeros(1, 5).expand(2, 5), "inplace_backward": True}, "not overlap"),
    ],
)
def test_invalid_arguments(change, message):
    arguments = {"logits": torch.zeros(2, 5), "target_ids": torch.zeros(2, dtype=torch.int64)}
    arguments.update(change)
    logits, targets = arguments.pop("logits"), arguments.pop("target_ids")
    with pytest.raises(ValueError, match=message):
        selected_logprob(logits, targets, **arguments)


@pytest.mark.spec("logprob.temperature")
@pytest.mark.parametrize("temperature", [1e-6, 1e30])
def test_extreme_temperatures(temperature, backend):
    logits = torch.tensor([[3.0, 1.0, -40.0], [100.0, 99.0, 98.5]])
    got = selected_logprob(logits, torch.tensor([0, 1]), temperature=temperature, backend=backend)
    want = [0.0, -1e6] if temperature < 1 else [-math.log(3)] * 2
    torch.testing.assert_close(got, torch.tensor(want))


@pytest.mark.spec("logprob.in-place")
@pytest.mark.parametrize(
    ("shape", "strides"), [((2, 2), (5, 4)), ((2, 2), (4, 5)), ((3, 2), (4, 8)), ((2, 3), (7, 4))]
)
def test_in_place_refuses_rows_that_overlap_across_two_strides(shape, strides):
    logits = torch.arange(60.0).as_strided((*shape, 4), (*strides, 1))  # each stride holds a row
    with pytest.raises(ValueError, match="selected_logprob: rows of logits must not overlap"):
        selected_logprob(logits, torch.zeros(shape, dtype=torch.int64), inplace_backward=True)


@pytest.mark.parametrize("strides", [(8, 4), (4, 8), (9, 4), (4, 9)])
def test_in_place_accepts_rows_in_either_order(strides):
    targets = torch.tensor([[0, 1], [2, 3]])
    grads = []
    for inplace in (False, True):
        memory = torch.arange(20.0).square() / 100
        leaf = memory.as_strided((2, 2, 4), (*strides, 1)).requires_grad_()
        selected_logprob(leaf, targets, inplace_backward=inplace).sum().backward()
        grads.append(leaf.grad.clone())
    assert grads[0].tolist() == grads[1].tolist()


def test_arguments_that_are_not_tensors():
    with pytest.raises(TypeError, match="logits: expected a torch tensor, got list"):
        selected_logprob([[0.0]], torch.zeros(1, dtype=torch.int64))
    with pytest.raises(TypeError, match="target_ids: expected a torch tensor, got list"):
        selected_logprob(torch.zeros(1, 2), [0])


def test_unknown_simd_level():
    with pytest.raises(ValueError, match="baseline, avx2 or avx512, got sse9"):
        _C.set_simd_level("sse9")


# --- autograd ----------------------------------------------------------------------------------


def test_gradcheck():
    logits = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 5, 2])
    mask = torch.tensor([1, 0, 1])

    def run(x):
        return selected_logprob(x, targets, loss_mask=mask, temperature=0.7, return_entropy=True)

    assert gradcheck(run, logits)


def test_inplace_gradient_is_stored_in_the_logits(simd):
    logits, targets = made(333, rows=5)
    want = both(logits, targets, 0.7)[2]
    leaf = logits.clone().requires_grad_()
    x = leaf * 1
    weight = torch.linspace(-1, 1, 5)
    logprob, entropy = selected_logprob(
        x, targets, temperature=0.7, return_entropy=True, inplace_backward=True
    )
    ((logprob * weight).sum() + 0.3 * (entropy * weight.flip(0)).sum()).backward()
    assert torch.equal(leaf.grad, want)
    assert torch.equal(x.detach(), want)


def test_inplace_backward_raises_for_other_uses_of_the_logits():
    leaf = torch.randn(2, 5, requires_grad=True)
    x = leaf * 1
    other = (x * x).sum()  # keeps x for its backward
    selected_logprob(x, torch.tensor([0, 1]), inplace_backward=True).sum().backward(
        retain_graph=True
    )
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


@pytest.mark.spec("logprob.second-derivative")
@pytest.mark.parametrize("compiled", [False, True])
def test_second_derivative_is_refused(compiled):
    x = torch.randn(2, 5, requires_grad=True)
    op = torch.compile(selected_logprob, fullgraph=True) if compiled else selected_logprob
    logprob = op(x, torch.tensor([0, 1]))
    with pytest.raises(RuntimeError, match=r"no second derivative|double backward"):
        (first,) = torch.autograd.grad(logprob.sum(), x, create_graph=True)
        torch.autograd.grad(first.square().sum(), x)


@pytest.mark.parametrize("wants_grad", [False, True])
def test_forward_mode_derivative_is_refused(wants_grad):
    x, targets = torch.randn(2, 5, requires_grad=wants_grad), torch.tensor([0, 1])
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones(2, 5))
        with pytest.raises(RuntimeError, match="selected_logprob: no forward-mode derivative"):
            selected_logprob(dual, targets)
    with pytest.raises(RuntimeError, match="masked_logprob_loss: no forward-mode derivative"):
        torch.func.jvp(
            lambda x: masked_logprob_loss(x, targets, None, None, loss="cross_entropy").loss,
            (x,),
            (torch.ones(2, 5),),
        )


def test_torch_backend_has_a_second_derivative():
    x = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 1])
    assert torch.autograd.gradgradcheck(
        lambda x: selected_logprob(x, targets, backend="torch"), (x,)
    )


def test_no_gradient_required():
    logits, targets = made(20)
    with torch.no_grad():
        assert not selected_logprob(logits.requires_grad_(), targets).requires_grad


def opcheck_inputs() -> list[tuple]:
    targets = torch.tensor([1, 2, 3, 4])
    return [
        (torch.randn(4, 9, requires_grad=True), targets, None, 1.0, True, False),
        (torch.randn(2, 2, 9), targets, torch.tensor([1, 0, 1, 1]).byte(), 0.5, False, False),
    ]


@pytest.mark.parametrize("inputs", opcheck_inputs(), ids=["entropy", "mask"])
def test_opcheck(inputs):
    torch.library.opcheck(torch.ops.skyrl_fast.selected_logprob.default, inputs)


@pytest.mark.parametrize("inplace", [False, True])
def test_compile_fullgraph(inplace):
    logits, targets = made(129)
    mask = torch.tensor([1, 0, 1, 1, 1, 1])
    weight = torch.linspace(-1, 1, 6)

    def loss(x):
        logprob, entropy = selected_logprob(
            x * 2, targets, loss_mask=mask, return_entropy=True, inplace_backward=inplace
        )
        return (logprob * weight + entropy).sum()

    eager, compiled = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss(eager).backward()
    torch.compile(loss, fullgraph=True, backend="aot_eager")(compiled).backward()
    assert torch.equal(eager.grad, compiled.grad)
