"""Kill -9 an asynchronous run at random times, resume it each time, count the trained samples.

    python examples/asynchronous/kill_and_resume.py --base work --kills 5

Exits with an error unless each (uid, repetition) was trained as often as in an undisturbed run.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.asynchronous.quickstart_run import (
    prepare,
    settings,
    start,
    train,
    trained,
)
from skyrl_fast.train.checkpoint.local import checkpoints

BATCH = 4
SMALL = [
    f"trainer.train_batch_size={BATCH}",
    f"trainer.policy_mini_batch_size={BATCH}",
    "trainer.epochs=1",
    "trainer.ckpt_interval=2",
    "trainer.eval_before_train=false",
    "trainer.eval_interval=-1",
    "data.val_data=[]",
    "generator.n_samples_per_prompt=4",
]


def main() -> None:
    """Train both runs, and compare them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, default=Path("asynchronous"))
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    base: Path = options.base.resolve()
    base.mkdir(parents=True, exist_ok=True)
    prepare(base)
    few = (base / "slow_train.jsonl").read_text(encoding="utf-8").splitlines()
    few = few[: options.steps * BATCH]
    (base / "few_train.jsonl").write_text("\n".join(few) + "\n", encoding="utf-8")
    for name in ("undisturbed", "killed"):
        shutil.rmtree(base / name, ignore_errors=True)
    train(base, overrides("undisturbed"), log="undisturbed.log")
    kill_and_resume(base, options.kills, random.Random(options.seed))
    wanted, got = (
        Counter((t.uid, t.repetition_id) for t in trained(base / name))
        for name in ("undisturbed", "killed")
    )
    print(f"undisturbed: {wanted.total()} trajectories; killed {options.kills} times: "
          f"{got.total()}; identical: {wanted == got}")  # fmt: skip
    sys.exit(wanted != got or set(got.values()) != {1})


def overrides(name: str) -> list[str]:
    """Return the settings of one run."""
    chosen = settings(name, staleness=2)
    return [*chosen, *SMALL, "data.train_data=[few_train.jsonl]"]


def kill_and_resume(base: Path, kills: int, moments: random.Random) -> None:
    """Start the run, kill it after a while, and repeat; then resume it to the end."""
    resume = [*overrides("killed"), "trainer.resume_mode=latest"]
    for number in range(kills):
        known = parts_of(base)
        process = start(base, resume, log="killed.log")
        until = None
        while process.poll() is None:
            if until is None and parts_of(base) - known:
                until = time.monotonic() + moments.uniform(0, 4)  # training has begun
            if until is not None and time.monotonic() > until:
                process.send_signal(signal.SIGKILL)
                break
            time.sleep(0.02)
        if process.wait() != -signal.SIGKILL:
            raise RuntimeError(f"exited with {process.returncode} before kill {number + 1}")
        print(f"kill {number + 1}: newest checkpoint at step {last_step(base)}", flush=True)
    train(base, resume, log="killed.log")


def parts_of(base: Path) -> set[tuple[str, int]]:
    """Return the stored batches with their times; a resumed run writes some of them again."""
    folder = base / "killed/trajectories"
    with suppress(FileNotFoundError):  # a resumed run removes batches after its checkpoint
        return {(path.name, path.stat().st_mtime_ns) for path in folder.glob("step_*")}
    return set()


def last_step(base: Path) -> int:
    """Return the step of the newest checkpoint; 0 without one."""
    found = checkpoints(base / "killed/checkpoints")
    return found[-1][0] if found else 0


if __name__ == "__main__":
    main()
