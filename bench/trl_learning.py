"""The reward of examples/reasoning_gym by steps, in TRL's GRPOTrainer, for the same seeds.

    python -m bench.trl_learning --base work [--seeds 42 7] [--steps 30] [--out trl.json]

Model, adapter, rows, reward, sampling, batch and optimizer come from the recipe's config, and the
held-out questions are answered by the trained adapter in this package's evaluation. Prompts come in
another order, and samples from other random numbers: the curves agree within noise. Compare with
`python examples/reasoning_gym/measure.py --base work --only trained`. A seed whose adapter is there
is read, not repeated. `bench.trl_steps --recipe reasoning_gym` measures seconds and memory by
turns. Needs TRL; `make peers` installs it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.trl_steps import optimizer_steps, trl_trainer
from examples.reasoning_gym.run import CONFIG, FOLDER, prepare
from examples.tiny_model.recipe import SPINS
from skyrl_fast.config.loading import load_config

LOG = "log_history.json"
ROWS_OF_PASS = 16  # all 64 take 12 GB
ENDS = 5  # steps of which a mean is printed


def train(seed: int, steps: int, folder: Path) -> None:
    """Train by TRL; leave the adapter and the log in a folder."""
    config = load_config(str(CONFIG), [f"trainer.seed={seed}"])
    updates = steps * optimizer_steps(config)
    trainer = trl_trainer(config, str(folder), updates, [], rows_of_pass=ROWS_OF_PASS)
    started = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - started
    trainer.save_model(str(folder))
    log = {"seconds": seconds, "history": trainer.state.log_history}
    (folder / LOG).write_text(json.dumps(log))


def evaluated(seed: int, folder: Path) -> float:
    """Return the score of the held-out questions by a trained adapter."""
    from skyrl_fast import evaluate

    out = folder / "evaluation"
    if not out.exists():
        evaluate(load_config(str(CONFIG), [f"trainer.seed={seed}"]), [folder], out=out)
    report = json.loads((out / "evaluation.json").read_text())
    return float(report["evaluations"][0]["score"]["mean"])


def rewards_of(history: list[dict[str, Any]]) -> list[float]:
    """Return the mean reward of each step."""
    return [row["reward"] for row in history if "reward" in row]


def report(found: dict[int, dict[str, Any]]) -> None:
    """Print a table."""
    print(
        f"| TRL, seed | sampled, first and last {ENDS} steps | held-out after | s per step |\n"
        "|---|---|---:|---:|"
    )
    for seed, one in found.items():
        first = statistics.mean(one["rewards"][:ENDS])
        last = statistics.mean(one["rewards"][-ENDS:])
        seconds = one["seconds"] / len(one["rewards"])
        print(f"| {seed} | {first:.2f}, {last:.2f} | {one['held_out']:.3f} | {seconds:.0f} |")


def main() -> None:
    """Train and evaluate each seed in a process of its own."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", type=Path, default=Path("."), help="parent of the runs' folder")
    parser.add_argument("--seeds", nargs="+", type=int, default=[42, 7])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path, help="JSON file of the results")
    parser.add_argument("--one", type=int, help="train one seed only")
    options = parser.parse_args()
    root = str(Path(__file__).resolve().parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    out = options.out and options.out.absolute()
    os.chdir(options.base)
    prepare(FOLDER)
    if options.one is not None:
        train(options.one, options.steps, FOLDER / f"trl_{options.one}")
        return
    found = {}
    for seed in options.seeds:
        folder = (FOLDER / f"trl_{seed}").absolute()
        if not (folder / LOG).exists():
            command = [sys.executable, "-m", "bench.trl_learning", "--one", str(seed)]
            subprocess.run([*command, "--steps", str(options.steps)], check=True)
        log = json.loads((folder / LOG).read_text())
        found[seed] = {
            "rewards": rewards_of(log["history"]),
            "seconds": log["seconds"],
            "held_out": evaluated(seed, folder),
        }
    report(found)
    if out:
        out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
