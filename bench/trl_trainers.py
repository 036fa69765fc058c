"""TRL's trainers with and without this package: seconds per step, memory, losses, calls.

    python -m bench.trl_trainers [--trainers grpo,rloo,dpo,kto,sft,async_grpo] [--vocab 32000]

"grpo_loss" is GRPO with the trainer of this package, which also has its loss; "async_grpo" see
bench/_async_grpo.py.

Each run is a process of its own, stock and installed by turns, on a CPU, with a Qwen2 of random
weights and a synthetic data set. Needs TRL; `make peers` installs it.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench import _async_grpo

TRAINERS = ("grpo", "rloo", "dpo", "kto", "sft", "async_grpo")
METRICS = ("loss", "grad_norm", "entropy")
WORDS = [f"w{i}" for i in range(500)]


def main() -> None:
    """Run the pairs and print a table, or one run of a pair."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trainers", default=",".join(TRAINERS))
    parser.add_argument("--vocab", type=int, default=32_000)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--response", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    parser.add_argument("--one", choices=("stock", "installed"), help="run one trainer; print JSON")
    options = parser.parse_args()
    if options.one:
        print("RESULT " + json.dumps(run(options, options.trainers, options.one == "installed")))
        return
    print("| trainer | s a step, stock | installed | ratio | peak MiB | loss | calls |")
    print("|---|---:|---:|---:|---|---:|---|")
    for trainer in options.trainers.split(","):
        print(line(trainer, pairs(options, trainer)), flush=True)


def pairs(options: argparse.Namespace, trainer: str) -> dict[str, list[dict[str, Any]]]:
    """Return the results of runs, stock and installed by turns."""
    found: dict[str, list[dict[str, Any]]] = {"stock": [], "installed": []}
    for _ in range(options.rounds):
        for kind, results in found.items():
            sizes = [f"--{name}={getattr(options, name)}" for name in SIZES]
            flags = ["--bf16"] if options.bf16 else []
            command = [sys.executable, "-m", "bench.trl_trainers", "--one", kind]
            done = subprocess.run(
                [*command, "--trainers", trainer, *sizes, *flags], capture_output=True, text=True
            )
            answers = [x for x in done.stdout.splitlines() if x.startswith("RESULT ")]
            if not answers:
                sys.exit(f"{trainer}, {kind}: {done.stdout[-2000:]}{done.stderr[-3000:]}")
            results.append(json.loads(answers[-1].removeprefix("RESULT ")))
    return found


SIZES = ("vocab", "hidden", "layers", "steps", "response")


def line(trainer: str, found: dict[str, list[dict[str, Any]]]) -> str:
    """Return a row of the table."""
    stock, ours = (min(r["seconds"] for r in found[kind]) for kind in ("stock", "installed"))
    memory = [statistics.median(r["peak_mib"] for r in found[k]) for k in ("stock", "installed")]
    first, last = found["stock"][0], found["installed"][0]
    worst = max(
        abs(a[name] - b[name])
        for a, b in zip(first["log"], last["log"], strict=True)
        for name in METRICS
        if name in a
    )
    return (
        f"| {trainer} | {stock:.2f} | {ours:.2f} | {stock / ours:.2f} | {memory[0]:.0f} -> "
        f"{memory[1]:.0f} | differs by {worst:.1e} | {last['calls']} |"
    )


def run(options: argparse.Namespace, trainer: str, installed: bool) -> dict[str, Any]:
    """Train a few steps; return the seconds of a step without the first, metrics and calls."""
    import torch
    from transformers import TrainerCallback

    import skyrl_fast.integrations.trl as fast

    if installed:
        fast.install()

    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.append(time.perf_counter())

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        made = make_trainer(trainer, options, Path(folder), Clock())
        made.train()
    log = [
        {name: float(row[name]) for name in METRICS if name in row}
        for row in made.state.log_history
        if "loss" in row
    ]
    steps = [b - a for a, b in itertools.pairwise(times)]
    functions = fast.report().rows if installed else ()
    return {
        "seconds": statistics.median(steps),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "log": log,
        "calls": fast.report().summary().partition(": ")[2] if installed else "",
        "counts": {
            one.name: (one.counts.calls, one.counts.handed_back)
            for one in functions
            if one.counts.calls
        },
    }


def make_trainer(name: str, options: argparse.Namespace, folder: Path, callback: Any) -> Any:
    """Return one of TRL's trainers with a model of random weights and a synthetic data set."""
    import trl
    from datasets import Dataset
    from transformers import Qwen2Config, Qwen2ForCausalLM

    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=options.vocab,
            hidden_size=options.hidden,
            intermediate_size=4 * options.hidden,
            num_hidden_layers=options.layers,
            num_attention_heads=8,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        )
    )
    model.save_pretrained(folder / "model")  # some trainers load a reference model
    model = Qwen2ForCausalLM.from_pretrained(folder / "model", dtype="float32")
    common = {
        "output_dir": str(folder),
        "max_steps": options.steps,
        "logging_steps": 1,
        "report_to": "none",
        "use_cpu": True,
        "bf16": options.bf16,
        "learning_rate": 1e-5,
        "save_strategy": "no",
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 8,
    }
    prompts = [" ".join(WORDS[(7 * i + j) % 500] for j in range(32)) for i in range(64)]
    answers = [
        " ".join(WORDS[(3 * i + j) % 500] for j in range(options.response)) for i in range(64)
    ]
    others = [
        " ".join(WORDS[(5 * i + j) % 500] for j in range(options.response)) for i in range(64)
    ]
    shared: dict[str, Any] = {"processing_class": tokenizer(), "callbacks": [callback]}
    if name == "async_grpo":
        return _async_grpo.make_trainer(folder / "model", common, shared, options.response)
    shared["model"] = model
    if name in ("grpo", "rloo", "grpo_loss"):
        config = trl.RLOOConfig if name == "rloo" else trl.GRPOConfig
        kind = trl.RLOOTrainer if name == "rloo" else trl.GRPOTrainer
        if name == "grpo_loss":
            kind = importlib.import_module("skyrl_fast.integrations.trl").GRPOTrainer
        settings = {"num_generations": 4, "max_completion_length": options.response}
        data = Dataset.from_dict({"prompt": prompts})
        return kind(
            args=config(**common, **settings), reward_funcs=reward, train_dataset=data, **shared
        )
    columns: dict[str, Any] = {
        "dpo": {"prompt": prompts, "chosen": answers, "rejected": others},
        "kto": {"prompt": prompts, "completion": answers, "label": [i % 2 == 0 for i in range(64)]},
        "sft": {"prompt": prompts, "completion": answers},
    }[name]
    config, kind = {
        "dpo": (trl.DPOConfig, trl.DPOTrainer),
        "kto": (trl.KTOConfig, trl.KTOTrainer),
        "sft": (trl.SFTConfig, trl.SFTTrainer),
    }[name]
    return kind(args=config(**common), train_dataset=Dataset.from_dict(columns), **shared)


def reward(completions: list[str], **_: Any) -> list[float]:
    """Return rewards that differ between answers."""
    return [sum(map(ord, text)) % 17 / 17 for text in completions]


def tokenizer() -> Any:
    """Return a tokenizer of 500 words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *WORDS]
    base = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    base.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=base, **special)


if __name__ == "__main__":
    main()
