"""Compile every CUDA kernel for every architecture; runs nothing and needs no GPU.

    python -m scripts.cuda_check [--jobs 2]

Fails on a compiler error, on a kernel that spills registers or has a stack frame, and, where there
is a `cuobjdump`, on a fatbin without one of the architectures. With a `cuobjdump` it also prints
what the kernels of `COUNTED` issue for an element and how they access memory, and fails on bank
conflicts and on fewer loads in flight than they are written with. Without nvcc it is skipped with a
message.
Fatbins and logs stay in build/cuda_check and are rebuilt when a source, the options or the compiler
changed. The host's side of a source is compiled by `make setup`.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from scripts import sass, sass_memory

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
class CountedKernel:
    """A kernel whose instructions and accesses are printed."""

    label: str
    source: str
    name: str  # a regular expression
    work: sass.Work | None  # None: it computes nothing of an element
    in_flight: int = 0  # the fewest bytes that a thread loads before it reads one of them


# The first's accesses are checked, too: addresses are computed by its instructions.
COUNTED_ARCHITECTURES = ("90a", "100")
SLOW_CONVERSION = "F2F.BF16.F32"  # of one float; two in one instruction run on another unit
FORWARD = sass.Work(in_loop=True)
BACKWARD = sass.Work(in_loop=False, stores=True)
VISIT = sass.Work(in_loop=False, marks=2, stores=True)  # for the sums, and the gradient
SCALE = sass.Work(in_loop=True, marks=0, stores=True)
CELL = sass.Work(in_loop=True, marks=0.75, mark="DADD", cells=8)  # three sums of four cells
LOGPROB, LOSS, POLICY = "logprob_cuda", "masked_logprob_loss_cuda", "policy_loss_cuda"
VISIT_FEW, VISIT_MANY = r"visit_kernel\w*Bf16ELi8", r"visit_kernel\w*Bf16ELi16"
COUNTED = (
    CountedKernel("forward", LOGPROB, r"forward_kernel\w*Bf16ELb0E", FORWARD),
    CountedKernel("forward, entropy", LOGPROB, r"forward_kernel\w*Bf16ELb1E", FORWARD),
    CountedKernel("backward", LOGPROB, r"backward_kernel\w*Bf16ELb0E", BACKWARD),
    CountedKernel("backward, entropy", LOGPROB, r"backward_kernel\w*Bf16ELb1E", BACKWARD),
    CountedKernel("gradient times a factor", LOGPROB, r"12scale_kernel\w*Bf16", SCALE),
    CountedKernel("masked loss, 8 vectors", LOSS, VISIT_FEW + "ELb0E", VISIT),
    CountedKernel("masked loss, 8 vectors, entropy", LOSS, VISIT_FEW + "ELb1E", VISIT),
    CountedKernel("masked loss, 16 vectors", LOSS, VISIT_MANY + "ELb0E", VISIT),
    CountedKernel("masked loss, 16 vectors, entropy", LOSS, VISIT_MANY + "ELb1E", VISIT),
    CountedKernel("masked loss, long rows", LOSS, r"revisit_kernel\w*Bf16ELb0E", FORWARD),
    CountedKernel("policy loss, a trained cell", POLICY, r"11loss_kernelIfLi0E", CELL, 96),
    CountedKernel("policy loss, partial sums", POLICY, r"11fold_kernel", None),
    CountedKernel("rows, padded to flat", "pack_cuda", r"padded_to_flat_kernel", None, 128),
    CountedKernel("rows, flat to padded", "pack_cuda", r"flat_to_padded_kernel", None, 128),
    CountedKernel("advantages of cells", "advantage_cuda", r"spread_kernel", None, 64),
    CountedKernel("policy loss, deltas", POLICY, r"12delta_kernelIf", None),
)


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
    check(find_nvcc(), jobs)


def check(nvcc: str | None, jobs: int) -> None:
    """Compile changed sources by this nvcc and check all kernels; exit with what is wrong."""
    if nvcc is None:
        print("cuda-check: skipped, no nvcc found (CUDA toolkit 13 or newer is needed)")
        return
    start = time.monotonic()
    sources = kernel_sources()
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        logs = dict(zip(sources, pool.map(lambda s: compiled(nvcc, s), sources), strict=True))
    faults: list[str] = []
    cuobjdump = find_cuobjdump()
    for source, log in logs.items():
        kernels = read_log(log.read_text())
        print(summary(source, kernels))
        faults += judged(source, kernels) + missing_architectures(log.with_suffix(".fatbin"))
        counted = [kernel for kernel in COUNTED if kernel.source == source.stem]
        if counted and cuobjdump is not None:
            list_code = partial(machine_code, cuobjdump, log.with_suffix(".fatbin"))
            faults += print_counts(counted, kernels, list_code)
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


def log_of(source: Path) -> Path:
    """Return where the compiler's output for `source` is; its fatbin is next to it."""
    return BUILD / f"{source.stem}.log"


