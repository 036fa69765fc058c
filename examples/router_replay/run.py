"""The mismatch of trainer and sampler with and without router replay, in one run.

    python examples/router_replay/run.py             about a minute on 2 cores

A random mixture of experts is rolled out by vLLM over several turns, with its routes recorded. The
trainer then computes the log-probabilities of the same tokens, with its own routes and with
replayed ones, while its routers differ from the sampler's: noise on their weights, or bfloat16.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # this file may be started from anywhere

from examples.router_replay.make_model import WORDS, make_model  # noqa: E402
from examples.tiny_model.recipe import make_once  # noqa: E402
from skyrl_fast.batch import StepBatch, batch_from_trajectories  # noqa: E402
from skyrl_fast.config import (  # noqa: E402
    EnvironmentConfig,
    GeneratorConfig,
    InferenceEngineConfig,
    SamplingParams,
)
from skyrl_fast.rollout.engine.vllm_engine import VllmEngine  # noqa: E402
from skyrl_fast.rollout.engine.vllm_start import VllmSetup  # noqa: E402
from skyrl_fast.rollout.env.factory import EnvFactory  # noqa: E402
from skyrl_fast.rollout.groups import rollout  # noqa: E402
from skyrl_fast.train.data.prompts import Prompt  # noqa: E402
from skyrl_fast.train.model.loading import hide_progress_bars, load_model  # noqa: E402
from skyrl_fast.train.model.micro_batch import plan_micro_batches  # noqa: E402
from skyrl_fast.train.model.policy import Policy  # noqa: E402

NOISE_LEVELS = (0.0, 0.003, 0.01, 0.03, 0.1, 0.3)
TURNS, MAX_GENERATE_LENGTH, MAX_INPUT_LENGTH = 3, 32, 400


@dataclass(frozen=True, slots=True)
class Mismatch:
    """|trainer - sampler| of the sampled tokens' log-probabilities.

    Args:
        trainer: why the trainer's routers differ.
        replay: whether recorded routes were replayed.
        mean, largest: of the absolute differences.
        kl: mean of exp(d) - d - 1 with d = trainer - sampler, an estimate of KL(sampler, trainer).
        ratio_off: share of tokens whose ratio exp(d) is outside 0.8 to 1.2.
    """

    trainer: str
    replay: bool
    mean: float
    largest: float
    kl: float
    ratio_off: float


def prompts(number: int) -> list[Prompt]:
    """Return short tasks of words from the model's vocabulary."""
    words = WORDS.split()
    tasks = [" ".join(words[(7 * i + k) % len(words)] for k in range(12)) for i in range(number)]
    return [
        Prompt(str(i), [{"role": "user", "content": task}], "rooms", {})
        for i, task in enumerate(tasks)
    ]


async def sample(model_path: Path, log_file: Path, *, num_prompts: int, samples: int) -> StepBatch:
    """Roll out on vLLM, and return the rows with log-probabilities and routes."""
    from transformers import AutoTokenizer

    config = GeneratorConfig(
        n_samples_per_prompt=samples,
        max_turns=TURNS,
        max_input_length=MAX_INPUT_LENGTH,
        sampling_params=SamplingParams(max_generate_length=MAX_GENERATE_LENGTH),
        context="append",
    )
    engine = VllmEngine(
        VllmSetup(
            str(model_path),
            InferenceEngineConfig(model_dtype="float32", enable_return_routed_experts=True),
            max_model_len=MAX_INPUT_LENGTH + MAX_GENERATE_LENGTH,
            log_file=str(log_file),
        )
    )
    environments = EnvFactory(EnvironmentConfig(register=[str(HERE / "rooms_env.py")]))
    try:
        await engine.start()
        trajectories = await rollout(
            prompts(num_prompts),
            engine,
            AutoTokenizer.from_pretrained(model_path),
            environments,
            config,
            phase="train",
            policy_version=0,
            seed=0,
        )
    finally:
        await engine.close()
        await environments.close()
    return batch_from_trajectories(trajectories)


