"""Reinforcement learning by the Tinker SDK, on a server that this program starts.

    python examples/tinker/run.py [--steps 30] [--rate 0.02] [--seed 0]

A tiny model of random weights learns to answer with an even number: the reward is the share of even
numbers among the words that it samples. All that trains it is the SDK's client; the server is
`skyrl-fast tinker`.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # examples/ beside the package

from examples.tiny_model.model import make_model, make_tokenizer

PROMPTS = [f"a number like {n}" for n in range(0, 80, 10)]
SAMPLES = 16  # of each prompt: a group
WORDS = 4  # of an answer
RATE = 2e-2
STEPS = 30


def write_model(folder: Path) -> Path:
    """Write the tiny model and its tokenizer, unless they are there."""
    if not (folder / "config.json").is_file():
        tokenizer = make_tokenizer(PROMPTS)
        tokenizer.save_pretrained(folder)
        make_model(tokenizer).save_pretrained(folder)
    return folder


def learn(client: Any, model: Path, *, steps: int, rate: float, seed: int) -> Iterator[float]:
    """Train an adapter by REINFORCE with the group's mean as baseline; yield the mean rewards.

    Args:
        client: a `tinker.ServiceClient`.
    """
    from tinker import types

    training = client.create_lora_training_client(
        base_model=str(model), rank=8, seed=seed, train_unembed=False
    ).result()
    tokenizer = training.get_tokenizer()
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    for step in range(steps):
        sampler = training.save_weights_and_get_sampling_client().result()
        futures = [
            sampler.sample(
                types.ModelInput.from_ints(prompt),
                num_samples=SAMPLES,
                sampling_params=types.SamplingParams(
                    max_tokens=WORDS, stop=[], seed=1000 * seed + step * len(prompts) + place
                ),
            )
            for place, prompt in enumerate(prompts)
        ]
        datums = []
        means = []
        for prompt, future in zip(prompts, futures, strict=True):
            sequences = future.result().sequences
            rewards = [reward(tokenizer.decode(one.tokens)) for one in sequences]
            means.append(sum(rewards) / len(rewards))
            datums += [
                make_datum(prompt, one, gained - means[-1])
                for one, gained in zip(sequences, rewards, strict=True)
            ]
        training.forward_backward(datums, "importance_sampling")
        training.optim_step(types.AdamParams(learning_rate=rate, grad_clip_norm=1.0)).result()
        yield sum(means) / len(means)


def reward(text: str) -> float:
    """Return the share of even numbers among an answer's words."""
    words = text.split()
    even = [word for word in words if word.isdigit() and int(word) % 2 == 0]
    return len(even) / WORDS


def make_datum(prompt: list[int], sequence: Any, advantage: float) -> Any:
    """Return the datum of a sampled sequence; tokens of the prompt have no advantage."""
    from tinker import types

    before = len(prompt) - 1
    tokens = list(sequence.tokens)
    zeros = [0.0] * before
    return types.Datum(
        model_input=types.ModelInput.from_ints([*prompt, *tokens[:-1]]),
        loss_fn_inputs={
            "target_tokens": [*prompt[1:], *tokens],
            "logprobs": [*zeros, *sequence.logprobs],
            "advantages": [*zeros, *[advantage] * len(tokens)],
        },
    )


@contextmanager
def server(model: Path, folder: Path) -> Iterator[dict[str, str]]:
    """Serve the model; yield the client's arguments."""
    command = [sys.executable, "-m", "skyrl_fast", "tinker", str(model)]
    process = subprocess.Popen(
        [*command, "--folder", str(folder), "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        greeting = "".join(process.stdout.readline() for _ in range(3))
        found = re.findall(r"export TINKER_\w+=(\S+)", greeting)
        if len(found) != 2:
            raise SystemExit("the server did not start")
        url, key = found
        yield {"base_url": url, "api_key": key}
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    """Start a server, train, and print the rewards."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--rate", type=float, default=RATE)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/tinker_example"))
    options = parser.parse_args()
    import tinker

    model = write_model(options.folder.absolute() / "model")
    with server(model, options.folder.absolute()) as address:
        client = tinker.ServiceClient(**address)
        rewards = learn(client, model, steps=options.steps, rate=options.rate, seed=options.seed)
        for step, mean in enumerate(rewards):
            sys.stdout.write(f"step {step}: reward {mean:.3f}\n")
        client.close("success").result()


if __name__ == "__main__":
    main()
