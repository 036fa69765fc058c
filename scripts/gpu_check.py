"""Run the GPU tests, plain and then under NVIDIA's compute-sanitizer: make gpu-check.

    python -m scripts.gpu_check [--tools memcheck,racecheck,initcheck,synccheck] [-k EXPRESSION]

The sanitizer's tools run in parallel, over the tests of the CUDA kernels. All runs are completed,
and the exit status is 0 only if all passed. Running without a GPU is an error.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from scripts.op_tests import EMULATED_TESTS

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "gpu_check"
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
# Graphs need the caching allocator, which hides errors; 2^31 elements, and twenty losses over the
# largest vocabularies, would take the tools hours.
NOT_UNDER_TOOLS = "not graph and not offsets_beyond and not compile and not twenty"
LAST_LINES = 15


def main() -> None:
    """Test, sanitize, report failures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--tools", default=",".join(TOOLS), help="sanitizer tools, comma-separated; may be empty"
    )
    parser.add_argument("-k", default="", help="test selection, as pytest's -k")
    parser.add_argument(
        "--venv", type=Path, help="virtual environment; default: the current Python"
    )
    args = parser.parse_args()
    python = (args.venv / "bin" / "python").as_posix() if args.venv else sys.executable
    refusal = why_not(python)
    if refusal:
        sys.exit(f"gpu-check: {refusal}; nothing was checked")
    BUILD.mkdir(parents=True, exist_ok=True)
    results = {"pytest -m gpu": run("pytest", plain(python, args.k), {})}
    tools = [tool for tool in args.tools.split(",") if tool]
    sanitizer = shutil.which("compute-sanitizer")
    if tools and sanitizer is None:
        results["compute-sanitizer"] = "is not on PATH"
        tools = []
    with ThreadPoolExecutor(len(tools) or 1) as pool:
        uncached = {
            "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"
        }  # so that out-of-bounds accesses of a tensor are seen
        jobs = {
            tool: pool.submit(run, tool, sanitized(sanitizer, tool, python, args.k), uncached)
            for tool in tools
        }
        results |= {tool: job.result() for tool, job in jobs.items()}
    for name, result in results.items():
        print(f"{name}: {result}")
    if any(result != "passed" for result in results.values()):
        raise SystemExit(1)


def why_not(python: str) -> str | None:
    """Return why the tests cannot run here, else None."""
    program = (
        "import torch, skyrl_fast._C as c; "
        "print(torch.cuda.is_available(), c.cuda_archs is not None)"
    )
    found = subprocess.run([python, "-c", program], cwd=ROOT, capture_output=True, text=True)
    if found.returncode != 0:
        return f"the package cannot be imported ({found.stderr.strip().splitlines()[-1]})"
    gpu, kernels = found.stdout.split()
    if gpu != "True":
        return "there is no GPU here"
    return None if kernels == "True" else "the CUDA kernels are not compiled in"


def plain(python: str, only: str) -> list[str]:
    """Return the command of all tests that need a GPU."""
    return [python, "-m", "pytest", "-q", "-m", "gpu", *(["-k", only] if only else [])]


def sanitized(sanitizer: str | None, tool: str, python: str, only: str) -> list[str]:
    """Return the command of the kernels' tests under one of the tools."""
    chosen = f"({only}) and {NOT_UNDER_TOOLS}" if only else NOT_UNDER_TOOLS
    tests = list(EMULATED_TESTS)
    return [
        *(str(sanitizer), "--tool", tool, "--error-exitcode", "9", "--print-limit", "20"),
        # Only our kernels are checked; initcheck must also see what torch's kernels write.
        *(("--kernel-name", "kernel_substring=skyrl_fast") if tool != "initcheck" else ()),
        *(python, "-m", "pytest", "-q", "-x", "-m", "gpu", "-p", "no:cacheprovider"),
        *("-o", "timeout=0", "-k", chosen, *tests),
    ]


def run(name: str, command: list[str], environment: dict[str, str]) -> str:
    """Return "passed" or the last lines of a command's output, which is saved in a log file."""
    log = BUILD / f"{name}.log"
    with log.open("w") as out:
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | environment, stdout=out, stderr=subprocess.STDOUT
        )
    lines = log.read_text(errors="replace").splitlines()
    if done.returncode == 0:
        print(f"{name}: {lines[-1]}", flush=True)
        return "passed"
    end = "\n  ".join(lines[-LAST_LINES:])
    return f"failed with status {done.returncode}, see {log.relative_to(ROOT)}\n  {end}"


if __name__ == "__main__":
    main()
