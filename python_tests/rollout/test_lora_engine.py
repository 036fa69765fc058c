"""Real vLLM with an adapter: exact after every update, and wrong adapters are refused."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("peft")

from _faulty_extension import ADAPTER_FAULTS
from _weights import ADAPTER, LORA, change_adapter, update_engine

from skyrl_fast.config import InferenceEngineConfig, SamplingParams
from skyrl_fast.config.settings import REFERENCE, LoraConfig
from skyrl_fast.rollout.engine.protocol import RefusedRequestError
from skyrl_fast.rollout.engine.vllm_engine import VllmEngine
from skyrl_fast.rollout.engine.vllm_start import VllmSetup
from skyrl_fast.rollout.engine.weights.probe import PolicyProbes, WeightProbe
from skyrl_fast.rollout.engine.weights.receipt import WeightSyncError
from skyrl_fast.train.model.loading import load_model
from skyrl_fast.train.model.lora import add_adapter, add_adapters
from skyrl_fast.train.model.policy import Policy

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
UPDATES = 40
TOLERANCE = 1e-5  # float32 on both sides; the kernels sum in another order


def make_policy(folder: Path, lora: LoraConfig = LORA) -> Policy:
    model = load_model(str(folder), device=torch.device("cpu"))
    torch.manual_seed(0)
    add_adapter(model, lora, base=str(folder))
    return Policy(model)


def make_probe(engine: Any, policy: Policy, name: str | None = None) -> WeightProbe:
    return WeightProbe(
        engine,
        probe=torch.randint(200, (2, 48), generator=torch.Generator().manual_seed(1)).tolist(),
        trainer_logprobs=policy.sequence_logprobs,
        policy=name,
    )


def make_setup(folder: Path, tmp_path: Path, **options: Any) -> VllmSetup:
    return VllmSetup(
        str(folder),
        InferenceEngineConfig(engine_init_kwargs=options),
        max_model_len=128,
        log_file=str(tmp_path / "engine.log"),
        adapter=ADAPTER,
    )


def save_with_head(folder: Path, target: Path) -> Path:
    """Write the model with a head of its own, which vLLM could give an adapter, too."""
    model = load_model(str(folder), device=torch.device("cpu"))
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone().mul_(0.75))
    model.save_pretrained(target)
    for file in folder.glob("*token*"):
        (target / file.name).write_bytes(file.read_bytes())
    return target


async def refuse_another_base(engine: Any, model: Path) -> None:
    policy = make_policy(model)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "base_layer" in name:
                parameter.mul_(1.1)
    with pytest.raises(WeightSyncError, match="differ from the trainer's"):
        await update_engine(engine, make_probe(engine, policy), policy.named_weights(adapter=True))


@pytest.mark.spec("lora.delivery")
async def test_adapters_are_exact_and_wrong_ones_are_refused(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    """Start-up dominates, so all assertions on a live engine of one policy share one."""
    model = save_with_head(tiny_model_folder, tmp_path / "model")
    policy = make_policy(model)
    extension = "_faulty_extension.FaultyAdapters"
    setup = make_setup(model, tmp_path, worker_extension_cls=extension)
    async with VllmEngine(setup) as engine:
        probe = make_probe(engine, policy)
        base = await engine.prompt_logprobs(probe.sequences[0])
        await refuse_another_base(engine, model)
        reports = [await update_engine(engine, probe, policy.named_weights(adapter=True))]
        assert reports[0].num_bytes == sum(4 * p.numel() for _, p in policy.trained_parameters())
        for _ in range(UPDATES):
            change_adapter(policy)
            reports.append(await update_engine(engine, probe, policy.named_weights(adapter=True)))
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
            [(expected, _)] = policy.sequence_logprobs([[*prompt, *answer.token_ids]])
            assert answer.logprobs == pytest.approx(expected[39:], abs=TOLERANCE)
        # Requests without an adapter would still see the base model.
        engine.lora_requests, current = {}, engine.lora_requests
        assert await engine.prompt_logprobs(probe.sequences[0]) == pytest.approx(base, abs=1e-6)
        engine.lora_requests = current
        for fault in ADAPTER_FAULTS:
            change_adapter(policy)
            await engine.vllm.llm.collective_rpc("set_fault", args=(fault,))
            with pytest.raises(WeightSyncError, match="logprobs") as caught:
                await update_engine(engine, probe, policy.named_weights(adapter=True))
            print(f"{fault}: {str(caught.value)[:150]}")
            await engine.vllm.llm.collective_rpc("set_fault", args=("",))
            await update_engine(engine, probe, policy.named_weights(adapter=True))
        # The files load in vLLM as `--lora-modules` does.
        policy.save(tmp_path / "adapter")
        from vllm.lora.request import LoRARequest

        current = engine.lora_requests
        engine.lora_requests = {"": LoRARequest("saved", 1000, str(tmp_path / "adapter"))}
        tokens = probe.sequences[0]
        [(expected, _)] = policy.sequence_logprobs([tokens])
        assert await engine.prompt_logprobs(tokens) == pytest.approx(expected, abs=TOLERANCE)
        engine.lora_requests = current
        # What vLLM has no layer for is refused by its receipt.
        weights = dict(policy.named_weights(adapter=True))
        first = next(name for name in weights if "lora_A" in name)
        for name in (first, first.replace("lora_A", "lora_B")):
            weights[name.replace("q_proj", "c_proj")] = weights[name].clone()
        with pytest.raises(WeightSyncError, match="c_proj"):
            await update_engine(engine, probe, weights)


async def test_each_request_is_answered_by_its_policy(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    """Requests of two policies and the reference are in one batch, through updates of both."""
    names, prompt = ("planner", "worker"), list(range(40, 60))
    lora = replace(LORA, policies=list(names))

    model = load_model(str(tiny_model_folder), device=torch.device("cpu"))
    torch.manual_seed(0)
    add_adapters(model, lora, base=str(tiny_model_folder))
    base = load_model(str(tiny_model_folder), device=torch.device("cpu"))
    trained = Policy(model)
    policies = {name: trained.with_adapter(name) for name in names}
    extension = "_faulty_extension.FaultyAdapters"
    setup = make_setup(tiny_model_folder, tmp_path, worker_extension_cls=extension)
    async with VllmEngine(replace(setup, policies=names)) as engine:
        one = {name: make_probe(engine, policies[name], name) for name in names}
        probe = PolicyProbes(list(one.values()))

        async def sample(name: str, session: int) -> tuple[str, Any]:
            sampling = SamplingParams(max_generate_length=8)
            return name, await engine.generate(
                prompt,
                sampling,
                session_id=str(session),
                policy_version=0,
                seed=session,
                policy=name,
            )

        for update in range(3):
            for name in names[: update + 1]:
                change_adapter(policies[name])
            weights = trained.named_weights(adapter=True)
            report = await update_engine(engine, probe, weights)
            assert report.difference.maximum < TOLERANCE
            expected = {**policies, REFERENCE: Policy(base)}
            requests = [sample(name, n) for n in range(3) for name in expected]
            said = set()
            for name, answer in await asyncio.gather(*requests):
                [(values, _)] = expected[name].sequence_logprobs([[*prompt, *answer.token_ids]])
                assert answer.logprobs == pytest.approx(values[19:], abs=TOLERANCE), name
                said.add((name, tuple(values[:19])))
            assert len({prefix for _, prefix in said}) == (2 if update == 0 else 3)
        with pytest.raises(RefusedRequestError, match="planner, worker, reference, got judge"):
            await sample("judge", 0)
        # One policy that keeps its old adapter is found, whatever the others do.
        change_adapter(policies["planner"])
        change_adapter(policies["worker"])
        await engine.vllm.llm.collective_rpc("set_fault", args=("stale adapter",))
        with pytest.raises(WeightSyncError, match="of policy planner"):
            await update_engine(engine, probe, trained.named_weights(adapter=True))


RUNS = {  # of three tokens each; -1: no adapter
    "one slot": (1, (0, 0, 0, 0)),
    "one of three": (3, (1, 1, 1, 1)),
    "one after the other": (3, (-1, 0, 1, -1)),
    "in turns": (3, (0, 2, 0, -1)),
}


@pytest.mark.parametrize("case", RUNS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_are_multiplied_one_by_one(case: str, dtype: torch.dtype) -> None:
    """The patched operations of a CPU return what vLLM's return, where each token has an adapter.

    Tokens without one are left as they are.
    """
    slots, runs = RUNS[case]
    from vllm.lora.ops import torch_ops
    from vllm.lora.punica_wrapper import punica_cpu

    from skyrl_fast.rollout.engine.vllm_patches.adapter_products import multiply_by_adapter

    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("shrink", "expand", "expand_slice"):
            for kind in ("bgmv", "sgmv"):
                full = f"{kind}_{name}"
                patch.setattr(punica_cpu, full, getattr(torch_ops, full))
        multiply_by_adapter()
        x, a, b = random(12, 20), random(slots, 1, 6, 20), random(slots, 1, 10, 6)
        lengths = torch.full((4,), 3)
        of_runs = torch.tensor(runs)
        tokens = of_runs.repeat_interleave(lengths)
        sequences = (lengths.cumsum(0) - lengths, lengths, of_runs, 4, 3, 12)
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
                expected[tokens < 0] = output[tokens < 0]
                # one rounding of the sums in another order
                tolerance = 1e-5 if dtype == torch.float32 else 0.05
                torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)
        gathers = []
        patch.setattr(torch, "einsum", lambda *_: gathers.append(1) or torch.zeros(12, 6))
        punica_cpu.bgmv_shrink(x, a, torch.zeros(12, 8), tokens, 0.5)
        assert not gathers
