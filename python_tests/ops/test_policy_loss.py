"""Policy losses, KL penalties, reductions and off-policy correction against SPEC section 6."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from _losses import F32, F64, IDS, NAN, VARIANTS, batch, loss_and_grad
from hypothesis import given
from hypothesis import strategies as st

from skyrl_fast.ops.policy_loss.loss import (
    KL_ESTIMATORS,
    LOSS_NAMES,
    kl_penalty,
    off_policy_correction,
    policy_loss,
    reduction_weights,
)
from skyrl_fast.ops.policy_loss.losses import (
    POLICY_LOSSES,
    Cispo,
    Dppo,
    KlCov,
    LossSettings,
    RolloutIs,
    Sapo,
)

INF = float("inf")


def log(*probabilities: float) -> torch.Tensor:
    return torch.log(torch.tensor([probabilities]))


# --- Hand-computed tables -----------------------------------------
# One trained token of ratio r = 1.5 or 0.5 with the default bounds 0.8 and 1.2; logprob l = log 0.6
# or log 0.2, old 0.4. Columns: value, d value / d logprob.
L6, L2 = math.log(0.6), math.log(0.2)
SIGMOID = 1 / (1 + math.exp(-0.5))
TABLE = [
    ("regular", 0.6, 1.0, {}, -1.2, 0.0),  # clipped above
    ("regular", 0.6, -1.0, {}, 1.5, 1.5),  # not clipped on the pessimistic side
    ("regular", 0.2, 1.0, {}, -0.5, -0.5),
    ("regular", 0.2, -1.0, {}, 0.8, 0.0),  # clipped below
    ("regular", 0.6, 1.0, {"eps_clip_high": 0.6}, -1.5, -1.5),
    ("dual_clip", 0.6, -1.0, {"clip_ratio_c": 1.4}, 1.4, 0.0),
    ("dual_clip", 0.6, -1.0, {}, 1.5, 1.5),
    ("gspo", 0.6, 1.0, {}, -1.2, 0.0),
    ("cispo", 0.6, 2.0, {"cispo_eps_clip_high": 0.1}, -2.2 * L6, -2.2),
    ("cispo", 0.2, 2.0, {}, -1.0 * L2, -1.0),  # by default its bounds are 0 and 5
    ("cispo", 0.2, 2.0, {"cispo_eps_clip_low": 0.0}, -2.0 * L2, -2.0),
    ("rollout_is", 0.2, 2.0, {"eps_clip_low": 0.6}, -1.0 * L2, -1.0),
    ("rollout_is", 0.6, 2.0, {}, 0.0, 0.0),
    ("sapo", 0.6, 1.0, {}, -4 * SIGMOID, -4 * SIGMOID * (1 - SIGMOID) * 1.5),
    ("dppo", 0.6, 1.0, {"delta_high": 0.25}, -1.5, -1.5),
    ("dppo", 0.6, 1.0, {"delta_high": 0.15}, 0.0, 0.0),  # moved by 0.2 upwards
    ("dppo", 0.6, -1.0, {"delta_low": 0.15}, 1.5, 1.5),  # moved against the advantage
    ("cross_entropy", 0.6, 1.0, {}, -L6, -1.0),
    ("importance_sampling", 0.6, 2.0, {}, -3.0, -3.0),
]


@pytest.mark.spec(
    "loss.regular",
    "loss.dual-clip",
    "loss.cispo",
    "loss.rollout-is",
    "loss.sapo",
    "loss.dppo",
    "loss.cross-entropy",
    "loss.importance-sampling",
)
@pytest.mark.parametrize(("name", "p", "advantage", "kw", "value", "grad"), TABLE)
def test_one_token_by_hand(
    name: str, p: float, advantage: float, kw: dict, value: float, grad: float, backend: str
) -> None:
    old = log(0.4)
    loss, g, _ = loss_and_grad(
        log(p), old, torch.tensor([[advantage]]), torch.ones(1, 1),
        loss=POLICY_LOSSES[name].settings(**kw), rollout_logprobs=old, backend=backend,
    )  # fmt: skip
    torch.testing.assert_close(loss, torch.tensor(value), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(g, torch.tensor([[grad]]), rtol=1e-5, atol=1e-6)


@pytest.mark.spec("loss.kl-k1", "loss.kl-abs", "loss.kl-k2")
def test_kl_estimators_by_hand(backend: str) -> None:
    d = math.log(2.0)  # logprob - reference
    expected = {"k1": d, "abs": d, "k2": d * d / 2, "k3": 0.5 + d - 1}
    slope = {"k1": 1.0, "abs": 1.0, "k2": d, "k3": 0.5}
    for name in KL_ESTIMATORS:
        x = log(0.8).requires_grad_()
        value = kl_penalty(x, log(0.4), estimator=name, backend=backend)
        value.sum().backward()
        torch.testing.assert_close(value, torch.tensor([[expected[name]]]))
        torch.testing.assert_close(x.grad, torch.tensor([[slope[name]]]))


@pytest.mark.spec("loss.kl-k3")
def test_k3_is_clamped(backend: str) -> None:
    x = torch.tensor([-100.0, -50.0, 0.0], requires_grad=True)
    value = kl_penalty(x, torch.tensor([0.0, -47.0, -100.0]), estimator="k3", backend=backend)
    value.sum().backward()
    # e^20 - 21 clamped to 10; e^3 - 4 = 16 clamped to 10; e^-20 + 20 - 1 clamped to 10
    assert value.tolist() == [10.0, 10.0, 10.0]
    assert x.grad is not None and x.grad.tolist() == [0.0, 0.0, 0.0]


def test_kl_is_added_to_the_loss(backend: str) -> None:
    loss, grad, metrics = loss_and_grad(
        log(0.8, 0.5), None, torch.zeros(1, 2), torch.ones(1, 2),
        ref_logprobs=log(0.4, 0.5), kl_estimator="k1", kl_coef=0.5, backend=backend,
    )  # fmt: skip
    assert math.isclose(float(loss), 0.5 * math.log(2) / 2, rel_tol=1e-6)
    torch.testing.assert_close(grad, torch.tensor([[0.25, 0.25]]))
    assert math.isclose(float(metrics["kl"]), math.log(2) / 2, rel_tol=1e-6)


def test_metrics_by_hand(backend: str) -> None:
    # ratios 1.5 (clipped above), 0.5 with A < 0 (clipped below), 1; the fourth token is masked
    _, _, m = loss_and_grad(
        log(0.6, 0.2, 0.4, 0.9), log(0.4, 0.4, 0.4, 0.1), torch.tensor([[1.0, -1.0, 1.0, 1.0]]),
        torch.tensor([[1, 1, 1, 0]]), backend=backend,
    )  # fmt: skip
    expected = {
        "num_tokens": 3, "clip_ratio": 2 / 3, "clip_ratio_low": 1 / 3, "clip_ratio_high": 1 / 3,
        "ratio_mean": 1.0, "ratio_max": 1.5, "ratio_min": 0.5, "policy_loss": (-1.2 + 0.8 - 1) / 3,
        "approx_kl": (0.5 - math.log(1.5) - 0.5 - math.log(0.5)) / 3,
    }  # fmt: skip
    for name, value in expected.items():
        assert math.isclose(float(m[name]), value, rel_tol=1e-5), name


@pytest.mark.spec("loss.rollout-is")
def test_ratio_at_equal_bounds_is_counted_as_clipped_once(backend: str) -> None:
    loss, _, m = loss_and_grad(
        log(0.4, 0.4), None, torch.ones(1, 2), torch.ones(1, 2), loss=RolloutIs(0.0, 0.0),
        rollout_logprobs=log(0.4, 0.8), backend=backend,
    )  # fmt: skip
    assert float(loss) == 0.0
    names = ("clip_ratio", "clip_ratio_low", "clip_ratio_high")
    assert [float(m[name]) for name in names] == [1.0, 1.0, 0.0]


# Rows 0 and 1 are trajectory 0 (prompt a), row 2 is trajectory 1 (prompt a), row 3 is trajectory 2
# (prompt b). Trained tokens: 3, 1, 2, 0.
MASK = torch.tensor([[1, 1, 1], [0, 0, 1], [0, 1, 1], [0, 0, 0]])
REDUCTIONS = [
    ("token_mean", [1 / 6] * 4),
    ("sequence_mean", [1 / 12, 1 / 4, 1 / 8, 1 / 4]),
    ("seq_mean_token_sum_norm", [1 / 40] * 4),
    ("prompt_mean", [1 / 12, 1 / 12, 1 / 12, 1 / 2]),
    ("trajectory_mean", [1 / 12, 1 / 12, 1 / 6, 1 / 3]),
]


@pytest.mark.spec(
    "loss.token-mean",
    "loss.sequence-mean",
    "loss.token-sum-norm",
    "loss.prompt-mean",
    "loss.trajectory-mean",
    "loss.counts",
)
@pytest.mark.parametrize(("reduction", "expected"), REDUCTIONS)
@pytest.mark.parametrize("ragged", [False, True])
def test_reduction_weights_by_hand(
    reduction: str, expected: list[float], ragged: bool, backend: str
) -> None:
    mask = MASK.reshape(-1) if ragged else MASK
    weights = reduction_weights(
        mask,
        reduction=reduction,
        cu_seqlens=torch.tensor([0, 3, 6, 9, 12]) if ragged else None,
        group_ids=["a", "a", "a", "b"],
        trajectory_ids=torch.tensor([7, 7, 9, 8]),
        max_seq_len=10,
        backend=backend,
    )
    torch.testing.assert_close(weights, torch.tensor(expected))


@pytest.mark.spec("loss.gspo")
def test_gspo_scopes_by_hand(backend: str) -> None:
    # d per row: (0.2, 0.4) and (0.6); means by row 0.3 and 0.6, by trajectory 0.4
    logprobs = torch.tensor([[-1.0, -1.0], [-1.0, -1.0]])
    old = logprobs - torch.tensor([[0.2, 0.4], [NAN, 0.6]])
    mask = torch.tensor([[1, 1], [0, 1]])
    args = (logprobs, old, -torch.ones(2, 2), mask)
    ones = torch.ones(2)
    by_row, _, _ = loss_and_grad(*args, loss="gspo", row_weights=ones, backend=backend)
    both, grad, _ = loss_and_grad(
        *args, loss="gspo", row_weights=ones, trajectory_ids=[5, 5], backend=backend
    )
    row, _, _ = loss_and_grad(
        *args, loss="gspo", row_weights=ones, trajectory_ids=[5, 5], scope="row", backend=backend
    )
    assert math.isclose(float(by_row), 2 * math.exp(0.3) + math.exp(0.6), rel_tol=1e-5)
    assert math.isclose(float(both), 3 * math.exp(0.4), rel_tol=1e-5)
    assert float(row) == float(by_row)
    torch.testing.assert_close(grad, math.exp(0.4) * torch.tensor([[1.0, 1.0], [0.0, 1.0]]))


# --- Against the reference -----------------------------------------
@pytest.mark.spec("loss.clip-cov", "loss.kl-cov")
@pytest.mark.parametrize("loss", VARIANTS, ids=IDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1), (3, 15), (5, 16), (4, 33), (3, 1000)])
def test_native_equals_reference(
    loss: str | LossSettings, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    data = batch(shape, dtype)
    wide = {k: v.double() if v.is_floating_point() else v for k, v in data.items()}

    def run(d: dict, backend: str) -> tuple:
        return loss_and_grad(
            d["logprobs"], d["old"], d["advantages"], d["mask"], loss=loss,
            rollout_logprobs=d["rollout"], ref_logprobs=d["ref"], kl_estimator="k3", kl_coef=0.1,
            token_weights=d["rollout"].abs(), reduction="trajectory_mean",
            trajectory_ids=[i // 2 for i in range(shape[0])], backend=backend,
        )  # fmt: skip

    value, grad, metrics = run(data, "native")
    want_loss, want_grad, want_metrics = run(wide, "torch")
    tolerance = F64 if dtype == torch.float64 else F32
    assert value.dtype == grad.dtype == dtype
    torch.testing.assert_close(value.double(), want_loss, **tolerance)
    torch.testing.assert_close(grad.double(), want_grad, **tolerance)
    for key, value in want_metrics.items():
        torch.testing.assert_close(metrics[key], value, msg=key, **tolerance)


@pytest.mark.parametrize("level", ["baseline", "avx2", "avx512"])
def test_simd_levels_agree(level: str) -> None:
    from skyrl_fast import _C

    before = _C.simd_level()
    try:
        _C.set_simd_level(level)
    except ValueError:
        pytest.skip(f"this CPU has no {level}")
    try:
        for loss in VARIANTS:
            test_native_equals_reference(loss, torch.float32, (7, 130))
    finally:
        _C.set_simd_level(before)
    # x87 registers that are left in use would make this NaN: numpy's fmod is x87 code.
    assert np.floor_divide(np.float64(1049.6), np.float64(200.0)) == 5.0


def test_ragged_equals_padded(backend: str) -> None:
    data = batch((4, 9))
    lengths = [9, 0, 3, 5]
    live = torch.arange(9)[None] >= 9 - torch.tensor(lengths)[:, None]
    data["mask"] &= live
    cu = torch.tensor([0, 9, 9, 12, 17], dtype=torch.int32)
    for variant in VARIANTS:
        kw: dict[str, Any] = dict(
            loss=variant, trajectory_ids=[0, 0, 1, 1], reduction="trajectory_mean"
        )
        loss, grad, _ = loss_and_grad(
            data["logprobs"], data["old"], data["advantages"], data["mask"],
            rollout_logprobs=data["rollout"], backend=backend, **kw,
        )  # fmt: skip
        flat = {k: v[live] for k, v in data.items()}
        flat_loss, flat_grad, _ = loss_and_grad(
            flat["logprobs"], flat["old"], flat["advantages"], flat["mask"],
            rollout_logprobs=flat["rollout"], cu_seqlens=cu, backend=backend, **kw,
        )  # fmt: skip
        torch.testing.assert_close(loss, flat_loss)
        torch.testing.assert_close(grad[live], flat_grad)
        assert not grad[~live].any()


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.uint8, torch.int64, torch.float32,
                                        torch.int32, torch.bfloat16])  # fmt: skip
def test_mask_dtypes(mask_dtype: torch.dtype, backend: str) -> None:
    d = batch((3, 20))
    args = (d["logprobs"], d["old"], d["advantages"])
    want = loss_and_grad(*args, d["mask"], backend="torch")
    got = loss_and_grad(*args, d["mask"].to(mask_dtype), backend=backend)
    torch.testing.assert_close(got[0], want[0])
    torch.testing.assert_close(got[1], want[1])


@pytest.mark.spec("loss.ratio")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_upcast(dtype: torch.dtype, backend: str) -> None:
    d = batch((2, 50), dtype)
    loss, grad, _ = loss_and_grad(
        d["logprobs"], d["old"], d["advantages"], d["mask"], backend=backend
    )
    want_loss, want_grad, _ = loss_and_grad(
        d["logprobs"].float(), d["old"].float(), d["advantages"].float(), d["mask"], backend="torch"
    )
    assert loss.dtype == torch.float32 and grad.dtype == dtype
    torch.testing.assert_close(loss, want_loss)
    torch.testing.assert_close(grad, want_grad.to(dtype))


def test_result_does_not_depend_on_the_number_of_threads() -> None:
    d = batch((400, 1000))
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            loss, grad, metrics = loss_and_grad(d["logprobs"], d["old"], d["advantages"], d["mask"])
            results.append((loss, grad, torch.stack(list(metrics.values()))))
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


# --- Splitting -----------------------------------------
@pytest.mark.spec("loss.split-invariance")
@pytest.mark.parametrize("reduction", [r for r, _ in REDUCTIONS])
@pytest.mark.parametrize("name", ["regular", "gspo", "sapo"])
def test_micro_batches_sum_to_the_mini_batch(reduction: str, name: str, backend: str) -> None:
    d = batch((6, 11))
    d["mask"][4] = False
    trajectories = torch.tensor([0, 0, 1, 2, 2, 2])
    weights = reduction_weights(
        d["mask"], reduction=reduction, group_ids=[0, 0, 0, 1, 1, 1],
        trajectory_ids=trajectories, max_seq_len=32,
    )  # fmt: skip

    def part(rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        loss, grad, _ = loss_and_grad(
            d["logprobs"][rows], d["old"][rows], d["advantages"][rows], d["mask"][rows], loss=name,
            row_weights=weights[rows], ref_logprobs=d["ref"][rows], kl_estimator="k2",
            trajectory_ids=trajectories[rows], backend=backend,
        )  # fmt: skip
        return loss, grad

    whole_loss, whole_grad = part(slice(0, 6))
    parts = [part(slice(0, 2)), part(slice(2, 3)), part(slice(3, 6))]
    torch.testing.assert_close(sum(loss for loss, _ in parts), whole_loss)
    assert torch.equal(torch.cat([grad for _, grad in parts]), whole_grad)


# --- Hostile input -----------------------------------------
@pytest.mark.spec("loss.masked-cells")
@pytest.mark.parametrize("loss", VARIANTS, ids=IDS)
@pytest.mark.parametrize("junk", [NAN, INF, -INF, 1e30])
def test_masked_positions_are_not_read(loss: str | LossSettings, junk: float, backend: str) -> None:
    d = batch((3, 40))
    call: dict[str, Any] = dict(loss=loss, kl_estimator="k3", backend=backend)

    def run() -> tuple:
        return loss_and_grad(
            d["logprobs"], d["old"], d["advantages"], d["mask"], rollout_logprobs=d["rollout"],
            ref_logprobs=d["ref"], token_weights=d["advantages"].abs(), **call,
        )  # fmt: skip

    want = run()
    for key in ("logprobs", "old", "advantages", "rollout", "ref"):
        d[key][~d["mask"]] = junk
    got = run()
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    assert not got[1][~d["mask"]].any()
    assert all(torch.equal(got[2][k], want[2][k]) for k in want[2])


@pytest.mark.spec("loss.all-masked")
@pytest.mark.parametrize("loss", VARIANTS, ids=IDS)
def test_all_masked_gives_zero_and_stays_connected(loss: str | LossSettings, backend: str) -> None:
    nothing = torch.full((2, 5), NAN)
    for reduction in ("token_mean", "sequence_mean", "trajectory_mean"):
        value, grad, metrics = loss_and_grad(
            nothing, nothing, nothing, torch.zeros(2, 5), loss=loss, rollout_logprobs=nothing,
            ref_logprobs=nothing, kl_estimator="k1", reduction=reduction, trajectory_ids=[0, 0],
            backend=backend,
        )  # fmt: skip
        assert float(value) == 0.0 and torch.equal(grad, torch.zeros(2, 5))
        assert all(float(v) == 0.0 for v in metrics.values())


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)])
def test_empty(shape: tuple[int, int], backend: str) -> None:
    empty = torch.zeros(shape)
    loss, grad, metrics = loss_and_grad(empty, empty, empty, empty, loss="gspo", backend=backend)
    assert float(loss) == 0.0 and grad.shape == shape and float(metrics["num_tokens"]) == 0.0
    _, new_mask, _ = off_policy_correction(
        empty, empty, empty, tis_ratio_type="sequence", sequence_mask="product", backend=backend
    )
    assert new_mask.shape == shape


def test_empty_ragged(backend: str) -> None:
    empty = torch.zeros(0)
    cu = torch.zeros(1, dtype=torch.int32)
    loss, _, _ = loss_and_grad(empty, empty, empty, empty, cu_seqlens=cu, backend=backend)
    assert float(loss) == 0.0


@pytest.mark.parametrize("name", sorted(set(LOSS_NAMES) - {"gspo", "clip_cov", "kl_cov"}))
def test_nan_at_a_trained_token_does_not_spread(name: str, backend: str) -> None:
    d = batch((2, 37))
    d["mask"][:] = True
    d["logprobs"][0, 3] = NAN
    loss, grad, _ = loss_and_grad(
        d["logprobs"], d["old"], d["advantages"], d["mask"], loss=name, backend=backend,
        rollout_logprobs=d["rollout"],
    )  # fmt: skip
    assert math.isnan(float(loss))
    assert math.isnan(float(grad[0, 3])) or name == "cross_entropy"  # whose gradient is -1
    grad[0, 3] = 0.0
    assert bool(torch.isfinite(grad).all())


def test_extreme_differences_are_clamped(backend: str) -> None:
    logprobs = torch.tensor([[0.0, -1000.0, -INF, -1e30]])
    old = torch.tensor([[-1000.0, 0.0, 0.0, 0.0]])
    loss, grad, metrics = loss_and_grad(
        logprobs, old, -torch.ones(1, 4), torch.ones(1, 4), loss="importance_sampling",
        row_weights=torch.ones(1), backend=backend,
    )  # fmt: skip
    assert math.isclose(float(loss), math.exp(20) + 3 * math.exp(-20), rel_tol=1e-6)
    assert torch.equal(grad, torch.zeros(1, 4))  # outside the clamp
    assert math.isclose(float(metrics["ratio_max"]), math.exp(20), rel_tol=1e-6)


def test_non_contiguous(backend: str) -> None:
    d = batch((8, 6))
    t = {k: v.t().contiguous().t() for k, v in d.items()}
    assert not t["logprobs"].is_contiguous()
    want = loss_and_grad(d["logprobs"], d["old"], d["advantages"], d["mask"], backend=backend)
    got = loss_and_grad(t["logprobs"], t["old"], t["advantages"], t["mask"], backend=backend)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


X = torch.zeros(2, 3)
BAD = [
    (dict(loss="ppo"), ValueError, "policy_loss: loss: expected one of"),
    (dict(kl_estimator="k4", ref_logprobs=X), ValueError, "kl_estimator"),
    (dict(kl_estimator="k3"), ValueError, "needs ref_logprobs"),
    (dict(loss="rollout_is"), ValueError, "needs rollout_logprobs"),
    (dict(loss=Cispo(cispo_ratio="rollout")), ValueError, "needs rollout_logprobs"),
    (dict(loss=Dppo(dppo_type="tv")), ValueError, "dppo_type"),
    (dict(loss=Sapo(tau_pos=0.0)), ValueError, "tau_pos"),
    (dict(loss=Sapo(tau_pos=math.inf)), ValueError, "tau_pos"),
    (dict(loss=Sapo(tau_neg=math.inf)), ValueError, "tau_neg"),
    (dict(loss=KlCov(ppo_kl_coef=math.inf)), ValueError, "ppo_kl_coef"),
    (dict(scope="group"), ValueError, "scope"),
    (dict(loss="gspo", scope="trajectory"), ValueError, "needs trajectory_ids"),
    (dict(loss="gspo", trajectory_ids=[0]), ValueError, "trajectory_ids: expected 2 entries"),
    (dict(old_logprobs=torch.zeros(2, 4)), ValueError, "old_logprobs: expected shape"),
    (dict(old_logprobs=torch.zeros(2, 3, dtype=torch.int64)), TypeError, "old_logprobs"),
    (dict(advantages=None), ValueError, "needs advantages"),
    (dict(loss_mask=torch.zeros(3, 2)), ValueError, "loss_mask: expected shape"),
    (dict(loss_mask=[[1, 1, 1]]), TypeError, "loss_mask: expected a torch tensor"),
    (dict(row_weights=torch.zeros(3)), ValueError, "row_weights: expected shape"),
    (dict(reduction="mean"), ValueError, "reduction"),
    (dict(reduction="prompt_mean"), ValueError, "needs group_ids"),
    (dict(reduction="seq_mean_token_sum_norm"), ValueError, "needs max_seq_len"),
    (dict(cu_seqlens=torch.tensor([0, 6])), ValueError, r"data: expected \(A,\)"),
    (dict(logprobs=torch.zeros(6)), ValueError, "without cu_seqlens"),
    (dict(logprobs=torch.zeros(2, 3, dtype=torch.int64)), TypeError, "logprobs: expected"),
    (dict(backend="triton"), ValueError, "triton"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_errors_name_op_and_argument(change: dict, error: type, message: str) -> None:
    call: dict[str, Any] = dict(logprobs=X, old_logprobs=X, advantages=X, loss_mask=X)
    with pytest.raises(error, match=message):
        policy_loss(**{**call, **change})


@pytest.mark.parametrize("cu", [[0, 4], [1, 6], [0, 4, 2, 6], [0, 7]])
def test_invalid_offsets(cu: list[int]) -> None:
    x = torch.zeros(6)
    with pytest.raises(ValueError, match="cu_seqlens"):
        policy_loss(x, x, x, x, cu_seqlens=torch.tensor(cu))


# --- Properties -----------------------------------------
@given(seed=st.integers(0, 10**6), rows=st.integers(0, 6), width=st.integers(0, 40),
       variant=st.sampled_from(VARIANTS), kl=st.sampled_from([None, *KL_ESTIMATORS]),
       reduction=st.sampled_from([r for r, _ in REDUCTIONS]))  # fmt: skip
def test_random_batches(
    seed: int, rows: int, width: int, variant: str | LossSettings, kl: str | None, reduction: str
) -> None:
    d = batch((rows, width), torch.float64, seed)
    results = [
        loss_and_grad(
            d["logprobs"], d["old"], d["advantages"], d["mask"], loss=variant, kl_estimator=kl,
            rollout_logprobs=d["rollout"], ref_logprobs=d["ref"], reduction=reduction,
            max_seq_len=50, group_ids=[i // 3 for i in range(rows)],
            trajectory_ids=[i // 2 for i in range(rows)], backend=b, seed=seed,
        )
        for b in ("native", "torch")
    ]  # fmt: skip
    torch.testing.assert_close(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1])


# --- Autograd and graphs -----------------------------------------
@pytest.mark.parametrize("name", ["regular", "dual_clip", "sapo", "dppo", "importance_sampling",
                                  "cross_entropy"])  # fmt: skip
def test_gradcheck(name: str, backend: str) -> None:
    # The other losses hold a factor without gradient: finite differences do not apply.
    d = batch((2, 6), torch.float64)
    x = d["logprobs"].requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: policy_loss(
            x, d["old"], d["advantages"], d["mask"], loss=name, kl_estimator="k3",
            ref_logprobs=d["ref"], backend=backend,
        )[0],
        (x,),
    )  # fmt: skip


@pytest.mark.parametrize("estimator", list(KL_ESTIMATORS))
def test_kl_gradcheck(estimator: str, backend: str) -> None:
    d = batch((2, 6), torch.float64)
    x = d["logprobs"].requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: kl_penalty(
            x, d["ref"], estimator=estimator, loss_mask=d["mask"], backend=backend
        ),
        (x,),
    )


@pytest.mark.parametrize("wants_grad", [True, False])
def test_loss_shares_no_memory_with_the_metrics(wants_grad: bool, backend: str) -> None:
    d = batch((2, 6), torch.float64)
    x = d["logprobs"].requires_grad_(wants_grad)
    out = policy_loss(x, d["old"], d["advantages"], d["mask"], backend=backend)
    before = float(out.metrics["loss"])
    with torch.no_grad():
        out.loss.mul_(2)
    assert float(out.metrics["loss"]) == before == float(out.loss.detach()) / 2


@pytest.mark.parametrize("penalty", [True, False])
def test_forward_mode_derivative_is_refused(penalty: bool) -> None:
    d = batch((2, 6))

    def value(x: torch.Tensor, backend: str | None = None) -> torch.Tensor:
        if penalty:
            return kl_penalty(x, d["ref"], loss_mask=d["mask"], backend=backend).sum()
        return policy_loss(x, d["old"], d["advantages"], d["mask"], backend=backend)[0]

    x, along = d["logprobs"], torch.randn(2, 6)
    with pytest.raises(RuntimeError, match="no forward-mode derivative"):
        torch.func.jvp(value, (x,), (along,))
    _, tangent = torch.func.jvp(lambda x: value(x, "torch"), (x,), (along,))
    (grad,) = torch.autograd.grad(value(leaf := x.clone().requires_grad_()), leaf)
    torch.testing.assert_close(tangent, (grad * along).sum())


def test_backward_twice_through_a_retained_graph(backend: str) -> None:
    d = batch((2, 6))
    x = d["logprobs"].requires_grad_()
    loss, _ = policy_loss(x, d["old"], d["advantages"], d["mask"], backend=backend)[:2]
    loss.backward(retain_graph=True)
    assert x.grad is not None
    once = x.grad.clone()
    (3 * loss).backward()
    torch.testing.assert_close(x.grad, 4 * once)


def test_no_gradient_is_computed_unless_required() -> None:
    d = batch((2, 6))
    x = d["logprobs"].requires_grad_()
    with torch.no_grad():
        loss, metrics = policy_loss(x, d["old"], d["advantages"], d["mask"])[:2]
    assert not loss.requires_grad and not metrics["loss"].requires_grad


def test_opcheck() -> None:
    d = batch((3, 20))
    ops = torch.ops.skyrl_fast
    weights = torch.ones(3)
    params = [0.8, 1.2, 3.0, 1.0, 1.05, 0.2, 0.2, 1.0, 0.1]
    call = (d["logprobs"], d["old"], d["advantages"], d["mask"], weights, None, d["ref"])
    for with_grad in (True, False):
        args = (
            *call,
            None,
            d["old"].abs(),
            d["old"].abs(),
            None,
            None,
            0,
            4,
            params,
            False,
            with_grad,
        )
        torch.library.opcheck(ops.policy_loss.default, args)
    kl = (d["logprobs"], d["ref"], d["mask"])
    torch.library.opcheck(ops.kl_penalty.default, (*kl, None, 4))
    torch.library.opcheck(ops.kl_penalty.default, (*kl, d["old"], 4))
    torch.library.opcheck(ops.delta_sums.default, (d["old"], d["rollout"], d["mask"], None))
    torch.library.opcheck(ops.mask_counts.default, (d["mask"], None))


@pytest.mark.parametrize("name", ["regular", "gspo"])
def test_compile_fullgraph(name: str) -> None:
    d = batch((3, 20))

    def step(x: torch.Tensor) -> torch.Tensor:
        out = policy_loss(
            x, d["old"], d["advantages"], d["mask"], loss=name, ref_logprobs=d["ref"],
            kl_estimator="k3",
        )  # fmt: skip
        return 2 * out.loss + 0 * out.metrics["clip_ratio"].float()

    x = d["logprobs"].clone().requires_grad_()
    torch.compile(step, fullgraph=True, backend="aot_eager")(x).backward()
    y = d["logprobs"].clone().requires_grad_()
    step(y).backward()
    torch.testing.assert_close(x.grad, y.grad)
