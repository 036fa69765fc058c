"""Build the CUDA ops for the CPU: `python python_tests/helpers/_emulation_build.py`."""

import concurrent.futures
import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAME = "_cuda_on_cpu"
FLAGS = (
    *("-std=c++17", "-O1", "-g1", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off"),
    *("-DSKYRL_FAST_EMULATE_CUDA=1", "-Wno-unknown-pragmas"),
    *shlex.split(os.environ.get("CXXFLAGS", "")),  # a sanitizer's
)


def kernels() -> list[Path]:
    """Return the CUDA kernel files, the emulation, and what of the CPU ops they call."""
    found = sorted((ROOT / "csrc").glob("*/*_cuda.cu"))
    found += sorted((ROOT / "csrc" / "emulation").glob("*.cpp"))
    return [*found, *(ROOT / "csrc" / f"{name}.cpp" for name in ("pack/pack_cpu", "core/parallel"))]


def bindings() -> list[Path]:
    """Return the files that include pybind11."""
    found = sorted((ROOT / "csrc").glob("*/*_cuda_bind.cpp"))
    return [*found, *(ROOT / "csrc/bindings" / n for n in ("borrow.cpp", "cuda_on_cpu_module.cpp"))]


def build() -> Path:
    """Return the built module; it is rebuilt when a source changed."""
    digest = hashlib.sha256(repr(FLAGS).encode())
    for path in sorted((ROOT / "csrc").rglob("*")):
        if path.is_file():
            digest.update(path.name.encode() + path.read_bytes())
    folder = ROOT / "build" / "emulation" / digest.hexdigest()[:16]
    module = folder / (NAME + str(sysconfig.get_config_var("EXT_SUFFIX")))
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one of pytest's processes builds, the others wait
        if not module.exists():
            _build(module)
    return module


def _build(module: Path) -> None:
    import pybind11

    folder = module.parent
    includes = [ROOT / "csrc", pybind11.get_include(), sysconfig.get_path("include")]
    launcher = [p for p in (shutil.which("ccache"),) if p]
    compiler = [*launcher, os.environ.get("CXX", "c++")]

    together = folder / "bindings.cpp"  # pybind11's headers are compiled once
    together.write_text("".join(f'#include "{path}"\n' for path in bindings()))

    def compiled(source: Path) -> Path:
        out = folder / (source.name + ".o")
        command = [*compiler, *FLAGS, "-x", "c++", *(f"-I{i}" for i in includes), "-c", str(source)]
        subprocess.run([*command, "-o", str(out)], check=True)
        return out

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = [str(o) for o in pool.map(compiled, [together, *kernels()])]
    part = folder / f"part{os.getpid()}"
    subprocess.run([compiler[-1], *FLAGS, "-shared", *objects, "-o", str(part)], check=True)
    part.rename(module)  # atomic: complete or absent


if __name__ == "__main__":
    build()
