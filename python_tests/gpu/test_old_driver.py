"""A driver that is too old for the CUDA kernels, by a stand-in for its library.

The CUDA runtime is inside the extension, and loads the driver's `libcuda.so.1`: here one that knows
its version and nothing else.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from skyrl_fast import _C
from skyrl_fast.ops import _backend

VERSION = 12080  # CUDA 12.8: of the series 570
SOURCE = f"""
int cuDriverGetVersion(int* version) {{ *version = {VERSION}; return 0; }}
int cuInit(unsigned flags) {{ return flags ? 1 : 0; }}
"""
CC = shutil.which("cc") or shutil.which("gcc")
pytestmark = [
    pytest.mark.skipif(_C.cuda_archs is None, reason="the CUDA kernels are not compiled in"),
    pytest.mark.skipif(CC is None, reason="no C compiler"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the driver's library."""
    path = tmp_path_factory.mktemp("driver")
    (path / "driver.c").write_text(SOURCE)
    library = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(path / "libcuda.so.1")]
    subprocess.run([str(CC), *library, str(path / "driver.c")], check=True)
    return path


def run(folder: Path, *arguments: str) -> str:
    """Return what Python prints with this driver."""
    environment = os.environ | {"LD_LIBRARY_PATH": str(folder), "COLUMNS": "400"}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment
    )
    return done.stdout + done.stderr


def versions() -> tuple[str, str]:
    runtime, _ = _C.cuda_versions()
    if runtime // 1000 <= VERSION // 1000:
        pytest.skip(f"this build's runtime ({runtime}) runs with the driver")
    return f"CUDA {_backend.cuda_name(runtime)}", f"CUDA {_backend.cuda_name(VERSION)}"


def test_import_works_and_knows_both_versions(folder: Path) -> None:
    runtime, driver = versions()
    said = run(folder, "-c", "from skyrl_fast.ops import _backend; print(_backend.driver_fault())")
    assert f"compiled with {runtime}" in said and f"this one is for {driver}" in said


def test_doctor_names_both_versions(folder: Path) -> None:
    said = " ".join(run(folder, "-m", "skyrl_fast", "doctor").split())
    for version in versions():
        assert version in said
    assert "update the driver" in said


def test_first_use_takes_another_backend_and_names_both_versions(folder: Path) -> None:
    program = (
        "import torch; from skyrl_fast.ops import _backend; "
        "print('native:', _backend.runs_native(torch.device('cuda:0')))"
    )
    said = run(folder, "-c", program)
    assert "native: False" in said and "RuntimeWarning" in said
    for version in versions():
        assert version in said
