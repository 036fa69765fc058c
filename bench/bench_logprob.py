"""selected_logprob compared with torch's formulations, on logits larger than the caches.

Floors for L bytes of logits: forward L read; forward and backward 2 L read and L written, or, where
the loss is known in the same pass, L read and L written. Only ours also returns the entropy. "read
floor" sums the logits' bytes as float32 by torch.sum.

Logits are refilled before each contender: an in-place gradient overwrites them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bench.baselines import logprob as baselines
from skyrl_fast import (
    _C,
    gathered_logprob,
    linear_logprob,
    masked_logprob_loss,
    selected_logprob,
)

SIZES = {"4096x151936": (4096, 151_936), "1024x32000": (1024, 32_000)}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SLOW_ROUNDS, FAST_ROUNDS = 2, 7  # of those that take seconds, and of ours

Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def ours(logits: torch.Tensor, targets: torch.Tensor, **options: object) -> torch.Tensor:
    return selected_logprob(logits, targets, return_entropy=True, **options)[0]


@functools.cache
def compiled() -> Function:
    return torch.compile(baselines.log_softmax_gather, dynamic=True)


def read_floor(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return logits.detach().view(torch.float32).sum()


FORWARD: dict[str, Function] = {
    "skyrl_fast": ours,
    "torch.compile": lambda x, t: compiled()(x, t),
    "cross_entropy": baselines.cross_entropy,
    "log_softmax_gather": baselines.log_softmax_gather,
    "logsumexp_rows": baselines.logsumexp_rows,
    "logsumexp_whole": baselines.logsumexp_whole,
    "read_floor": read_floor,
}


@functools.cache
def compiled_several() -> Function:
    return torch.compile(baselines.log_softmax_gather_several, dynamic=True)


GATHERED: dict[str, Function] = {
    "skyrl_fast": gathered_logprob,
    "torch.compile": lambda x, ids: compiled_several()(x, ids),
    "log_softmax_gather": baselines.log_softmax_gather_several,
}
BACKWARD = [
    "skyrl_fast",
    "skyrl_fast_loss",
    "skyrl_fast_new_tensor",
    "torch.compile",
    "cross_entropy",
    "log_softmax_gather",
]
LARGE_FORWARD = ["skyrl_fast", "torch.compile", "cross_entropy", "log_softmax_gather", "read_floor"]


@functools.lru_cache(maxsize=1)
def buffer(size: str, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    rows, vocab = SIZES[size]
    targets = torch.randint(0, vocab, (rows,), generator=torch.Generator().manual_seed(1))
    return torch.empty(rows, vocab, dtype=DTYPES[dtype]), targets


def fresh(size: str, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    logits, targets = buffer(size, dtype)
    row = torch.randn(2 * logits.shape[1], generator=torch.Generator().manual_seed(2)) * 3
    with torch.no_grad():
        for r in range(logits.shape[0]):  # the same numbers, elsewhere in each row
            start = 997 * r % logits.shape[1]
            logits[r] = row[start : start + logits.shape[1]]
    return logits, targets


def check(function: Function, logits: torch.Tensor, targets: torch.Tensor) -> None:
    got = function(logits[:3], targets[:3]).detach()
    want = baselines.log_softmax_gather(logits[:3].double(), targets[:3])
    # Contenders that compute in bfloat16 have errors of up to 2^-8 of 16.
    loose = got.dtype == torch.bfloat16 or logits.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), want, rtol=0, atol=0.07 if loose else 1e-4)


def forward_backward(name: str, logits: torch.Tensor, targets: torch.Tensor) -> None:
    leaf = logits.detach().requires_grad_()
    weight = 1.0 / targets.numel()
    if name == "skyrl_fast_loss":
        loss = masked_logprob_loss(
            leaf, targets, None, None, loss="cross_entropy", inplace_backward=True
        )[0]
        loss.backward()
        return
    function = FORWARD.get(name, ours)
    options = {"inplace_backward": True} if name == "skyrl_fast" else {}
    (function(leaf, targets, **options) * weight).sum().backward()


def timed(benchmark, function, size: str, dtype: str, threads: int, ours: bool, copies: int):
    logits, targets = fresh(size, dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        rounds = FAST_ROUNDS if ours or logits.nbytes < 1 << 28 else SLOW_ROUNDS
        benchmark.pedantic(function, args=(logits, targets), rounds=rounds, warmup_rounds=1)
    finally:
        torch.set_num_threads(before)
    num_bytes = logits.nbytes * copies
    benchmark.extra_info["bytes"] = num_bytes
    benchmark.extra_info["gb_per_s"] = num_bytes / benchmark.stats.stats.min / 1e9


def cases(size: str, small: list[str], large: list[str]) -> list[str]:
    return large if SIZES[size][0] * SIZES[size][1] > 1 << 28 else small


@pytest.mark.parametrize("contender", list(FORWARD))
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("size", list(SIZES))
def test_forward(benchmark, size: str, dtype: str, threads: int, contender: str) -> None:
    if contender not in cases(size, list(FORWARD), LARGE_FORWARD):
        pytest.skip("one that takes long at this size, and is never the fastest")
    benchmark.group = f"logprob forward {size} {dtype} {threads}T"
    function = FORWARD[contender]
    if contender != "read_floor":
        check(function, *fresh(size, dtype))
    with torch.no_grad():
        fast = contender in ("skyrl_fast", "read_floor")
        timed(benchmark, function, size, dtype, threads, fast, 1)


@pytest.mark.parametrize("contender", BACKWARD)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("size", list(SIZES))
def test_forward_backward(benchmark, size: str, dtype: str, threads: int, contender: str) -> None:
    if contender == "log_softmax_gather" and size == "4096x151936":
        pytest.skip("four times the logits in memory, and never the fastest")
    benchmark.group = f"logprob forward+backward {size} {dtype} {threads}T"
    function = functools.partial(forward_backward, contender)
    fast = contender in ("skyrl_fast", "skyrl_fast_loss")
    timed(benchmark, function, size, dtype, threads, fast, 2 if contender.endswith("loss") else 3)


@pytest.mark.parametrize("trained", [100, 30])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_trained_rows(benchmark, dtype: str, trained: int) -> None:
    benchmark.group = f"logprob forward 4096x151936 {dtype} 1T, percent of rows trained"
    mask = torch.rand(4096, generator=torch.Generator().manual_seed(3)) < trained / 100
    function = functools.partial(ours, loss_mask=mask)
    with torch.no_grad():
        timed(benchmark, function, "4096x151936", dtype, 1, True, 1)


def kept_sets(size: int | None, vocab: int, targets: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return sets of up to `size` ids per row that hold the target, or nothing for None.

    Ids are drawn with weights 1 / rank, as tokens are frequent: rows share many of them.
    """
    if size is None:
        return {}
    g = torch.Generator().manual_seed(5)
    weights = 1.0 / torch.arange(1, vocab + 1)
    sets = []
    for target in targets[:, None]:
        drawn = torch.multinomial(weights, size - 1, generator=g) * 7919 % vocab  # spread out
        sets.append(torch.cat([drawn, target]).unique())
    cu = torch.tensor([0, *map(len, sets)]).cumsum(0)
    return {"kept_ids": torch.cat(sets).to(torch.int32), "cu_kept": cu}