def measure(model_path: Path, batch: StepBatch) -> Iterator[Mismatch]:
    """Yield the mismatch of each kind of trainer, without and with replay."""
    model = load_model(str(model_path), device=torch.device("cpu"))
    for noise in NOISE_LEVELS:
        noisy = with_noisy_routers(model, noise, seed=1)
        yield from _compare(f"noise {noise:g}", noisy, batch, torch.float32)
    yield from _compare("bfloat16", model, batch, torch.bfloat16)


def with_noisy_routers(model: Any, noise: float, *, seed: int) -> Any:
    """Return a copy with Gaussian noise on the router weights, `noise` times their deviation."""
    noisy = copy.deepcopy(model)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in noisy.model.layers:
            weight = layer.mlp.gate.weight
            weight += noise * weight.std() * torch.randn(weight.shape, generator=random)
    return noisy


def _compare(name: str, model: Any, batch: StepBatch, dtype: torch.dtype) -> Iterator[Mismatch]:
    trained = batch.loss_mask != 0
    assert batch.rollout_logprobs is not None
    for replay in (False, True):
        # The head is in float32, to measure the routes and not the rounding of logits.
        policy = Policy(
            copy.deepcopy(model), dtype=dtype, head_dtype=torch.float32, router_replay=replay
        )
        difference = (policy.batch_logprobs(batch) - batch.rollout_logprobs)[trained]
        size = difference.abs()
        yield Mismatch(
            trainer=name,
            replay=replay,
            mean=float(size.mean()),
            largest=float(size.max()),
            kl=float((difference.exp() - difference - 1).mean()),
            ratio_off=float(((difference.exp() - 1).abs() > 0.2).float().mean()),
        )


def rerouted_share(model: Any, batch: StepBatch) -> float:
    """Return the share of recorded (token, layer) pairs with other experts in the model."""
    moved = cells = 0
    for micro in plan_micro_batches(batch, 16384, router_replay=True):
        assert micro.expert_indices is not None and micro.router_padding_mask is not None
        chosen = chosen_experts(model, micro.input_ids).sort(-1).values
        recorded = micro.expert_indices.flatten(0, 1).long().sort(-1).values
        has_route = ~micro.router_padding_mask.flatten()
        moved += int((chosen != recorded).any(-1)[has_route].sum())
        cells += int(has_route.sum()) * chosen.shape[1]
    return moved / cells


def chosen_experts(model: Any, input_ids: torch.Tensor) -> torch.Tensor:
    """Return the experts that the model chooses: (tokens, layers, experts per token)."""
    chosen: list[torch.Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _m, _a, output: chosen.append(output[2]))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(input_ids=input_ids)
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, 1)


def table(results: Sequence[Mismatch], rerouted: dict[str, float]) -> str:
    """Return the results as a Markdown table."""
    lines = [
        "| trainer | other experts | mean, free | mean, replay | largest, free | largest, replay "
        "| KL, free | KL, replay |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for free, replayed in zip(results[::2], results[1::2], strict=True):
        share = f"{100 * rerouted[free.trainer]:.1f} %" if free.trainer in rerouted else "-"
        values = [
            f"{getattr(one, field):.2g}"
            for field in ("mean", "largest", "kl")
            for one in (free, replayed)
        ]
        lines.append(f"| {free.trainer} | {share} | " + " | ".join(values) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", type=Path, default=Path("runs/router_replay"))
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    options = parser.parse_args(arguments)
    hide_progress_bars()
    base: Path = options.base
    make_once(base / "model", make_model)
    batch = asyncio.run(
        sample(
            base / "model",
            base / "engine.log",
            num_prompts=options.prompts,
            samples=options.samples,
        )
    )
    model = load_model(str(base / "model"), device=torch.device("cpu"))
    rerouted = {
        f"noise {noise:g}": rerouted_share(with_noisy_routers(model, noise, seed=1), batch)
        for noise in NOISE_LEVELS
    }
    results = list(measure(base / "model", batch))
    summary = {
        "rows": batch.num_rows,
        "trained_tokens": int((batch.loss_mask != 0).sum()),
        "rerouted_share": rerouted,
        "results": [asdict(result) for result in results],
    }
    (base / "results.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    print(f"{summary['rows']} rows, {summary['trained_tokens']} sampled tokens\n")
    print(table(results, rerouted))
    print(f"\nwritten to {base / 'results.json'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
