"""Check and measure the package on a GPU: make gpu-check.

    python -m scripts.gpu_check [--results FOLDER] [--seconds 540] [--parts NAMES]
                                [-k EXPRESSION] [--wheels FOLDER] [--dry]

A build for this GPU where there is none, the kernels' tests, first figures, training with
transformers in vLLM's place, benchmarks, the other tests, and the kernels' tests under
compute-sanitizer: the most valuable first. Results are written as they come, to four to five small
files whose names begin with `gpu`, to be committed in bench/results. Interrupted or limited by
`--seconds`, the same command runs what is left. The exit status is 0 only if every part has passed.
`--dry` tries the commands on a machine without a GPU: it checks and measures nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from scripts.op_tests import EMULATED_TESTS, OTHER_GPU_TESTS
from scripts.parts import ROOT, Part, add_options, run_parts

BUILD = ROOT / "build" / "gpu_check"
RESULTS = ROOT / "bench" / "results"
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
TOOL_SECONDS = 60
# At least, of each part without a GPU: other work may share the processor.
DRY_LIMIT = 300
# Graphs need the caching allocator, which hides errors; 2^31 elements, and twenty losses over the
# largest vocabularies, would take the tools hours.
NOT_UNDER_TOOLS = "not graph and not offsets_beyond and not compile and not twenty"
# So that out-of-bounds accesses of a tensor are seen.
UNCACHED = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
TRITON_TESTS = "python_tests/ops/test_triton.py"
# Of settings, the environment and checkpoints.
TRAINING_NEEDS = ("omegaconf", "skyrl_gym", "pandas", "requests", "xxhash")
SECTIONS = (
    "SpeedOfLight",
    "MemoryWorkloadAnalysis",
    "Occupancy",
    "LaunchStats",
    "WarpStateStats",
    "InstructionStats",
)
# Part: substring of the groups' names at full size, and at tiny size; seconds predicted, at most.
GROUPS = {
    "batches": ("17006 x", "5 x (7", 30, 90),
    "linear": ("linear_logprob", "linear_logprob", 40, 120),
    "steps": ("optimizer step", "optimizer step", 60, 180),
    "vocabulary-151936": ("8192 x 151936", "6 x 64", 60, 240),
    "trees-search": ("agents search", "agents search", 60, 240),
    "over-tokens": ("over tokens", "over tokens", 60, 240),
    "vocabulary-32000": ("8192 x 32000", "6 x 50", 30, 180),
    "vocabulary-128256": ("8192 x 128256", "", 40, 180),
    "vocabulary-262144": ("8192 x 262144", "", 60, 240),
    "trees-agentic": ("agents agentic", "", 90, 400),
    "trees-sql": ("agents sql", "", 60, 300),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    parser.add_argument("-k", default="", help="selection of tests, as pytest's -k")
    parser.add_argument("--results", type=Path, help=f"folder of the results; default: {RESULTS}")
    options = parser.parse_args(arguments)
    if not (options.dry or options.list or has_gpu()):
        sys.exit("gpu-check: there is no GPU here; nothing was checked or measured")
    folder = BUILD / "dry" if options.dry else BUILD
    results = options.results or (folder if options.dry else RESULTS)
    parts = [*all_parts(options.k, results.resolve(), dry=options.dry)]
    if options.dry:
        parts = [rehearsed(part) for part in parts]
    raise SystemExit(run_parts("gpu-check", parts, folder, options, results=results))


def rehearsed(part: Part) -> Part:
    """Return a part with time enough on a processor that other work shares."""
    return replace(part, limit=max(part.limit, DRY_LIMIT))


def has_gpu() -> bool:
    """Return whether torch sees a GPU."""
    import torch

    return torch.cuda.is_available()


def all_parts(only: str, results: Path, *, dry: bool) -> Iterator[Part]:
    """Yield the parts, the most valuable first.

    Args:
        only: selection of tests.
        results: folder of the benchmarks' files.
        dry: commands that work without a GPU, with tiny sizes.
    """
    python = sys.executable
    small = ("--device", "cpu", "--tiny") if dry else ()
    tests = {part.name: part for part in test_parts(only, dry=dry)}
    benches = {part.name: part for part in bench_parts(results, small)}
    tools = [Part(tool, sanitized(tool, only), TOOL_SECONDS, 50, UNCACHED) for tool in TOOLS]
    training = Part(
        "training", (python, "-m", "bench.gpu.training", *small), 150, 60, needs=TRAINING_NEEDS
    )
    trees = (*training.command, "trainer.row_layout=tree")
    doctor = (python, "-m", "skyrl_fast", "doctor")
    if not dry:
        yield Part("machine", ("nvidia-smi", "-q", "-d", "CLOCK,POWER,MEMORY"), 20, 2)
    yield Part("build", (python, "-m", "scripts.gpu_build", *small[:2]), 400, 60)
    # Triton compiles each of its kernels, which takes a minute.
    yield Part("doctor", doctor if dry else (*doctor, "--gpu", "native"), 60, 15)
    yield tests.pop("tests-kernels")
    yield benches.pop("first-figures")
    yield Part("training-trees", trees, 150, 60, needs=TRAINING_NEEDS)
    yield training
    for name in ("batches", "linear", "steps"):
        yield benches.pop(name)
    yield tests.pop("tests-triton")
    if not dry:
        yield from tools[:2]
    yield from benches.values()
    yield from tests.values()
    if not dry:
        yield Part("doctor-triton", (*doctor, "--gpu", "triton"), 240, 100)
        yield from tools[2:]


def bench_parts(results: Path, small: tuple[str, ...]) -> Iterator[Part]:
    """Yield the benchmarks: our own figures of one size, then those of others next to ours."""
    report = (sys.executable, "-m", "bench.gpu.report", "--out", str(results), *small)
    column = 1 if small else 0
    first = GROUPS["vocabulary-151936"][column]
    yield Part("first-figures", (*report, "--ours", "--only", first), 90, 30)
    for name, group in GROUPS.items():
        if only := group[column]:
            predicted, limit = group[2:]
            yield Part(name, (*report, "--only", str(only)), limit, predicted)
    profile = (sys.executable, "-m", "bench.gpu.profile", *small)
    yield Part("profile", profile if small else (*ncu(results), *profile), 120, 60)


def test_parts(only: str, *, dry: bool) -> Iterator[Part]:
    """Yield all tests that need a GPU, in three parts."""
    pytest = (sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider")
    options = (*(("-k", only) if only else ()), *(("--collect-only",) if dry else ()))
    for name, tests, predicted, limit in (
        ("tests-kernels", EMULATED_TESTS, 90, 240),
        ("tests-triton", (TRITON_TESTS,), 120, 300),
        ("tests-others", OTHER_GPU_TESTS, 120, 300),
    ):
        yield Part(name, (*pytest, *options, *tests), limit, predicted)


def sanitized(tool: str, only: str) -> tuple[str, ...]:
    """Return the command of the kernels' tests under one of the tools, a line for each test."""
    chosen = f"({only}) and {NOT_UNDER_TOOLS}" if only else NOT_UNDER_TOOLS
    return (
        *("compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--print-limit", "20"),
        # Only our kernels are checked; initcheck must also see what torch's kernels write.
        *(("--kernel-name", "kernel_substring=skyrl_fast") if tool != "initcheck" else ()),
        *(sys.executable, "-m", "pytest", "-v", "-x", "-m", "gpu", "-p", "no:cacheprovider"),
        *("-o", "timeout=0", "-k", chosen, *EMULATED_TESTS),
    )


def ncu(results: Path) -> tuple[str, ...]:
    """Return the profiler's command; its report is a text file."""
    sections = [option for section in SECTIONS for option in ("--section", section)]
    return (
        *("ncu", "--clock-control", "none", "--target-processes", "all", "--launch-count", "9"),
        *("--kernel-name", "regex:forward_kernel|backward_kernel|visit_kernel|loss_kernel|fold"),
        *(*sections, "--log-file", str(results / "gpu_profile.txt")),
    )


if __name__ == "__main__":
    main()
