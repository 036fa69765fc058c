"""Log-probabilities normalised over the ids that truncated sampling kept. M rows, V vocab."""

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch.autograd import gradcheck

from skyrl_fast import linear_logprob, masked_logprob_loss, selected_logprob
from skyrl_fast.ops.logprob import linear as linear_module
from skyrl_fast.ops.logprob.masked_loss import TOKEN_LOSSES

VOCAB = 1200
SIZES = (1, 2, 31, 32, 33, 1000, VOCAB, 0)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MASK = torch.tensor([1, 1, 0, 1, 1, 1, 1, 1])
FORWARD = {"rtol": 1e-6, "atol": 4e-6}  # float32 sums of logits of magnitude 15
# Half a unit in the last place of the dtype, float32's error of 4e-6, and two units in the last
# place of a probability of 1 (of a set of one id).
GRADIENT = {
    torch.float32: {"rtol": 4e-6, "atol": 2.4e-7},
    torch.bfloat16: {"rtol": 2**-8 + 2e-4, "atol": 2.4e-7},
    torch.float16: {"rtol": 2**-10, "atol": 2.4e-7},
}


def offsets(sizes: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *sizes]).cumsum(0)


def case(
    dtype: torch.dtype = torch.float32, vocab: int = VOCAB, sizes: Sequence[int] = SIZES
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return logits, targets, and kept ids that contain the targets."""
    g = torch.Generator().manual_seed(0)
    logits = (torch.randn(len(sizes), vocab, generator=g) * 4).to(dtype)
    sets = [torch.randperm(vocab, generator=g)[:size].sort().values for size in sizes]
    targets = torch.tensor([int(s[len(s) // 2]) if len(s) else 7 for s in sets])
    return logits, targets, {"kept_ids": torch.cat(sets).int(), "cu_kept": offsets(sizes)}


def visited(logits: torch.Tensor, targets: torch.Tensor, **options: object) -> list[torch.Tensor]:
    """Return log-probability, entropy and the gradient of a combination of both."""
    leaf = logits.detach().clone().requires_grad_()
    logprob, entropy = selected_logprob(leaf * 1, targets, return_entropy=True, **options)
    weight = torch.linspace(-1, 1, targets.numel(), dtype=logprob.dtype)
    ((logprob * weight).sum() + 0.3 * (entropy * weight.flip(0)).sum()).backward()
    assert leaf.grad is not None
    return [logprob.detach(), entropy.detach(), leaf.grad]


def outside(kept: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return (M, V) bool, the logits that do not count."""
    cu = kept["cu_kept"].tolist()
    out = torch.zeros(len(SIZES), VOCAB, dtype=torch.bool)
    for row, size in enumerate(SIZES):
        out[row] = size > 0
        out[row, kept["kept_ids"][cu[row] : cu[row + 1]].long()] = False
    return out


def by_hand(
    logits: torch.Tensor, targets: torch.Tensor, kept: dict[str, torch.Tensor], temperature: float
) -> list[torch.Tensor]:
    """Compute `visited` row by row in float64, with -inf outside the set."""
    masked = logits.double().masked_fill(outside(kept), -math.inf)
    return visited(masked, targets, temperature=temperature, backend="torch")


@pytest.mark.spec("logprob.kept-sets")
def test_hand_table(backend):
    """Probabilities 0.1, 0.2, 0.3, 0.4: of three kept ones, of one, and of all."""
    logits = torch.log(torch.tensor([[0.1, 0.2, 0.3, 0.4]])).repeat(3, 1).requires_grad_()
    logprob, entropy = selected_logprob(
        logits,
        torch.tensor([1, 3, 0]),
        kept_ids=torch.tensor([1, 2, 3, 3], dtype=torch.int32),
        cu_kept=torch.tensor([0, 3, 4, 4]),
        return_entropy=True,
        backend=backend,
    )
    want = torch.log(torch.tensor([2 / 9, 1.0, 0.1]))
    torch.testing.assert_close(logprob.detach(), want, rtol=1e-6, atol=1e-7)
    p = [[2 / 9, 3 / 9, 4 / 9], [1.0], [0.1, 0.2, 0.3, 0.4]]
    want = torch.tensor([-sum(x * math.log(x) for x in row) for row in p])
    torch.testing.assert_close(entropy.detach(), want, rtol=1e-6, atol=1e-7)
    logprob.sum().backward()
    want = [[0, 7 / 9, -3 / 9, -4 / 9], [0, 0, 0, 0], [0.9, -0.2, -0.3, -0.4]]
    # two units in the last place of 1: 1 - p of a set of one id
    torch.testing.assert_close(logits.grad, torch.tensor(want), rtol=1e-6, atol=2.4e-7)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_float64(dtype, inplace, temperature, backend):
    logits, targets, kept = case(dtype)
    want = by_hand(logits, targets, kept, temperature)
    got = visited(
        *(logits, targets),
        **kept,
        temperature=temperature,
        inplace_backward=inplace,
        backend=backend,
    )
    torch.testing.assert_close(got[0].double(), want[0], **FORWARD)
    torch.testing.assert_close(got[1].double(), want[1], **FORWARD)
    torch.testing.assert_close(got[2].double(), want[2], **GRADIENT[dtype])
    assert not got[2][outside(kept)].any()


def test_only_kept_logits_are_read(backend):
    """NaN outside the sets, in masked rows and between rows; a masked row with a wrong set."""
    logits, targets, kept = case()
    want = by_hand(logits, targets, kept, 1.0)
    memory = torch.full((len(SIZES), VOCAB + 3), math.nan)
    cu = kept["cu_kept"].tolist()
    memory[:, :VOCAB] = logits.masked_fill(outside(kept), math.nan)
    rows = memory[:, :VOCAB]
    rows[2] = math.nan
    kept["kept_ids"][cu[2] : cu[3]] = -9
    targets[2] = -100
    got = visited(rows, targets, **kept, loss_mask=MASK, backend=backend)
    live = MASK != 0
    torch.testing.assert_close(got[0][live].double(), want[0][live], **FORWARD)
    torch.testing.assert_close(got[2][live].double(), want[2][live], **GRADIENT[torch.float32])
    assert got[0][2] == got[1][2] == 0 and torch.equal(got[2][2], torch.zeros(VOCAB))


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_and_layouts(threads):
    logits, targets, kept = case()
    want = visited(logits, targets, **kept)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    flat = visited(logits, targets, **kept)
    wide = torch.zeros(2, 5, VOCAB)
    wide[:, :4] = logits.view(2, 4, VOCAB)
    got, _ = selected_logprob(
        wide[:, :4], targets.view(2, 4), **kept, return_entropy=True, backend="native"
    )
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(flat, want, strict=True))
    assert torch.equal(got.flatten(), want[0])


