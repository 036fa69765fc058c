"""vLLM's sleep mode, of a scripted engine and of vLLM for CPUs."""

import asyncio
import inspect
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from _weights import ScriptedEngine

from skyrl_fast.config import ConfigError, InferenceEngineConfig, SamplingParams
from skyrl_fast.config.loading import load_config
from skyrl_fast.rollout.engine import vllm_start
from skyrl_fast.rollout.engine.protocol import EngineDeadError
from skyrl_fast.rollout.engine.serve_vllm import serve_command
from skyrl_fast.rollout.engine.vllm_engine import VllmEngine
from skyrl_fast.rollout.engine.vllm_start import VllmSetup
from skyrl_fast.rollout.engine.weights.probe import ProbeDifference, WeightSyncReport
from skyrl_fast.rollout.engine.weights.transports.file import WeightPlaces, send_by_file
from skyrl_fast.train.data.prompts import Prompt
from skyrl_fast.train.flow.vllm_rollouts import PROBE_SEQUENCES, VllmRollouts


@pytest.mark.spec("memory.sleep")
async def test_an_engine_that_sleeps_is_not_put_to_sleep_again() -> None:
    """vLLM would save memory that is no longer mapped."""
    engine = ScriptedEngine("file")

    await engine.start()
    await engine.sleep()
    await engine.sleep()
    assert engine.llms[0].calls == ["sleep 1 abort"]  # at level 2 the base would be lost


def test_failing_to_sleep_is_a_death() -> None:
    engine = ScriptedEngine("file")

    async def go() -> None:
        await engine.start()
        engine.llms[0].fault = "cannot sleep"
        await engine.sleep()

    with pytest.raises(EngineDeadError, match="could not sleep: RuntimeError: Memory usage"):
        asyncio.run(go())


class FakePool:
    """Records the calls of `VllmRollouts`, and reads the weights as a real pool does."""

    start_with_model = True
    weights_dtype = torch.bfloat16
    compute_dtype = torch.bfloat16
    report = WeightSyncReport(0.0, 0.0, ProbeDifference(0.0, 0.0, 0.0, 1.0), 0.0)

    def __init__(self, events: list[str]) -> None:
        self.events = events
        self.reports: dict[int, WeightSyncReport] = {}

    async def sleep(self) -> None:
        self.events.append("sleep")

    async def release(self) -> None:
        self.events.append("release")

    interrupt = release

    async def verify(self, make_probe: Any) -> Any:
        self.events.append("verify")
        return self.report

    async def update(self, weights: Any, make_probe: Any, frozen: Any) -> Any:
        for name, _ in weights:
            self.events.append(name)
        self.events.append("load")
        engines = [make_probe(self), make_probe(self)]
        self.expected = await asyncio.gather(*(probe.ask_trainer() for probe in engines))
        return self.report


class FakePolicy:
    frozen_parts = ()
    dtype = torch.bfloat16
    router_replay = False

    offloaded_bytes = 8

    def __init__(self, events: list[str], adapter: str = "", *, num_ranks: int = 1) -> None:
        self.events = events
        self.adapter = adapter
        self.ranks = SimpleNamespace(size=num_ranks)

    def with_adapter(self, name: str) -> Any:
        return FakePolicy(self.events, name)

    def named_weights(self, dtype: torch.dtype, *, adapter: bool = False) -> Any:
        assert dtype == torch.bfloat16  # the engines'
        yield from (("a", torch.zeros(1)), ("b", torch.zeros(1)))

    def free_cached_memory(self) -> None:
        self.events.append("free")

    def load_base(self) -> None:
        self.events.append("base on")

    def offload_base(self) -> None:
        self.events.append("base off")

    def load_weights(self) -> None:
        self.events.append("weights on")

    def offload_weights(self) -> None:
        self.events.append("weights off")

    def sequence_logprobs(self, sequences: list[list[int]]) -> list[tuple[list[float], float]]:
        self.events.append(f"probe {self.adapter}".strip())
        return [([float(len(self.adapter))] * (len(ids) - 1), 1.0) for ids in sequences]


