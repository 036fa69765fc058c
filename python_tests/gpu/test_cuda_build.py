"""The compile-only check of CUDA kernels, and the architectures of the built extension."""

import shutil
import subprocess
from pathlib import Path

import pytest

from scripts import cuda_check
from skyrl_fast import _C

LOG = """
ptxas info    : Compiling entry function '_Zgood' for 'sm_80'
ptxas info    : Function properties for _Zgood
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 400 bytes cmem[0]
ptxas info    : Compiling entry function '_Zbad' for 'sm_90a'
ptxas info    : Function properties for _Zbad
    16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 255 registers
"""


def test_ptxas_log_is_parsed() -> None:
    good, bad = cuda_check.read_log(LOG)
    assert good == cuda_check.Kernel("_Zgood", "sm_80", 40, 0, 0)
    assert bad == cuda_check.Kernel("_Zbad", "sm_90a", 255, 16, 20)


def test_spills_and_missing_architectures_are_reported() -> None:
    faults = cuda_check.judged(Path("x.cu"), cuda_check.read_log(LOG))
    assert faults == [
        "x.cu: _Zbad for sm_90a: 16 bytes of stack, 20 bytes spilled",
        "x.cu: no kernel for sm_100",
        "x.cu: no kernel for sm_120",
    ]


def test_check_without_nvcc_is_skipped_with_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    cuda_check.check(None, jobs=1)
    assert "skipped, no nvcc found" in capsys.readouterr().out


def test_build_contains_every_kernel_and_architecture() -> None:
    text = (cuda_check.ROOT / "CMakeLists.txt").read_text()
    for source in cuda_check.kernel_sources():
        assert str(source.relative_to(cuda_check.ROOT)) in text
    for binding in cuda_check.SOURCES.glob("*/*_cuda_bind.cpp"):
        assert str(binding.relative_to(cuda_check.ROOT)) in text


# By the version of nvcc. The last of each has PTX, for later devices.
BUILT_BY = {
    "12.0.140": "80-real;90a-real;90",
    "12.6.85": "80-real;90a-real;90",
    "12.8.93": "80-real;90a-real;100-real;120",
    "13.0.88": "80-real;90a-real;100-real;120",
}


@pytest.mark.skipif(shutil.which("cmake") is None, reason="CMake is not installed")
@pytest.mark.parametrize("version", BUILT_BY)
def test_architectures_are_those_that_nvcc_knows(version: str, tmp_path: Path) -> None:
    script = tmp_path / "architectures.cmake"
    rules = cuda_check.ROOT / "cmake" / "cuda_architectures.cmake"
    script.write_text(
        f"include({rules})\n"
        f"skyrl_cuda_architectures({version} found)\n"
        'message(NOTICE "${found}")\n'
    )
    done = subprocess.run(["cmake", "-P", str(script)], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == BUILT_BY[version]


def test_the_newest_nvcc_builds_what_is_checked() -> None:
    names = [name.removesuffix("-real") for name in BUILT_BY["13.0.88"].split(";")]
    assert names == list(cuda_check.ARCHITECTURES)


def test_extension_contains_the_architectures_it_reports() -> None:
    if _C.cuda_archs is None:
        pytest.skip("the CUDA kernels are not compiled in: no nvcc when this was built")
    held = cuda_check.held_architectures(Path(_C.__file__))
    if held is None:
        pytest.skip("there is no cuobjdump here: neither on PATH nor with Triton")
    code, ptx = held
    names = _C.cuda_archs.split(",")
    compiled = {f"sm_{n.removesuffix('-real')}" for n in names if not n.endswith("-virtual")}
    without_letters = {name.removesuffix("a") for name in compiled}  # as cuobjdump 12 prints them
    assert code in (compiled, without_letters)
    of_ptx = {name.removesuffix("-virtual") for name in names if not name.endswith("-real")}
    assert ptx == {f"sm_{name}" for name in of_ptx}
