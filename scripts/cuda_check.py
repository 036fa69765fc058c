"""Compile every CUDA kernel for every architecture; runs nothing and needs no GPU.

    python scripts/cuda_check.py [--jobs 2]

Fails on a compiler error, on a kernel that spills registers or has a stack frame, and where
`cuobjdump` (if available) does not find each architecture in the object. Without nvcc it is skipped
with a message. Objects and logs stay in build/cuda_check and are rebuilt when a source, the options
or the compiler changed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "csrc"
BUILD = ROOT / "build" / "cuda_check"
ARCHITECTURES = ("80", "90a", "100", "120")  # those of CMakeLists.txt; the last also as PTX
NEWEST = ARCHITECTURES[-1]
OPTIONS = ("-std=c++17", "-O3", "-Xptxas=-v", "-Werror=all-warnings", f"-I{SOURCES}")

COMPILED = re.compile(r"Compiling entry function '(\w+)' for '(sm_\w+)'")
FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
REGISTERS = re.compile(r"Used (\d+) registers")


@dataclass(frozen=True, slots=True)
class Kernel:
    """The assembler's statistics of one kernel on one architecture."""

    name: str
    architecture: str
    registers: int
    stack_bytes: int
    spilled_bytes: int


def main() -> None:
    """Compile changed sources, then check all kernels."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    jobs = parser.parse_args().jobs
    nvcc = find_nvcc()
    if nvcc is None:
        print("cuda-check: skipped, no nvcc found (CUDA toolkit 13 or newer is needed)")
        return
    start = time.monotonic()
    sources = kernel_sources()
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        logs = dict(zip(sources, pool.map(lambda s: compiled(nvcc, s), sources), strict=True))
    faults: list[str] = []
    for source, log in logs.items():
        kernels = read_log(log.read_text())
        print(summary(source, kernels))
        faults += judged(source, kernels) + missing_architectures(log.with_suffix(".o"))
    print(f"cuda-check: {len(sources)} files in {time.monotonic() - start:.0f} s")
    if faults:
        sys.exit("\n".join(["cuda-check failed:", *faults]))


def kernel_sources() -> list[Path]:
    """Return the CUDA sources."""
    return sorted(SOURCES.glob("*/*.cu"))


def find_nvcc() -> str | None:
    """Return nvcc, from PATH or the toolkit's default folder."""
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def find_cuobjdump() -> str | None:
    """Return cuobjdump: on PATH, in the toolkit, or the one that comes with Triton."""
    found = shutil.which("cuobjdump") or shutil.which("cuobjdump", path="/usr/local/cuda/bin")
    triton = importlib.util.find_spec("triton")
    if found is None and triton is not None and triton.origin is not None:
        folder = Path(triton.origin).parent / "backends" / "nvidia" / "bin"
        found = shutil.which("cuobjdump", path=str(folder))
    return found


def target_options() -> list[str]:
    """Return nvcc's options for machine code of each architecture, and PTX of the newest."""
    options = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in ARCHITECTURES]
    return [*options, f"-gencode=arch=compute_{NEWEST},code=compute_{NEWEST}"]


def compiled(nvcc: str, source: Path) -> Path:
    """Return the log of compiling `source`; the object is next to it."""
    command = [nvcc, *OPTIONS, *target_options(), "-c", str(source)]
    digest = hashlib.sha256("\n".join([*command, version(nvcc)]).encode())
    for path in [source, *sorted(SOURCES.glob("*/*.h"))]:
        digest.update(path.name.encode() + path.read_bytes())
    log = BUILD / f"{source.stem}.log"
    stamp = log.with_suffix(".stamp")
    if stamp.exists() and stamp.read_text() == digest.hexdigest():
        return log
    BUILD.mkdir(parents=True, exist_ok=True)
    stamp.unlink(missing_ok=True)
    done = subprocess.run(
        [*command, "-o", str(log.with_suffix(".o"))], capture_output=True, text=True
    )
    log.write_text(done.stdout + done.stderr)
    if done.returncode != 0:
        sys.exit(f"cuda-check: {source.name} does not compile\n{log.read_text()}")
    stamp.write_text(digest.hexdigest())
    return log


def version(nvcc: str) -> str:
    """Return the output of nvcc --version."""
    return subprocess.check_output([nvcc, "--version"], text=True)


def read_log(text: str) -> list[Kernel]:
    """Return the kernels of one log of `ptxas -v`."""
    found: list[Kernel] = []
    name = architecture = ""
    frame = (0, 0)
    for line in text.splitlines():
        if match := COMPILED.search(line):
            name, architecture = match.groups()
            frame = (0, 0)
        elif match := FRAME.search(line):
            stack, stores, loads = map(int, match.groups())
            frame = (stack, stores + loads)
        elif (match := REGISTERS.search(line)) and name:
            found.append(Kernel(name, architecture, int(match.group(1)), *frame))
            name = ""
    return found


def judged(source: Path, kernels: list[Kernel]) -> list[str]:
    """Return what is wrong with the kernels of one source."""
    faults = [
        f"{source.name}: {k.name} for {k.architecture}: {k.stack_bytes} bytes of stack, "
        f"{k.spilled_bytes} bytes spilled"
        for k in kernels
        if k.stack_bytes or k.spilled_bytes
    ]
    for architecture in ARCHITECTURES:
        if not any(k.architecture == f"sm_{architecture}" for k in kernels):
            faults.append(f"{source.name}: no kernel for sm_{architecture}")
    return faults


def summary(source: Path, kernels: list[Kernel]) -> str:
    """Return one line: how many kernels, and their registers by architecture."""
    parts = []
    for architecture in ARCHITECTURES:
        registers = [k.registers for k in kernels if k.architecture == f"sm_{architecture}"]
        if registers:
            parts.append(f"sm_{architecture} {min(registers)}-{max(registers)}")
    return (
        f"{source.name}: {len(kernels) // len(ARCHITECTURES)} kernels, registers {', '.join(parts)}"
    )


def held_architectures(binary: Path) -> tuple[set[str], set[str]] | None:
    """Return the architectures of a binary's machine code and of its PTX, by cuobjdump."""
    cuobjdump = find_cuobjdump()
    if cuobjdump is None:
        return None
    listed = [
        subprocess.check_output([cuobjdump, option, str(binary)], text=True)
        for option in ("--list-elf", "--list-ptx")
    ]
    return tuple(set(re.findall(r"\.(sm_\w+)\.", text)) for text in listed)  # type: ignore[return-value]


def missing_architectures(binary: Path) -> list[str]:
    """Return what cuobjdump should find in a binary and does not."""
    held = held_architectures(binary)
    if held is None:
        return []
    code, ptx = held
    wanted = {f"sm_{a}" for a in ARCHITECTURES}
    faults = [f"{binary.name}: no machine code for {a}" for a in sorted(wanted - code)]
    return faults + ([] if f"sm_{NEWEST}" in ptx else [f"{binary.name}: no PTX for sm_{NEWEST}"])


if __name__ == "__main__":
    main()
