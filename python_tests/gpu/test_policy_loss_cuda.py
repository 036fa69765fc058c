"""policy_loss on a GPU, and its kernels emulated on the CPU, against the reference."""

import math
from types import ModuleType
from typing import Any

import pytest
import torch
from _losses import F32, F64, IDS, NAN, VARIANTS, batch, loss_and_grad, penalty_and_grad
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from skyrl_fast.ops.policy_loss import autograd as policy_loss_op
from skyrl_fast.ops.policy_loss.loss import KL_ESTIMATORS, policy_loss
from skyrl_fast.ops.policy_loss.losses import LossSettings
from skyrl_fast.ops.policy_loss.reduction import REDUCTIONS

SHAPES = [(1, 1), (1, 2), (3, 31), (2, 32), (5, 33), (7, 1000)]  # the last: several blocks
Result = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]


def run(device: str, data: dict[str, torch.Tensor], **options: Any) -> Result:
    d = {name: value.to(device) for name, value in data.items()}
    options = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    loss, grad, metrics = loss_and_grad(
        d["logprobs"], d["old"], d["advantages"], d["mask"],
        rollout_logprobs=d["rollout"], ref_logprobs=d["ref"], **options,
    )  # fmt: skip
    return loss.cpu(), grad.cpu(), {name: value.cpu() for name, value in metrics.items()}


def reference(data: dict[str, torch.Tensor], **options: Any) -> Result:
    wide = {k: v.double() if v.is_floating_point() else v for k, v in data.items()}
    return run("cpu", wide, backend="torch", **options)


def assert_equal(got: Result, want: Result, dtype: torch.dtype = torch.float32) -> None:
    tolerance = F64 if dtype == torch.float64 else F32
    assert got[0].dtype == got[1].dtype == dtype
    torch.testing.assert_close(got[0].double(), want[0], **tolerance)
    torch.testing.assert_close(got[1].double(), want[1], **tolerance)
    for name, value in want[2].items():
        torch.testing.assert_close(got[2][name], value, msg=name, **tolerance)


