"""Off-policy correction: tables by hand, native against the reference, SkyRL's own."""

import math
from typing import Any

import pytest
import torch
from _losses import batch
from _skyrl_losses import skyrl_losses
from hypothesis import given
from hypothesis import strategies as st

from skyrl_fast import _C
from skyrl_fast.ops.policy_loss.loss import policy_loss
from skyrl_fast.ops.policy_loss.off_policy import off_policy_correction

NAN = float("nan")


@pytest.mark.spec("loss.off-policy-weight", "loss.off-policy-token-mask", "loss.off-policy-tis")
def test_off_policy_order_by_hand(backend: str) -> None:
    # ratios old / rollout, by row:       outlier over 50   token mask [0.4, 3]   left
    ratios = torch.tensor(
        [
            [1.0, 100.0, 1.0],  # dropped                                          -
            [2.0, 4.0, 0.5],  #                        4 dropped                   2, 0.5
            [2.5, 2.5, 0.2],  #                        0.2 dropped                 2.5, 2.5
        ]
    )
    old, rollout = ratios.log(), torch.zeros(3, 3)
    call = dict(outlier_high=50.0, token_mask_low=0.4, token_mask_high=3.0, backend=backend)
    weights, mask, metrics = off_policy_correction(
        old, rollout, torch.ones(3, 3), tis_ratio_type="token", tis_cap=2.2,
        sequence_mask="product", sequence_mask_high=5.0, **call,
    )  # fmt: skip
    # products of the remaining ratios: 1 and 6.25, so the sequence mask drops the last row
    assert mask.tolist() == [[0, 0, 0], [1, 0, 1], [0, 0, 0]]
    assert weights is not None
    expected = torch.tensor([[0, 0, 0], [2.0, 0, 0.5], [0, 0, 0]])
    torch.testing.assert_close(weights, expected)
    assert math.isclose(float(metrics["outlier_seq_masked_ratio"]), 1 / 3)
    assert math.isclose(float(metrics["token_mask_ratio"]), 2 / 6)
    assert math.isclose(float(metrics["tis_token_clip_high_ratio"]), 2 / 4)
    assert math.isclose(float(metrics["product_sequence_mask_over_high_ratio"]), 1 / 3)
    assert math.isclose(float(metrics["is_ratio_max"]), 100.0, rel_tol=1e-5)
    assert math.isclose(float(metrics["is_ratio_mean"]), 113.7 / 9, rel_tol=1e-5)
    std = ratios.std()
    torch.testing.assert_close(metrics["is_ratio_std"], std.double(), rtol=1e-5, atol=0)


@pytest.mark.spec("loss.sequence-scope")
def test_off_policy_trajectory_scope_by_hand(backend: str) -> None:
    ratios = torch.tensor([[2.0, 1.0], [0.5, 1.0], [3.0, 1.0]])
    args = (ratios.log(), torch.zeros(3, 2), torch.ones(3, 2, dtype=torch.bool))
    call: dict[str, Any] = dict(
        tis_ratio_type="sequence", sequence_mask="product", sequence_mask_low=0.4,
        sequence_mask_high=2.5, backend=backend,
    )  # fmt: skip
    weights, mask, _ = off_policy_correction(*args, trajectory_ids=["x", "x", "y"], **call)
    assert mask.dtype == torch.bool and mask.tolist() == [[True] * 2, [True] * 2, [False] * 2]
    torch.testing.assert_close(weights, torch.tensor([[1.0, 1], [1, 1], [0, 0]]))
    weights, _, _ = off_policy_correction(
        *args, trajectory_ids=["x", "x", "y"], scope="row", **call
    )
    torch.testing.assert_close(weights, torch.tensor([[2.0, 2], [0.5, 0.5], [0, 0]]))
    _, mask, _ = off_policy_correction(
        *args, outlier_high=2.5, outlier_low=0.6, trajectory_ids=[0, 0, 1], backend=backend
    )
    assert not mask.any()  # the outlier in row 1 also masks row 0 of its trajectory


@pytest.mark.spec("loss.off-policy-sequence-mask")
def test_geometric_mask_uses_the_mean(backend: str) -> None:
    ratios = torch.tensor([[1.02, 0.98], [1.02, 1.02]])
    _, mask, metrics = off_policy_correction(
        ratios.log(), torch.zeros(2, 2), torch.ones(2, 2), sequence_mask="geometric",
        backend=backend,
    )  # fmt: skip
    assert mask.tolist() == [[1, 1], [0, 0]]
    assert float(metrics["geo_sequence_mask_over_high_ratio"]) == 0.5


