"""Log-probabilities of several tokens per row."""

from typing import Any

import pytest
import torch

from skyrl_fast import gathered_logprob, selected_logprob
from skyrl_fast.ops.logprob import reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ROWS = (1, 2, 31, 32, 33, 1000)
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 1e-5, torch.float16: 1e-5, torch.float64: 1e-12}


def by_torch(logits: torch.Tensor, ids: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return (logits.to(dtype) / temperature).log_softmax(-1).gather(-1, ids)


def test_cases_by_hand(backend: str) -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.0, 2.0, -torch.inf, 0.0]]).log_softmax(-1)
    ids = torch.tensor([[0, 3, 3], [2, 1, 0]])
    got = gathered_logprob(logits, ids, backend=backend)
    quarter = torch.tensor(0.25).log()
    assert torch.allclose(got[0], quarter.expand(3))
    assert got[1, 0] == -torch.inf
    assert float(got[1, 1] - got[1, 2]) == pytest.approx(2.0, abs=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
def test_values_and_gradients_are_those_of_torch(
    backend: str, dtype: torch.dtype, rows: int
) -> None:
    random = torch.Generator().manual_seed(rows)
    for width, vocab, temperature in ((1, 7, 1.0), (5, 33, 0.7), (40, 100, 2.0)):
        logits = (5 * torch.randn(rows, vocab, generator=random)).to(dtype)
        ids = torch.randint(vocab, (rows, width), generator=random)
        gradient = torch.randn(rows, width, generator=random).to(
            torch.promote_types(dtype, torch.float32)
        )
        ours, theirs = (logits.clone().requires_grad_(True) for _ in range(2))
        got = gathered_logprob(ours, ids, temperature=temperature, backend=backend)
        expected = by_torch(theirs, ids, temperature)
        assert got.dtype == expected.dtype
        torch.testing.assert_close(got, expected, rtol=0, atol=10 * CLOSE[dtype])
        got.backward(gradient)
        expected.backward(gradient)
        # In 16 bits torch rounds the sum of a row's gradients once, the kernels in another place.
        bits = torch.finfo(dtype).eps
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=max(1e-5, 20 * bits))


@pytest.mark.parametrize("width", [1, 3, 64, 300])
@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_gradients_equal_the_reference_in_float64(
    backend: str, dtype: torch.dtype, width: int
) -> None:
    """Ids are drawn from few, so that most are in a row several times; every third row is off."""
    random = torch.Generator().manual_seed(width)
    logits = (3 * torch.randn(33, 1000, generator=random)).to(dtype)
    ids = torch.randint(40, (33, width), generator=random)
    mask = torch.arange(33) % 3 != 0
    ids[~mask] = -100
    gradient = torch.randn(33, width, generator=random)
    logits[~mask] = torch.nan
    ours = logits.clone().requires_grad_(True)
    exact = logits.double().requires_grad_(True)
    got = gathered_logprob(ours, ids, loss_mask=mask, temperature=0.8, backend=backend)
    expected = reference.gathered_logprob(exact, ids, mask, 0.8)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-5)
    assert (got[~mask] == 0).all()
    got.backward(gradient)
    expected.backward(gradient.double())
    assert (ours.grad[~mask] == 0).all()
    # A probability has an error of 1e-6 from sums in float32. The gradient is rounded once to its
    # dtype; torch rounds its sums in 16 bits once per id.
    largest = float(exact.grad.abs().max())
    roundings = 1 if backend == "native" else 20
    atol = largest * (1e-6 + roundings * torch.finfo(dtype).eps)
    torch.testing.assert_close(ours.grad.double(), exact.grad, rtol=0, atol=atol)


def test_gradients_of_equal_ids_add(backend: str) -> None:
    gradients = []
    for ids, gradient in (([[1, 1, 1]], [[0.5, 2.0, -1.0]]), ([[1, 0]], [[1.5, 0.0]])):
        logits = torch.tensor([[0.0, 1.0, -1.0]], requires_grad=True)
        values = gathered_logprob(logits, torch.tensor(ids), backend=backend)
        values.backward(torch.tensor(gradient))
        gradients.append(logits.grad)
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-6)


def test_rows_without_a_gradient_are_not_read() -> None:
    logits = torch.full((3, 40), torch.nan)
    logits[1] = 0.0
    logits.requires_grad_(True)
    ids = torch.tensor([[0, 1], [2, 2], [3, 4]])
    values = gathered_logprob(logits, ids)
    assert values[[0, 2]].isnan().all()
    values.backward(torch.tensor([[0.0, 0.0], [1.0, 1.0], [0.0, 0.0]]))
    assert (logits.grad[[0, 2]] == 0).all()
    assert float(logits.grad[1, 2]) == pytest.approx(2 - 2 / 40)


