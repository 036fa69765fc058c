"""The first use of Triton's kernels. `test_triton.py` runs this file in Triton's interpreter."""

import os
from pathlib import Path

import pytest
import torch
from _planted import KERNELS, faulty, planted

from skyrl_fast import selected_logprob
from skyrl_fast.ops import _backend, _triton, first_use

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
OPS = [op for op, backends in first_use.BACKENDS_ON_GPU.items() if "triton" in backends]
IN_TRITON = tuple(name for name in KERNELS if hasattr(_triton, name))
pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="no GPU, and TRITON_INTERPRET not set"
)


@pytest.fixture(autouse=True)
def untrusted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty cache folder; the CPU counts as a GPU without compiled kernels."""
    monkeypatch.setattr(_backend, "first_use_reasons", {})
    monkeypatch.setattr(_backend, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(_backend, "device_kind", lambda device: "cuda")
    monkeypatch.setattr(_backend, "runs_native", lambda device: False)
    if INTERPRETED:  # Triton's interpreter would take minutes for the largest vocabulary
        small = first_use.LOGIT_CASES[:4]
        monkeypatch.setattr(first_use, "LOGIT_CASES", small)


@pytest.mark.parametrize("op", OPS)
def test_first_use_trusts_right_kernels(op: str) -> None:
    assert first_use.check_first_use(op, DEVICE, "triton") == ""


@pytest.mark.parametrize(("kernel", "fault"), planted(IN_TRITON))
def test_first_use_refuses_a_faulty_kernel(
    kernel: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    op = KERNELS[kernel][0]
    monkeypatch.setattr(_triton, kernel, faulty(getattr(_triton, kernel), kernel, fault))
    with pytest.warns(RuntimeWarning, match=f"{op}: the triton kernel .* are not (close|equal)"):
        assert not _backend.is_trusted(op, DEVICE, "triton")


def test_torch_computes_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = faulty(_triton.selected_logprob, "selected_logprob", "row")
    monkeypatch.setattr(_triton, "selected_logprob", kernel)
    logits = torch.tensor([[0.0, 0.0], [0.0, 50.0]], device=DEVICE)
    with pytest.warns(RuntimeWarning, match="selected_logprob: the triton kernel differs"):
        got = selected_logprob(logits, torch.tensor([1, 1], device=DEVICE))
    torch.testing.assert_close(got, logits.log_softmax(1)[:, 1])