@pytest.mark.spec("loss.clip-cov", "loss.kl-cov", "loss.covariance")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("loss", VARIANTS, ids=IDS)
def test_equals_reference(
    gpu: str, loss: str | LossSettings, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    data = batch(shape, dtype)
    options = dict(
        loss=loss, kl_estimator="k3", kl_coef=0.1, token_weights=data["rollout"].abs(),
        reduction="trajectory_mean", trajectory_ids=[i // 2 for i in range(shape[0])],
    )  # fmt: skip
    assert_equal(run(gpu, data, backend="native", **options), reference(data, **options), dtype)


@pytest.mark.spec(
    "loss.kl-k1",
    "loss.kl-abs",
    "loss.kl-k2",
    "loss.kl-k3",
    "loss.token-mean",
    "loss.sequence-mean",
    "loss.token-sum-norm",
    "loss.prompt-mean",
    "loss.trajectory-mean",
)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_penalties_and_reductions(gpu: str, estimator: str, reduction: str) -> None:
    data = batch((6, 40))
    options: dict[str, Any] = dict(
        kl_estimator=estimator, kl_coef=0.3, reduction=reduction, group_ids=[0, 0, 0, 1, 1, 2],
        trajectory_ids=[0, 0, 1, 2, 2, 3], max_seq_len=64,
    )  # fmt: skip
    assert_equal(run(gpu, data, **options), reference(data, **options))


@given(
    lengths=st.lists(st.integers(0, 70), max_size=12),
    variant=st.sampled_from(VARIANTS),
    estimator=st.sampled_from([None, *KL_ESTIMATORS]),
    mask_dtype=st.sampled_from([torch.bool, torch.uint8, torch.int64, torch.float32, torch.int32]),
    weighted=st.booleans(),
    scale=st.integers(1, 60),
    order=st.integers(0, 3),
    seed=st.integers(0, 2**20),
)
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_ragged_rows_in_any_thread_order(
    emulated_gpu: ModuleType,
    lengths: list[int],
    variant: tuple[str, dict[str, Any]],
    estimator: str | None,
    mask_dtype: torch.dtype,
    weighted: bool,
    scale: int,
    order: int,
    seed: int,
) -> None:
    """Rows of 0 to 4,200 cells, several blocks of them, rows without cells in between; float64."""
    emulated_gpu.set_order(order)
    lengths = [length * scale for length in lengths]
    data = batch((sum(lengths),), torch.float64, seed)
    data["mask"] = data["mask"].to(mask_dtype)
    options = dict(
        loss=variant, kl_estimator=estimator, kl_coef=0.2, reduction="sequence_mean",
        token_weights=data["ref"].abs() if weighted else None,
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0),
    )  # fmt: skip
    got = run("cpu", data, backend="native", **options)
    assert_equal(got, reference(data, **options), torch.float64)


# Rows of a block and of several, short ones within a thread's four cells, and none.
LENGTHS = [0, 1, 2, 3, 0, 0, 2500, 5, 4, 1000, 0, 1, 1, 1, 700, 0, 1500, 0]


def moved(data: dict[str, torch.Tensor], cells: int) -> dict[str, torch.Tensor]:
    """Return the same values, `cells` elements behind a boundary of 16 bytes."""
    return {k: torch.cat([v.new_zeros(cells), v])[cells:] for k, v in data.items()}


@pytest.mark.parametrize("cells", [0, 1])  # as vectors; one by one
@pytest.mark.parametrize("loss", VARIANTS, ids=IDS)
def test_policy_stream_alone(gpu: str, loss: str | LossSettings, cells: int) -> None:
    data = batch((sum(LENGTHS),))
    for name in ("logprobs", "old", "advantages"):
        data[name][~data["mask"]] = NAN
    options = dict(
        loss=loss, cu_seqlens=torch.tensor([0, *LENGTHS]).cumsum(0), reduction="sequence_mean",
        scope="trajectory", trajectory_ids=[i // 2 for i in range(len(LENGTHS))],
    )  # fmt: skip
    got = run(gpu, moved(data, cells), backend="native", **options)
    assert_equal(got, reference(data, **options))


@given(
    lengths=st.lists(st.integers(0, 70), max_size=40),
    variant=st.sampled_from(VARIANTS),
    mask_dtype=st.sampled_from([torch.bool, torch.uint8, torch.int64, torch.float32]),
    scale=st.integers(1, 60),
    cells=st.integers(0, 4),
    order=st.integers(0, 3),
)
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_policy_stream_of_ragged_rows(
    emulated_gpu: ModuleType,
    lengths: list[int],
    variant: tuple[str, dict[str, Any]],
    mask_dtype: torch.dtype,
    scale: int,
    cells: int,
    order: int,
) -> None:
    emulated_gpu.set_order(order)
    lengths = [length * scale for length in lengths]
    data = batch((sum(lengths),))
    data["mask"] = data["mask"].to(mask_dtype) * 3  # any number but 0
    options = dict(
        loss=variant, reduction="sequence_mean", cu_seqlens=torch.tensor([0, *lengths]).cumsum(0)
    )
    got = run("cpu", moved(data, cells), backend="native", **options)
    assert_equal(got, reference(data, **options))


@pytest.mark.slow
@pytest.mark.parametrize("width", [3, 5000])
def test_many_blocks_visit_more_cells_each(gpu: str, width: int) -> None:
    sums = 2 * 1024  # with so many a block has two
    rows = sums * policy_loss_op.CELLS_PER_SUM // width + 1
    data = batch((rows, width))
    options: dict[str, Any] = dict(reduction="sequence_mean")
    assert_equal(run(gpu, data, backend="native", **options), reference(data, **options))


@pytest.mark.spec("loss.gpu-no-sync")
@pytest.mark.parametrize("order", [1, 2, 3])
def test_thread_order_does_not_change_the_result(emulated_gpu: ModuleType, order: int) -> None:
    data = batch((5, 1000))
    results = []
    for o in (0, order):
        emulated_gpu.set_order(o)
        results.append(run("cpu", data, loss="gspo", kl_estimator="k3"))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    assert results[0][2] == results[1][2]


def test_number_of_launches_is_two_plus_one_for_the_backward(emulated_gpu: ModuleType) -> None:
    d = batch((5, 1000))
    weights, before = torch.full((5,), 0.01), emulated_gpu.launches()
    x = d["logprobs"].requires_grad_()
    loss, _ = policy_loss(x, d["old"], d["advantages"], d["mask"], row_weights=weights)[:2]
    assert emulated_gpu.launches() == before + 2
    loss.backward()
    assert emulated_gpu.launches() == before + 3


@pytest.mark.parametrize("factor", [1.0, -2.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradient_scales_with_the_loss(gpu: str, dtype: torch.dtype, factor: float) -> None:
    d = {name: value.to(gpu) for name, value in batch((5, 1000), dtype).items()}
    x = d["logprobs"].requires_grad_()
    arguments = (x, d["old"], d["advantages"], d["mask"])
    (want,) = torch.autograd.grad(policy_loss(*arguments, backend="torch")[0] * factor, x)
    (got,) = torch.autograd.grad(policy_loss(*arguments)[0] * factor, x)
    torch.testing.assert_close(got, want, **(F64 if dtype == torch.float64 else F32))


def test_sizes_match_the_kernels(cuda_on_cpu: ModuleType) -> None:
    assert cuda_on_cpu.cells_per_sum == policy_loss_op.CELLS_PER_SUM
    assert cuda_on_cpu.num_loss_sums == policy_loss_op.NUM_LOSS_SUMS


@pytest.mark.spec("loss.masked-cells")
@pytest.mark.parametrize("junk", [NAN, math.inf])
def test_masked_positions_are_not_read(gpu: str, junk: float) -> None:
    data = batch((3, 40))
    want = run(gpu, data, loss="gspo", kl_estimator="k3")
    for name in ("logprobs", "old", "advantages", "rollout", "ref"):
        data[name][~data["mask"]] = junk
    got = run(gpu, data, loss="gspo", kl_estimator="k3")
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1]) and got[2] == want[2]


@pytest.mark.spec("loss.all-masked")
@pytest.mark.parametrize("shape", [(2, 5), (0, 5), (3, 0)])
def test_no_trained_tokens(gpu: str, shape: tuple[int, int]) -> None:
    data = {name: torch.full(shape, NAN) for name in batch((1, 1))} | {"mask": torch.zeros(shape)}
    for name in ("regular", "gspo"):
        loss, grad, metrics = run(gpu, data, loss=name, kl_estimator="k1")
        assert loss.item() == 0.0 and torch.equal(grad, torch.zeros(shape))
        assert all(value.item() == 0.0 for value in metrics.values())


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
@pytest.mark.parametrize("shape", [(0,), (300,), (3, 100)])
def test_kl_penalty(gpu: str, estimator: str, shape: tuple[int, ...]) -> None:
    data = batch(shape, torch.float64)
    data["logprobs"][~data["mask"]] = NAN
    results = [
        penalty_and_grad(data, device, estimator, backend)
        for device, backend in ((gpu, "native"), ("cpu", "torch"))
    ]
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, **F64)


def test_gspo_at_trajectory_scope(gpu: str) -> None:
    data = batch((6, 30))
    options: dict[str, Any] = dict(loss="gspo", trajectory_ids=["a", "b", "a", "c", "b", "a"])
    assert_equal(run(gpu, data, **options), reference(data, **options))


def test_second_backward_recomputes_the_gradient(gpu: str) -> None:
    d = {name: value.to(gpu) for name, value in batch((2, 20)).items()}
    x = d["logprobs"].requires_grad_()
    loss, _ = policy_loss(x, d["old"], d["advantages"], d["mask"])[:2]
    (once,) = torch.autograd.grad(2 * loss, x, retain_graph=True)
    (again,) = torch.autograd.grad(2 * loss, x)
    assert torch.equal(once, again) and once.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"row_weights": torch.zeros(3)}, "row_weights: expected shape"),
        ({"advantages": torch.zeros(2, 5)}, "advantages: expected shape"),
        ({"old_logprobs": None, "loss": "gspo", "advantages": None}, "needs advantages"),
    ],
)
def test_invalid_arguments(gpu: str, change: dict[str, Any], message: str) -> None:
    d = batch((2, 4))
    arguments = {
        "logprobs": d["logprobs"],
        "old_logprobs": d["old"],
        "advantages": d["advantages"],
        "loss_mask": d["mask"],
    } | change
    moved = {n: v.to(gpu) if isinstance(v, torch.Tensor) else v for n, v in arguments.items()}
    with pytest.raises(ValueError, match=message):
        policy_loss(**moved)


