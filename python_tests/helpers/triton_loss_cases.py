"""policy_loss by Triton against the reference; run as `triton_cases.py` is."""

from typing import Any

import pytest
import torch
from _losses import IDS, NAN, VARIANTS, batch, loss_and_grad, penalty_and_grad
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_cases import DEVICE, pytestmark  # noqa: F401

from skyrl_fast.ops.policy_loss.loss import KL_ESTIMATORS, policy_loss
from skyrl_fast.ops.policy_loss.losses import LossSettings
from skyrl_fast.ops.policy_loss.reduction import REDUCTIONS

# Clip bounds and coefficients reach a kernel as float32.
CLOSE = {torch.float32: dict(rtol=2e-5, atol=2e-6), torch.float64: dict(rtol=1e-6, atol=1e-7)}


def both(
    data: dict[str, torch.Tensor], **options: Any
) -> tuple[tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]], ...]:
    """Return loss, gradient and metrics by Triton, and by the reference in float64."""
    results = []
    for device, backend in ((DEVICE, "triton"), ("cpu", "torch")):
        d = {k: v.to(device) for k, v in data.items()}
        if backend == "torch":
            d = {k: v.double() if v.is_floating_point() else v for k, v in d.items()}
        moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        loss, grad, metrics = loss_and_grad(
            d["logprobs"], d["old"], d["advantages"], d["mask"],
            rollout_logprobs=d["rollout"], ref_logprobs=d["ref"], backend=backend, **moved,
        )  # fmt: skip
        results.append((loss.cpu(), grad.cpu(), {k: v.cpu() for k, v in metrics.items()}))
    return tuple(results)


def assert_both_equal(data: dict[str, torch.Tensor], **options: Any) -> None:
    got, want = both(data, **options)
    close = CLOSE[data["logprobs"].dtype]
    torch.testing.assert_close(got[0].double(), want[0], **close)
    torch.testing.assert_close(got[1].double(), want[1], **close)
    for name, value in want[2].items():
        torch.testing.assert_close(got[2][name], value, msg=name, **close)


@pytest.mark.parametrize(
    "shape", [(3, 33), *(pytest.param(s, marks=pytest.mark.slow) for s in ((1, 1), (7, 500)))]
)
@pytest.mark.parametrize("loss", VARIANTS, ids=IDS)
def test_equals_reference(loss: str | LossSettings, shape: tuple[int, int]) -> None:
    data = batch(shape)
    assert_both_equal(
        data, loss=loss, kl_estimator="k3", kl_coef=0.1, token_weights=data["rollout"].abs(),
        reduction="trajectory_mean", trajectory_ids=[i // 2 for i in range(shape[0])],
    )  # fmt: skip


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_penalties_and_reductions(estimator: str, reduction: str) -> None:
    assert_both_equal(
        batch((6, 40)), kl_estimator=estimator, kl_coef=0.3, reduction=reduction,
        group_ids=[0, 0, 0, 1, 1, 2], trajectory_ids=[0, 0, 1, 2, 2, 3], max_seq_len=64,
    )  # fmt: skip


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
@pytest.mark.parametrize("shape", [(0,), (700,), (3, 100)])
def test_kl_penalty(estimator: str, shape: tuple[int, ...]) -> None:
    data = batch(shape)
    data["logprobs"][~data["mask"]] = NAN
    results = [
        penalty_and_grad(data, device, estimator, backend)
        for device, backend in ((DEVICE, "triton"), ("cpu", "torch"))
    ]
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, **CLOSE[torch.float32])


@given(
    lengths=st.lists(st.integers(0, 300), max_size=9),
    variant=st.sampled_from(VARIANTS),
    estimator=st.sampled_from([None, *KL_ESTIMATORS]),
    mask_dtype=st.sampled_from([torch.bool, torch.uint8, torch.int64, torch.float32]),
    seed=st.integers(0, 2**20),
)
@settings(max_examples=12)
def test_ragged_rows(
    lengths: list[int],
    variant: str | LossSettings,
    estimator: str | None,
    mask_dtype: torch.dtype,
    seed: int,
) -> None:
    data = batch((sum(lengths),), torch.float64, seed)
    data["mask"] = data["mask"].to(mask_dtype)
    assert_both_equal(
        data, loss=variant, kl_estimator=estimator, kl_coef=0.2, reduction="sequence_mean",
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0),
    )  # fmt: skip


def test_masked_positions_are_not_read() -> None:
    data = batch((3, 40))
    options: dict[str, Any] = dict(loss="gspo", kl_estimator="k3")
    want, _ = both(data, **options)
    for name in ("logprobs", "old", "advantages", "rollout", "ref"):
        data[name][~data["mask"]] = NAN
    got, _ = both(data, **options)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1]) and got[2] == want[2]


@pytest.mark.parametrize("shape", [(2, 5), (0, 5), (3, 0)])
def test_no_trained_tokens(shape: tuple[int, int]) -> None:
    data = {name: torch.full(shape, NAN) for name in batch((1, 1))} | {"mask": torch.zeros(shape)}
    for name in ("regular", "gspo"):
        (loss, grad, metrics), _ = both(data, loss=name, kl_estimator="k1")
        assert loss.item() == 0.0 and torch.equal(grad, torch.zeros(shape))
        assert all(value.item() == 0.0 for value in metrics.values())


@pytest.mark.slow
def test_compile_fullgraph() -> None:
    d = {name: value.to(DEVICE) for name, value in batch((3, 9)).items()}
    weights = torch.full((3,), 0.1, device=DEVICE)

    def step(x: torch.Tensor) -> torch.Tensor:
        return policy_loss(
            x, d["old"], d["advantages"], d["mask"], row_weights=weights, backend="triton"
        )[0]

    grads = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        x = d["logprobs"].clone().requires_grad_()
        (3 * function(x)).backward()
        grads.append(x.grad)
    assert torch.equal(grads[0], grads[1]) and grads[0].any()
