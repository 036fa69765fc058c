"""Check the package on a GPU: make gpu-check.

    python -m scripts.gpu_check [--seconds 540] [--parts NAMES] [-k EXPRESSION] [--dry]

Machine and versions, a build for this GPU where there is none, the GPU tests, the kernels' tests
under compute-sanitizer's tools, and training with transformers in vLLM's place. Interrupted or
limited by `--seconds`, the same command runs what is left. The exit status is 0 only if every part
has passed. `--dry` tries the commands on a machine without a GPU: it checks nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from scripts.op_tests import EMULATED_TESTS
from scripts.parts import ROOT, Part, add_options, run_parts

BUILD = ROOT / "build" / "gpu_check"
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
# Graphs need the caching allocator, which hides errors; 2^31 elements, and twenty losses over the
# largest vocabularies, would take the tools hours.
NOT_UNDER_TOOLS = "not graph and not offsets_beyond and not compile and not twenty"
# So that out-of-bounds accesses of a tensor are seen.
UNCACHED = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
TRITON_TESTS = "python_tests/ops/test_triton.py"


def main() -> None:
    """Run the parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    parser.add_argument("-k", default="", help="selection of tests, as pytest's -k")
    options = parser.parse_args()
    if not (options.dry or options.list or has_gpu()):
        sys.exit("gpu-check: there is no GPU here; nothing was checked")
    folder = BUILD / "dry" if options.dry else BUILD
    parts = [*check_parts(options.k, dry=options.dry)]
    raise SystemExit(run_parts("gpu-check", parts, folder, options))


def has_gpu() -> bool:
    """Return whether torch sees a GPU."""
    import torch

    return torch.cuda.is_available()


def check_parts(only: str, *, dry: bool) -> Iterator[Part]:
    """Yield the parts, the most informative first.

    Args:
        only: selection of tests.
        dry: commands that work without a GPU.
    """
    python = sys.executable
    if not dry:
        yield Part("machine", ("nvidia-smi", "-q", "-d", "CLOCK,POWER,MEMORY"), 30)
        yield Part("build", (python, "-m", "scripts.gpu_build"), 400)
    compare = () if dry else ("--gpu",)
    yield Part("doctor", (python, "-m", "skyrl_fast", "doctor", *compare), 120)
    yield from test_parts(only, dry=dry)
    if not dry:
        for tool in TOOLS:
            yield Part(tool, sanitized(tool, only), 900, UNCACHED, group="compute-sanitizer")
    small = ("--device", "cpu", "--tiny") if dry else ()
    training = (python, "-m", "bench.gpu.training", *small)
    yield Part("training", training, 300)
    yield Part("training-trees", (*training, "trainer.rows=tree"), 200)


def test_parts(only: str, *, dry: bool) -> Iterator[Part]:
    """Yield all tests that need a GPU, in three runs at the same time."""
    pytest = (sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider")
    options = (*(("-k", only) if only else ()), *(("--collect-only",) if dry else ()))
    others = [f"--ignore={test}" for test in (*EMULATED_TESTS, TRITON_TESTS)]
    for name, tests in (
        ("tests-kernels", EMULATED_TESTS),
        ("tests-triton", (TRITON_TESTS,)),
        ("tests-others", ("python_tests", *others)),
    ):
        yield Part(name, (*pytest, *options, *tests), 600, group="tests")


def sanitized(tool: str, only: str) -> tuple[str, ...]:
    """Return the command of the kernels' tests under one of the tools."""
    chosen = f"({only}) and {NOT_UNDER_TOOLS}" if only else NOT_UNDER_TOOLS
    return (
        *("compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--print-limit", "20"),
        # Only our kernels are checked; initcheck must also see what torch's kernels write.
        *(("--kernel-name", "kernel_substring=skyrl_fast") if tool != "initcheck" else ()),
        *(sys.executable, "-m", "pytest", "-q", "-x", "-m", "gpu", "-p", "no:cacheprovider"),
        *("-o", "timeout=0", "-k", chosen, *EMULATED_TESTS),
    )


if __name__ == "__main__":
    main()
