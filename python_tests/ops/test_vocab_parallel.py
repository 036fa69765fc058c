"""vocab_parallel_logprob: slices of the vocabulary on several ranks, over gloo on the CPU."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from skyrl_fast import selected_logprob, vocab_parallel_logprob
from skyrl_fast.ops.logprob.vocab_parallel import combine_slices

ROWS = 6
# two and three ranks, equal and unequal slices, one of a single column, one of padding only
SPLITS = [[0, 50, 100], [0, 33, 34, 100], [0, 97, 100, 104]]


def full(dtype: torch.dtype, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(3)
    logits = (torch.randn(ROWS, width, generator=g) * 4).to(dtype)
    logits[:, 100:] = -math.inf  # padding of the vocabulary
    logits[4] = math.nan  # masked
    targets = torch.tensor([0, 33, 99, 50, -100, 96])
    return logits, targets, torch.tensor([1, 1, 1, 1, 0, 1])


def kept_sets() -> dict[str, torch.Tensor]:
    """Sets in several slices, in one, and none; the masked row has a wrong one."""
    sets = [[0, 34, 98], [33], [], [2, 50], [-9, 3], [1, 10, 33, 34, 60, 96, 99]]
    cu = torch.tensor([0, *map(len, sets)]).cumsum(0)
    return {"kept_ids": torch.tensor([i for ids in sets for i in ids]).int(), "cu_kept": cu}


def loss_of(logprob: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
    weight = torch.linspace(-1, 1, ROWS, dtype=logprob.dtype, device=logprob.device)
    return (logprob * weight).sum() + 0.3 * (entropy * weight.flip(0)).sum()


def one_rank(
    rank: int, borders: list[int], dtype: torch.dtype, how: str, folder: Path, with_sets: bool
) -> list[torch.Tensor]:
    """Return log-probabilities, entropies and the gradient of one slice."""
    device = "cpu"
    if how == "cuda":
        device = f"cuda:{rank}"
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if how == "cuda" else "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=len(borders) - 1,
        timeout=timedelta(seconds=120),
    )
    logits, targets, mask = full(dtype, borders[-1])
    begin, end = borders[rank], borders[rank + 1]
    leaf = logits[:, begin:end].to(device, copy=True).requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        if how == "emulated":
            import _emulation

            _emulation.play_gpu(_emulation.load(), patch)
        logprob, entropy = vocab_parallel_logprob(
            leaf * 1,
            targets.to(device),
            vocab_start=begin,
            loss_mask=mask.to(device),
            temperature=0.7,
            return_entropy=True,
            inplace_backward=rank == 0,
            **({k: v.to(device) for k, v in kept_sets().items()} if with_sets else {}),
        )
        loss_of(logprob, entropy).backward()
    dist.destroy_process_group()
    return [t.detach().cpu() for t in (logprob, entropy, leaf.grad)]


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    """Return a process for each rank; a rank waits for the others, so each has its own."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max(map(len, SPLITS)) - 1, mp_context=context) as pool:
        yield pool


def ranks(
    pool: ProcessPoolExecutor,
    borders: list[int],
    dtype: torch.dtype,
    how: str,
    folder: Path,
    with_sets: bool = False,
) -> list[list[torch.Tensor]]:
    jobs = [
        pool.submit(one_rank, rank, borders, dtype, how, folder, with_sets)
        for rank in range(len(borders) - 1)
    ]
    return [job.result() for job in jobs]


def check(results: list[list], dtype: torch.dtype, width: int, with_sets: bool = False) -> None:
    logits, targets, mask = full(dtype, width)
    leaf = logits.double().requires_grad_()
    want, want_entropy = selected_logprob(
        *(leaf, targets),
        loss_mask=mask,
        temperature=0.7,
        return_entropy=True,
        backend="torch",
        **(kept_sets() if with_sets else {}),
    )
    loss_of(want, want_entropy).backward()
    for logprob, entropy, _ in results:
        assert torch.equal(logprob, results[0][0]) and torch.equal(entropy, results[0][1])
        # float32 sums of slices, combined in float64
        torch.testing.assert_close(logprob.double(), want.detach(), rtol=1e-6, atol=4e-6)
        torch.testing.assert_close(entropy.double(), want_entropy.detach(), rtol=1e-6, atol=4e-6)
    grad = torch.cat([r[2] for r in results], dim=1).double()
    rtol = 1e-5 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(grad, leaf.grad, rtol=rtol, atol=1e-6)


