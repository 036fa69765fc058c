"""LoRA beside training all weights: rewards, seconds, bytes of a sync, and peak memory.

    python -m bench.lora --base work [--seeds 42 7 3] [--steps N] [--out FILE.md] [--plot FILE.png]

Runs the quickstart over seeds, and once with a learning rate of 0, and SmolLM2 with the first seed:
each with an adapter (the examples' `lora.yaml`) and with all weights, one after the other. Memory
is compared with the plan. A finished run is read, not repeated. An hour on two cores with
nothing else.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from examples.asynchronous.soak import children, command_of
from skyrl_fast.config.loading import load_config
from skyrl_fast.ops._backend import main_memory
from skyrl_fast.train.memory.device_plan import GIB
from skyrl_fast.train.memory.plan import plan_memory
from skyrl_fast.train.output.loggers import read_metrics
from skyrl_fast.train.output.metric_table import EVAL_REWARD as EVAL
from skyrl_fast.train.output.metric_table import REWARD as SAMPLED
from skyrl_fast.train.output.plot import plot_runs

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
POLL_SECONDS = 0.2  # between two readings of the processes' memory
FULL_PASS = 512  # tokens that most mini-batches of SmolLM2's task exceed
ENGINE = "VLLM::EngineCor"  # the kernel cuts names


@dataclass(frozen=True, slots=True)
class Run:
    """One training run.

    Args:
        example: folder of the example.
        frozen: whether the learning rate is 0.
        bfloat16: whether trainer and engine compute, and hold an adapter's base, in bfloat16.
        tokens: `trainer.max_tokens_per_microbatch`; None: the example's.
    """

    example: str
    lora: bool
    seed: int
    frozen: bool = False
    bfloat16: bool = False
    tokens: int | None = None

    @property
    def kind(self) -> str:
        """What is trained, for tables and plots."""
        kind = ("LoRA" if self.lora else "all weights") + ", bfloat16" * self.bfloat16
        return kind if self.tokens is None else f"{kind}, passes of {self.tokens} tokens"

    @property
    def name(self) -> str:
        """Return its folder's name."""
        kind = "lora" if self.lora else "full"
        return (
            f"{self.example}_{kind}_{self.seed}{'_lr_0' * self.frozen}{'_bfloat16' * self.bfloat16}"
            + ("" if self.tokens is None else f"_{self.tokens}")
        )

    @property
    def settings(self) -> list[str]:
        """Return its overrides of the example's settings."""
        settings = [str(EXAMPLES / self.example / "lora.yaml")] * self.lora
        settings += [f"trainer.seed={self.seed}"]
        settings += ["trainer.policy.optimizer_config.lr=0"] * self.frozen
        both = ["trainer.policy.dtype", "generator.inference_engine.model_dtype"]
        settings += [f"{name}=bfloat16" for name in both * self.bfloat16]
        if self.tokens is not None:
            settings += [f"trainer.max_tokens_per_microbatch={self.tokens}"]
        return settings

    def planned_bytes(self, base: Path) -> int:
        """Return the memory plan's sum, of trainer and engine."""
        config = load_config(EXAMPLES / self.example / "config.yaml", self.settings)
        config.trainer.device = "cpu"
        config.trainer.policy.model.path = str(base / str(config.trainer.policy.model.path))
        (device,) = plan_memory(config, capacity=main_memory()).devices
        return device.total


@dataclass(frozen=True, slots=True)
class Measured:
    """The metrics of a run's steps, and the peak memory of its trainer and engine in bytes."""

    rows: list[dict[str, Any]]
    peaks: dict[str, int]

    def middle(self, name: str) -> float:
        """Return the median of a metric over all steps but the first, which warms up."""
        values = [row[name] for row in self.rows if row["step"] and name in row]
        return median(values[1:] or values)

    def ends(self, name: str) -> tuple[float, float]:
        """Return the first and the last value of a metric."""
        values = [row[name] for row in self.rows if name in row]
        return values[0], values[-1]


def measure_peaks(command: Sequence[str]) -> dict[str, int]:
    """Run a command; return the peak resident bytes of its process, of its engine's, and of both.

    Memory that they share counts once in that of both, which is sampled.

    Raises:
        CalledProcessError: it fails.
    """
    peaks = dict.fromkeys(("trainer", "engine", "both"), 0)
    process = subprocess.Popen(command)
    engines: list[int] = []
    while process.poll() is None:
        if not engines:  # reading all processes of the machine takes a share of a core
            engines = [pid for pid in children(process.pid) if ENGINE in command_of(pid)]
        trainer, engine = memory_of([process.pid]), memory_of(engines)
        for name, found in (("trainer", trainer), ("engine", engine)):
            peaks[name] = max(peaks[name], found["VmHWM"])
        own = sum(found[kind] for found in (trainer, engine) for kind in ("RssAnon", "RssFile"))
        shared = max(found["RssShmem"] for found in (trainer, engine))
        peaks["both"] = max(peaks["both"], own + shared)
        time.sleep(POLL_SECONDS)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return peaks


