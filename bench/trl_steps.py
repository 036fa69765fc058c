"""Seconds and peak memory per batch of a recipe, here and in TRL's GRPOTrainer, by turns.

    python -m bench.trl_steps [--recipe gsm8k] [--base .] [--batches 12] [--rounds 3]

Recipes are those of examples/: "gsm8k", "smollm" and "reasoning_gym" of one turn, the last with an
adapter, "quickstart" of several (SQL in a
database). Missing models and data are created, as `make gsm8k` and so on do. Both sides train the
same prompts, answers of the same lengths, optimizer steps, KL term and learning rate, which all
come from the recipe's config. "step" and "merged" are ours with rows as sequences, "auto" is ours
in the cheapest layout; "trl" generates with transformers. In the quickstart its `rollout_func`
plays the turns with this package's prompts and environment, one generation of all open
trajectories for each turn, as TRL's own loop for tools does, whose chat templates the model does
not know; a trajectory is one row.

Each run is a process of its own, with its children: "largest" is the most memory that one of them
had, "all" the most that all had at one time, where shared pages count once. Before, the loss and
the gradient of one fixed batch are compared. Needs TRL; `make peers` installs it.
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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from examples.gsm8k.run import RECIPES as GSM8K
from examples.quickstart.run import RECIPES as QUICKSTART
from examples.reasoning_gym.run import RECIPES as REASONING_GYM
from examples.smollm.run import RECIPES as SMOLLM
from examples.tiny_model.recipe import SPINS
from skyrl_fast.config import Config
from skyrl_fast.config.loading import load_config

RECIPES = {
    "gsm8k": GSM8K["single_turn"],
    "reasoning_gym": REASONING_GYM["task"],
    **SMOLLM,
    **QUICKSTART,
}
FORMS = {
    "step": ("trainer.row_layout=sequence",),
    "auto": ("trainer.row_layout=auto",),
    "merged": ("trainer.rows=merged", "trainer.row_layout=sequence"),
}
KINDS = ("trl", *FORMS)
WARM_UP = 2  # batches
PHASES = ("generate", "environment", "batch", "advantages", "forward_backward", "sync")
SAMPLING_SECONDS = 2.0  # between two readings of the memory, which cost milliseconds


def main() -> None:
    """Print a table, or the result of one run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", choices=RECIPES, default="gsm8k")
    parser.add_argument("--base", type=Path, default=Path("."), help="parent of runs/, quickstart/")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["trl", "step", "auto"])
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--rows",
        type=int,
        help="of a pass of TRL, and of the fixed batch; default: of a mini-batch",
    )
    parser.add_argument("--one", choices=(*KINDS, "fixed"), help="run one kind; print JSON")
    options = parser.parse_args()
    root = str(Path(__file__).resolve().parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    os.chdir(options.base)
    recipe = RECIPES[options.recipe]
    if not options.one:
        recipe.prepare(recipe.folder)
        table(options)
        return
    with recipe.service(recipe.folder) as settings:
        overrides = [*settings, "trainer.rows=step"]  # one turn: the same rows
        if options.one == "fixed":
            overrides.append("trainer.policy.model.lora.rank=0")
            config = load_config(str(recipe.config), overrides)
            if options.rows is not None:
                prompts = options.rows // config.generator.n_samples_per_prompt
                config.trainer.policy_mini_batch_size = max(1, prompts)
            result: dict[str, Any] = fixed_batch(config)
        elif options.one == "trl":
            result = trl_run(load_config(str(recipe.config), overrides), options)
        else:
            result = our_run(str(recipe.config), overrides, options)
    print("RESULT " + json.dumps(result))


def table(options: argparse.Namespace) -> None:
    """Run all kinds by turns, and print the medians."""
    print(json.dumps(child(options, "fixed")), flush=True)
    results: dict[str, list[dict[str, Any]]] = {kind: [] for kind in options.kinds}
    for _ in range(options.rounds):
        for kind, found in results.items():
            found.append(child(options, kind))
            print(f"{kind}: {statistics.median(found[-1]['seconds']):.3f} s a batch", flush=True)
    print(
        "| rows | s a batch (least to most) | TRL / it | largest, GiB | all, GiB "
        "| sampled tokens a batch | phases, s |\n|---|---:|---:|---:|---:|---:|---|"
    )
    seconds = {kind: flat(found, "seconds") for kind, found in results.items()}
    for kind, found in results.items():
        phases = [row for result in found for row in result["phases"]]
        split = {name: [row[name] for row in phases if name in row] for name in PHASES}
        middle = statistics.median(seconds[kind])
        base = statistics.median(seconds.get("trl", seconds[kind]))
        largest, total = (max(result[name] for result in found) for name in ("largest", "all"))
        print(
            f"| {kind} | {middle:.3f} ({min(seconds[kind]):.2f} to {max(seconds[kind]):.2f}) "
            f"| {base / middle:.2f} | {largest:.2f} | {total:.2f} "
            f"| {statistics.mean(flat(found, 'tokens')):.0f} | "
            + ", ".join(f"{k} {statistics.median(v):.3f}" for k, v in split.items() if v)
            + " |",
            flush=True,
        )


def flat(results: list[dict[str, Any]], name: str) -> list[float]:
    """Return the values of all batches."""
    return [value for result in results for value in result[name]]


def child(options: argparse.Namespace, kind: str) -> dict[str, Any]:
    """Return the result of a run in a process of its own, with the peaks of its memory."""
    command = [sys.executable, "-m", "bench.trl_steps", f"--recipe={options.recipe}"]
    command += [f"--batches={options.batches}", "--one", kind]
    if options.rows is not None:
        command.append(f"--rows={options.rows}")
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        largest = total = 0.0
        while process.poll() is None:
            one, together = memory_of(psutil.Process(process.pid))
            largest, total = max(largest, one), max(total, together)
            time.sleep(SAMPLING_SECONDS)
        output.seek(0)
        text = output.read()
    answers = [x for x in text.splitlines() if x.startswith("RESULT ")]
    if not answers:
        sys.exit(f"{kind}: {text[-5000:]}")
    result: dict[str, Any] = json.loads(answers[-1].removeprefix("RESULT "))
    return result | {"largest": largest, "all": total}


def memory_of(process: psutil.Process) -> tuple[float, float]:
    """Return GiB: the peak of the largest process of a tree, and what all have now."""
    largest = total = 0
    try:
        for one in (process, *process.children(recursive=True)):
            status = Path(f"/proc/{one.pid}/status").read_text()
            if "VmHWM:" in status:  # not of one that is ending
                largest = max(largest, int(status.split("VmHWM:")[1].split()[0]) << 10)
                total += one.memory_full_info().pss
    except (OSError, psutil.Error):
        return largest / 2**30, 0.0  # one ended meanwhile: the sum is none
    return largest / 2**30, total / 2**30


def our_run(path: str, overrides: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds, sampled tokens and phases of each batch."""
    from skyrl_fast import train_agent
    from skyrl_fast.train.output.loggers import read_metrics

    with tempfile.TemporaryDirectory() as folder:
        config = load_config(
            path,
            [
                *overrides,
                "data.val_data=[]",
                f"trainer.run_path={folder}/run",
                *FORMS[options.one],
                f"trainer.max_training_steps={WARM_UP + options.batches}",
                "trainer.ckpt_interval=-1",
                "trainer.eval_interval=-1",
                "trainer.logger=[jsonl]",
                "trainer.plot=false",
            ],
        )
        result = train_agent(config)
        steps = [row for row in read_metrics(result.metrics) if "timing/step" in row][WARM_UP:]
    return {
        "seconds": [row["timing/step"] for row in steps],
        "tokens": [row["timing/tokens_per_second"] * row["timing/step"] for row in steps],
        "phases": [
            {name.removeprefix("timing/"): value for name, value in row.items()} for row in steps
        ],
    }


def trl_run(config: Config, options: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds, sampled tokens and generation of each batch: one generation each."""
    from transformers import TrainerCallback

    updates = optimizer_steps(config)
    times: list[float] = []
    generations: list[float] = []
    tokens: list[int] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        steps = updates * (WARM_UP + options.batches)
        trainer = trl_trainer(config, folder, steps, [Clock()], rows_of_pass=options.rows)
        generate = trainer._generate

        def timed(prompts: list[Any]) -> Any:
            started = time.perf_counter()
            answer = generate(prompts)
            generations.append(time.perf_counter() - started)
            masks = answer[2] if answer[2] is not None else [[1] * len(ids) for ids in answer[1]]
            tokens.append(sum(map(sum, masks)))
            return answer

        trainer._generate = timed
        trainer.train()
    ends = times[updates - 1 :: updates]
    seconds = [b - a for a, b in itertools.pairwise(ends)][WARM_UP - 1 :]
    return {
        "seconds": seconds,
        "tokens": tokens[WARM_UP:],
        "phases": [
            {"generate": spent, "forward_backward": whole - spent}
            for spent, whole in zip(generations[WARM_UP:], seconds, strict=True)
        ],
    }


def optimizer_steps(config: Config) -> int:
    """Return the optimizer steps of a batch."""
    return config.trainer.train_batch_size // config.trainer.policy_mini_batch_size


def trl_trainer(
    config: Config,
    folder: str,
    steps: int,
    callbacks: list[Any],
    *,
    rows_of_pass: int | None = None,
) -> Any:
    """Return TRL's trainer for the recipe's model, data, batch and optimizer.

    Args:
        rows_of_pass: rows of a forward and backward pass; None: those of a mini-batch.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trainer, generator = config.trainer, config.generator
    path = trainer.policy.model.path
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype="float32")
    # A stop string is one token of the recipes' tokenizers; TRL has no other way to stop at it.
    stops = [tokenizer.convert_tokens_to_ids(text) for text in generator.sampling_params.stop or ()]
    assert tokenizer.unk_token_id is None or tokenizer.unk_token_id not in stops
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *stops]
    rows = rows_by_prompt(config)
    rollout = None
    if generator.max_turns > 1:
        rollout = rollout_of(config, rows, tokenizer)
    mini_batch = trainer.policy_mini_batch_size * generator.n_samples_per_prompt
    size = rows_of_pass or mini_batch
    passes = mini_batch // size
    optimizer, algorithm = trainer.policy.optimizer_config, trainer.algorithm
    settings = trl.GRPOConfig(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=passes,
        steps_per_generation=optimizer_steps(config) * passes,
        num_generations=generator.n_samples_per_prompt,
        max_completion_length=generator.sampling_params.max_generate_length,
        learning_rate=optimizer.lr,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.max_grad_norm,
        warmup_steps=optimizer.num_warmup_steps,
        lr_scheduler_type="constant_with_warmup",
        beta=algorithm.kl_loss_coef if algorithm.use_kl_loss else 0.0,
        epsilon_high=algorithm.eps_clip_high,
        loss_type="dapo",
        temperature=generator.sampling_params.temperature,
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        disable_tqdm=True,
        seed=trainer.seed,
    )
    return trl.GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        args=settings,
        reward_funcs=reward_of(config, rows),
        train_dataset=Dataset.from_dict({"prompt": [row["prompt"] for row in rows.values()]}),
        callbacks=callbacks,
        rollout_func=rollout,
        peft_config=adapter_of(config),
    )


def adapter_of(config: Config) -> Any:
    """Return PEFT's settings of the recipe's adapter; None: all weights are trained."""
    if not config.trains_adapter:
        return None
    from peft import LoraConfig

    lora = config.trainer.policy.model.lora
    return LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules="all-linear", task_type="CAUSAL_LM"
    )


def rows_by_prompt(config: Config) -> dict[str, dict[str, Any]]:
    """Return the training rows by their prompts, of which TRL's functions get no more."""
    lines = Path(config.data.train_data[0]).read_text().splitlines()
    return {json.dumps(row["prompt"]): row for row in map(json.loads, lines)}


def reward_of(config: Config, rows: dict[str, dict[str, Any]]) -> Callable[..., list[float]]:
    """Return the recipe's reward as a function of TRL's."""
    if config.generator.max_turns > 1:
        return lambda env_reward, **_: env_reward  # from the rollout

    def score(text: str, row: dict[str, Any]) -> float:
        if "reward_spec" in row:  # gsm8k; "gsm8k" is also the default of env_class
            from skyrl_gym.envs.gsm8k.utils import compute_score

            return float(compute_score(text, row["reward_spec"]["ground_truth"]))
        if "reasoning_gym" in row:
            from examples.reasoning_gym.last_number import LastNumber

            return float(LastNumber(row).step(text).reward["reward"])
        from examples.smollm.agent import rewarded

        return rewarded(text, row["answer"])

    def reward(prompts: list[Any], completions: list[Any], **_: Any) -> list[float]:
        pairs = zip(prompts, completions, strict=True)
        return [score(answer[0]["content"], rows[json.dumps(prompt)]) for prompt, answer in pairs]

    return reward


def rollout_of(config: Config, rows: dict[str, dict[str, Any]], tokenizer: Any) -> Any:
    """Return a `rollout_func` of TRL's that plays the turns of text2sql."""
    from skyrl_fast.extras.text2sql.env import Text2SqlEnv
    from skyrl_fast.rollout.chat_template import ChatTemplate
    from skyrl_fast.rollout.context import begin_context

    generator = config.generator
    settings = {"db_path": config.environment.skyrl_gym.text2sql["db_path"]}
    threads = ThreadPoolExecutor(os.cpu_count())

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        template = ChatTemplate(tokenizer)
        contexts = [begin_context("append", template, prompt) for prompt in prompts]
        first = [list(context.prompt_token_ids()) for context in contexts]
        environments = [
            Text2SqlEnv(settings, {"max_turns": generator.max_turns, **rows[json.dumps(prompt)]})
            for prompt in prompts
        ]
        masks: list[list[int]] = [[] for _ in prompts]
        rewards = [0.0] * len(prompts)
        unfinished = list(range(len(prompts)))
        while unfinished:
            inputs = [list(contexts[i].prompt_token_ids()) for i in unfinished]
            answers, _ = trainer._generate_single_turn(inputs, None, {}, trainer.num_generations)
            texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
            stepped = threads.map(lambda i, text: environments[i].step(text), unfinished, texts)
            following = []
            for i, ids, text, step in zip(unfinished, answers, texts, stepped, strict=True):
                context = contexts[i]
                context.add_response(ids, {"role": "assistant", "content": text}, replaced=False)
                masks[i] += [1] * len(ids)
                rewards[i] += step["reward"]
                if step["done"]:
                    continue
                context.add_observation(step["observations"])
                length = len(context.prompt_token_ids())
                masks[i] += [0] * (length - len(first[i]) - len(masks[i]))
                if length <= generator.max_input_length:
                    following.append(i)
            unfinished = following
        tokens = [context.prompt_token_ids() for context in contexts]
        return {
            "prompt_ids": first,
            "completion_ids": [ids[len(a) :] for ids, a in zip(tokens, first, strict=True)],
            "logprobs": None,  # as of TRL's own generation
            "env_mask": masks,
            "env_reward": rewards,
        }

    return rollout


def fixed_batch(config: Config) -> dict[str, float]:
    """Return loss and gradient norm of one batch by TRL and by every layout of rows."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from skyrl_fast.batch import StepBatch
    from skyrl_fast.train.model.policy import Policy
    from skyrl_fast.train.model.row_layout import uses_trees
    from skyrl_fast.train.update import accumulate_gradient

    path, samples = config.trainer.policy.model.path, config.generator.n_samples_per_prompt
    sampling = config.generator.sampling_params
    longest, temperature = sampling.max_generate_length, sampling.temperature
    tokenizer = AutoTokenizer.from_pretrained(path)
    rows = list(rows_by_prompt(config).values())[: config.trainer.policy_mini_batch_size]
    generator = torch.Generator().manual_seed(0)
    prompts, responses, groups = [], [], []
    for number, row in enumerate(rows):
        ids = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True)
        ids = ids if isinstance(ids, list) else ids["input_ids"]
        for sample in range(samples):
            length = int(torch.randint(5, longest, (1,), generator=generator))
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
    for kind, layout in (("step", "sequence"), ("auto", "auto")):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        policy = Policy(model, tree=uses_trees(layout), temperature=temperature)
        ours = batch.with_(ref_logprobs=policy.batch_logprobs(batch) - 0.1)
        metrics = accumulate_gradient(policy, ours, algorithm=config.trainer.algorithm)
        found[f"{kind} loss"] = metrics["policy/loss"]
        found[f"{kind} gradient"] = norm(model)
    with tempfile.TemporaryDirectory() as folder:
        trainer = trl_trainer(config, folder, 1, [])
        model = trainer.model
        reference = Policy(model, temperature=temperature).batch_logprobs(batch) - 0.1
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
