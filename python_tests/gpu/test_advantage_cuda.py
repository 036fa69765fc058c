"""group_advantage on a GPU, and its kernels emulated on the CPU: bit-identical to the CPU."""

import math
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from skyrl_fast import _C, group_advantage
from skyrl_fast.ops import _backend

ESTIMATORS = ["grpo", "dr_grpo", "rloo", "maxrl"]


def on_cpu(*arguments: object, **options: object) -> torch.Tensor:
    """Run the CPU kernel while a GPU is emulated."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_backend, "on_gpu", lambda tensor: tensor.is_cuda)
        patch.setattr(_backend, "device_kind", lambda device: device.type)
        return group_advantage(*arguments, **options)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_by_hand(gpu: str, estimator: str) -> None:
    """Group a: a trajectory of two rows with reward 1, one of three with reward 0."""
    rewards = torch.tensor([[9.0, 9.0], [0.5, 0.5], [9, 9], [9, 9], [0, 0]]).to(gpu)
    mask = torch.tensor([[1, 1], [0, 1], [1, 1], [1, 0], [1, 1]]).to(gpu)
    got = group_advantage(
        rewards,
        ["a"] * 5,
        is_last_step=[False, True, False, False, True],
        response_mask=mask,
        estimator=estimator,
    )
    high, low = {
        "grpo": (0.70710, -0.70710),
        "dr_grpo": (0.5, -0.5),
        "rloo": (1.0, -1.0),
        "maxrl": (1.0, -1.0),
    }[estimator]
    want = torch.tensor([high, high, low, low, low])[:, None] * mask.cpu()
    torch.testing.assert_close(got.cpu(), want, rtol=0, atol=1e-5)


@pytest.mark.spec("advantage.gpu-non-finite")
@given(
    trajectories=st.lists(
        st.tuples(st.integers(-3, 3), st.integers(1, 4)), min_size=0, max_size=40
    ),
    width=st.integers(0, 70),
    layout=st.sampled_from(["padded", "ragged", "per row"]),
    mask_dtype=st.sampled_from([None, torch.bool, torch.uint8, torch.int64, torch.float32]),
    estimator=st.sampled_from(ESTIMATORS),
    order=st.integers(0, 3),
    seed=st.integers(0, 2**20),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_result_equals_the_cpu_bit_for_bit(
    emulated_gpu: ModuleType,
    trajectories: list[tuple[int, int]],
    width: int,
    layout: str,
    mask_dtype: torch.dtype | None,
    estimator: str,
    order: int,
    seed: int,
) -> None:
    emulated_gpu.set_order(order)
    g = torch.Generator().manual_seed(seed)
    ids = [f"g{group}" for group, turns in trajectories for _ in range(turns)]
    last = [turn == turns - 1 for _, turns in trajectories for turn in range(turns)]
    num_rows, cu = len(ids), None
    shape: tuple[int, ...] = (num_rows, width)
    if layout == "ragged":
        lengths = torch.randint(0, width + 1, (num_rows,), generator=g)
        cu = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(torch.int32)
        shape = (int(cu[-1]),)
    rewards = torch.randn(shape if layout != "per row" else (num_rows,), generator=g)
    mask = torch.randint(0, 2, shape, generator=g).to(mask_dtype) if mask_dtype else None
    options = {"is_last_step": last, "response_mask": mask, "estimator": estimator}
    got = group_advantage(rewards, ids, cu_seqlens=cu, **options)
    want = on_cpu(rewards, ids, cu_seqlens=cu, **options)
    assert torch.equal(got, want)


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
@pytest.mark.parametrize("size", [7, 8, 9, 31, 32, 33, 64, 100])
def test_groups_larger_than_a_warp_equal_the_cpu_bit_for_bit(
    gpu: str, size: int, estimator: str
) -> None:
    rewards = torch.randn(3 * size + 2, generator=torch.Generator().manual_seed(size))
    ids = torch.arange(3 * size + 2) % 3 * 10  # the last group has fewer rows
    got = group_advantage(rewards.to(gpu), ids, estimator=estimator)
    assert torch.equal(got.cpu(), on_cpu(rewards, ids, estimator=estimator))


@pytest.mark.parametrize("dtype", [None, torch.bool, torch.int64, torch.float32])
def test_long_rows_and_trajectories(gpu: str, dtype: torch.dtype | None) -> None:
    """Rows of several parts, beginning at any cell; a trajectory's last row is 100 rows on."""
    g = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 9, (105,), generator=g)
    lengths[[0, 40, 104]] = torch.tensor([5001, 2050, 3000])
    cu = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    rewards = torch.randn(105, generator=g)
    last = [row in (100, 104) for row in range(105)]
    mask = torch.randint(0, 3, (int(cu[-1]),), generator=g)
    mask = None if dtype is None else mask.to(dtype)
    options = {"is_last_step": last, "cu_seqlens": cu}
    there = None if mask is None else mask.to(gpu)
    got = group_advantage(rewards.to(gpu), ["a"] * 105, response_mask=there, **options)
    want = on_cpu(rewards, ["a"] * 105, response_mask=mask, **options)
    assert torch.equal(got.cpu(), want)


