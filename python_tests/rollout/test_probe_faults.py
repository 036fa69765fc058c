"""Bfloat16 engines: rounding does not stop a run, and wrong weights do."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from _probe_sweep import (
    KERNEL_FAULTS,
    LEARNING_RATES,
    NUM_MODELS,
    OTHER_DTYPE,
    TRANSFER_FAULTS,
    Counts,
    ModelKind,
    _step,
    make_model,
    model_kinds,
    sweep,
)
from _thorough import THOROUGH
from _weights import update_engine

from skyrl_fast.config import InferenceEngineConfig
from skyrl_fast.rollout.engine.vllm_engine import VllmEngine
from skyrl_fast.rollout.engine.vllm_start import VllmSetup
from skyrl_fast.rollout.engine.weights.probe import WeightProbe
from skyrl_fast.rollout.engine.weights.receipt import WeightSyncError
from skyrl_fast.train.model.policy import Policy

# One layer's update at these learning rates is smaller than bfloat16 rounds: only what the loader
# took is exact, not what a kernel makes of it.
UNSEEN = ("kernels", "one layer stale by one update")
RULES = ("sync.receipts", "sync.dtype", "sync.probe-limits", "sync.standstill")


def _checked(counts: dict[tuple[str, str], Counts], *, updates: int) -> None:
    for key, row in counts.items():
        if key[0] == "none":
            assert row.refused["any"] == 0, key
        elif key != UNSEEN:
            assert row.refused["any"] == row.cases == updates, key
    assert len(counts) == 2 + len(TRANSFER_FAULTS) + len(KERNEL_FAULTS) + len([OTHER_DTYPE])


@pytest.mark.spec(*RULES)
def test_rounding_passes_and_faults_are_refused() -> None:
    kinds = [ModelKind(2, 2.5, width=64), ModelKind(28, 3.5, "Llama", tied=True, width=64)]
    _checked(sweep(kinds, [1e-6]), updates=2)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.spec(*RULES)
def test_rounding_passes_and_faults_are_refused_in_updates_of_many_models() -> None:
    learning_rates = LEARNING_RATES if THOROUGH else LEARNING_RATES[:1]
    _checked(sweep(model_kinds(), learning_rates), updates=len(learning_rates) * NUM_MODELS)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(900)
@pytest.mark.spec(*RULES)
@pytest.mark.parametrize(
    "kind",
    [
        ModelKind(2, 2.5, "Qwen2", tied=True),
        ModelKind(12, 3.5, "Qwen3"),
        ModelKind(28, 3.5, "Llama"),
    ],
    ids=lambda kind: f"{kind.layers} layers",
)
def test_real_bfloat16_engine(kind: ModelKind, tiny_tokenizer: Any, tmp_path: Path) -> None:
    model = make_model(kind, seed=kind.layers)
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    asyncio.run(_drive(model, tmp_path))


async def _drive(model: Any, folder: Path) -> None:
    policy = Policy(model, dtype=torch.bfloat16)
    options = {"worker_extension_cls": "_faulty_extension.FaultyExtension"}
    config = VllmSetup(
        str(folder / "model"),
        InferenceEngineConfig(model_dtype="bfloat16", engine_init_kwargs=options),
        max_model_len=128,
        log_file=str(folder / "engine.log"),
    )
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    async with VllmEngine(config) as engine:
        probe = WeightProbe(
            engine,
            probe=torch.randint(200, (2, 48)).tolist(),
            trainer_logprobs=policy.sequence_logprobs,
            dtype=torch.bfloat16,
        )
        reports = [await probe.verify()]
        faults = [(place, name) for place, names in PLACES.items() for name in names]
        for place, name in faults:
            _step(model, optimizer, 1e-6)
            reports.append(await update_engine(engine, probe, policy.named_weights()))
            _step(model, optimizer, 1e-6)
            await engine.vllm.llm.collective_rpc("set_fault", args=(place, name))
            with pytest.raises(WeightSyncError) as caught:
                await update_engine(engine, probe, policy.named_weights())
            print(f"{place}: {name}: {str(caught.value)[:150]}")
            await engine.vllm.llm.collective_rpc("set_fault", args=(None,))
        reports.append(await update_engine(engine, probe, policy.named_weights()))
    for name in ("mean", "quantile", "maximum"):
        worst = max(getattr(r.difference, name) / r.difference.logit_std for r in reports)
        print(f"{len(reports)} syncs without a fault: largest {name} / logit_std {worst:.4f}")


# Tensors that vLLM's loader is not given are named as without new values, also after the receipt.
PLACES = {"transfer": TRANSFER_FAULTS, "kernels": KERNEL_FAULTS}