@pytest.mark.spec("loss.off-policy-outlier")
def test_outlier_masks_its_sequence(backend: str) -> None:
    ratios = torch.tensor([[1.0, 9.0], [1.0, 1.0], [0.1, 1.0], [1.0, 1.0]])
    args = (ratios.log(), torch.zeros(4, 2), torch.ones(4, 2))
    call: dict[str, Any] = dict(outlier_high=5.0, outlier_low=0.5, backend=backend)
    _, mask, metrics = off_policy_correction(*args, trajectory_ids=[7, 7, 8, 9], **call)
    assert mask.tolist() == [[0, 0], [0, 0], [0, 0], [1, 1]]
    shares = {name: float(value) for name, value in metrics.items() if name.startswith("outlier")}
    assert shares == {
        "outlier_seq_masked_ratio": pytest.approx(2 / 3),
        "outlier_seq_over_high_ratio": pytest.approx(1 / 3),
        "outlier_seq_under_low_ratio": pytest.approx(1 / 3),
    }
    _, mask, metrics = off_policy_correction(*args, scope="row", **call)
    assert mask.tolist() == [[0, 0], [1, 1], [0, 0], [1, 1]]
    assert float(metrics["outlier_seq_masked_ratio"]) == 0.5


def test_rows_of_a_trajectory_need_not_be_adjacent(backend: str) -> None:
    ratios = torch.tensor([[2.0, 1.0], [3.0, 1.0], [0.5, 1.0]])
    weights, _, _ = off_policy_correction(
        ratios.log(), torch.zeros(3, 2), torch.ones(3, 2), tis_ratio_type="sequence",
        trajectory_ids=["x", "y", "x"], backend=backend,
    )  # fmt: skip
    torch.testing.assert_close(weights, torch.tensor([[1.0, 1], [3, 3], [1, 1]]))


def test_mask_is_unchanged_without_masking_rules(backend: str) -> None:
    mask = torch.tensor([[1.0, 0.0]])
    args = (torch.zeros(1, 2), torch.tensor([[0.0, NAN]]), mask)
    weights, new_mask, metrics = off_policy_correction(
        *args, tis_ratio_type="token", backend=backend
    )
    assert new_mask is mask
    assert weights.tolist() == [[1.0, 0.0]]
    weights, new_mask, metrics = off_policy_correction(*args, backend=backend)
    assert weights is None and new_mask is mask
    assert {k: float(v) for k, v in metrics.items()} == {
        "is_ratio_mean": 1, "is_ratio_std": 0, "is_ratio_max": 1, "is_ratio_min": 1,
    }  # fmt: skip


def test_nan_is_outside_all_token_bounds_and_not_an_outlier(backend: str) -> None:
    old, rollout = torch.tensor([[0.0, 0.0]]), torch.tensor([[NAN, 0.0]])
    mask = torch.ones(1, 2)
    call: dict[str, Any] = dict(backend=backend, outlier_high=2.0)
    assert off_policy_correction(old, rollout, mask, **call)[1].tolist() == [[1, 1]]
    weights, new_mask, metrics = off_policy_correction(
        old, rollout, mask, tis_ratio_type="token", token_mask_high=5.0, **call
    )
    assert new_mask.tolist() == [[0, 1]] and weights.tolist() == [[0, 1]]
    assert float(metrics["is_ratio_max"]) == 1.0
    # A weight of 0 drops the token from the loss, NaN or not.
    current = torch.zeros(1, 2, requires_grad=True)
    loss, _ = policy_loss(
        current, rollout, torch.ones(1, 2), mask, token_weights=weights, backend=backend
    )[:2]
    loss.backward()
    assert loss.item() == -0.5 and current.grad.tolist() == [[0.0, -0.5]]


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0)])
def test_empty_input(shape: tuple[int, int], backend: str) -> None:
    empty = torch.zeros(shape)
    weights, mask, metrics = off_policy_correction(
        empty, empty, empty, tis_ratio_type="sequence", sequence_mask="product", outlier_high=1.0,
        trajectory_ids=[0] * shape[0], backend=backend,
    )  # fmt: skip
    assert weights.shape == mask.shape == shape
    assert all(float(value) == 0.0 for value in metrics.values())