def events_of_an_update(
    *overrides: str, adapters: Sequence[str] = (), num_ranks: int = 1
) -> list[str]:
    needed = ["data.train_data=[x]", "trainer.policy.model.path=m"]
    config = load_config(None, [*needed, *overrides])
    events: list[str] = []
    pool: Any = FakePool(events)
    environments: Any = None
    prompts = [Prompt("a", [{"role": "user", "content": "x"}], "fake", {})]
    tokenizer = SimpleNamespace(eos_token_id=0, encode=lambda text, **_: [1, 2, 3])
    rollouts = VllmRollouts(config, tokenizer, pool, environments, prompts)

    async def go() -> None:
        policy: Any = FakePolicy(events, num_ranks=num_ranks)
        await rollouts.update_weights(policy, version=0)
        await rollouts.sleep(policy)
        metrics = await rollouts.update_weights(policy, version=1)
        leaves = config.offloads_weights(config.engine_place)
        assert metrics.get("sync/offloaded_bytes") == (8.0 if leaves else None)

    asyncio.run(go())
    of_policies = [PROBE_SEQUENCES * [([len(name)] * 2, 1.0)] for name in adapters or [""]]
    assert pool.expected == 2 * [of_policies if adapters else of_policies[0]]
    return events


def test_the_trainer_frees_its_cache_before_the_engine_wakes_up() -> None:
    events = events_of_an_update("generator.inference_engine.enable_sleep_mode=true")
    assert events == ["verify", "sleep", "a", "b", "free", "load", "probe"]
    assert events_of_an_update() == ["verify", "a", "b", "load", "probe"]


LORA = ["trainer.policy.model.lora.rank=4", "generator.inference_engine.enable_sleep_mode=true"]


@pytest.mark.spec("memory.frozen-base")
def test_trainer_and_engine_have_the_base_on_the_gpu_by_turns() -> None:
    """The engine is asleep while the trainer's base is on the GPU, also before the first update."""
    update = ["sleep", "base on", "probe", "base off", "a", "b", "free", "load"]
    assert events_of_an_update(*LORA) == [*update, "sleep", "base on", *update]


@pytest.mark.spec("memory.offload-weights")
def test_weights_are_on_the_gpu_while_the_engine_sleeps() -> None:
    """One rank sends its copies in main memory; several gather on the GPUs, and make room then."""
    chosen = "trainer.placement.offload_weights=true"
    on = [chosen, "generator.inference_engine.enable_sleep_mode=true"]
    probe = ["sleep", "weights on", "probe"]
    update = [*probe, "weights off", "a", "b", "weights off", "free", "load"]
    assert events_of_an_update(*on) == [*update, "sleep", "weights on", *update]
    update = [*probe, "a", "b", "weights off", "free", "load"]
    assert events_of_an_update(*on, num_ranks=2) == [*update, "sleep", "weights on", *update]
    # Of an adapter the base leaves, and an engine that is awake has memory of its own.
    assert "weights off" not in events_of_an_update(*LORA, chosen)
    assert "weights off" not in events_of_an_update(chosen)


def test_the_trainer_computes_its_side_of_the_probe_once_for_each_policy() -> None:
    """Not for each engine; where the base leaves the GPU, before the engines need it."""
    names = ["planner", "judge"]
    policies = "trainer.policy.model.lora.policies=[planner,judge]"
    update = ["a", "b", "load", *(f"probe {name}" for name in names)]
    awake = events_of_an_update(LORA[0], policies, adapters=names)
    assert awake[:3] == ["a", "b", "load"] and sorted(awake) == sorted(2 * update)
    asleep = events_of_an_update(*LORA, policies, adapters=names)
    assert asleep[:6] == ["sleep", "base on", "probe planner", "probe judge", "base off", "a"]
    assert sorted(asleep).count("probe judge") == 2