def command_for(nvcc: str, source: Path) -> list[str]:
    """Return the command that compiles `source`, without its output."""
    return [nvcc, *OPTIONS, *target_options(), "-fatbin", str(source)]


def digest_of(nvcc: str, source: Path) -> str:
    """Return a digest of all that the fatbin of `source` depends on."""
    digest = hashlib.sha256("\n".join([*command_for(nvcc, source), version(nvcc)]).encode())
    for path in [source, *sorted(SOURCES.glob("*/*.h"))]:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def is_compiled(nvcc: str, source: Path) -> bool:
    """Return whether the fatbin of `source` is that of the present sources."""
    stamp = log_of(source).with_suffix(".stamp")
    return stamp.exists() and stamp.read_text() == digest_of(nvcc, source)


def compiled(nvcc: str, source: Path) -> Path:
    """Compile `source` unless its fatbin is up to date; return the log."""
    log = log_of(source)
    if is_compiled(nvcc, source):
        return log
    stamp = log.with_suffix(".stamp")
    BUILD.mkdir(parents=True, exist_ok=True)
    stamp.unlink(missing_ok=True)
    done = subprocess.run(
        [*command_for(nvcc, source), "-o", str(log.with_suffix(".fatbin"))],
        capture_output=True,
        text=True,
    )
    log.write_text(done.stdout + done.stderr)
    if done.returncode != 0:
        sys.exit(f"cuda-check: {source.name} does not compile\n{log.read_text()}")
    stamp.write_text(digest_of(nvcc, source))
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


def machine_code(cuobjdump: str, binary: Path, architecture: str) -> str:
    """Return cuobjdump's listing of a binary's machine code."""
    command = [cuobjdump, "-sass", "-arch", f"sm_{architecture}", str(binary)]
    return subprocess.check_output(command, text=True)


def print_counts(
    counted: Sequence[CountedKernel], kernels: list[Kernel], list_code: Callable[[str], str]
) -> list[str]:
    """Print instructions and accesses of the counted kernels of one source; return its faults.

    Args:
        counted: those to print.
        kernels: all kernels of the source, as compiled.
        list_code: returns the listing of the machine code of an architecture.
    """
    faults: list[str] = []
    for architecture in COUNTED_ARCHITECTURES:
        code = sass.functions(list_code(architecture))
        of_one = [k for k in kernels if k.architecture == f"sm_{architecture}"]
        registers = {k.name: k.registers for k in of_one}
        for kernel in counted:
            for name in code:
                if re.search(kernel.name, name):
                    faults += print_count(kernel, architecture, registers[name], code[name])
    return faults


def print_count(
    kernel: CountedKernel, architecture: str, registers: int, code: list[sass.Instruction]
) -> list[str]:
    """Print one kernel's instructions and accesses; return its faults."""
    label = f"{kernel.label}, sm_{architecture}"
    parts = [f"{registers} registers", sass.widths(code)]
    if kernel.work is not None:
        parts.insert(0, instructions_of(code, kernel.work))
    in_flight = sass_memory.bytes_in_flight(code)
    parts.append(f"{in_flight} bytes in flight")
    faults = slow_conversions(label, code)
    if architecture == COUNTED_ARCHITECTURES[0]:
        shared = sass_memory.shared_cost(code)
        if shared.least:
            parts.append(f"{shared.wavefronts} wavefronts of at least {shared.least}")
        faults += memory_faults(kernel, in_flight, shared)
    print(f"  {label}: {', '.join(parts)}")
    return faults


def slow_conversions(label: str, code: list[sass.Instruction]) -> list[str]:
    """Return what is slow about a kernel's conversions to bfloat16."""
    number = sum(instruction.opcode.startswith(SLOW_CONVERSION) for instruction in code)
    if number == 0:
        return []
    return [f"{label}: expected conversions of two floats to bfloat16, got {number} of one"]


def memory_faults(
    kernel: CountedKernel, in_flight: int, shared: sass_memory.SharedCost
) -> list[str]:
    """Return what is slow about a kernel's accesses."""
    faults = []
    if in_flight < kernel.in_flight:
        faults.append(
            f"{kernel.label}: expected {kernel.in_flight} bytes in flight, got {in_flight}"
        )
    if shared.wavefronts > shared.least:
        faults.append(
            f"{kernel.label}: expected {shared.least} wavefronts of shared memory, got "
            f"{shared.wavefronts}: bank conflicts"
        )
    return faults


def instructions_of(code: list[sass.Instruction], work: sass.Work) -> str:
    """Return the instructions for an element, or why they cannot be counted."""
    try:
        counted = sass.count(code, work)
    except ValueError as error:  # another nvcc lays out the kernel differently
        return f"not counted ({error})"
    shortest, longest = counted.per_element
    outside = f" and {counted.outside} a thread" if counted.outside else ""
    return f"{shortest:.1f} to {longest:.1f} instructions an element{outside}"


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