def test_all_masked(backend: str) -> None:
    nan = torch.full((2, 40), NAN)
    weights, mask, metrics = off_policy_correction(
        nan, nan, torch.zeros(2, 40, dtype=torch.int64), tis_ratio_type="token", token_mask_low=0.5,
        sequence_mask="geometric", outlier_low=0.5, backend=backend,
    )  # fmt: skip
    assert not weights.any() and not mask.any() and mask.dtype == torch.int64
    assert all(float(value) == 0.0 for value in metrics.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tis_ratio_type": "tokens"}, r"tis_ratio_type: expected one of .*got 'tokens'"),
        ({"sequence_mask": "mean"}, r"sequence_mask: expected one of .*got 'mean'"),
        ({"scope": "group"}, r"scope: expected one of .*got 'group'"),
        ({"scope": "trajectory"}, "scope='trajectory' needs trajectory_ids, got None"),
        ({"trajectory_ids": [0]}, "trajectory_ids: expected 2 entries, got 1"),
        ({"rollout_logprobs": torch.zeros(2, 4)}, r"rollout_logprobs: expected shape \(2, 3\)"),
        ({"loss_mask": torch.zeros(3)}, r"loss_mask: expected shape \(2, 3\)"),
    ],
)
def test_errors_name_op_and_argument(change: dict[str, Any], message: str) -> None:
    x = torch.zeros(2, 3)
    call: dict[str, Any] = dict(old_logprobs=x, rollout_logprobs=x, loss_mask=x)
    with pytest.raises(ValueError, match=f"off_policy_correction: {message}"):
        off_policy_correction(**{**call, **change})


@pytest.mark.parametrize(
    "bounds",
    [
        {"tis_ratio_type": "token", "tis_cap": float("nan")},
        {"tis_ratio_type": "token", "tis_cap": -1.0},
        {"token_mask_low": 2.0, "token_mask_high": 1.0},
        {"outlier_low": float("nan")},
        {"sequence_mask": "product", "sequence_mask_low": float("nan")},
    ],
)
def test_bounds_that_mean_nothing_are_refused(bounds: dict[str, Any]) -> None:
    zeros = torch.zeros(1, 3)
    with pytest.raises(ValueError, match=r"off_policy_correction: (tis_cap|\w+_mask|outlier)"):
        off_policy_correction(zeros, zeros, torch.ones(1, 3), **bounds)


# --- Native against the reference -----------------------------------------

bounds = st.sampled_from([None, 0.6, 1.0, 1.6])
ranges = st.tuples(bounds, bounds).filter(lambda pair: None in pair or pair[0] <= pair[1])
MASKS = (torch.bool, torch.uint8, torch.int64, torch.float32)


def assert_same(one: tuple, two: tuple) -> None:
    (weights, mask, metrics), (want_weights, want_mask, want_metrics) = one, two
    assert torch.equal(mask, want_mask) and mask.dtype == want_mask.dtype
    assert (weights is None) == (want_weights is None)
    if weights is not None:
        torch.testing.assert_close(weights, want_weights, equal_nan=True)
    assert list(metrics) == list(want_metrics)
    for name, value in want_metrics.items():
        torch.testing.assert_close(metrics[name], value, msg=name)


@given(seed=st.integers(0, 10**6), rows=st.integers(1, 40), width=st.integers(1, 70),
       ids=st.sampled_from(["rows", "pairs", "mixed"]), ragged=st.booleans(),
       tis=st.sampled_from([None, "token", "sequence"]),
       sequence_mask=st.sampled_from([None, "geometric", "product"]),
       outliers=ranges, tokens=ranges,
       mask_dtype=st.sampled_from(MASKS))  # fmt: skip