def test_tokens_without_rows_are_refused(gpu: str) -> None:
    cells, weights = torch.zeros(4, device=gpu), torch.zeros(0, device=gpu)
    cu = torch.zeros(1, dtype=torch.int32, device=gpu)
    with pytest.raises(ValueError, match="cu_seqlens: expected offsets of rows"):
        policy_loss(cells, cells, cells, cells, cu_seqlens=cu, row_weights=weights)


def test_opcheck(gpu: str) -> None:
    d = {name: value.to(gpu) for name, value in batch((3, 7)).items()}
    ops = torch.ops.skyrl_fast
    weights = torch.full((3,), 0.1, device=gpu)
    params = [0.8, 1.2, 3.0, 1.0, 1.05, 0.2, 0.2, 1.0, 0.1]
    call = (d["old"], d["advantages"], d["mask"], weights, None, d["ref"], *(None,) * 5)
    for with_grad in (False, True):
        args = (d["logprobs"], *call, 0, 4, params, False, with_grad)
        torch.library.opcheck(ops.policy_loss.default, args)
    torch.library.opcheck(ops.kl_penalty.default, (d["old"], d["ref"], d["mask"], None, 4))
    torch.library.opcheck(ops.delta_sums.default, (d["old"], d["rollout"], d["mask"], None))


