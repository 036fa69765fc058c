"""Seconds per batch of a recipe, here and in TRL's GRPOTrainer, by turns.

    python -m bench.trl_steps MODEL DATA.jsonl [--batches 12] [--rounds 3]

MODEL and DATA are those of the gsm8k recipe (`make gsm8k` creates runs/gsm8k/model and data). Both
train batches of 32 prompts with 5 answers of at most 32 tokens in two optimizer steps, with a KL
term and the same learning rate. "step" and "auto" are values of `trainer.rows`; "trl" generates
with transformers. Each run is a process of its own. Before, the loss and the gradient of one fixed
batch are compared. Needs TRL; `make peers` installs it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CONFIG = Path(__file__).resolve().parent.parent / "examples" / "gsm8k" / "offline.yaml"
KINDS = ("trl", "step", "auto")
PROMPTS, SAMPLES, OPTIMIZER_STEPS, LONGEST, KL = 32, 5, 2, 32, 0.001
WARM_UP = 2  # batches
PHASES = ("generate", "environment", "batch", "advantages", "forward_backward", "sync")


def main() -> None:
    """Print a table, or the result of one run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", choices=(*KINDS, "fixed"))
    options = parser.parse_args()
    if options.one == "fixed":
        print("RESULT " + json.dumps(fixed_batch(options)))
    elif options.one == "trl":
        print("RESULT " + json.dumps(trl_run(options)))
    elif options.one:
        print("RESULT " + json.dumps(our_run(options, options.one)))
    else:
        table(options)


def table(options: argparse.Namespace) -> None:
    """Run all kinds by turns, and print the medians."""
    print(json.dumps(child(options, "fixed")), flush=True)
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    phases: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for _ in range(options.rounds):
        for kind in KINDS:
            result = child(options, kind)
            seconds[kind] += result["seconds"]
            phases[kind] += result["phases"]
    for kind in KINDS:
        split = {
            name: round(statistics.median(row.get(name, 0.0) for row in phases[kind]), 3)
            for name in (PHASES if phases[kind] else ())
        }
        middle, base = statistics.median(seconds[kind]), statistics.median(seconds["trl"])
        spread = f"{min(seconds[kind]):.2f} to {max(seconds[kind]):.2f}"
        print(f"{kind}: {middle:.3f} s a batch ({spread}), TRL / it {base / middle:.2f} {split}")


