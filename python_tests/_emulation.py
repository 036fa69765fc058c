"""The CUDA ops on the CPU: the kernels' own sources, launchers and bindings, compiled by the C++
compiler against csrc/emulation, where the threads of a block are fibers.

What this shows without a GPU: indices, strides, borders, barriers, reductions, launch shapes, and
the Python code around them. What it cannot show: instructions of the device, memory ordering,
speed.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from skyrl_fast import _C
from skyrl_fast.ops import _backend

ROOT = Path(__file__).resolve().parent.parent
NAME = "_cuda_on_cpu"
FLAGS = (
    *("-std=c++17", "-O1", "-g1", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off"),
    *("-DSKYRL_FAST_EMULATE_CUDA=1", "-Wno-unknown-pragmas", "-x", "c++"),
)


def sources() -> list[Path]:
    """Every CUDA kernel file, its binding, and the emulation."""
    found = sorted((ROOT / "csrc").glob("*_cuda.cu"))
    found += sorted((ROOT / "csrc" / "bindings").glob("*_cuda.cpp"))
    found += sorted((ROOT / "csrc" / "emulation").glob("*.cpp"))
    names = ("bindings/borrow", "bindings/cuda_on_cpu_module", "pack_cpu", "parallel")
    return [*found, *(ROOT / "csrc" / f"{name}.cpp" for name in names)]


def build() -> Path:
    """Return the built module; it is made again when a source changed."""
    digest = hashlib.sha256(repr(FLAGS).encode())
    for path in sorted((ROOT / "csrc").rglob("*")):
        if path.is_file():
            digest.update(path.name.encode() + path.read_bytes())
    folder = ROOT / "build" / "emulation" / digest.hexdigest()[:16]
    module = folder / (NAME + str(sysconfig.get_config_var("EXT_SUFFIX")))
    if module.exists():
        return module
    import pybind11

    folder.mkdir(parents=True, exist_ok=True)
    includes = [ROOT / "csrc", pybind11.get_include(), sysconfig.get_path("include")]
    launcher = [p for p in (shutil.which("ccache"),) if p]
    compiler = [*launcher, os.environ.get("CXX", "c++")]

    def compiled(source: Path) -> Path:
        out = folder / (source.name + ".o")
        command = [*compiler, *FLAGS, *(f"-I{i}" for i in includes), "-c", str(source)]
        subprocess.run([*command, "-o", str(out)], check=True)
        return out

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = [str(o) for o in pool.map(compiled, sources())]
    part = folder / f"part{os.getpid()}"
    subprocess.run([compiler[-1], "-shared", *objects, "-o", str(part)], check=True)
    part.rename(module)  # whole, or not there
    return module


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
    """Make the CPU pass for a GPU: ops take their GPU path, down to emulated kernels."""
    for name in dir(cuda_on_cpu):
        if not name.startswith("__"):
            patch.setattr(_C, name, getattr(cuda_on_cpu, name), raising=False)
    patch.setattr(_C, "cuda_archs", "emulated")
    patch.setattr(_backend, "on_gpu", lambda tensor: True)
    patch.setattr(_backend, "device_kind", lambda device: "cuda")
    patch.setattr(_backend, "cuda_stream", lambda tensor: 0)
    patch.setattr(_backend, "pinned", lambda shape, dtype: torch.empty(shape, dtype=dtype))
    cuda_on_cpu.set_order(0)
    cuda_on_cpu.set_compute_major(9)


@pytest.fixture
def emulated_gpu(cuda_on_cpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The emulated ops, while the CPU passes for a GPU."""
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