@pytest.mark.parametrize("name", ["regular", "gspo", "sapo"])
def test_compile_fullgraph(gpu: str, name: str) -> None:
    d = {name: value.to(gpu) for name, value in batch((3, 9)).items()}
    weights = torch.full((3,), 0.1, device=gpu)

    def step(x: torch.Tensor) -> torch.Tensor:
        return policy_loss(x, d["old"], d["advantages"], d["mask"], loss=name, row_weights=weights)[
            0
        ]

    grads = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        x = d["logprobs"].clone().requires_grad_()
        (3 * function(x)).backward()
        grads.append(x.grad)
    assert torch.equal(grads[0], grads[1]) and grads[0].any()


# --- tests that need a device --------------------------------------------------------------------


@pytest.mark.gpu
def test_cuda_graph() -> None:
    d = {name: value.cuda() for name, value in batch((16, 900)).items()}
    weights = torch.full((16,), 0.01, device="cuda")

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        loss, metrics = policy_loss(
            d["logprobs"], d["old"], d["advantages"], d["mask"], loss="gspo", row_weights=weights
        )[:2]
        return loss, metrics["ratio_mean"]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    d["logprobs"].copy_(batch((16, 900), seed=9)["logprobs"])
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["regular", "gspo", "dppo", "sapo"])
def test_no_device_synchronization_and_deterministic_result(name: str) -> None:
    d = {n: value.cuda() for n, value in batch((64, 2000)).items()}
    x = d["logprobs"].requires_grad_()
    results = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            loss, metrics = policy_loss(
                x, d["old"], d["advantages"], d["mask"], loss=name, ref_logprobs=d["ref"],
                kl_estimator="k3", trajectory_ids=[i // 3 for i in range(64)],
            )[:2]  # fmt: skip
            (grad,) = torch.autograd.grad(loss, x)
            results.append((loss.detach(), grad, torch.stack(list(metrics.values()))))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_generator_on_either_device(place: str) -> None:
    d = {name: value.cuda() for name, value in batch((16, 900)).items()}
    options = {"loss": "clip_cov", "clip_cov_lb": 0.0, "clip_cov_ratio": 0.1}
    losses = []
    for seed in (1, 1, 2):
        draws = torch.Generator(place).manual_seed(seed)
        cells = (d["logprobs"], d["old"], d["advantages"], d["mask"])
        losses.append(policy_loss(*cells, generator=draws, **options)[0].item())
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements() -> None:
    num_rows, width = 2**16 + 1, 2**15
    if torch.cuda.get_device_properties(0).total_memory < 48 << 30:
        pytest.skip("needs 48 GB")
    logprobs = torch.zeros(num_rows, width, device="cuda", requires_grad=True)
    mask = torch.zeros(num_rows, width, dtype=torch.bool, device="cuda")
    mask[0, 0] = mask[-1, -1] = True
    advantages = torch.ones(1, 1, device="cuda").expand(num_rows, width)
    weights = torch.arange(num_rows, device="cuda").float()
    loss, metrics = policy_loss(logprobs, None, advantages, mask, row_weights=weights)[:2]
    loss.backward()
    assert loss.item() == 1 - num_rows and metrics["num_tokens"].item() == 2
    assert logprobs.grad is not None and logprobs.grad.count_nonzero().item() == 1
    assert logprobs.grad[-1, -1].item() == 1 - num_rows


@pytest.mark.gpu
def test_second_device() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    data = batch((7, 300))
    assert_equal(run("cuda:1", data, kl_estimator="k3"), reference(data, kl_estimator="k3"))
