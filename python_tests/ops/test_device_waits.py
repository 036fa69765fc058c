"""Ops never read device memory on the host: meta tensors stand for GPU tensors, and fake kernels
only check their devices. Reading a value, or mixing devices, is an error."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from skyrl_fast import (
    _C,
    group_advantage,
    kl_penalty,
    linear_logprob,
    masked_logprob_loss,
    padded_to_varlen,
    policy_loss,
    selected_logprob,
    varlen_to_padded,
)
from skyrl_fast.ops import _backend

KERNELS = (
    *("selected_logprob", "selected_logprob_backward", "masked_logprob_loss", "group_advantage"),
    *("policy_loss", "delta_sums", "kl_penalty", "scale_rows", "scale_cells"),
    *("expand_rows", "padded_to_flat", "flat_to_padded"),
)


def tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for v in value for t in tensors_of(v)] if isinstance(value, (list, tuple)) else []


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that were called."""
    names: list[str] = []

    def kernel(name: str) -> Callable[..., None]:
        def launch(*arguments: Any) -> None:
            assert {t.device.type for t in tensors_of(arguments)} == {"meta"}, name
            names.append(name)

        return launch

    for name in KERNELS:
        monkeypatch.setattr(_C, f"{name}_cuda", kernel(name), raising=False)
    monkeypatch.setattr(_C, "cuda_archs", "meta")
    monkeypatch.setattr(_backend, "runs_native", lambda device: True)
    monkeypatch.setattr(_backend, "is_trusted", lambda op, device, backend: True)
    monkeypatch.setattr(_backend, "on_gpu", lambda tensor: tensor.is_meta)
    monkeypatch.setattr(
        _backend, "device_kind", lambda device: "cuda" if device.type == "meta" else device.type
    )
    monkeypatch.setattr(_backend, "cuda_stream", lambda tensor: 0)
    monkeypatch.setattr(
        _backend, "allocate_pinned", lambda shape, dtype: torch.empty(shape, dtype=dtype)
    )
    return names


def there(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def leaf(*shape: int) -> torch.Tensor:
    return there(*shape).requires_grad_()


@pytest.mark.parametrize("flags", [None, [False, True, True]])
def test_advantages(launched: list[str], flags: list[bool] | None) -> None:
    group_advantage(there(3, 4), ["a", "a", "b"], is_last_step=flags, response_mask=there(3, 4))
    assert launched == ["group_advantage"]
    with pytest.raises(ValueError, match="expected one id within a trajectory"):
        group_advantage(there(3), ["a", "b", "b"], is_last_step=[False, True, True])


@pytest.mark.spec("loss.gpu-no-sync")
@pytest.mark.parametrize("loss", ["regular", "gspo", "sapo", "dppo", "cispo"])
@pytest.mark.parametrize("ragged", [False, True])
def test_policy_loss(launched: list[str], loss: str, ragged: bool) -> None:
    shape = (12,) if ragged else (3, 4)
    cells = [there(*shape) for _ in range(4)]
    total, _ = policy_loss(
        leaf(*shape), *cells[:3], loss=loss, ref_logprobs=cells[3], kl_estimator="k3",
        cu_seqlens=torch.tensor([0, 4, 8, 12]) if ragged else None,
        row_weights=there(3), trajectory_ids=["a", "a", "b"],
    )[:2]  # fmt: skip
    total.backward()
    assert launched == ["scale_cells"]
    kl_penalty(leaf(*shape), cells[0], loss_mask=cells[2]).sum().backward()


@pytest.mark.spec("logprob.gpu-no-sync")
def test_logits(launched: list[str]) -> None:
    targets, mask = there(5, dtype=torch.int64), there(5, dtype=torch.bool)
    for inplace in (False, True):
        options = {"loss_mask": mask, "return_entropy": True, "inplace_backward": inplace}
        logprob, entropy = selected_logprob(leaf(5, 9) * 1, targets, **options)
        (logprob + entropy).sum().backward()
    assert launched == ["selected_logprob_backward"]  # in place; the others are torch operators
    out = masked_logprob_loss(leaf(5, 9), targets, there(5), there(5), loss_mask=mask)
    out.loss.backward()
    assert launched[1:] == ["scale_rows"]
    linear_logprob(leaf(5, 3), leaf(9, 3), targets, chunk_rows=2).sum().backward()


@pytest.mark.spec("batch.gpu-no-sync")
def test_rows(launched: list[str]) -> None:
    flat = padded_to_varlen(leaf(3, 6, 2), lengths=torch.tensor([4, 0, 6]))
    varlen_to_padded(flat.values, torch.tensor([0, 4, 4, 10])).sum().backward()
    assert launched == ["padded_to_flat", "flat_to_padded"] * 2
