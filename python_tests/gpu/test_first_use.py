"""The first use of a kernel on a GPU: compared with torch, remembered, refused where it differs."""

import json
import warnings
from pathlib import Path
from types import ModuleType

import pytest
import torch
from _planted import KERNELS, faulty, planted

from skyrl_fast import _C, selected_logprob
from skyrl_fast.commands import doctor
from skyrl_fast.ops import _backend, first_use

CPU = torch.device("cpu")
SMALL = first_use.LOGIT_CASES[:4]  # for emulated kernels
LOGITS = torch.tensor([[0.0, 0.0], [0.0, 50.0]])
TARGETS = torch.tensor([1, 1])


@pytest.fixture
def untrusted(emulated_gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An emulated GPU on which nothing has been compared, with an empty cache folder."""
    monkeypatch.setattr(_backend, "is_trusted", IS_TRUSTED)
    monkeypatch.setattr(_backend, "first_use_reasons", {})
    monkeypatch.setattr(_backend, "cache_folder", lambda: tmp_path)
    return tmp_path / "first_use"


IS_TRUSTED = _backend.is_trusted


@pytest.mark.parametrize("op", first_use.BACKENDS_ON_GPU)
def test_first_use_trusts_right_kernels(op: str, untrusted: Path) -> None:
    assert first_use.check_first_use(op, CPU, "native") == ""


@pytest.mark.parametrize(("kernel", "fault"), planted())
def test_first_use_refuses_a_faulty_kernel(
    kernel: str, fault: str, untrusted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    op = KERNELS[kernel][0]
    native = getattr(_C, f"{kernel}_cuda")
    monkeypatch.setattr(_C, f"{kernel}_cuda", faulty(native, kernel, fault))
    with pytest.warns(RuntimeWarning, match=f"{op}: the native kernel .* are not (close|equal)"):
        assert not _backend.is_trusted(op, CPU, "native")


def test_the_next_backend_computes_the_result(
    untrusted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_backend, "HAS_TRITON", False)
    native = _C.selected_logprob_cuda
    monkeypatch.setattr(_C, "selected_logprob_cuda", faulty(native, "selected_logprob", "sign"))
    with pytest.warns(RuntimeWarning, match="selected_logprob: the native kernel differs"):
        got = selected_logprob(LOGITS, TARGETS)
    torch.testing.assert_close(got, LOGITS.log_softmax(1)[:, 1])
    with warnings.catch_warnings(action="error"):  # said once
        selected_logprob(LOGITS, TARGETS)
    with pytest.raises(ValueError, match="expected a backend with torch's results on cpu, got 'na"):
        selected_logprob(LOGITS, TARGETS, backend="native")


def test_results_are_remembered_by_device_and_build(
    untrusted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    native = _C.selected_logprob_cuda

    def counted(*arguments: object) -> None:
        calls.append(arguments)
        native(*arguments)

    monkeypatch.setattr(_C, "selected_logprob_cuda", counted)
    selected_logprob(LOGITS, TARGETS)
    assert len(calls) > 1
    (record,) = untrusted.iterdir()
    assert json.loads(record.read_text())["reason"] == ""
    _backend.first_use_reasons.clear()  # as in another process
    calls.clear()
    selected_logprob(LOGITS, TARGETS)
    assert len(calls) == 1
    monkeypatch.setattr(first_use, "_fingerprint", lambda device: "another build")
    _backend.first_use_reasons.clear()
    selected_logprob(LOGITS, TARGETS)
    assert len(calls) > 2


def test_failure_of_the_reference_is_not_blamed_on_the_kernel(
    untrusted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("the reference fails")

    monkeypatch.setattr("skyrl_fast.ops.logprob.reference.selected_logprob", fail)
    with pytest.raises(RuntimeError, match="the reference fails"):
        selected_logprob(LOGITS, TARGETS)
    assert not untrusted.exists()
    monkeypatch.undo()
    assert first_use.run_cases("selected_logprob", CPU, "native") == ""


def test_comparison_is_free_of_the_default_dtype(untrusted: Path) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        reasons = [
            first_use.run_cases(op, CPU, "native", SMALL) for op in first_use.BACKENDS_ON_GPU
        ]
    finally:
        torch.set_default_dtype(torch.float32)
    assert reasons == [""] * len(reasons)


def test_comparison_is_free_of_the_callers_modes(untrusted: Path) -> None:
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert _backend.is_trusted("linear_logprob", CPU, "native")


def test_doctor_counts_and_measures(untrusted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_backend, "HAS_TRITON", False)
    native = _C.kl_penalty_cuda
    monkeypatch.setattr(_C, "kl_penalty_cuda", faulty(native, "kl_penalty", "mask"))
    with pytest.warns(RuntimeWarning, match="kl_penalty"):
        assert not _backend.is_trusted("kl_penalty", CPU, "native")
    assert _backend.is_trusted("selected_logprob", CPU, "native")
    (kernels,) = doctor.gpu_kernels([CPU])
    assert kernels.status == doctor.PROBLEM
    assert kernels.found == "1 of 8 ops equal to torch, 1 different, 6 not used yet"
    assert "kl_penalty (native)" in kernels.advice
    table = "\n".join(doctor.gpu_table([CPU], logits=SMALL, rounds=1))
    assert "| kl_penalty | k3 | native | differs" in table
    assert "| selected_logprob | kept sets | native | 0." in table
