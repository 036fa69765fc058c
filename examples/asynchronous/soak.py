"""Many asynchronous steps with failing and hanging environments, and an engine that is killed.

    python examples/asynchronous/soak.py --base work --steps 200

5 % of the episodes raise, 1 % never return; the engine's process is killed once during the run.
Exits with an error unless the run finishes, every group was trained once, all of these faults are
in the metrics and in the log by name, and the trainer's memory did not grow.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.asynchronous.quickstart_run import prepare, settings, start, trained
from skyrl_fast.train.output.loggers import read_metrics

GROWTH = 1.1  # of the trainer's memory from the second quarter of the steps to the last
# Faults by their metric, and their text in the log.
NAMED = {
    "environment_errors": "environment slow_text2sql:",
    "environment_timeouts": "did not return within 4 s",
    "engine_deaths": "DEAD:",
    "engine_restarts": "BACK:",
}


def main() -> None:
    """Train with faults, and check the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, default=Path("asynchronous"))
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    base: Path = options.base.resolve()
    base.mkdir(parents=True, exist_ok=True)
    prepare(base)
    shutil.rmtree(base / "soak", ignore_errors=True)
    (base / "soak.log").unlink(missing_ok=True)
    # --verbose also logs failed attempts, not only trajectories that failed after all retries.
    process = start(base, [*overrides(options.steps), "--verbose"], log="soak.log")
    memory = disturb(process, base / "soak/metrics.jsonl", kill_at=options.steps // 3)
    problems = find_problems(base, options.steps, process.returncode, memory)
    print("\n".join(problems) or "all checks passed")
    sys.exit(bool(problems))


def overrides(steps: int) -> list[str]:
    """Return the settings of the run."""
    return [
        *settings(
            "soak",
            staleness=2,
            env="shortest: 0.01, longest: 0.3, failures: 0.05, hanging: 0.01",
        ),
        f"trainer.max_training_steps={steps}",
        "trainer.train_batch_size=4",
        "trainer.policy_mini_batch_size=4",
        "trainer.epochs=100",
        "trainer.ckpt_interval=50",
        "trainer.eval_before_train=false",
        "trainer.eval_interval=-1",
        "data.val_data=[]",
        "generator.n_samples_per_prompt=4",
        "environment.timeout_seconds=4",
        "generator.trajectory_timeout_seconds=60",
    ]


def disturb(
    process: subprocess.Popen[bytes], metrics: Path, *, kill_at: int
) -> list[tuple[int, float]]:
    """Kill the engine once; return (step, MiB of the trainer), once a second."""
    memory: list[tuple[int, float]] = []
    killed = False
    while process.poll() is None:
        time.sleep(1.0)
        rows = read_metrics(metrics)
        step = rows[-1]["step"] if rows else 0
        memory.append((step, resident_mib(process.pid)))
        if not killed and step >= kill_at:
            for child in children(process.pid):
                if "EngineCore" in command_of(child):
                    os.kill(child, signal.SIGKILL)
                    killed = True
                    print(f"killed engine process {child} after step {step}", flush=True)
    return memory


def find_problems(
    base: Path, steps: int, code: int | None, memory: list[tuple[int, float]]
) -> list[str]:
    """Return descriptions of failed checks; print the counts."""
    problems = [] if code == 0 else [f"exited with {code}: see {base / 'soak.log'}"]
    rows = [row for row in read_metrics(base / "soak/metrics.jsonl") if "timing/step" in row]
    if len(rows) != steps:
        problems.append(f"{len(rows)} of {steps} steps")
    faults = {name: value for name, value in rows[-1].items() if name.startswith("faults/")}
    print("\n".join(f"{name} {value:.0f}" for name, value in sorted(faults.items())))
    for name in NAMED:
        if not faults.get(f"faults/{name}"):
            problems.append(f"no {name} in the metrics")
    log = (base / "soak.log").read_text(encoding="utf-8", errors="replace")
    for name, text in NAMED.items():
        print(f"{log.count(text)} times in the log: {text}")
        if log.count(text) < faults[f"faults/{name}"]:
            problems.append(f"some {name} are missing in the log")
    per_group = Counter((t.step, t.uid) for t in trained(base / "soak"))
    if len(per_group) != 4 * steps or set(per_group.values()) != {4}:
        problems.append("a group is incomplete, or was trained twice in a step")
    if max(row["async/staleness_max"] for row in rows) > 2:
        problems.append("a group was trained with a staleness above 2")
    quarters = [
        statistics.median([mib for step, mib in memory if low < 4 * step / steps <= low + 1] or [0])
        for low in range(4)
    ]
    print("memory of the trainer, median in each quarter of the steps: "
          f"{', '.join(f'{mib:.0f}' for mib in quarters)} MiB")  # fmt: skip
    if quarters[3] > GROWTH * quarters[1]:
        problems.append("the trainer's memory grew")
    seconds = sum(row["timing/step"] for row in rows)
    print(f"{len(rows)} steps in {seconds:.0f} s")
    return problems


def children(pid: int) -> list[int]:
    """Return the descendants of a process."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            child = int(path.parent.name)
            found += [child, *children(child)]
    return found


def command_of(pid: int) -> str:
    """Return a process's name and arguments."""
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
        return Path(f"/proc/{pid}/comm").read_text() + arguments.decode(errors="replace")
    except OSError:
        return ""


def resident_mib(pid: int) -> float:
    """Return a process's resident memory."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


if __name__ == "__main__":
    main()
