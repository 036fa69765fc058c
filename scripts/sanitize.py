"""Run the kernel tests under AddressSanitizer and UndefinedBehaviorSanitizer.

    python3 scripts/sanitize.py --venv .venv

Builds the extension and the emulated CUDA kernels with both sanitizers into build/sanitize, with
a copy of the sources, and runs the tests of the ops there. Leaks are not checked: Python and torch
keep memory on purpose. Any report of a sanitizer ends the run with an error.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
from pathlib import Path

from op_tests import EMULATED_TESTS, OP_TESTS
from source_copy import ROOT, copy_sources

BUILD = ROOT / "build" / "sanitize"
FLAGS = "-fsanitize=address,undefined -fno-omit-frame-pointer"


def main() -> None:
    """Build, copy, test."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    python = (parser.parse_args().venv.resolve() / "bin" / "python").as_posix()
    tree = BUILD / "tree"
    build_extension(python)
    shutil.rmtree(tree, ignore_errors=True)
    copy_sources(tree, ("skyrl_fast", "python_tests", "csrc"), ("pyproject.toml",))
    for extension in (BUILD / "out").glob("_C*.so"):
        shutil.copy(extension, tree / "skyrl_fast")
    compiling = os.environ | {"CXX": "g++", "CXXFLAGS": FLAGS}
    emulation = [python, "python_tests/helpers/_emulation_build.py"]
    subprocess.run(emulation, cwd=tree, env=compiling, check=True)
    environment = compiling | {
        "LD_PRELOAD": f"{runtime('libasan.so')} {runtime('libstdc++.so')}",
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        "HYPOTHESIS_PROFILE": "default",
        "PYTHONPATH": str(tree),
    }
    tests = [*OP_TESTS, *EMULATED_TESTS, "python_tests/train/test_micro_batch.py"]
    # torch.compile starts a compiler, which must not inherit the sanitizer.
    command = [python, "-m", "pytest", "-q", "-x", "-k", "not compile and not opcheck", *tests]
    subprocess.run(command, cwd=tree, env=environment, check=True)


def build_extension(python: str) -> None:
    """Build _C with the sanitizers."""
    find = "import pybind11; print(pybind11.get_cmake_dir())"
    pybind11 = subprocess.check_output([python, "-c", find], text=True).strip()
    cmake = Path(python).parent / "cmake"
    options = {
        "SKYRL_FAST_SANITIZE": "ON",
        "SKYRL_FAST_CUDA": "off",
        # At -O2 the vector kernels' many inlined checks take an hour to compile.
        "CMAKE_BUILD_TYPE": "None",
        "CMAKE_CXX_FLAGS": "-O1 -g1",
        "SKYRL_FAST_OUTPUT": BUILD / "out",
        "pybind11_DIR": pybind11,
        "Python_EXECUTABLE": python,
    }
    defines = [f"-D{key}={value}" for key, value in options.items()]
    subprocess.run([cmake, "-S", ROOT, "-B", BUILD / "cmake", "-G", "Ninja", *defines], check=True)
    subprocess.run([cmake, "--build", BUILD / "cmake", "-j2"], check=True)


def runtime(library: str) -> str:
    """Return the path of a run-time library of the compiler."""
    return subprocess.check_output(["g++", f"-print-file-name={library}"], text=True).strip()


if __name__ == "__main__":
    main()