@pytest.mark.spec("logprob.vocab-parallel")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("borders", SPLITS)
def test_ranks_equal_one_process(
    pool: ProcessPoolExecutor, borders: list[int], dtype: torch.dtype, tmp_path: Path
) -> None:
    check(ranks(pool, borders, dtype, "native", tmp_path), dtype, borders[-1])


@pytest.mark.spec("logprob.vocab-parallel")
def test_ranks_with_emulated_kernels(
    pool: ProcessPoolExecutor, cuda_on_cpu: object, tmp_path: Path
) -> None:
    borders = SPLITS[2]
    check(ranks(pool, borders, torch.bfloat16, "emulated", tmp_path), torch.bfloat16, borders[-1])


@pytest.mark.spec("logprob.kept-sets")
@pytest.mark.parametrize("how", ["native", "emulated"])
def test_ranks_with_kept_sets(
    pool: ProcessPoolExecutor, how: str, cuda_on_cpu: object, tmp_path: Path
) -> None:
    results = ranks(pool, SPLITS[1], torch.float32, how, tmp_path, with_sets=True)
    check(results, torch.float32, SPLITS[1][-1], with_sets=True)


def test_wrong_sets_are_refused_on_every_rank() -> None:
    """Before the ranks exchange anything: all hold all ids."""
    for kept in ([1, 1], [1, 2], [-1, 3]):
        with pytest.raises(ValueError, match="vocab_parallel_logprob: kept_ids must"):
            vocab_parallel_logprob(
                torch.zeros(1, 4), torch.tensor([3]), vocab_start=4,
                kept_ids=torch.tensor(kept, dtype=torch.int32), cu_kept=torch.tensor([0, 2]),
            )  # fmt: skip


@pytest.mark.gpu
def test_ranks_on_gpus(pool: ProcessPoolExecutor, tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    check(ranks(pool, SPLITS[0], torch.bfloat16, "cuda", tmp_path), torch.bfloat16, 100)


def test_single_rank_equals_selected_logprob() -> None:
    logits, targets, mask = full(torch.float32, 100)
    got = vocab_parallel_logprob(
        logits, targets, vocab_start=0, loss_mask=mask, return_entropy=True
    )
    want = selected_logprob(logits, targets, loss_mask=mask, return_entropy=True)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_target_on_no_rank_gives_nan() -> None:
    got = vocab_parallel_logprob(torch.zeros(3, 8), torch.tensor([3, 8, -1]), vocab_start=0)
    assert got.isnan().tolist() == [False, True, True]


def test_slices_by_hand() -> None:
    """Softmax (1/4, 1/4 and 1/2), of logits 0, 0 and ln 2; and a slice of nothing but -inf."""
    ln2 = math.log(2)
    parts = torch.tensor(
        [[[ln2, ln2, 0.0, 1.0]], [[ln2, 0.0, 0.0, 0.0]], [[-math.inf, math.nan, 0.0, 0.0]]],
        dtype=torch.float64,
    )
    logprob, entropy, lse = combine_slices(parts)
    torch.testing.assert_close(logprob, torch.tensor([-2 * ln2], dtype=torch.float64))
    torch.testing.assert_close(entropy, torch.tensor([1.5 * ln2], dtype=torch.float64))
    torch.testing.assert_close(lse, torch.tensor([2 * ln2], dtype=torch.float64))


def test_invalid_arguments() -> None:
    with pytest.raises(ValueError, match="vocab_start must not be negative"):
        vocab_parallel_logprob(torch.zeros(1, 4), torch.tensor([0]), vocab_start=-1)
    with pytest.raises(ValueError, match="float32, bfloat16 or float16"):
        vocab_parallel_logprob(torch.zeros(1, 4).double(), torch.tensor([0]), vocab_start=0)
