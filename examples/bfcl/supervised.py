"""The warm start goes on in place of reinforcement learning: the score on held-out calls by steps.

    python examples/bfcl/supervised.py
    python examples/bfcl/supervised.py trainer.seed=7 trainer.run_path=runs/bfcl/supervised_7

The demonstrations, the settings and the model are those of run.py, and so are the evaluations. The
scores are in `metrics.jsonl` of the run's folder, as those of a training are.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # this file may be started from anywhere

from examples.bfcl.run import CONFIG, FOLDER, prepare  # noqa: E402
from examples.tiny_model.measure import EVAL  # noqa: E402
from examples.tiny_model.recipe import SPINS  # noqa: E402

STEPS = 40  # as many as config.yaml trains
INTERVAL = 10
EVALUATED = range(INTERVAL, STEPS + 1, INTERVAL)
KEPT = ("step", "timing/step", "policy/policy_entropy", "policy/cross_entropy")


def demonstrate(folder: Path, seed: int) -> dict[int, Path]:
    """Train the warm-started model on the demonstrations again; return checkpoints by step."""
    command = [sys.executable, "-m", "skyrl_fast", "sft", str(HERE / "warm_start.yaml"), "--resume"]
    command += [
        f"trainer.policy.model.path={FOLDER / 'model'}",
        f"trainer.run_path={folder}",
        f"trainer.seed={seed}",
        f"trainer.max_training_steps={STEPS}",
        f"trainer.epochs={STEPS}",
        f"trainer.ckpt_interval={INTERVAL}",
        "trainer.max_ckpts_to_keep=-1",
    ]
    subprocess.run(command, check=True)
    return {step: folder / f"checkpoints/step_{step:06d}" for step in EVALUATED}


def main() -> None:
    """Train, evaluate, and write the scores."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", type=Path, default=Path("."), help="parent of runs/")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="seed and folder")
    options = parser.parse_args()
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)  # torch reads it when it is first imported
    from skyrl_fast import evaluate
    from skyrl_fast.config.loading import load_config
    from skyrl_fast.train.output.loggers import read_metrics
    from skyrl_fast.train.output.plot import plot_runs

    default = f"trainer.run_path={FOLDER / 'supervised'}"
    config = load_config(str(CONFIG), [default, *options.overrides])
    folder = Path(config.trainer.run_path)
    os.chdir(options.base)
    prepare(FOLDER)
    checkpoints = demonstrate(folder / "sft", config.trainer.seed)
    targets = {0: FOLDER / "model", **checkpoints}
    found = evaluate(config, [*targets.values()], out=folder / "evaluation", say=print)
    scores = {}
    for step, evaluation in zip(targets, found, strict=True):
        scores[step] = evaluation.score.mean
    lines = [json.dumps({"step": 0, EVAL: scores[0]})]
    for row in read_metrics(folder / "sft/metrics.jsonl"):
        kept = {name: row[name] for name in KEPT}
        if row["step"] in scores:
            kept[EVAL] = scores[row["step"]]
        lines.append(json.dumps(kept))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    label = "the demonstrations again, supervised"
    curve = [*scores.items()]
    plot_runs({label: [curve]}, "score of held-out questions", folder / "learning_curve.png")


if __name__ == "__main__":
    main()