def test_ids_and_flags_on_the_device(gpu: str) -> None:
    rewards = torch.randn(50, 3, generator=torch.Generator().manual_seed(1))
    ids, last = torch.arange(50) // 5 % 4, torch.arange(50) % 5 == 4
    got = group_advantage(rewards.to(gpu), ids.to(gpu), is_last_step=last.to(gpu))
    assert torch.equal(got.cpu(), on_cpu(rewards, ids, is_last_step=last))


@pytest.mark.spec("advantage.gpu-non-finite")
def test_non_finite_score_affects_only_its_group(gpu: str) -> None:
    rewards = torch.tensor([1.0, math.nan, 2.0, 1.0, math.inf, 0.0]).to(gpu)
    got = group_advantage(rewards, ["a", "a", "b", "b", "c", "c"])
    assert got.isnan().tolist() == [True, True, False, False, True, True]


def test_inputs_refused_on_the_cpu_are_errors(gpu: str) -> None:
    rewards = torch.zeros(2, device=gpu)
    with pytest.raises(ValueError, match="is_last_step: expected True in the last row"):
        group_advantage(rewards, ["a", "a"], is_last_step=[True, False])
    with pytest.raises(ValueError, match="group_ids: expected one id within a trajectory"):
        group_advantage(rewards, ["a", "b"], is_last_step=[False, True])


def test_number_of_kernel_launches_is_three(emulated_gpu: ModuleType) -> None:
    before = emulated_gpu.launches()
    group_advantage(torch.zeros(1000), [i // 10 for i in range(1000)])
    assert emulated_gpu.launches() == before + 3


@pytest.mark.spec("advantage.gpu-order")
@pytest.mark.parametrize("groups", [[0, 0, 1, 1], [1, 0, 1, 0]])
def test_gpu_sorts_nothing_that_is_known_on_the_cpu(
    emulated_gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, groups: list[int]
) -> None:
    """Only last rows are sent, by group; the CPU sorts them only if groups are not adjacent."""
    sorts, sent = [], []
    sort, kernel = torch.sort, _C.group_advantage_cuda

    def counted(keys: torch.Tensor, **options: bool) -> object:
        sorts.append(keys.tolist())
        return sort(keys, **options)

    def launched(*arguments: Any) -> None:
        sent.append([arguments[1].tolist(), arguments[2].tolist()])
        kernel(*arguments)

    monkeypatch.setattr(torch, "sort", counted)
    monkeypatch.setattr(_C, "group_advantage_cuda", launched)
    ids, last = [g for g in groups for _ in range(3)], [False, False, True] * 4
    rewards = torch.tensor([float(row % 5) for row in range(12)])
    got = group_advantage(rewards, ids, is_last_step=last)
    assert torch.equal(got, on_cpu(rewards, ids, is_last_step=last))
    rows = [2, 5, 8, 11] if groups[0] == groups[1] else [2, 8, 5, 11]
    labels = [0, 0, 1, 1]  # by first appearance
    assert sent == [[labels, rows]]
    assert sorts == ([] if groups[0] == groups[1] else [[0, 1, 0, 1]])


@pytest.mark.gpu
def test_cuda_graph_capture_without_synchronization() -> None:
    rewards, ids = torch.randn(64, 5, device="cuda"), (torch.arange(64) // 8).cuda()
    mask = torch.ones(64, 5, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        want = group_advantage(rewards, ids, response_mask=mask)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = group_advantage(rewards, ids, response_mask=mask)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, want)