@pytest.mark.spec("logprob.fused-loss")
@pytest.mark.parametrize(("dtype", "inplace"), [(torch.float32, False), (torch.bfloat16, True)])
@pytest.mark.parametrize("loss", TOKEN_LOSSES)
def test_fused_loss(loss, dtype, inplace):
    """Equals selected_logprob and the loss in float64; zero gradient outside the sets."""
    logits, targets, kept = case(dtype)
    g = torch.Generator().manual_seed(1)
    current = by_hand(logits, targets, kept, 0.7)[0]
    arguments = {
        "old_logprobs": current + 0.2 * torch.randn(8, generator=g),
        "advantages": torch.randn(8, generator=g),
        "rollout_logprobs": current + 0.2 * torch.randn(8, generator=g),
        "ref_logprobs": current + 0.2 * torch.randn(8, generator=g),
    }
    options = {"loss": loss, "kl_estimator": "k3", "kl_coef": 0.1, "temperature": 0.7}

    def run(values: torch.Tensor, **more: object) -> tuple[torch.Tensor, ...]:
        leaf = values.detach().clone().requires_grad_()
        out = masked_logprob_loss(
            *(leaf * 1, targets), loss_mask=MASK, **arguments, **options, **kept, **more,
            return_entropy=True,
        )  # fmt: skip
        out.loss.backward()
        return out.loss.detach(), out.logprobs, out.entropy, leaf.grad

    got = run(logits, inplace_backward=inplace)
    want = run(logits.double(), backend="torch")
    for g_, w in zip(got[:3], want[:3], strict=True):
        torch.testing.assert_close(g_.double(), w, rtol=4e-6, atol=4e-6)
    close = {k: 2 * v for k, v in GRADIENT[dtype].items()}  # and the loss's derivative's error
    torch.testing.assert_close(got[3].double(), want[3], rtol=close["rtol"], atol=1e-6)
    assert not got[3][outside(kept)].any()


