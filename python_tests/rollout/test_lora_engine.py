"""Real vLLM with an adapter: exact after every update, and wrong adapters are refused."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("peft")

from _faulty_extension import ADAPTER_FAULTS
from _weights import ADAPTER, LORA, change_adapter, update_engine

from skyrl_fast.config import InferenceEngineConfig, SamplingParams
from skyrl_fast.config.settings import LoraConfig
from skyrl_fast.rollout.engine.vllm_engine import VllmEngine
from skyrl_fast.rollout.engine.vllm_start import VllmSetup
from skyrl_fast.rollout.engine.weights.probe import WeightProbe
from skyrl_fast.rollout.engine.weights.receipt import WeightSyncError
from skyrl_fast.train.model.lora import add_adapter
from skyrl_fast.train.model.policy import Policy, load_model

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
UPDATES = 40
TOLERANCE = 1e-5  # float32 on both sides; the kernels sum in another order


def make_policy(folder: Path, lora: LoraConfig = LORA) -> Policy:
    model = load_model(str(folder), device=torch.device("cpu"))
    torch.manual_seed(0)
    add_adapter(model, lora, base=str(folder))
    return Policy(model)


def make_probe(engine: Any, policy: Policy) -> WeightProbe:
    return WeightProbe(
        engine,
        probe=torch.randint(200, (2, 48), generator=torch.Generator().manual_seed(1)).tolist(),
        trainer_logprobs=lambda probe: [policy.sequence_logprobs(ids) for ids in probe],
    )


def make_setup(folder: Path, tmp_path: Path, **options: Any) -> VllmSetup:
    return VllmSetup(
        str(folder),
        InferenceEngineConfig(engine_init_kwargs=options),
        max_model_len=128,
        log_file=str(tmp_path / "engine.log"),
        adapter=ADAPTER,
    )


@pytest.mark.spec("lora.delivery")
def test_adapters_are_exact_and_wrong_ones_are_refused(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    async def go() -> None:
        policy = make_policy(tiny_model_folder)
        extension = "_faulty_extension.FaultyAdapters"
        setup = make_setup(tiny_model_folder, tmp_path, worker_extension_cls=extension)
        async with VllmEngine(setup) as engine:
            probe = make_probe(engine, policy)
            base = await engine.prompt_logprobs(probe._probe[0])
            reports = [await update_engine(engine, probe, policy.named_weights(adapter=True))]
            assert reports[0].num_bytes == sum(
                4 * p.numel() for _, p in policy.trained_parameters()
            )
            for _ in range(UPDATES):
                change_adapter(policy)
                reports.append(
                    await update_engine(engine, probe, policy.named_weights(adapter=True))
                )
                assert reports[-1].max_change > 1e-3
            worst = max(report.difference.maximum for report in reports)
            seconds = max(report.update_seconds for report in reports)
            print(f"{len(reports)} updates: largest difference {worst:.1e}, {seconds:.3f} s")
            assert worst < TOLERANCE
            # Sampled tokens have the adapter's log-probabilities, also of a cached prefix.
            prompt = list(range(40, 80))
            for _ in range(2):
                answer = await engine.generate(
                    prompt,
                    SamplingParams(max_generate_length=16),
                    session_id="a",
                    policy_version=UPDATES,
                    seed=1,
                )
                expected, _ = policy.sequence_logprobs([*prompt, *answer.token_ids])
                assert answer.logprobs == pytest.approx(expected[39:], abs=TOLERANCE)
            # Requests without an adapter would still see the base model.
            engine._lora_request, current = None, engine._lora_request
            assert await engine.prompt_logprobs(probe._probe[0]) == pytest.approx(base, abs=1e-6)
            engine._lora_request = current
            for fault in ADAPTER_FAULTS:
                change_adapter(policy)
                await engine._llm.collective_rpc("set_fault", args=(fault,))
                with pytest.raises(WeightSyncError, match="logprobs") as caught:
                    await update_engine(engine, probe, policy.named_weights(adapter=True))
                print(f"{fault}: {str(caught.value)[:150]}")
                await engine._llm.collective_rpc("set_fault", args=("",))
                await update_engine(engine, probe, policy.named_weights(adapter=True))
            # The files load in vLLM as `--lora-modules` does.
            policy.save(tmp_path / "adapter")
            from vllm.lora.request import LoRARequest

            current = engine._lora_request
            engine._lora_request = LoRARequest("saved", 1000, str(tmp_path / "adapter"))
            tokens = probe._probe[0]
            expected, _ = policy.sequence_logprobs(tokens)
            assert await engine.prompt_logprobs(tokens) == pytest.approx(expected, abs=TOLERANCE)
            engine._lora_request = current
            # What vLLM has no layer for is refused by its receipt.
            weights = dict(policy.named_weights(adapter=True))
            first = next(name for name in weights if "lora_A" in name)
            for name in (first, first.replace("lora_A", "lora_B")):
                weights[name.replace("q_proj", "c_proj")] = weights[name].clone()
            with pytest.raises(WeightSyncError, match="c_proj"):
                await update_engine(engine, probe, weights)

    asyncio.run(go())


def save_with_head(folder: Path, target: Path) -> Path:
    """Write the model with a head of its own, which vLLM could give an adapter, too."""
    model = load_model(str(folder), device=torch.device("cpu"))
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone().mul_(1.5))
    model.save_pretrained(target)
    for file in folder.glob("*token*"):
        (target / file.name).write_bytes(file.read_bytes())
    return target


@pytest.mark.spec("lora.delivery")
def test_an_adapter_for_another_base_is_refused(tiny_model_folder: Path, tmp_path: Path) -> None:
    async def go() -> None:
        model = save_with_head(tiny_model_folder, tmp_path / "model")
        policy = make_policy(model)
        with torch.no_grad():
            for name, parameter in policy.model.named_parameters():
                if "base_layer" in name:
                    parameter.mul_(1.1)
        weights = policy.named_weights(adapter=True)
        async with VllmEngine(make_setup(model, tmp_path)) as engine:
            with pytest.raises(WeightSyncError, match="differ from the trainer's"):
                await update_engine(engine, make_probe(engine, policy), weights)
            right = make_policy(model)
            change_adapter(right)
            probe = make_probe(engine, right)
            report = await update_engine(engine, probe, right.named_weights(adapter=True))
            assert report.difference.maximum < TOLERANCE

    asyncio.run(go())


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_adapter_is_multiplied_at_once(slots: int, dtype: torch.dtype) -> None:
    """The patched operations of a CPU return what vLLM's return."""
    from vllm.lora.ops import torch_ops
    from vllm.lora.punica_wrapper import punica_cpu

    from skyrl_fast.rollout.engine.vllm_patches.single_adapter import multiply_at_once

    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("shrink", "expand", "expand_slice"):
            for kind in ("bgmv", "sgmv"):
                full = f"{kind}_{name}"
                patch.setattr(punica_cpu, full, getattr(torch_ops, full))
        multiply_at_once()
        x, a, b = random(12, 20), random(slots, 1, 6, 20), random(slots, 1, 10, 6)
        tokens = torch.arange(12) % slots
        lengths = torch.full((4,), 3)
        sequences = (lengths.cumsum(0) - lengths, lengths, torch.arange(4) % slots, 4, 3, 12)
        cases = [
            ("shrink", x, a, torch.zeros(12, 8), (0.5,)),
            *(
                ("expand", random(12, 6), b, random(12, width), (add,))
                for width in (10, 9, 13)
                for add in (True, False)
            ),
            *(
                ("expand_slice", random(12, 6), b, random(12, 30), (7, 10, add))
                for add in (True, False)
            ),
        ]
        for name, inputs, matrices, output, rest in cases:
            for kind, where in (("bgmv", (tokens,)), ("sgmv", sequences)):
                expected, got = output.clone(), output.clone()
                getattr(torch_ops, f"{kind}_{name}")(inputs, matrices, expected, *where, *rest)
                getattr(punica_cpu, f"{kind}_{name}")(inputs, matrices, got, *where, *rest)
                # one rounding of the sums in another order
                tolerance = 1e-5 if dtype == torch.float32 else 0.05
                torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)
        gathers = []
        patch.setattr(torch, "einsum", lambda *_: gathers.append(1) or torch.zeros(12, 6))
        punica_cpu.bgmv_shrink(x, a, torch.zeros(12, 8), tokens, 0.5)
        assert bool(gathers) == (slots > 1)