def test_the_base_stays_where_the_probe_needs_both_models() -> None:
    """Of merged weights, and of routes that the trainer replays."""
    replay = [
        "trainer.policy.moe_enable_routing_replay=true",
        "generator.inference_engine.enable_return_routed_experts=true",
    ]
    for overrides in (["trainer.policy.model.lora.weight_sync=merged"], replay):
        assert "base off" not in events_of_an_update(*LORA, *overrides)


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        (["trainer.fully_async.enabled=true"], "the engine generates during updates"),
        (
            [
                "generator.inference_engine.run_engines_locally=false",
                "generator.inference_engine.external_server_urls=[http://127.0.0.1:1]",
            ],
            "servers do not sleep",
        ),
    ],
)
def test_sleep_mode_is_refused_where_the_engine_cannot_sleep(
    overrides: list[str], wanted: str
) -> None:
    needed = ["data.train_data=[x]", "trainer.policy.model.path=m"]
    load_config(None, [*needed, *overrides])
    with pytest.raises(
        ConfigError, match=f"enable_sleep_mode: expected null or false with .*, as {wanted}"
    ):
        load_config(
            None, [*needed, *overrides, "generator.inference_engine.enable_sleep_mode=true"]
        )


@pytest.mark.spec("memory.engine-gpus")
def test_arguments_on_a_gpu() -> None:
    engine = InferenceEngineConfig(enable_sleep_mode=True, gpu_ids=[3])
    setup = VllmSetup("model", engine, max_model_len=64)
    on_cpu = vllm_start.engine_args(replace(setup, on_cpu=True))
    assert not {"enable_sleep_mode", "device_ids"} & set(on_cpu)
    setup = replace(setup, on_cpu=False)
    arguments = vllm_start.engine_args(setup)
    assert (arguments["enable_sleep_mode"], arguments["device_ids"]) == (True, [3])
    command = serve_command(setup, host="127.0.0.1", port=1)
    assert command[command.index("--device-ids") + 1] == "3"
    plain = vllm_start.engine_args(VllmSetup("model", max_model_len=64, on_cpu=False))
    assert not {"enable_sleep_mode", "device_ids"} & set(plain)


@pytest.mark.vllm
def test_vllm_has_these_arguments_and_calls() -> None:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = InferenceEngineConfig(enable_sleep_mode=True, gpu_ids=[0])
    setup = VllmSetup("model", engine, max_model_len=64, on_cpu=False)
    arguments = vllm_start.engine_args(setup)
    assert set(arguments) <= {field.name for field in fields(AsyncEngineArgs)}
    inspect.signature(AsyncLLM.sleep).bind(None, level=1, mode="abort")
    inspect.signature(AsyncLLM.wake_up).bind(None, tags=["weights"])


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(900)
async def test_real_vllm_serves_after_sleeping(tiny_model_folder: Path, tmp_path: Path) -> None:
    """On a CPU its worker keeps the memory, but the engine pauses, and waits for both tags.

    The weights come as a file in memory that has no name.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder, dtype=torch.float32)
    setup = VllmSetup(
        str(tiny_model_folder),
        InferenceEngineConfig(max_num_seqs=4),
        max_model_len=64,
        log_file=str(tmp_path / "vllm.log"),
    )
    async with VllmEngine(setup) as engine:
        assert engine.weights_dtype == torch.float32
        before = await engine.prompt_logprobs([1, 2, 3])
        await engine.sleep()
        assert await engine.vllm.llm.is_sleeping()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
        weights = dict(model.named_parameters())
        places = WeightPlaces(shared_memory=tmp_path / "absent")
        with send_by_file(weights, torch.float32, unnamed=True, places=places) as call:
            await engine.load_weights(call)
        assert not await engine.vllm.llm.is_sleeping()
        after = await engine.prompt_logprobs([1, 2, 3])
        ids = torch.tensor([[1, 2, 3]])
        logits = model(ids).logits[0, :-1].log_softmax(-1)
        expected = logits.gather(1, ids[0, 1:, None])[:, 0].tolist()
        assert after == pytest.approx(expected, abs=1e-3) and before != after
        out = await engine.generate(
            [1, 2], SamplingParams(max_generate_length=4), session_id="a", policy_version=1
        )
        assert out.stop_reason in ("length", "stop")
