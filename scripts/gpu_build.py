"""Compile the extension for the GPU of this machine, unless it holds kernels for it.

    python -m scripts.gpu_build [--device cpu]

One architecture takes a quarter of the time of all. `--device cpu`: the extension without CUDA
kernels, if there is none that loads.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
WITH_SUFFIX = {(9, 0): "90a"}  # architectures whose own instructions the kernels use


def main() -> None:
    """Check, else compile."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    if parser.parse_args().device == "cpu":
        program = [sys.executable, "-c", "import skyrl_fast"]
        if subprocess.run(program, cwd=ROOT, capture_output=True).returncode:
            subprocess.run(["make", "ext", f"PYTHON={sys.executable}"], cwd=ROOT, check=True)
        print("gpu-build: the extension loads")
        return
    if not torch.cuda.is_available():
        sys.exit("gpu-build: there is no GPU here")
    capability = torch.cuda.get_device_capability()
    number = WITH_SUFFIX.get(capability, "".join(map(str, capability)))
    found = compiled_architectures()
    if number in found:
        print(f"gpu-build: the extension holds kernels for {number} ({', '.join(found)})")
        return
    # Line numbers in the code are for the sanitizer and the profiler; they cost no time.
    environment = os.environ | {"CUDAFLAGS": "-lineinfo"}
    arguments = ("SKYRL_FAST_CUDA=on", f"SKYRL_FAST_CUDA_ARCHS={number}-real")
    python = f"PYTHON={sys.executable}"
    subprocess.run(["make", "ext", python, *arguments], cwd=ROOT, env=environment, check=True)
    print(f"gpu-build: compiled for {', '.join(compiled_architectures())}")


def compiled_architectures() -> list[str]:
    """Return the architectures of the extension's kernels; none if it cannot be imported."""
    program = "import skyrl_fast._C as c; print(c.cuda_archs or '')"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    return [name.removesuffix("-real") for name in done.stdout.strip().split(",") if name]


if __name__ == "__main__":
    main()
