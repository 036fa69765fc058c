"""The column of real engines in docs/reference/models.md: three updates of a tiny model of a type.

Imported before processes are forked, by `scripts.models_page`: vLLM's imports take longer than all
the rest.
"""

from __future__ import annotations

import asyncio
import copy
import multiprocessing
import os
import re
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import vllm.v1.engine.core
import vllm.v1.worker.cpu_worker  # noqa: F401

from bench._tokenizer import byte_level_tokenizer
from python_tests.helpers._weights import update_engine
from scripts.tiny_models import BUDGET, agent_rows, tiny_model
from skyrl_fast.config import InferenceEngineConfig
from skyrl_fast.rollout.engine.protocol import EngineDeadError
from skyrl_fast.rollout.engine.vllm_engine import VllmEngine
from skyrl_fast.rollout.engine.vllm_start import VllmSetup
from skyrl_fast.rollout.engine.weights.probe import WeightProbe
from skyrl_fast.rollout.engine.weights.receipt import WeightSyncError
from skyrl_fast.train.flow.vllm_rollouts import PROBE_SEQUENCES, PROBE_TOKENS
from skyrl_fast.train.model.loading import load_model
from skyrl_fast.train.model.micro_batch import plan_micro_batches, response_positions
from skyrl_fast.train.model.policy import Policy

UPDATES = 3
LEARNING_RATE = 1e-2
TOLERANCE = 1e-5  # float32 on both sides; the kernels sum in another order
CHANGED = 1e-2  # of log-probabilities by the updates, or nothing is verified
HEAD_SCALE = 0.25  # rounding grows with the logits
POSITIONS = 128
LLAMA4 = {
    "attention_chunk_size": 32,
    "num_experts_per_tok": 1,
    # vLLM's layers attend to all tokens where they have no rotary embeddings.
    "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
}
# What vLLM wants of a config, or of sizes, and real checkpoints have.
SETTINGS: dict[str, dict[str, Any]] = {
    "falcon": {"ffn_hidden_size": 512},
    "glm4_moe": {"head_dim": 32},
    "llama4": LLAMA4,
    "llama4_text": LLAMA4,
}
OF_PARENTS = ("CalledProcessError", "RuntimeError: Error raised in subprocess")
ERROR = re.compile(r"\b\w+Error(?:: .+|$)", re.MULTILINE)


async def compare_updates(policy: Policy, engine: VllmEngine) -> tuple[float, float, float]:
    """Return the largest difference from the engine, what updates changed, and the rounding."""
    batch = agent_rows()
    assert batch.advantages is not None
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(40, 240, (PROBE_SEQUENCES, PROBE_TOKENS), generator=generator).tolist()
    probe = WeightProbe(
        engine,
        probe=rows,
        trainer_logprobs=policy.sequence_logprobs,
    )
    reports = [await probe.verify()]
    weights = [parameter for _, parameter in policy.trained_parameters()]
    optimizer = torch.optim.AdamW(weights, lr=LEARNING_RATE)
    for _ in range(UPDATES):
        optimizer.zero_grad()
        for micro in plan_micro_batches(batch, BUDGET, tree=policy.tree, limits=policy.rope_limits):
            advantages = batch.advantages[response_positions(batch, micro)]
            (-(policy.logprobs(micro)[0] * advantages).mean()).backward()
        optimizer.step()
        sent = (policy.named_weights(), policy.frozen_parts)
        reports.append(await update_engine(engine, probe, *sent))
    differences = [report.difference.maximum for report in reports]
    print("differences:", *(f"{value:.1e}" for value in differences))
    model = copy.deepcopy(policy.model).double()
    model.set_experts_implementation("eager")  # the fused one has no float64
    wide = Policy(model, tree=False)
    narrow, double = (of.sequence_logprobs(rows) for of in (policy, wide))
    pairs = zip(narrow, double, strict=True)
    rounding = max(float(abs(torch.tensor(a) - torch.tensor(b)).max()) for (a, _), (b, _) in pairs)
    print(f"rounding of the trainer: {rounding:.1e}")
    return max(differences), max(report.max_change or 0.0 for report in reports[1:]), rounding


def measure_engine(kind: str) -> dict[str, str]:
    """Return the engine's cell of a type; this process's output is lost.

    It is `exact`, or why the engine does not serve the type, or by how much engine and trainer
    differ: by more than 1e-5 and more than four times what the trainer's float32 differs from
    float64.
    """
    forked = multiprocessing.get_context("fork")  # it has imported vLLM
    with (
        tempfile.TemporaryDirectory() as name,
        (Path(name) / "log").open("wb") as log,
        patch("vllm.v1.engine.utils.get_mp_context", lambda: forked),
    ):
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
        return {"engine": check(kind, Path(name))}


def check(kind: str, folder: Path) -> str:
    """Return the cell; the engine's output is in the folder's file `log`."""
    byte_level_tokenizer().save_pretrained(folder)
    model = tiny_model(kind, SETTINGS.get(kind))
    head = model.get_output_embeddings()
    if head is not None:
        head.weight.data.mul_(HEAD_SCALE)
    model.save_pretrained(folder)
    policy = Policy(load_model(str(folder), device=torch.device("cpu")), tree=None)
    options = InferenceEngineConfig(max_num_seqs=8)
    setup = VllmSetup(str(folder), options, max_model_len=POSITIONS)

    async def run() -> tuple[float, float, float]:
        async with VllmEngine(setup) as engine:
            return await compare_updates(policy, engine)

    try:
        difference, change, rounding = asyncio.run(run())
    except EngineDeadError as error:
        output = (folder / "log").read_text(errors="replace")
        errors = [match[0] for match in ERROR.finditer(output)]
        errors = [line for line in errors if not line.startswith(OF_PARENTS)] or errors
        return f"vLLM: {errors[0] if errors else error}"
    except WeightSyncError as error:  # which ends a run
        return f"refused: {str(error).partition(' (')[0]}"
    if difference > max(TOLERANCE, 4 * rounding):
        return f"differs by {difference:.1e}, within the probe's limit"
    if change < CHANGED:
        return f"WRONG: the updates changed log-probabilities by {change:.1e}"
    return "exact"
