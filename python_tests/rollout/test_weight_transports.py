"""Each transport to the same pair of scripted workers: order, restarts, errors, dtypes."""

import asyncio
from typing import Any

import pytest
import torch
from _weights import ScriptedEngine, make_probe, no_sending_thread

from skyrl_fast.rollout.engine.pool import EnginePool
from skyrl_fast.rollout.engine.weights.receipt import WeightSyncError
from skyrl_fast.rollout.engine.weights.transports.broadcast import send_by_broadcast
from skyrl_fast.rollout.engine.weights.transports.file import send_by_file

pytestmark = [pytest.mark.parametrize("backend", ["file", "gloo"])]
TRANSPORTS: dict[str, Any] = {"file": send_by_file, "gloo": send_by_broadcast}
LOADS = {"file": "load_weights_file", "gloo": "load_weights_broadcast"}
STARTS = {"file": [], "gloo": ["join_weights_group"]}
SENT = {"w": torch.ones(1), "large": torch.linspace(0, 1, 8 << 20)}


def make_pool(*engines: ScriptedEngine, backend: str) -> EnginePool:
    return EnginePool(engines, transport=TRANSPORTS[backend])


def holds_what_was_sent(engine: ScriptedEngine) -> bool:
    loaded = [worker.model.loaded for worker in engine.llms[-1].workers]
    return all(torch.equal(one[name], SENT[name]) for one in loaded for name in SENT)


async def test_workers_are_awake_before_they_load(backend: str) -> None:
    engine = ScriptedEngine(backend)
    pool = make_pool(engine, backend=backend)

    await pool.start()
    await pool.sleep()
    await pool.update(SENT, make_probe)
    await pool.update(SENT, make_probe)  # awake: as always
    await pool.close()
    load = [LOADS[backend], "reset_prefix_cache"]
    assert engine.llms[0].calls == [
        *(*STARTS[backend], "sleep 1 abort", "wake_up weights", *load, "wake_up kv_cache"),
        *(*load, "shutdown"),
    ]
    assert holds_what_was_sent(engine)
    assert pool.reports[0].num_bytes == 4 + (32 << 20)


async def test_an_engine_that_dies_in_an_update_gets_the_weights_after_its_restart(
    backend: str,
) -> None:
    engine = ScriptedEngine(backend)
    pool = make_pool(engine, backend=backend)

    await pool.start()
    engine.llms[0].fault = "dies"
    await asyncio.wait_for(pool.update(SENT, make_probe), 60)
    first, second = engine.llms
    assert first.calls == [*STARTS[backend], LOADS[backend], "shutdown"]
    assert second.calls[: len(first.calls) - 1] == [*STARTS[backend], LOADS[backend]]
    assert holds_what_was_sent(engine)
    assert (pool.faults["engine_deaths"], pool.faults["engine_restarts"]) == (1, 1)


@pytest.mark.parametrize("dies", ["while it falls asleep", "asleep"])
async def test_an_engine_that_dies_asleep_restarts_awake(dies: str, backend: str) -> None:
    engine = ScriptedEngine(backend)
    pool = make_pool(engine, backend=backend)

    await pool.start()
    engine.llms[0].errored = dies != "asleep"
    await pool.sleep()
    engine.llms[0].errored = True
    await pool.update(SENT, make_probe)
    calls = [*STARTS[backend], LOADS[backend], "reset_prefix_cache"]
    assert engine.llms[1].calls == calls  # neither sleeps nor wakes up
    assert (pool.faults["engine_deaths"], pool.faults["engine_restarts"]) == (1, 1)


async def load(
    engine: ScriptedEngine, fault: str, weights: Any = SENT, *, seconds: float = 60.0
) -> None:
    await engine.start()
    engine.llms[0].fault = fault
    with TRANSPORTS[engine.backend](weights, None) as call:
        async with asyncio.timeout(seconds):
            await engine.load_weights(call)


def test_an_error_of_the_loader_ends_the_update(backend: str) -> None:
    with pytest.raises(WeightSyncError, match="could not load the new weights: unknown layer"):
        asyncio.run(load(ScriptedEngine(backend), "refuses"))
    assert no_sending_thread()


@pytest.mark.spec("sync.receipts")
def test_a_parameter_without_a_new_value_is_named(backend: str) -> None:
    with pytest.raises(WeightSyncError, match="parameters got no new values: w"):
        asyncio.run(load(ScriptedEngine(backend), "", {"large": SENT["large"]}))


@pytest.mark.spec("sync.receipts")
async def test_a_shared_parameter_is_loaded_by_any_of_its_names(backend: str) -> None:
    engine = ScriptedEngine(backend)
    await engine.start()
    for worker in engine.llms[0].workers:
        worker.model.other = torch.nn.Module()
        worker.model.other.w = worker.model.w
    weights = {"large": SENT["large"], "other.w": torch.ones(1)}
    with TRANSPORTS[backend](weights, None) as call:
        await engine.load_weights(call)
    assert "other.w" in engine.llms[0].workers[0].model.loaded


def test_an_update_that_is_cancelled_ends_the_transfer(backend: str) -> None:
    with pytest.raises(TimeoutError):
        asyncio.run(load(ScriptedEngine(backend), "hangs", seconds=0.5))
    assert no_sending_thread()


@pytest.mark.spec("async.weight-transfer")
@pytest.mark.parametrize(
    ("second", "expected"), [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32)]
)
async def test_weights_are_cast_if_all_engines_have_one_dtype(
    second: torch.dtype, expected: torch.dtype, backend: str
) -> None:
    engines = [ScriptedEngine(backend), ScriptedEngine(backend)]
    for engine, dtype in zip(engines, (torch.bfloat16, second), strict=True):
        engine.weights_dtype = dtype
    pool = make_pool(*engines, backend=backend)

    await pool.start()
    await pool.update({"w": torch.ones(1)}, make_probe)
    await pool.close()
    workers = [worker for engine in engines for worker in engine.llms[0].workers]
    assert [worker.model.loaded["w"].dtype for worker in workers] == [expected] * 4
