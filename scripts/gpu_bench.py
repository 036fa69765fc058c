"""Measure the package on a GPU: make bench-gpu.

    python -m scripts.gpu_bench [--seconds 540] [--parts NAMES] [--dry]

Our figures first, then every op compared with its peers, the profiler's view of our kernels,
optimizer steps of published models' shapes, and prefix trees. Each part adds its groups to
bench/results/gpu.json and gpu.md. Interrupted or limited by `--seconds`, the same command runs what
is left. `--dry` tries the commands on a machine without a GPU: it measures nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from scripts.gpu_check import has_gpu
from scripts.parts import ROOT, Part, add_options, run_parts

BUILD = ROOT / "build" / "gpu_bench"
# Part: substring of the groups' names at full size, and at tiny size; seconds at most.
GROUPS = {
    "vocabulary-151936": ("8192 x 151936", "6 x 64", 300),
    "batches": ("17006 x", "5 x (7", 150),
    "steps": ("optimizer step", "optimizer step", 300),
    "linear": ("linear_logprob", "linear_logprob", 300),
    "vocabulary-32000": ("8192 x 32000", "6 x 50", 240),
    "trees-search": ("agents search", "agents search", 300),
    "vocabulary-128256": ("8192 x 128256", "", 240),
    "vocabulary-262144": ("8192 x 262144", "", 240),
    "over-tokens": ("over tokens", "over tokens", 300),
    "trees-agentic": ("agents agentic", "", 400),
    "trees-sql": ("agents sql", "", 300),
}
SECTIONS = (
    *("SpeedOfLight", "MemoryWorkloadAnalysis", "Occupancy", "LaunchStats", "WarpStateStats"),
    "InstructionStats",
)


def main() -> None:
    """Run the parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    options = parser.parse_args()
    if not (options.dry or options.list or has_gpu()):
        sys.exit("bench-gpu: there is no GPU here; nothing was measured")
    folder = BUILD / "dry" if options.dry else BUILD
    raise SystemExit(run_parts("bench-gpu", [*bench_parts(dry=options.dry)], folder, options))


def bench_parts(*, dry: bool) -> Iterator[Part]:
    """Yield the parts, the most wanted first; `dry`: commands that work without a GPU."""
    python = sys.executable
    small = ("--device", "cpu", "--tiny") if dry else ()
    report = (python, "-m", "bench.gpu.report", *small)
    if not dry:
        yield Part("build", (python, "-m", "scripts.gpu_build"), 400)
    first = GROUPS["vocabulary-151936"][dry]
    yield Part("first-figures", (*report, "--ours", "--only", first), 120)
    profile = (python, "-m", "bench.gpu.profile", *small)
    for name, (full, tiny, seconds) in GROUPS.items():
        if only := tiny if dry else full:
            yield Part(name, (*report, "--only", only), seconds)
        if name == "batches":
            yield Part("profile", profile if dry else (*ncu(), *profile), 150)


def ncu() -> tuple[str, ...]:
    """Return the profiler's command; its report is a text file."""
    sections = [option for section in SECTIONS for option in ("--section", section)]
    return (
        *("ncu", "--clock-control", "none", "--target-processes", "all", "--launch-count", "9"),
        *("--kernel-name", "regex:forward_kernel|backward_kernel|visit_kernel|loss_kernel|fold"),
        *(*sections, "--log-file", str(BUILD / "ncu.txt")),
    )


if __name__ == "__main__":
    main()
