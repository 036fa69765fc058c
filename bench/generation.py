"""Generation of a batch against the engine's own: the same requests, given to vLLM at once.

    python -m bench.generation CONFIG.yaml [SETTING=VALUE ...] [--folder DIR] [--rounds 12]

Runs `Rollouts.generate` on batches of training prompts, and after each one the requests that it
made through `vllm.LLM.generate`, in one process and with the same settings of the engine: all at
once ("vllm"), and those of each turn at once, one turn after another ("vllm_turns"), without agent
loop, environments and tokenizer. Relative paths of the settings are those of `--folder`, such as
the one where `make train` created quickstart/.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from skyrl_fast.config import Config, SamplingParams
from skyrl_fast.config.loading import load_config
from skyrl_fast.rollout.engine.from_settings import make_vllm_setup
from skyrl_fast.rollout.engine.pool import EnginePool
from skyrl_fast.rollout.engine.protocol import Generation, vllm_sampling_params
from skyrl_fast.rollout.engine.vllm_start import engine_args, engine_environment, environment
from skyrl_fast.rollout.trajectory import Trajectory
from skyrl_fast.train.data.prompts import Prompt, PromptSampler, digest_of, load_prompts
from skyrl_fast.train.flow.vllm_rollouts import VllmRollouts, start_rollouts
from skyrl_fast.train.model.loading import load_tokenizer

WARM_UP = 2  # batches


class Request(NamedTuple):
    """A request of a session's turn."""

    prompt_token_ids: list[int]
    sampling: SamplingParams
    seed: int | None
    session: str


def record_requests(pool: EnginePool) -> list[Request]:
    """Return a list to which each request of the pool is added."""
    requests: list[Request] = []
    generate = pool.generate

    async def recorded(
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        session_id: str,
        seed: int | None = None,
        **options: Any,
    ) -> Generation:
        requests.append(Request(list(prompt_token_ids), sampling, seed, session_id))
        return await generate(
            prompt_token_ids, sampling, session_id=session_id, seed=seed, **options
        )

    pool.generate = recorded  # type: ignore[method-assign]
    return requests


def batches(config: Config, prompts: list[Prompt], count: int) -> list[list[Prompt]]:
    """Return the first batches of the run's order."""
    size = config.trainer.train_batch_size
    digest = digest_of(prompts)
    sampler = PromptSampler(len(prompts), batch_size=size, seed=config.trainer.seed, digest=digest)
    return [[prompts[i] for i in sampler.next_batch()] for _ in range(count)]


def start_llm(config: Config, model: str) -> Any:
    """Return vLLM's offline engine with the settings of ours."""
    setup = make_vllm_setup(config, model)
    with environment(engine_environment(setup)):
        from vllm import LLM

        asynchronous = {"enable_log_requests"}
        arguments = {k: v for k, v in engine_args(setup).items() if k not in asynchronous}
        return LLM(**arguments)


async def measure(config: Config, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of both, by batch."""
    model = config.trainer.policy.model.path
    assert model is not None
    tokenizer = load_tokenizer(model)
    env_class = config.environment.env_class
    prompts = load_prompts(config.data.train_data, default_env_class=env_class)
    llm = start_llm(config, model)
    rollouts: VllmRollouts = await start_rollouts(config, tokenizer, model, prompts=prompts)
    requests = record_requests(rollouts._pool)
    names = ("batch", "vllm", "vllm_turns", "requests", "tokens")
    seconds: dict[str, list[float]] = {name: [] for name in names}
    try:
        for number, batch in enumerate(batches(config, prompts, WARM_UP + rounds)):
            requests.clear()
            gc.collect()
            start = time.perf_counter()
            trajectories = await rollouts.generate(batch, step=number, phase="train")
            ours = time.perf_counter() - start
            refuse_failures(trajectories)
            alone = {}
            for name, parts in (("vllm", [list(requests)]), ("vllm_turns", by_turn(requests))):
                start = time.perf_counter()
                for part in parts:
                    await asyncio.to_thread(own_batch, llm, part, f"{name}-{number}")
                alone[name] = time.perf_counter() - start
            if number >= WARM_UP:
                seconds["batch"].append(ours)
                for name, value in alone.items():
                    seconds[name].append(value)
                seconds["requests"].append(len(requests))
                steps = [step for t in trajectories for step in t.steps]
                seconds["tokens"].append(sum(len(step.response_ids) for step in steps))
    finally:
        await rollouts.close()
    return seconds


def refuse_failures(trajectories: Sequence[Trajectory]) -> None:
    """End with the reason if a trajectory failed: the batch would be smaller than the run's."""
    failures = [t.failure for t in trajectories if t.failure is not None]
    if failures:
        sys.exit(f"{len(failures)} of {len(trajectories)} trajectories failed: {failures[0]}")


def by_turn(requests: Sequence[Request]) -> list[list[Request]]:
    """Return the first requests of all sessions, then the second, and so on."""
    turns: list[list[Request]] = []
    seen: Counter[str] = Counter()
    for request in requests:
        if seen[request.session] == len(turns):
            turns.append([])
        turns[seen[request.session]].append(request)
        seen[request.session] += 1
    return turns


def own_batch(llm: Any, requests: list[Request], salt: str) -> None:
    """Give the requests to vLLM's own batch call; the prefix cache does not know earlier ones."""
    from vllm import SamplingParams as VllmSamplingParams

    prompts = [
        {"prompt_token_ids": request.prompt_token_ids, "cache_salt": salt} for request in requests
    ]
    parameters = [
        VllmSamplingParams(
            **vllm_sampling_params(request.sampling, seed=request.seed),
            detokenize=bool(request.sampling.stop),
            **request.sampling.additional_kwargs,
        )
        for request in requests
    ]
    llm.generate(prompts, parameters, use_tqdm=False)


def main() -> None:
    """Print medians, and the ratios of the first to both others, as a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("settings", nargs="*")
    parser.add_argument("--folder", default=".")
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args()
    file = Path(args.config).resolve()
    os.chdir(args.folder)
    seconds = asyncio.run(measure(load_config(str(file), args.settings), args.rounds))
    result = {name: statistics.median(values) for name, values in seconds.items()}
    for name in ("vllm", "vllm_turns"):
        ratios = [a / b for a, b in zip(seconds["batch"], seconds[name], strict=True)]
        result[f"batch / {name}"] = statistics.median(ratios)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