def test_native_equals_torch(
    seed: int, rows: int, width: int, ids: str, ragged: bool, tis: str | None,
    sequence_mask: str | None, outliers: tuple, tokens: tuple, mask_dtype: torch.dtype,
) -> None:  # fmt: skip
    d = batch((rows, width), torch.float64, seed)
    d["mask"][::7] = False
    call: dict[str, Any] = dict(
        tis_ratio_type=tis, tis_cap=1.5, sequence_mask=sequence_mask, sequence_mask_low=0.8,
        sequence_mask_high=1.3, outlier_low=outliers[0], outlier_high=outliers[1],
        token_mask_low=tokens[0], token_mask_high=tokens[1],
    )  # fmt: skip
    if ids != "rows":
        call["trajectory_ids"] = [i // 2 if ids == "pairs" else i % 3 for i in range(rows)]
    args = [d["old"], d["rollout"], d["mask"].to(mask_dtype)]
    if ragged:
        cut = torch.randint(0, rows * width + 1, (max(0, rows - 1),),
                            generator=torch.Generator().manual_seed(seed))  # fmt: skip
        offsets = torch.cat([torch.tensor([0]), cut.sort().values, torch.tensor([rows * width])])
        call["cu_seqlens"] = offsets
        args = [x.reshape(-1) for x in args]
    assert_same(*(off_policy_correction(*args, backend=b, **call) for b in ("native", "torch")))


FULL: dict[str, Any] = dict(
    tis_ratio_type="sequence", sequence_mask="geometric", sequence_mask_low=0.9,
    sequence_mask_high=1.1, outlier_high=3.0, token_mask_low=0.4,
)  # fmt: skip


@pytest.mark.parametrize("width", [1, 2, 31, 32, 33, 1000])
@pytest.mark.parametrize("level", ["baseline", "avx2", "avx512"])
def test_simd_levels_equal_the_reference(level: str, width: int) -> None:
    d = batch((9, width))
    call = FULL | {"trajectory_ids": [0, 0, 0, 1, 1, 2, 3, 3, 3]}
    before = _C.simd_level()
    try:
        _C.set_simd_level(level)
    except ValueError:
        pytest.skip(f"this CPU has no {level}")
    try:
        got = off_policy_correction(d["old"], d["rollout"], d["mask"], backend="native", **call)
    finally:
        _C.set_simd_level(before)
    want = off_policy_correction(d["old"], d["rollout"], d["mask"], backend="torch", **call)
    assert torch.equal(got[1], want[1])
    torch.testing.assert_close(got[0], want[0], rtol=1e-4, atol=1e-6)  # products of 1000 ratios
    for name, value in want[2].items():
        torch.testing.assert_close(got[2][name], value, msg=name, rtol=1e-5, atol=1e-6)


def test_result_does_not_depend_on_the_number_of_threads() -> None:
    d = batch((3000, 300))
    call = FULL | {"trajectory_ids": [i // 3 for i in range(3000)]}
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(off_policy_correction(d["old"], d["rollout"], d["mask"], **call))
    finally:
        torch.set_num_threads(before)
    for weights, mask, metrics in results[1:]:
        assert torch.equal(weights, results[0][0]) and torch.equal(mask, results[0][1])
        assert {k: float(v) for k, v in metrics.items()} == {
            k: float(v) for k, v in results[0][2].items()
        }


def test_reference_never_synchronizes_with_the_device() -> None:
    """Fake tensors have no values: reading one on the host fails."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.zeros(4, 8)
        weights, mask, metrics = off_policy_correction(
            x, x, x, tis_ratio_type="sequence", sequence_mask="product", outlier_high=2.0,
            token_mask_high=3.0, backend="torch",
        )  # fmt: skip
    assert weights.shape == mask.shape == (4, 8)
    assert all(value.shape == () for value in metrics.values())


# --- SkyRL -----------------------------------------


@pytest.mark.peers
@pytest.mark.parametrize("tis", [None, "token", "sequence"])
@pytest.mark.parametrize("sequence_mask", [None, "geometric", "product"])
def test_off_policy_equals_skyrl(tis: str | None, sequence_mask: str | None, backend: str) -> None:
    skyrl_losses()
    from skyrl.backends.skyrl_train.utils import off_policy_correction_utils as peer
    from skyrl.train.config import OffPolicyCorrectionConfig

    d = batch((40, 5))
    mask = d["mask"].float()
    config = OffPolicyCorrectionConfig(
        tis_ratio_type=tis, sequence_mask_metric=sequence_mask, geo_mask_high=1.2,
        geo_mask_low=0.8, outlier_token_is_threshold_high=3.0, token_mask_is_threshold_low=0.5,
        token_mask_is_threshold_high=2.0,
    )  # fmt: skip
    ratio, _, want_mask = peer.compute_off_policy_correction(d["old"], d["rollout"], mask, config)
    bounds = dict(sequence_mask_low=0.8, sequence_mask_high=1.2)
    weights, new_mask, _ = off_policy_correction(
        d["old"], d["rollout"], mask, tis_ratio_type=tis, sequence_mask=sequence_mask,
        outlier_high=3.0, token_mask_low=0.5, token_mask_high=2.0, backend=backend,
        **(bounds if sequence_mask == "geometric" else {}),
    )  # fmt: skip
    assert torch.equal(new_mask, want_mask)
    if tis is not None:
        assert weights is not None
        torch.testing.assert_close(weights * new_mask, ratio * want_mask)