def train(
    run: Run,
    base: Path,
    steps: int | None,
    *,
    measure: Callable[[Sequence[str]], dict[str, int]] = measure_peaks,
) -> Measured:
    """Run it below this folder, unless that was done.

    Args:
        run: what to train.
        base: parent of its folder.
        steps: of training; None: all.
        measure: runs a command, and returns its peaks.
    """
    folder = base / "lora" / run.name
    if not (folder / "peaks.json").exists():  # written at the end
        example = EXAMPLES / run.example
        settings = [*run.settings, f"trainer.run_path={folder.resolve()}"]
        settings += ["trainer.logger=[jsonl]", "trainer.plot=false", "trainer.ckpt_interval=-1"]
        settings += [f"trainer.max_training_steps={steps}"] * (steps is not None)
        command = [sys.executable, str(example / "run.py"), "--base", str(base), *settings]
        peaks = measure(command)
        (folder / "peaks.json").write_text(json.dumps(peaks), encoding="utf-8")
    peaks = json.loads((folder / "peaks.json").read_text(encoding="utf-8"))
    return Measured(read_metrics(folder / "metrics.jsonl"), peaks)


def memory_of(pids: Sequence[int]) -> dict[str, int]:
    """Return the kernel's figures of processes' memory in bytes; 0 of those that have ended."""
    found = dict.fromkeys(("VmHWM", "RssAnon", "RssFile", "RssShmem"), 0)
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
        except OSError:
            continue
        for name, _, value in (line.partition(":") for line in lines):
            if name in found:
                found[name] += 1024 * int(value.split()[0])
    return found


def reward_table(found: dict[Run, Measured]) -> str:
    """Return a table of the quickstart's runs."""
    lines = [
        "| trained, seed | evaluation, before and after | seconds per update | per sync | MB |",
        "|---|---|---:|---:|---:|",
    ]
    for run, measured in found.items():
        before, after = measured.ends(EVAL)
        name = f"{run.kind}, {run.seed}{', learning rate 0' * run.frozen}"
        lines.append(
            f"| {name} | {before:.2f}, {after:.2f}"
            f" | {measured.middle('timing/forward_backward'):.2f}"
            f" | {measured.middle('sync/update_seconds'):.3f}"
            f" | {measured.middle('sync/num_bytes') / 1e6:.2f} |"
        )
    return "\n".join(lines)


def memory_table(found: dict[Run, Measured], planned: dict[Run, int]) -> str:
    """Return a table of runs, with the memory plan's bytes of each."""
    lines = [
        "| trained | trainer, peak GiB | engine | both | planned | seconds per step | per sync |"
        " MB | sampled reward, first and last step | evaluation |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---|---|",
    ]
    for run, measured in found.items():
        sizes = [*(measured.peaks[name] for name in ("trainer", "engine", "both")), planned[run]]
        peaks = " | ".join(f"{size / GIB:.2f}" for size in sizes)
        rewards = " | ".join(
            f"{first:.2f}, {last:.2f}" for first, last in map(measured.ends, (SAMPLED, EVAL))
        )
        lines.append(
            f"| {run.example}: {run.kind} | {peaks} | {measured.middle('timing/step'):.1f}"
            f" | {measured.middle('sync/update_seconds'):.2f}"
            f" | {measured.middle('sync/num_bytes') / 1e6:.1f} | {rewards} |"
        )
    return "\n".join(lines)


def plot(found: dict[Run, Measured], path: Path) -> None:
    """Write the evaluations of the quickstart's runs."""
    curves: dict[str, list[list[tuple[int, float]]]] = {}
    for run, measured in found.items():
        points = [(row["step"], row[EVAL]) for row in measured.rows if EVAL in row]
        curves.setdefault(run.kind + ", learning rate 0" * run.frozen, []).append(points)
    plot_runs(curves, "evaluation reward", path)


def main() -> None:
    """Run all, print the tables and plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", type=Path, default=Path("."), help="parent of the runs' folders")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 7, 3])
    parser.add_argument("--steps", type=int, help="of each run; default: as the examples have it")
    parser.add_argument("--out", type=Path, help="file for the tables; default: print them")
    parser.add_argument("--plot", type=Path, help="file for the evaluations (needs matplotlib)")
    args = parser.parse_args()
    base = args.base.resolve()
    base.mkdir(parents=True, exist_ok=True)
    first = args.seeds[0]
    rewards = [Run("quickstart", lora, seed) for lora, seed in product((True, False), args.seeds)]
    rewards += [Run("quickstart", lora, first, frozen=True) for lora in (True, False)]
    memory = [Run("smollm", lora, first) for lora in (True, False)]
    memory += [Run("smollm", True, first, bfloat16=True)]
    memory += [Run("smollm", lora, first, tokens=FULL_PASS) for lora in (True, False)]
    memory += [Run("quickstart", lora, first) for lora in (True, False)]
    found = {run: train(run, base, args.steps) for run in (*rewards, *memory)}
    of_quickstart = {run: found[run] for run in rewards}
    planned = {run: run.planned_bytes(base) for run in memory}
    of_memory = memory_table({run: found[run] for run in memory}, planned)
    text = f"{reward_table(of_quickstart)}\n\n{of_memory}\n"
    if args.out is None:
        print(text)
    else:
        args.out.write_text(text, encoding="utf-8")
    if args.plot is not None:
        plot(of_quickstart, args.plot)


if __name__ == "__main__":
    main()