def child(options: argparse.Namespace, kind: str) -> dict[str, Any]:
    """Return the result of a run in a process of its own."""
    command = [sys.executable, "-m", "bench.trl_steps", options.model, options.data]
    command += [f"--batches={options.batches}", "--one", kind]
    done = subprocess.run(command, capture_output=True, text=True)
    answers = [x for x in done.stdout.splitlines() if x.startswith("RESULT ")]
    if not answers:
        sys.exit(f"{kind}: {done.stdout[-2000:]}{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(answers[-1].removeprefix("RESULT "))
    return result


def our_run(options: argparse.Namespace, rows: str) -> dict[str, Any]:
    """Return the seconds of each batch, and of its phases."""
    from skyrl_fast import train_agent
    from skyrl_fast.config.loading import load_config
    from skyrl_fast.train.output.loggers import read_metrics

    with tempfile.TemporaryDirectory() as folder:
        overrides = [
            f"data.train_data=[{options.data}]",
            "data.val_data=[]",
            f"trainer.policy.model.path={options.model}",
            f"trainer.run_path={folder}/run",
            f"trainer.rows={rows}",
            "generator.step_wise_trajectories=true",  # one turn: the same rows
            f"trainer.max_training_steps={WARM_UP + options.batches}",
            "trainer.ckpt_interval=-1",
            "trainer.logger=[jsonl]",
            "trainer.plot=false",
            f"trainer.algorithm.kl_loss_coef={KL}",
        ]
        config = load_config(str(CONFIG), overrides)
        result = train_agent(config)
        steps = [row for row in read_metrics(result.metrics) if "timing/step" in row][WARM_UP:]
    return {
        "seconds": [row["timing/step"] for row in steps],
        "phases": [
            {name.removeprefix("timing/"): value for name, value in row.items()} for row in steps
        ],
    }


def trl_run(options: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of each batch: `OPTIMIZER_STEPS` optimizer steps, the first generates."""
    from transformers import TrainerCallback

    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        steps = OPTIMIZER_STEPS * (WARM_UP + options.batches)
        trl_trainer(options, folder, steps, [Clock()]).train()
    ends = times[OPTIMIZER_STEPS - 1 :: OPTIMIZER_STEPS]
    seconds = [b - a for a, b in itertools.pairwise(ends)]
    return {"seconds": seconds[WARM_UP - 1 :], "phases": []}


def trl_trainer(options: argparse.Namespace, folder: str, steps: int, callbacks: list[Any]) -> Any:
    """Return TRL's trainer for the recipe's model, data, batch and optimizer."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import trl
    from datasets import Dataset
    from skyrl_gym.envs.gsm8k.utils import compute_score
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rows = [json.loads(line) for line in Path(options.data).read_text().splitlines()]
    data = Dataset.from_dict(
        {
            "prompt": [row["prompt"] for row in rows],
            "truth": [row["reward_spec"]["ground_truth"] for row in rows],
        }
    )

    def reward(completions: list[Any], truth: list[str], **_: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        return [compute_score(text, wanted) for text, wanted in zip(texts, truth, strict=True)]

    settings = trl.GRPOConfig(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=PROMPTS * SAMPLES // OPTIMIZER_STEPS,
        steps_per_generation=OPTIMIZER_STEPS,
        num_generations=SAMPLES,
        max_completion_length=LONGEST,
        learning_rate=3e-4,
        warmup_steps=2,
        lr_scheduler_type="constant_with_warmup",
        beta=KL,
        loss_type="dapo",
        temperature=1.0,
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        disable_tqdm=True,
        seed=42,
    )
    return trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(options.model, dtype="float32"),
        processing_class=AutoTokenizer.from_pretrained(options.model),
        args=settings,
        reward_funcs=reward,
        train_dataset=data,
        callbacks=callbacks,
    )


def fixed_batch(options: argparse.Namespace) -> dict[str, float]:
    """Return loss and gradient norm of one batch by TRL and by every layout of rows."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from skyrl_fast.batch import StepBatch
    from skyrl_fast.config.loading import load_config
    from skyrl_fast.train.model.policy import Policy
    from skyrl_fast.train.model.row_layout import uses_trees
    from skyrl_fast.train.update import accumulate_gradient

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    rows = [json.loads(line) for line in Path(options.data).read_text().splitlines()][:16]
    generator = torch.Generator().manual_seed(0)
    prompts, responses, groups = [], [], []
    for number, row in enumerate(rows):
        ids = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True)
        ids = ids if isinstance(ids, list) else ids["input_ids"]
        for sample in range(SAMPLES):
            length = int(torch.randint(5, LONGEST, (1,), generator=generator))
            responses.append(torch.randint(3, 60, (length,), generator=generator).tolist())
            prompts.append(ids)
            groups.append((f"p{number}", sample))
    advantages = torch.randn(len(prompts), generator=generator)
    lengths = [len(response) for response in responses]
    batch = StepBatch.from_generator_output(
        {
            "prompt_token_ids": prompts,
            "response_ids": responses,
            "trajectory_ids": groups,
            "is_last_step": [True] * len(prompts),
            "loss_masks": [[1] * n for n in lengths],
            "rewards": [0.0] * len(prompts),
            "rollout_logprobs": [[-1.0] * n for n in lengths],
        },
        step_wise=True,
    ).with_(advantages=torch.repeat_interleave(advantages, torch.tensor(lengths)))
    found = {}
    overrides = ["data.train_data=[a]", "trainer.policy.model.path=a"]
    algorithm = load_config(str(CONFIG), [*overrides, f"trainer.algorithm.kl_loss_coef={KL}"])
    for kind in ("step", "auto"):
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
        policy = Policy(model, tree=uses_trees(kind))
        ours = batch.with_(ref_logprobs=policy.batch_logprobs(batch) - 0.1)
        metrics = accumulate_gradient(policy, ours, algorithm=algorithm.trainer.algorithm)
        found[f"{kind} loss"] = metrics["policy/loss"]
        found[f"{kind} gradient"] = norm(model)
    with tempfile.TemporaryDirectory() as folder:
        trainer = trl_trainer(options, folder, 1, [])
        model = trainer.model
        reference = Policy(model).batch_logprobs(batch) - 0.1
        model.zero_grad()
        loss = trainer.compute_loss(model, inputs_of(batch, advantages, reference, trainer))
        loss.backward()
    found["trl loss"], found["trl gradient"] = float(loss.detach()), norm(model)
    return found


def inputs_of(batch: Any, advantages: Any, reference: Any, trainer: Any) -> dict[str, Any]:
    """Return the batch as TRL's loss takes it: prompts padded left, answers right."""
    import torch

    cu, ends = batch.cu_seqlens.tolist(), batch.cu_responses.tolist()
    pad = trainer.pad_token_id if hasattr(trainer, "pad_token_id") else 0
    prompts, answers, logprobs = [], [], []
    for row in range(batch.num_rows):
        tokens = batch.tokens[cu[row] : cu[row + 1]].long()
        size = ends[row + 1] - ends[row]
        prompts.append(tokens[:-size])
        answers.append(tokens[-size:])
        logprobs.append(reference[ends[row] : ends[row + 1]])
    sequence = torch.nn.utils.rnn.pad_sequence

    def padded(parts: list[Any], side: str, value: float) -> Any:
        return sequence(parts, batch_first=True, padding_value=value, padding_side=side)

    ones = [[torch.ones_like(part) for part in parts] for parts in (prompts, answers)]
    return {
        "prompt_ids": padded(prompts, "left", pad),
        "prompt_mask": padded(ones[0], "left", 0),
        "completion_ids": padded(answers, "right", pad),
        "completion_mask": padded(ones[1], "right", 0),
        "ref_per_token_logps": padded(logprobs, "right", 0.0),
        "advantages": advantages,
        "num_items_in_batch": torch.tensor(float(ends[-1])),
    }


def norm(model: Any) -> float:
    """Return the norm of the gradient."""
    grads = [p.grad.norm() for p in model.parameters() if p.grad is not None]
    return float(sum(g**2 for g in grads) ** 0.5)


if __name__ == "__main__":
    main()
