"""The CUDA ops on the CPU: the kernels' own sources, launchers and bindings, compiled by the C++
compiler against csrc/emulation, where the threads of a block are fibers.

What this shows without a GPU: indices, strides, borders, barriers, reductions, launch shapes, and
the Python code around them. What it cannot show: instructions of the device, memory ordering,
speed.
"""

import functools
import importlib.machinery
import importlib.util
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from _emulation_build import NAME, build

from skyrl_fast import _C
from skyrl_fast.ops import _backend


@functools.cache
def load() -> ModuleType:
    """Return the emulated ops as a module."""
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(build()))
    spec = importlib.util.spec_from_loader(NAME, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def cuda_on_cpu() -> ModuleType:
    """The emulated ops, as _C has them in a CUDA build."""
    pytest.importorskip("pybind11", reason="the emulation is built with pybind11")
    return load()


def play_gpu(cuda_on_cpu: ModuleType, patch: pytest.MonkeyPatch) -> None:
    """Present the CPU as a GPU: ops take their GPU path, down to emulated kernels."""
    for name in dir(cuda_on_cpu):
        if not name.startswith("__"):
            patch.setattr(_C, name, getattr(cuda_on_cpu, name), raising=False)
    patch.setattr(_C, "cuda_archs", "emulated")
    patch.setattr(_backend, "runs_native", lambda device: True)
    patch.setattr(_backend, "is_trusted", lambda op, device, backend: True)
    patch.setattr(_backend, "on_gpu", lambda tensor: True)
    patch.setattr(_backend, "device_kind", lambda device: "cuda")
    patch.setattr(_backend, "cuda_stream", lambda tensor: 0)
    patch.setattr(_backend, "allocate_pinned", lambda shape, dtype: torch.empty(shape, dtype=dtype))
    cuda_on_cpu.set_order(0)
    cuda_on_cpu.set_compute_major(9)


@pytest.fixture
def emulated_gpu(cuda_on_cpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The emulated ops, while the CPU is presented as a GPU."""
    play_gpu(cuda_on_cpu, monkeypatch)
    yield cuda_on_cpu


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def gpu(request: pytest.FixtureRequest) -> str:
    """The device that a kernel test runs on: the CPU with emulated kernels, and a real GPU."""
    if request.param == "cuda":
        if _C.cuda_archs is None:
            pytest.skip("the CUDA kernels are not compiled in")
        return "cuda"
    request.getfixturevalue("emulated_gpu")
    return "cpu"
