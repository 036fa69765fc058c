"""A weight sync of an engine with vLLM's second model runner; run by test_model_runner_v2.py."""

import asyncio
import json
import sys
from pathlib import Path

import torch
from _probe_sweep import _step
from _weights import update_engine

from skyrl_fast.config import InferenceEngineConfig, SamplingParams
from skyrl_fast.rollout.engine.vllm_engine import VllmEngine
from skyrl_fast.rollout.engine.vllm_start import VllmSetup
from skyrl_fast.rollout.engine.weights.probe import WeightProbe
from skyrl_fast.train.model.loading import load_model
from skyrl_fast.train.model.policy import Policy

PROMPT = [1, 2, 3]


async def main(folder: Path) -> None:
    """Update the weights, and write what the engine answered to result.json."""
    model = load_model(str(folder / "model"), device=torch.device("cpu"))
    policy = Policy(model)
    config = VllmSetup(
        str(folder / "model"),
        InferenceEngineConfig(model_dtype="float32"),
        max_model_len=128,
        log_file=str(folder / "engine.log"),
    )
    async with VllmEngine(config) as engine:
        probe = WeightProbe(
            engine,
            probe=[list(range(5, 45))],
            trainer_logprobs=policy.sequence_logprobs,
        )
        await probe.verify()
        _step(model, torch.optim.AdamW(model.parameters()), 1e-3)
        report = await update_engine(engine, probe, policy.named_weights())
        # Random sampling uses a function that the interpreter lacks (libdevice's log).
        greedy = SamplingParams(max_generate_length=4, temperature=0.0)
        generation = await engine.generate(PROMPT, greedy, session_id="a", policy_version=1)
        [(values, _)] = policy.sequence_logprobs([[*PROMPT, *generation.token_ids]])
        result = {
            "difference": report.difference.maximum,
            "change": report.max_change,
            "generated": generation.logprobs,
            "trainer": values[len(PROMPT) - 1 :],
        }
    (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