def test_the_operator_obeys_torch() -> None:
    """Checked by torch itself: its registration, shapes without data, and strides."""
    logits = torch.randn(2, 3, 50).transpose(0, 1).requires_grad_(True)
    ids = torch.randint(50, (6, 4))
    mask = torch.tensor([1, 0, 1, 1, 1, 1], dtype=torch.uint8)
    for keep in (None, mask):
        torch.library.opcheck(
            torch.ops.skyrl_fast.gathered_logprob, (logits, ids, keep, 0.7), rtol=1e-5, atol=1e-6
        )


def test_a_second_derivative_is_refused() -> None:
    logits = torch.randn(2, 5, requires_grad=True)
    values = gathered_logprob(logits, torch.tensor([[0, 1], [2, 3]]))
    (first,) = torch.autograd.grad(values.square().sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="gathered_logprob: no second derivative"):
        first.sum().backward()


def test_it_compiles_without_a_break() -> None:
    logits = torch.randn(4, 30, requires_grad=True)
    ids = torch.randint(30, (4, 3))
    function = torch.compile(gathered_logprob, fullgraph=True, backend="aot_eager")
    got = function(logits, ids)
    torch.testing.assert_close(got, gathered_logprob(logits, ids), rtol=0, atol=0)
    got.sum().backward()
    assert logits.grad is not None


def test_threads_change_no_bit() -> None:
    logits = torch.randn(300, 4000, requires_grad=True)
    ids = torch.randint(4000, (300, 20))
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            logits.grad = None
            values = gathered_logprob(logits, ids)
            values.sum().backward()
            results.append((values.detach(), logits.grad))
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, *results))


def test_one_token_is_the_selected_one(backend: str) -> None:
    logits = torch.randn(3, 4, 50, generator=torch.Generator().manual_seed(0))
    ids = torch.randint(50, (3, 4), generator=torch.Generator().manual_seed(1))
    got = gathered_logprob(logits, ids[..., None], backend=backend)[..., 0]
    torch.testing.assert_close(got, selected_logprob(logits, ids), rtol=0, atol=1e-6)


def test_gradients_in_float64() -> None:
    logits = torch.randn(4, 9, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([[0, 0], [8, 1], [3, 2], [5, 5]])
    torch.autograd.gradcheck(lambda x: gathered_logprob(x, ids, temperature=1.3), logits)


def test_unusual_rows(backend: str) -> None:
    logits = torch.zeros(4, 3)
    logits[0, 1] = torch.nan
    logits[1, 2] = torch.inf
    logits[2] = -torch.inf
    ids = torch.tensor([[0, 1]]).expand(4, 2)
    got = gathered_logprob(logits, ids, backend=backend)
    assert got[:3].isnan().all()
    assert torch.allclose(got[3], -torch.tensor(3.0).log())
    assert gathered_logprob(logits[:0], ids[:0], backend=backend).shape == (0, 2)
    assert gathered_logprob(logits, ids[:, :0], backend=backend).shape == (4, 0)
    turned = torch.randn(3, 5, 7).transpose(0, 1)
    many = torch.randint(7, (5, 3, 2))
    torch.testing.assert_close(
        gathered_logprob(turned, many, backend=backend), by_torch(turned, many), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize(
    ("logits", "ids", "options", "message"),
    [
        (torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), {}, "target_ids: expected shape"),
        (
            torch.zeros(2, 3),
            torch.zeros(3, 1, dtype=torch.int64),
            {},
            "target_ids: expected shape",
        ),
        (torch.zeros(2, 3), torch.zeros(2, 1), {}, "integers"),
        (torch.zeros(2, 3), torch.full((2, 1), 3), {}, r"expected ids in \[0, 3\).*got 3"),
        (torch.zeros(2, 3), torch.full((2, 1), -1), {}, "got -1"),
        (torch.zeros(2, 3).int(), torch.zeros(2, 1, dtype=torch.int64), {}, "expected float32"),
        (torch.zeros(3, 2).T, torch.zeros(2, 1, dtype=torch.int64), {}, "contiguous"),
        (torch.zeros(2, 3), torch.zeros(2, 1, dtype=torch.int64), {"temperature": 0.0}, "positive"),
        (
            torch.zeros(2, 3),
            torch.zeros(2, 1, dtype=torch.int64),
            {"loss_mask": torch.ones(3)},
            r"loss_mask: expected shape \(2,\), got \(3,\)",
        ),
        (
            torch.zeros(2, 3),
            torch.tensor([[-100, 0], [0, 5]]),
            {"loss_mask": torch.tensor([0, 1])},
            "got 5 in row 1",
        ),
    ],
)
def test_wrong_arguments_are_refused(
    logits: torch.Tensor, ids: torch.Tensor, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        gathered_logprob(logits, ids, **options)
    with pytest.raises(TypeError, match="target_ids: expected a torch tensor"):
        gathered_logprob(torch.zeros(2, 3), [[0]])  # type: ignore[arg-type]