# --- hostile inputs ------------------------------------------------------------------------------


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


CU = torch.tensor([0, 2, 4])
BAD = {
    "out of range": (ids(1, 3, 2, 9), CU, r"kept_ids: expected ids in \[0, 5\).*got 9 in row 1"),
    "below": (ids(-1, 3, 2, 3), CU, r"kept_ids: expected ids in \[0, 5\).*got -1 in row 0"),
    "twice": (ids(1, 3, 3, 3), CU, "kept_ids: expected one above 3.*got 3 in row 1"),
    "falls": (ids(3, 1, 3, 4), CU, "kept_ids: expected one above 3.*got 1 in row 0"),
    "no target": (ids(1, 3, 1, 2), CU, "wanted 3 in row 1, got 2 other ids"),
    "rows": (ids(1, 3), torch.tensor([0, 2]), r"cu_kept: expected \(3,\)"),
    "wraps": (ids(1, 3, 2, 3), CU + 2**32, "cu_kept"),
    "floats": (ids(1, 3, 2, 3), CU.float(), "cu_kept: expected a 1-D vector of ints"),
    "falling offsets": (
        ids(1, 3, 2, 3),
        torch.tensor([0, 5, 4]),
        "cu_kept: expected non-decreasing",
    ),
    "int64 ids": (ids(1, 3, 2, 3).long(), CU, r"kept_ids: expected \(K,\) int32"),
    "no offsets": (ids(1, 3, 2, 3), None, "together"),
    "no ids": (None, CU, "together"),
}
HIDDEN = torch.eye(5)[:2]
OPS: dict[str, Callable[..., object]] = {
    "selected_logprob": lambda t, **k: selected_logprob(torch.zeros(2, 5), t, **k),
    "masked_logprob_loss": lambda t, **k: masked_logprob_loss(
        torch.zeros(2, 5), t, None, None, loss="cross_entropy", **k
    ),
    "linear_logprob": lambda t, **k: linear_logprob(HIDDEN, torch.eye(5), t, **k),
}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("bad", BAD)
def test_wrong_sets_are_refused(bad, op, backend):
    kept_ids, cu, message = BAD[bad]
    with pytest.raises((ValueError, TypeError), match=f"{op}: .*{message}"):
        OPS[op](torch.tensor([3, 3]), kept_ids=kept_ids, cu_kept=cu, backend=backend)


def test_wrong_sets_leave_the_logits_alone():
    """The check precedes the first row that is written in place."""
    logits = torch.randn(2, 5).requires_grad_()
    before = logits.detach().clone()
    with pytest.raises(ValueError, match="kept_ids"):
        masked_logprob_loss(
            logits, torch.tensor([3, 3]), None, torch.ones(2), kept_ids=ids(1, 3, 1, 2),
            cu_kept=CU, inplace_backward=True,
        )  # fmt: skip
    assert torch.equal(logits, before)


# --- torch's machinery ---------------------------------------------------------------------------


def test_gradcheck():
    logits, targets, kept = case(torch.float64, 12, (3, 1, 12, 0))
    assert gradcheck(
        lambda x: selected_logprob(x, targets, **kept, return_entropy=True), logits.requires_grad_()
    )


