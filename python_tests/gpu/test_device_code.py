"""Which GPUs run the compiled CUDA kernels, all others take Triton; and where they are launched."""

import contextlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from skyrl_fast import _C, ops
from skyrl_fast.commands import doctor
from skyrl_fast.ops import _backend

BUILT = "80-real,90a-real,100-real,120"  # machine code for all, PTX for the last
RUNS = {
    (7, 0): False,
    (7, 5): False,
    (8, 0): True,
    (8, 6): True,
    (8, 9): True,
    (9, 0): True,
    (10, 0): True,
    (10, 3): True,
    (11, 0): False,  # older than the PTX, no machine code of its major
    (12, 0): True,
    (12, 1): True,
    (13, 0): True,
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """CPU tensors as those of GPU 0, with compiled kernels; the GPUs that were asked."""
    indices: list[int] = []
    monkeypatch.setattr(_C, "cuda_archs", BUILT)
    monkeypatch.setattr(_backend, "HAS_TRITON", True)
    monkeypatch.setattr(_backend, "device_kind", lambda device: "cuda")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(_backend, "is_trusted", lambda *_: True)  # there are no kernels to compare
    _backend.device_capability.cache_clear()
    yield indices
    _backend.device_capability.cache_clear()


def answer(
    monkeypatch: pytest.MonkeyPatch, indices: list[int], capability: tuple[int, int]
) -> None:
    def ask(index: int) -> tuple[int, int]:
        indices.append(index)
        return capability

    monkeypatch.setattr(torch.cuda, "get_device_capability", ask)


ON_GPU = ("native", "triton", "torch")


@pytest.mark.spec("tensors.device-code")
@pytest.mark.parametrize("capability", list(RUNS))
def test_devices_without_code_take_triton(
    monkeypatch: pytest.MonkeyPatch, asked: list[int], capability: tuple[int, int]
) -> None:
    answer(monkeypatch, asked, capability)
    for _ in range(2):
        chosen = _backend.select("op", torch.zeros(1), available_on_gpu=ON_GPU)
        assert chosen == ("native" if RUNS[capability] else "triton")
    assert asked == [0]  # once


@pytest.mark.spec("tensors.device-code")
def test_native_by_name_on_a_device_without_code_is_an_error(
    monkeypatch: pytest.MonkeyPatch, asked: list[int]
) -> None:
    answer(monkeypatch, asked, (7, 5))
    with pytest.raises(ValueError, match="backend 'native' cannot run on cuda"):
        _backend.select("op", torch.zeros(1), backend="native", available_on_gpu=ON_GPU)


@pytest.mark.parametrize(
    ("built", "capability", "runs"),
    [
        ("90", (10, 0), True),
        ("90-virtual", (12, 0), True),
        ("90", (8, 9), False),
        ("90a", (10, 0), False),
        ("100f", (10, 3), True),
        ("100f", (12, 0), False),
        ("native", (8, 6), True),
    ],
)
def test_architectures_of_other_builds(built: str, capability: tuple[int, int], runs: bool) -> None:
    assert _backend.has_code(built, capability) is runs


@pytest.mark.spec("tensors.compile")
def test_answer_is_a_constant_of_a_graph(monkeypatch: pytest.MonkeyPatch, asked: list[int]) -> None:
    answer(monkeypatch, asked, (7, 5))
    device = torch.device("cuda", 0)

    def add(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if _backend.runs_native(device) else x + 2

    compiled = torch.compile(add, fullgraph=True, backend="eager")
    assert compiled(torch.zeros(1)).item() == 2


@pytest.mark.spec("tensors.current-device")
@pytest.mark.parametrize("use_triton", [False, True])
def test_kernels_are_launched_by_torchs_guard_of_the_tensors_gpu(
    monkeypatch: pytest.MonkeyPatch, use_triton: bool
) -> None:
    """torch's guard leaves GPU 0 without a CUDA context; cudaSetDevice(0) would create one."""
    current = ["cuda:0"]
    launched: list[tuple[str, tuple[object, ...]]] = []

    @contextlib.contextmanager
    def device(chosen: str) -> Iterator[None]:
        current.append(chosen)
        yield
        current.pop()

    def kernel(*arguments: object) -> None:
        launched.append((current[-1], arguments))

    launchers = SimpleNamespace(probe=kernel)
    monkeypatch.setitem(sys.modules, "skyrl_fast.ops._triton", launchers)
    monkeypatch.setattr(ops, "_triton", launchers, raising=False)
    monkeypatch.setattr(_C, "probe_cuda", kernel, raising=False)
    monkeypatch.setattr(_backend, "cuda_stream", lambda tensor: 7)
    monkeypatch.setattr(torch.cuda, "device", device)
    tensor: Any = SimpleNamespace(is_cuda=True, device="cuda:1")
    _backend.run_kernel("probe", use_triton, tensor, "argument")
    assert launched == [("cuda:1", ("argument",) if use_triton else ("argument", 7))]
    assert current == ["cuda:0"]


@pytest.mark.spec("tensors.current-device")
def test_no_kernel_is_launched_around_the_guard() -> None:
    package = Path(_backend.__file__).parents[1]
    calls = {p.name for p in package.rglob("*.py") if re.search(r"_C\.\w+_cuda\b", p.read_text())}
    assert calls == set()
    runtime = [p.read_text() for p in (package.parent / "csrc").rglob("*") if p.is_file()]
    assert not any("cudaSetDevice" in text for text in runtime)


OLD_DRIVER = (13000, 12080)  # a runtime of CUDA 13.0, a driver of the series 570


@pytest.mark.parametrize(
    ("runtime", "driver", "runs"),
    [
        (13000, 12080, False),
        (13020, 13000, True),  # of one major version
        (13000, 13010, True),
        (12080, 13000, True),
        (12080, 11080, False),
        (13000, 0, True),  # no driver: no GPU asks
    ],
)
def test_a_driver_runs_kernels_of_its_major_version_and_older_ones(
    runtime: int, driver: int, runs: bool
) -> None:
    assert (_backend.fault_of_versions(runtime, driver) == "") == runs


def test_a_driver_that_is_too_old_is_named_once_and_triton_runs(
    asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, asked, (9, 0))
    monkeypatch.setattr(_C, "cuda_versions", lambda: OLD_DRIVER, raising=False)
    said = (
        r"the CUDA kernels were compiled with CUDA 13\.0 and need a driver for CUDA 13 \(580 or "
        r"newer\); this one is for CUDA 12\.8\. They are not used: Triton's are, or torch"
    )
    _backend.driver_runs_kernels.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match=said) as warned:
            for _ in range(2):
                chosen = _backend.select("op", torch.ones(1), available_on_gpu=ON_GPU)
                assert chosen == "triton"
        assert len(warned) == 1
        findings = {finding.name: finding for finding in doctor.findings()}
        kernels = findings["CUDA kernels"]
        assert kernels.status == doctor.PROBLEM and "is for CUDA 12.8" in kernels.found
        assert "update the driver" in kernels.advice
    finally:
        _backend.driver_runs_kernels.cache_clear()
