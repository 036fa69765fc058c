"""Real vLLM: weight updates during generation, and a killed engine process."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from _listening import LOOPBACK, listening
from _weights import (
    ADAPTER,
    AdapterVersions,
    Versions,
    engine_process,
    kill_engine_process,
    wrong_tokens,
)
from fake_envs import FakePrompt, loop_config, register_fakes

from skyrl_fast.config import EnvironmentConfig, InferenceEngineConfig, SamplingParams
from skyrl_fast.rollout.engine.pool import EnginePool
from skyrl_fast.rollout.engine.vllm_engine import VllmEngine
from skyrl_fast.rollout.engine.vllm_start import VllmSetup
from skyrl_fast.rollout.engine.weights.gate import WeightGate
from skyrl_fast.rollout.engine.weights.transports.broadcast import send_by_broadcast
from skyrl_fast.rollout.env.factory import EnvFactory
from skyrl_fast.rollout.groups import environment_runner, run_groups
from skyrl_fast.rollout.policy_calls import PolicyCalls

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
register_fakes()


@pytest.mark.slow
@pytest.mark.parametrize("has_adapter", [pytest.param(False, marks=pytest.mark.ci), True])
@pytest.mark.spec("async.token-versions")
async def test_every_token_has_its_version_and_a_killed_engine_restarts(
    tiny_tokenizer: Any, tiny_model_folder: Path, tmp_path: Path, has_adapter: bool
) -> None:
    versions = AdapterVersions(tiny_model_folder) if has_adapter else Versions(tiny_model_folder)
    config = VllmSetup(
        str(tiny_model_folder),
        InferenceEngineConfig(weight_sync_backend="gloo"),
        log_file=str(tmp_path / "engine.log"),
        adapter=ADAPTER if has_adapter else None,
    )
    pool = EnginePool([VllmEngine(config)], transport=send_by_broadcast)
    await pool.start()
    gate = WeightGate()
    factory = EnvFactory(EnvironmentConfig())
    loop = loop_config(
        n_samples_per_prompt=6,
        max_turns=3,
        max_input_length=900,
        sampling_params=SamplingParams(
            max_generate_length=120, additional_kwargs={"ignore_eos": True}
        ),
    )
    runner = environment_runner(PolicyCalls(pool, gate, tiny_tokenizer, 0), factory, loop)
    try:
        await pool.verify(versions.make_probe)
        prompts = [FakePrompt(str(i)) for i in range(4)]
        work = asyncio.create_task(run_groups(runner, prompts, phase="train", policy_version=0))
        for version in range(1, 4):
            await asyncio.sleep(0.15)
            versions.another()
            async with gate.hold_closed(pool.interrupt):
                await pool.update(versions.weights(), versions.make_probe)
                gate.version = version
        got = await work
        wrong, total, largest = wrong_tokens(versions, got)
        print(f"{total} tokens, largest difference {largest:.1e}")
        assert wrong == 0 and total == 24 * 3 * 120
        mixed = [s for t in got for s in t.steps if s.token_versions is not None]
        assert mixed, "no request was interrupted: the updates came too late"

        work = asyncio.create_task(run_groups(runner, prompts, phase="train", policy_version=3))
        await asyncio.sleep(0.15)
        kill_engine_process()
        await asyncio.wait_for(pool.wait_for_fault(), 60)
        assert not work.done()
        await pool.repair(versions.weights(), versions.make_probe)
        got = await work
        assert [t.failure for t in got] == [None] * 24
        assert wrong_tokens(versions, got)[:2] == (0, 24 * 3 * 120)
        assert {v for t in got for s in t.steps for v in s.versions} == {3}
        assert pool.faults["engine_deaths"] == pool.faults["engine_restarts"] == 1
        for pid in (os.getpid(), engine_process()):
            assert listening(pid) <= {LOOPBACK}
    finally:
        await pool.close()
        await factory.close()