@pytest.mark.parametrize("kept", [None, 50, 1000])
@pytest.mark.parametrize("how", ["forward", "forward+backward", "one pass"])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_kept_sets(benchmark, dtype: str, how: str, kept: int | None) -> None:
    """Time rows normalised over the ids that truncated sampling kept; None: over all."""
    size = "1024x32000"
    benchmark.group = f"logprob {how} {size} {dtype} 1T, kept ids of a row"
    sets = kept_sets(kept, SIZES[size][1], buffer(size, dtype)[1])

    def run(logits: torch.Tensor, targets: torch.Tensor) -> None:
        if how == "forward":
            ours(logits, targets, **sets)
            return
        leaf = logits.detach().requires_grad_()
        if how == "one pass":
            arguments = {"loss": "cross_entropy", "inplace_backward": True, **sets}
            masked_logprob_loss(leaf, targets, None, None, **arguments).loss.backward()
        else:
            ours(leaf, targets, inplace_backward=True, **sets).sum().backward()

    timed(benchmark, run, size, dtype, 1, True, {"forward": 1, "one pass": 2}.get(how, 3))


GATHERED_IDS = 20  # of each row, as top-k distillation has


@pytest.mark.parametrize("contender", ["skyrl_fast", "torch.compile", "log_softmax_gather"])
@pytest.mark.parametrize("how", ["forward", "forward+backward"])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_gathered(benchmark, dtype: str, how: str, contender: str) -> None:
    """Time several ids per row: the floors are those of one id, whose lines add little."""
    size = "1024x32000"
    benchmark.group = f"gathered_logprob {how} {size}, {GATHERED_IDS} ids, {dtype} 1T"
    rows, vocab = SIZES[size]
    ids = torch.randint(vocab, (rows, GATHERED_IDS), generator=torch.Generator().manual_seed(6))
    function = GATHERED[contender]
    few = fresh(size, dtype)[0][:3]
    exact = baselines.log_softmax_gather_several(few.double(), ids[:3])
    # Contenders that compute in bfloat16 have errors of up to 2^-8 of 16.
    tolerance = 0.07 if dtype == "bf16" else 1e-4
    torch.testing.assert_close(function(few, ids[:3]).double(), exact, rtol=0, atol=tolerance)

    def run(logits: torch.Tensor, targets: torch.Tensor) -> None:
        if how == "forward":
            with torch.no_grad():
                function(logits, ids)
        else:
            function(logits.detach().requires_grad_(), ids).sum().backward()

    copies = 1 if how == "forward" else 3
    timed(benchmark, run, size, dtype, 1, contender == "skyrl_fast", copies)