def test_opcheck_and_compile():
    logits, targets, kept = case(vocab=40, sizes=(3, 1, 40, 0))
    begin, end = kept["cu_kept"][:-1], kept["cu_kept"][1:]
    ranges = torch.stack([torch.where(begin == end, -1, begin), end], 1)
    inputs = (logits.requires_grad_(), targets, None, 0.7, True, False, False, kept["kept_ids"])
    torch.library.opcheck(torch.ops.skyrl_fast.selected_logprob.default, (*inputs, ranges))

    def total(x: torch.Tensor) -> torch.Tensor:
        logprob = selected_logprob(x, targets, **kept)
        fused = masked_logprob_loss(x, targets, None, torch.ones(4), **kept)
        return logprob.sum() + fused.loss

    want = torch.autograd.grad(total(logits), logits)[0]
    got = torch.autograd.grad(torch.compile(total, fullgraph=True)(logits), logits)[0]
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)


def test_vmap():
    logits, targets, kept = case(vocab=40, sizes=(3, 1, 40, 0))
    both = torch.stack([logits, logits + 1])
    got = torch.func.vmap(lambda x: selected_logprob(x, targets, **kept))(both)
    want = selected_logprob(logits, targets, **kept)
    torch.testing.assert_close(got, want.expand(2, -1), **FORWARD)


# --- linear_logprob ------------------------------------------------------------------------------


def linear(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, **options: object
) -> list[torch.Tensor]:
    hidden, weight = (x.detach().clone().requires_grad_() for x in (hidden, weight))
    logprob, entropy = linear_logprob(hidden, weight, targets, return_entropy=True, **options)
    slope = torch.linspace(-1, 1, targets.numel(), dtype=logprob.dtype)
    ((logprob * slope).sum() + 0.3 * (entropy * slope.flip(0)).sum()).backward()
    return [logprob.detach(), entropy.detach(), hidden.grad, weight.grad]


@pytest.mark.parametrize("rows_per_gathered", [1e-9, 1e9])
@pytest.mark.parametrize("chunk_rows", [None, 1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear(dtype, chunk_rows, rows_per_gathered, backend, monkeypatch):
    """Small sets over a part of the head or over all of it; the others always over all."""
    cost = {4: rows_per_gathered, 2: rows_per_gathered}
    monkeypatch.setattr(linear_module, "ROWS_PER_GATHERED", cost)
    _, targets, kept = case()
    g = torch.Generator().manual_seed(2)
    hidden = torch.randn(8, 24, generator=g).to(dtype)
    weight = (torch.randn(VOCAB, 24, generator=g) / 2).to(dtype)
    options = {"temperature": 0.7, "loss_mask": MASK, **kept}
    got = linear(hidden, weight, targets, chunk_rows=chunk_rows, backend=backend, **options)
    want = linear(hidden.double(), weight.double(), targets, **options)
    # logits and their gradients are rounded to the dtype
    close = {"rtol": 2e-5, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 0.03, "atol": 0.06}
    for g_, w in zip(got, want, strict=True):
        torch.testing.assert_close(g_.double(), w, **close)
    ids_of_none = torch.ones(VOCAB, dtype=torch.bool)
    only_small = {"kept_ids": kept["kept_ids"][:99], "cu_kept": offsets(SIZES[:5])}
    ids_of_none[only_small["kept_ids"].long()] = False
    got = linear(hidden[:5], weight, targets[:5], backend=backend, **only_small)
    assert not got[3][ids_of_none].any()


def test_linear_gradcheck():
    logits, targets, kept = case(torch.float64, 12, (3, 1, 12, 0))
    weight = torch.randn(12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert gradcheck(
        lambda h, w: linear_logprob(h, w, targets, **kept, return_entropy=True),
        (logits[:, :4].clone().requires_grad_(), weight.requires_grad_()),
    )
