"""Install a wheel as users do, without a compiler, and run the op tests on several torch versions.

    python3 scripts/wheel_test.py [--wheels dist] [--torch 2.6.0 --torch 2.13.0+cpu] [TEST ...]

The wheel comes from a folder (`make wheels` writes dist/), or is built with pip. For each version:
a separate virtual environment with that torch and the wheel (nothing else of the project), and the
tests of the ops, also on the emulated GPU, outside the source tree. A version that the package
index lacks is reported and skipped.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from op_tests import EMULATED_TESTS, OP_TESTS

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "wheel_test"
TEST_REQUIREMENTS = (
    "pytest", "pytest-timeout", "pytest-benchmark", "hypothesis", "numpy", "pybind11",
)  # fmt: skip


def main() -> None:
    """Build the wheel, check its symbols, test it with each torch."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", action="append", help="torch versions, oldest first")
    parser.add_argument("--wheels", type=Path, help="folder of built wheels; default: build one")
    parser.add_argument("tests", nargs="*", help="test files, default: all of the ops")
    arguments = parser.parse_args()
    versions = arguments.torch or ["2.6.0", "2.9.1", "2.13.0+cpu"]
    tests = arguments.tests or [*OP_TESTS, *EMULATED_TESTS, "python_tests/ops/test_triton.py"]
    shutil.rmtree(BUILD, ignore_errors=True)
    wheels = arguments.wheels.resolve() if arguments.wheels else build_wheel().parent
    (wheel,) = wheels.glob(f"*-cp{sys.version_info[0]}{sys.version_info[1]}-*.whl")
    check_symbols(wheel)
    results = {version: test_under(version, wheels, tests) for version in versions}
    for version, result in results.items():
        print(f"torch {version}: {result}")
    if any(result == "failed" for result in results.values()):
        raise SystemExit(1)


def build_wheel() -> Path:
    """Build the wheel in pip's isolated environment, from a bare virtual environment."""
    python = make_venv("bare")
    start = time.monotonic()
    subprocess.run([python, "-m", "pip", "wheel", "-q", "--no-deps", "-w", BUILD, ROOT], check=True)
    (wheel,) = BUILD.glob("*.whl")
    size = wheel.stat().st_size / 1e6
    print(f"{wheel.name}: {size:.1f} MB, built in {time.monotonic() - start:.0f} s")
    return wheel


def check_symbols(wheel: Path) -> None:
    """Exit if the extension links torch or needs one of its symbols."""
    unpacked = BUILD / "unpacked"
    shutil.unpack_archive(wheel, unpacked, "zip")
    (extension,) = unpacked.glob("skyrl_fast/_C*.so")
    linked = subprocess.check_output(["ldd", extension], text=True)
    symbols = subprocess.check_output(["nm", "-D", "--undefined-only", extension], text=True)
    for text, name in ((linked, "libtorch"), (linked, "libc10"), (symbols, "_ZN2at")):
        if name in text:
            raise SystemExit(f"{extension.name} needs {name}")
    if "_ZN3c10" in symbols or "_ZN5torch" in symbols:
        raise SystemExit(f"{extension.name} needs symbols of torch")
    print(linked.rstrip())


def test_under(version: str, wheels: Path, tests: list[str]) -> str:
    """Return "passed", "failed", or why the version could not be tested."""
    python = make_venv(f"torch-{version}")
    if subprocess.run([python, "-m", "pip", "install", "-q", f"torch=={version}"]).returncode != 0:
        return "not available from the package index"
    subprocess.run([python, "-m", "pip", "install", "-q", *TEST_REQUIREMENTS], check=True)
    install_wheel(python, wheels)
    tree = BUILD / f"tests-{version}"
    for folder in ("python_tests", "csrc"):  # CUDA kernels are emulated from their sources
        shutil.copytree(ROOT / folder, tree / folder)
    shutil.copy(ROOT / "pyproject.toml", tree)
    done = subprocess.run([python, "-m", "pytest", "-q", *tests], cwd=tree)
    return "passed" if done.returncode == 0 else "failed"


def install_wheel(python: str, wheels: Path) -> None:
    """Install the package from a folder of wheels, without a compiler on PATH, and call an op."""
    start = time.monotonic()
    bare = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    bare |= {"PATH": str(Path(python).parent)}
    options = ("--no-index", "--only-binary", ":all:", "--find-links", str(wheels))
    subprocess.run(
        [python, "-m", "pip", "install", "-q", *options, "skyrl-fast"], check=True, env=bare
    )
    print(f"installed in {time.monotonic() - start:.1f} s", flush=True)
    one = "import skyrl_fast as s, torch; print(s.group_advantage(torch.ones(2), torch.arange(2)))"
    subprocess.run([python, "-c", one], check=True, env=bare, cwd=BUILD)


def make_venv(name: str) -> str:
    """Return the Python of a fresh virtual environment."""
    folder = BUILD / name
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    return (folder / "bin" / "python").as_posix()


if __name__ == "__main__":
    main()
