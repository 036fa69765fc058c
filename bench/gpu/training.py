"""Train the quickstart's agent on a GPU, with transformers in vLLM's place.

    python -m bench.gpu.training [--folder FOLDER] [--steps 8] [key=value ...]

For machines without vLLM: everything else is the trainer's own, from prompts and environments to
kernels, optimizer, hand-over of the weights by file, the check of the engine's weights, and
checkpoints. Prints each step's metrics; `--device cpu --tiny` tries it without a GPU, with one step
of an untrained model.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from pathlib import Path
from unittest import mock

import torch

from bench.gpu.torch_engine import TorchEngine
from skyrl_fast.config.loading import load_config
from skyrl_fast.train.output.loggers import read_metrics

ROOT = Path(__file__).resolve().parents[2]
SHOWN = (
    *("reward/avg_raw_reward", "policy/loss", "policy/grad_norm", "policy/ratio_mean"),
    "policy/rollout_train_logprobs_abs_diff_mean",
    *("sync/logprob_abs_diff_mean", "sync/logprob_abs_diff_max", "sync/update_seconds"),
)


def main() -> None:
    """Create data and model once, then train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "gpu_training")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="one step of an untrained model")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings of the run")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("training: there is no GPU here")
    folder = options.folder / "tiny" if options.tiny else options.folder
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)  # the quickstart's paths are relative
    _prepare(tiny=options.tiny)
    run = Path("quickstart/run")
    shutil.rmtree(run, ignore_errors=True)
    config = load_config(
        str(ROOT / "examples/quickstart/config.yaml"),
        [
            f"trainer.device={options.device}",
            f"trainer.max_training_steps={1 if options.tiny else options.steps}",
            "trainer.logger=[jsonl]",
            "trainer.plot=false",
            "generator.inference_engine.enable_sleep_mode=false",
            "generator.inference_engine.weight_sync_backend=file",
            *(TINY if options.tiny else ()),
            *options.settings,
        ],
    )
    from skyrl_fast.train.run import train_agent

    started = time.perf_counter()
    with mock.patch("skyrl_fast.rollout.engine.from_settings.VllmEngine", TorchEngine):
        result = train_agent(config)
    for row in read_metrics(run / "metrics.jsonl"):
        print(row["step"], {name: round(row[name], 5) for name in SHOWN if name in row}, flush=True)
    peak = torch.cuda.max_memory_allocated() if options.device == "cuda" else 0
    print(
        f"trained {result.step} steps in {time.perf_counter() - started:.1f} s, evaluation "
        f"{result.before} -> {result.after}, peak {peak / 2**30:.2f} GiB"
    )


TINY = (
    *("trainer.train_batch_size=2", "trainer.policy_mini_batch_size=2"),
    *("generator.n_samples_per_prompt=2", "generator.max_turns=2"),
    *("generator.sampling_params.max_generate_length=8", "trainer.eval_before_train=false"),
    *("trainer.eval_interval=-1", "trainer.ckpt_interval=-1"),
)


def _prepare(*, tiny: bool) -> None:
    """Create the quickstart's data and model in the working directory."""
    from examples.quickstart.make_data import make_data
    from examples.quickstart.warm_start import warm_start
    from examples.tiny_model.recipe import make_once

    steps = {"num_steps": 1, "batch_size": 2} if tiny else {}
    make_once(Path("quickstart/data"), lambda path: make_data(path, seed=0))
    make_once(
        Path("quickstart/model"),
        lambda path: warm_start(Path("quickstart/data"), path, seed=0, **steps),
    )


if __name__ == "__main__":
    main()
