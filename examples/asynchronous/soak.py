"""Many asynchronous steps with faulty environments, killed engines and a stop in the worst moment.

    python examples/asynchronous/soak.py --base work --steps 500

Of the episodes 5 % raise, 1 % never return, and 0.5 % never return and hold Python's lock. The
engine's process is killed twice; while it starts again the second time, the run gets a SIGTERM,
and is resumed. Exits with an error unless the run finishes, every group was trained once, all
faults are in the metrics and in the log by name, no process is left, and memory, threads and open
files of the trainer, the engine and the environments do not grow in the last half.
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
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.asynchronous.quickstart_run import prepare, settings, start, trained
from skyrl_fast.train.output.loggers import read_metrics

GROWTH = 1.05  # of memory from the third quarter of the steps to the last
MORE = 6  # threads or open files in the last quarter: of requests in flight
STOP_SECONDS = 2.0  # after the second kill: the engine is starting
END_SECONDS = 60.0  # for the run to end after SIGTERM
# Faults by their metric, and their text in the log.
NAMED = {
    "environment_errors": "environment slow_text2sql:",
    "environment_timeouts": "did not return within 4 s",
    "engine_deaths": "DEAD:",
    "engine_restarts": "BACK:",
}


@dataclass(frozen=True, slots=True)
class Usage:
    """Resources of a process (with its children, for environments) after a step."""

    step: int
    role: str  # trainer, engine, environments
    memory: float  # MiB
    threads: int
    files: int


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
    usage, problems = run(base, options.steps)
    problems += find_problems(base, options.steps, usage)
    print("\n".join(problems) or "all checks passed")
    sys.exit(bool(problems))


def overrides(steps: int) -> list[str]:
    """Return the settings of the run."""
    return [
        *settings(
            "soak",
            staleness=2,
            env="shortest: 0.01, longest: 0.3, failures: 0.05, hanging: 0.01, freezing: 0.005",
        ),
        f"trainer.max_training_steps={steps}",
        "trainer.train_batch_size=4",
        "trainer.policy_mini_batch_size=4",
        "trainer.epochs=100",
        "trainer.ckpt_interval=10",
        "trainer.eval_before_train=false",
        "trainer.eval_interval=-1",
        "data.val_data=[]",
        "generator.n_samples_per_prompt=4",
        "environment.workers=process",
        "environment.timeout_seconds=4",
        "generator.trajectory_timeout_seconds=60",
    ]


def run(base: Path, steps: int) -> tuple[list[Usage], list[str]]:
    """Train, disturb, stop and resume; return the resources in use, and what went wrong."""
    # --verbose also logs failed attempts, not only trajectories that failed after all retries.
    arguments = [*overrides(steps), "--verbose"]
    usage: list[Usage] = []
    problems = []
    kill_at = [steps // 8, steps // 4]
    process = start(base, arguments, log="soak.log")
    children_seen = watch(process, base, kill_at, usage)
    if process.poll() is not None:
        problems.append(f"exited with {process.returncode} before it was stopped")
    time.sleep(STOP_SECONDS)
    process.send_signal(signal.SIGTERM)
    stopped = time.monotonic()
    try:
        code = process.wait(END_SECONDS)
        print(f"SIGTERM: exit code {code} after {time.monotonic() - stopped:.1f} s", flush=True)
    except subprocess.TimeoutExpired:
        problems.append(f"the run did not end in {END_SECONDS:.0f} s after SIGTERM")
        process.kill()
    problems += left_over(children_seen)
    process = start(base, [*arguments, "--resume"], log="soak.log")
    children_seen = watch(process, base, [], usage)
    if process.returncode != 0:
        problems.append(f"exited with {process.returncode}: see {base / 'soak.log'}")
    return usage, problems + left_over(children_seen)


def watch(
    process: subprocess.Popen[bytes], base: Path, kill_at: list[int], usage: list[Usage]
) -> set[int]:
    """Kill the engine after these steps; return after the last kill, or when the run has ended.

    Args:
        usage: gets the resources in use, once a second.

    Returns:
        The processes that the run has started.
    """
    waiting = list(kill_at)
    seen: set[int] = set()
    while process.poll() is None:
        time.sleep(1.0)
        rows = read_metrics(base / "soak/metrics.jsonl")
        step = int(rows[-1]["step"]) if rows else 0
        found = children(process.pid)
        seen |= set(found)
        engines = [child for child in found if "EngineCore" in command_of(child)]
        usage += measured(step, process.pid, engines, found)
        if waiting and step >= waiting[0] and engines:
            for engine in engines:
                with suppress(ProcessLookupError):
                    os.kill(engine, signal.SIGKILL)
            print(f"killed the engine's process after step {step}", flush=True)
            del waiting[0]
            if not waiting and kill_at:
                return seen
    return seen


def measured(step: int, trainer: int, engines: list[int], found: list[int]) -> list[Usage]:
    """Return the resources in use by the trainer, the engine and the environments."""
    environments = [child for child in found if "fork_server" in command_of(child)]
    result = [usage_of(step, "trainer", [trainer]), usage_of(step, "engine", engines)]
    return [*result, usage_of(step, "environments", environments)]


def usage_of(step: int, role: str, pids: list[int]) -> Usage:
    """Return the resources of these processes; shared memory is divided among those that share."""
    memory, threads, files = 0.0, 0, 0
    for pid in pids:
        with suppress(OSError, ValueError):
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
            memory += int(text.partition("Pss:")[2].split()[0]) / 1024
            threads += len(list(Path(f"/proc/{pid}/task").iterdir()))
            files += len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return Usage(step, role, memory, threads, files)


def left_over(pids: set[int]) -> list[str]:
    """Return a problem if processes of an ended run are alive after a few seconds."""
    alive: list[int] = []
    for _ in range(100):
        alive = [pid for pid in pids if is_running(pid)]
        if not alive:
            return []
        time.sleep(0.1)
    names = ", ".join(command_of(pid).splitlines()[0] for pid in alive)
    return [f"{len(alive)} processes were left: {names}"]


def is_running(pid: int) -> bool:
    """Return whether it is alive, and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def find_problems(base: Path, steps: int, usage: list[Usage]) -> list[str]:
    """Return descriptions of failed checks; print the counts."""
    problems = []
    rows = [row for row in read_metrics(base / "soak/metrics.jsonl") if "timing/step" in row]
    if len(rows) != steps:
        problems.append(f"{len(rows)} of {steps} steps")
    faults = {name: value for name, value in rows[-1].items() if name.startswith("faults/")}
    print("\n".join(f"{name} {value:.0f}" for name, value in sorted(faults.items())))
    log = (base / "soak.log").read_text(encoding="utf-8", errors="replace")
    for name, text in NAMED.items():
        # The counts of a resumed run begin with 0.
        counted = max(row.get(f"faults/{name}", 0.0) for row in rows)
        print(f"{log.count(text)} times in the log: {text}")
        if not counted:
            problems.append(f"no {name} in the metrics")
        if log.count(text) < counted:
            problems.append(f"some {name} are missing in the log")
    per_group = Counter((t.step, t.uid) for t in trained(base / "soak"))
    if len(per_group) != 4 * steps or set(per_group.values()) != {4}:
        problems.append("a group is incomplete, or was trained twice in a step")
    if max(row["async/staleness_max"] for row in rows) > 2:
        problems.append("a group was trained with a staleness above 2")
    problems += growth(usage, steps)
    seconds = sum(row["timing/step"] for row in rows)
    print(f"{len(rows)} steps in {seconds:.0f} s")
    return problems


def growth(usage: list[Usage], steps: int) -> list[str]:
    """Return what grew from the third quarter of the steps to the last; print all quarters."""
    problems = []
    for role in ("trainer", "engine", "environments"):
        for what, most in (("memory", 0.0), ("threads", MORE), ("files", MORE)):
            quarters = [
                statistics.median(
                    [
                        float(getattr(one, what))
                        for one in usage
                        if one.role == role and low < 4 * one.step / steps <= low + 1
                    ]
                    or [0.0]
                )
                for low in range(4)
            ]
            shown = ", ".join(f"{value:.0f}" for value in quarters)
            print(f"{role}: {what}, median in each quarter of the steps: {shown}")
            if role != "environments" or what == "memory":
                most = most or (GROWTH - 1) * quarters[2] + (20 if role == "environments" else 0)
                if quarters[3] > quarters[2] + most:
                    problems.append(f"{what} of the {role} grew")
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


if __name__ == "__main__":
    main()