@pytest.mark.parametrize("level", ["avx512", "avx2", "baseline"])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_simd_levels(benchmark, dtype: str, level: str) -> None:
    benchmark.group = f"logprob forward 1024x32000 {dtype} 1T, SIMD level"
    before = _C.simd_level()
    try:
        _C.set_simd_level(level)
    except ValueError as missing:
        pytest.skip(str(missing))
    try:
        with torch.no_grad():
            timed(benchmark, ours, "1024x32000", dtype, 1, True, 1)
    finally:
        _C.set_simd_level(before)


def peak_bytes(function: Callable[[], object]) -> int:
    """Return a call's peak extra memory in bytes, from the kernel's high-water mark (Linux)."""

    def read(field: str) -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.split(field + ":")[1].split()[0]) << 10

    Path("/proc/self/clear_refs").write_text("5")  # peak := present
    before = read("VmRSS")
    function()
    return max(0, read("VmHWM") - before)


@pytest.mark.parametrize("contender", BACKWARD)
def test_extra_memory(benchmark, contender: str) -> None:
    size, dtype = "1024x32000", "fp32"
    benchmark.group = f"logprob forward+backward {size} {dtype}, extra memory"
    logits, targets = fresh(size, dtype)
    function = functools.partial(forward_backward, contender, logits, targets)
    function()
    extra = peak_bytes(function)
    benchmark.extra_info["extra_memory_of_logits"] = extra / logits.nbytes
    benchmark.pedantic(function, rounds=3)


LINEAR_HEAD = (896, 151_936)  # hidden, vocab: a 0.5 B model's
LINEAR_WORKS = {
    "512x896x151936 fp32 2T, 30 % trained": (512, torch.float32, 0.3),
    "1536x896x151936 bf16 2T": (1536, torch.bfloat16, 1.0),  # several chunks of logits
}


@pytest.mark.parametrize("contender", ["skyrl_fast", "torch_whole_logits", "torch_trained_rows"])
@pytest.mark.parametrize("work", LINEAR_WORKS)
def test_linear(benchmark, work: str, contender: str) -> None:
    """Time forward and backward; the gradients are compared first."""
    rows, dtype, share = LINEAR_WORKS[work]
    if share == 1.0 and contender == "torch_trained_rows":
        pytest.skip("all rows are trained")
    hidden, vocab = LINEAR_HEAD
    benchmark.group = f"linear_logprob {work}"
    g = torch.Generator().manual_seed(4)
    h = torch.randn(rows, hidden, generator=g).to(dtype).requires_grad_()
    w = (torch.randn(vocab, hidden, generator=g) * hidden**-0.5).to(dtype).requires_grad_()
    targets = torch.randint(0, vocab, (rows,), generator=g)
    mask = torch.rand(rows, generator=g) < share

    def run() -> None:
        h.grad = w.grad = None
        if contender == "skyrl_fast":
            logprob = linear_logprob(h, w, targets, loss_mask=mask)
        elif contender == "torch_trained_rows":
            logprob = baselines.cross_entropy(h[mask] @ w.T, targets[mask])
        else:
            logprob = baselines.cross_entropy(h @ w.T, targets) * mask
        logprob.sum().backward()

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        run()
        benchmark.extra_info["gradient_error"] = linear_error(h, w, targets, mask)
        benchmark.pedantic(run, rounds=3)
    finally:
        torch.set_num_threads(before)


def linear_error(
    h: torch.Tensor, w: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor
) -> float:
    """Return the relative error against float64 of hidden's gradient in a few trained rows."""
    some = mask.nonzero().squeeze(1)[:8]
    head = w.detach().double()
    p = (h.detach()[some].double() @ head.T).softmax(1)
    exact = head[targets[some]] - p @ head
    error = float((h.grad[some].double() - exact).norm() / exact.norm())
    assert error < (1e-4 if h.dtype == torch.float32 else 2e-2)
    return error


@pytest.mark.parametrize("kept", [None, 50, 1000])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_linear_kept_sets(benchmark, dtype: str, kept: int | None) -> None:
    """Time forward and backward of rows with kept sets: only their part of the head is read."""
    rows, (hidden, vocab) = 512, LINEAR_HEAD
    benchmark.group = f"linear_logprob {rows}x{hidden}x{vocab} {dtype} 2T, kept ids of a row"
    g = torch.Generator().manual_seed(4)
    h = torch.randn(rows, hidden, generator=g).to(DTYPES[dtype]).requires_grad_()
    w = (torch.randn(vocab, hidden, generator=g) * hidden**-0.5).to(DTYPES[dtype]).requires_grad_()
    targets = torch.randint(0, vocab, (rows,), generator=g)
    sets = kept_sets(kept, vocab, targets)

    def run() -> None:
        h.grad = w.grad = None
        linear_logprob(h, w, targets, **sets).sum().backward()

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        benchmark.pedantic(run, rounds=3, warmup_rounds=1)
    finally:
        torch.set_num_threads(before)
