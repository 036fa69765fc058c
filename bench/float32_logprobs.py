"""Log-probabilities of vLLM and of the trainer in float32, compared with float64, by length.

    python -m bench.float32_logprobs [--scale 0.2]

A model of random weights samples 200 tokens after prompts of each length. The trainer computes
their log-probabilities in float32, and transformers does in float64.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench._tokenizer import byte_level_tokenizer
from skyrl_fast.batch import batch_from_trajectories
from skyrl_fast.config import SamplingParams
from skyrl_fast.rollout.engine.protocol import Generation
from skyrl_fast.rollout.engine.vllm_engine import VllmEngine
from skyrl_fast.rollout.engine.vllm_start import VllmSetup
from skyrl_fast.rollout.trajectory import Step, Trajectory
from skyrl_fast.train.model.policy import Policy

ROOT = Path(__file__).resolve().parent.parent
LENGTHS = (500, 2_000, 5_000, 10_886)
SAMPLED = 200
SAMPLES = 4  # per length


def save_model(folder: str, tokenizer: Any, scale: float) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        **{"vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 128},
        **{"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1},
        **{"max_position_embeddings": 16_384, "tie_word_embeddings": True},
        **{"initializer_range": scale, "eos_token_id": tokenizer.eos_token_id},
    )
    tokenizer.save_pretrained(folder)
    Qwen2ForCausalLM(config).float().save_pretrained(folder)


async def sampled(folder: str, prompts: list[list[int]]) -> list[Generation]:
    longest = max(LENGTHS) + SAMPLED
    sampling = SamplingParams(max_generate_length=SAMPLED)
    async with VllmEngine(VllmSetup(folder, max_model_len=longest)) as engine:
        return [
            await engine.generate(ids, sampling, session_id="a", policy_version=0, seed=seed)
            for seed, ids in enumerate(prompts)
        ]


def recomputed(policy: Policy, prompt: list[int], answer: Generation) -> np.ndarray:
    """Return (T,) the trainer's log-probabilities of an answer."""
    ids = answer.token_ids
    step = Step(prompt, ids, [1] * len(ids), answer.logprobs, 0.0, "stop", 0, "", "", 0.0, 0.0)
    batch = batch_from_trajectories([Trajectory("a", 0, [step], "stop", "env", {}, 0.0)])
    return policy.batch_logprobs(batch).double().numpy()


def reference(model: Any, prompt: list[int], answer: Generation) -> np.ndarray:
    """Return (T,) log-probabilities of an answer in float64."""
    ids = torch.tensor([prompt + answer.token_ids])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids).logits[0, len(prompt) - 1 : -1], -1)
    return logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()


def main() -> None:
    """Print a table of the largest differences."""
    from transformers import AutoModelForCausalLM

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=0.2, help="of the weights")
    scale = parser.parse_args().scale
    tokenizer = byte_level_tokenizer()
    text = "".join(path.read_text() for path in sorted((ROOT / "docs").rglob("*.md")))
    ids = tokenizer.encode(text[: SAMPLES * max(LENGTHS)])
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder, tokenizer, scale)
        prompts = [ids[k * n : (k + 1) * n] for n in LENGTHS for k in range(SAMPLES)]
        answers = asyncio.run(sampled(folder, prompts))
        policy = Policy(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
        exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    differences: dict[int, list[list[float]]] = {n: [] for n in LENGTHS}
    for prompt, answer in zip(prompts, answers, strict=True):
        engine = np.array(answer.logprobs)
        trainer, wanted = recomputed(policy, prompt, answer), reference(exact, prompt, answer)
        pairs = ((engine, trainer), (engine, wanted), (trainer, wanted))
        differences[len(prompt)].append([float(np.abs(a - b).max()) for a, b in pairs])
    print("| prompt tokens | engine, trainer | engine, float64 | trainer, float64 |")
    print("|---|---|---|---|")
    for length, found in differences.items():
        largest = " | ".join(f"{value:.1e}" for value in np.max(found, axis=0))
        print(f"| {length:,} | {largest} |")


if __name__ == "__main__":
    main()
