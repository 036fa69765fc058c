"""Several engines of one machine: their servers' starts, ends and restarts, with real processes."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from skyrl_fast.config import SamplingParams
from skyrl_fast.config.loading import load_config
from skyrl_fast.config.settings import Config
from skyrl_fast.rollout.engine.engine_server import EngineServer, ServerAccess
from skyrl_fast.rollout.engine.from_settings import make_engines, make_untrained_engines
from skyrl_fast.rollout.engine.pool import EnginePool, PoolSeconds
from skyrl_fast.rollout.engine.protocol import EngineDeadError
from skyrl_fast.rollout.engine.remote import ServerLimits
from skyrl_fast.rollout.engine.started_engine import NodeEngine
from skyrl_fast.rollout.engine.vllm_engine import VllmEngine
from skyrl_fast.rollout.engine.vllm_start import VllmSetup

SERVER = Path(__file__).parents[1] / "helpers" / "_small_server.py"
QUICK = PoolSeconds(poll=0.01)


def small_command(behaviour: str, setup: VllmSetup, *, host: str, port: int) -> list[str]:
    return [sys.executable, str(SERVER), host, str(port), behaviour]


def small_server(
    behaviour: str, make_setup: Callable[[], VllmSetup], access: ServerAccess
) -> EngineServer:
    return EngineServer(make_setup, access, command=partial(small_command, behaviour))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text("")
    return folder


def node_engine(model: Path, number: int = 0, *, behaviour: str = "", **options: Any) -> NodeEngine:
    return NodeEngine(
        number,
        VllmSetup(str(model), log_file=str(model.parent / f"engine_{number}.log"), on_cpu=True),
        ServerAccess(f"key {number}"),
        weight_sync=None,
        make_server=partial(small_server, behaviour),
        limits=ServerLimits(start_poll=0.01),
        **options,
    )


async def ask(engine: NodeEngine | EnginePool, session: str = "s") -> int:
    """Return the process that answers."""
    sampling = SamplingParams(max_generate_length=1)
    got = await engine.generate([1, 2], sampling, session_id=session, policy_version=0)
    return got.token_ids[0]


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.spec("update.node-engines")
async def test_engines_are_processes_and_one_that_dies_comes_back(model: Path) -> None:
    engines = [node_engine(model, number) for number in range(2)]
    pool = EnginePool(engines, seconds=QUICK)
    await pool.start()
    first, second = [await ask(pool, f"s{number}") for number in range(2)]
    assert first != second and os.getpid() not in (first, second)
    assert [await ask(pool, f"s{number}") for number in range(2)] == [first, second]
    os.kill(first, signal.SIGKILL)
    await asyncio.wait_for(pool.wait_for_fault(), 20)
    assert await ask(pool, "s0") == second
    reason = f"its server exited with code -9; {model.parent}/engine_0.log ends"
    assert reason in pool.activity()[0]
    while pool.activity():
        await pool.restart()
    third = await ask(pool, "s2")
    assert third not in (first, second)
    await pool.close()
    assert not any(map(is_running, (first, second, third)))


@pytest.mark.spec("update.node-engines")
async def test_signals_of_a_terminal_do_not_reach_the_servers(model: Path) -> None:
    engine = node_engine(model)
    await engine.start()
    pid = await ask(engine)
    assert os.getpgid(pid) == pid != os.getpgid(0)
    await engine.close()


@pytest.mark.parametrize(
    ("behaviour", "wanted"),
    [
        ("exits", r"engine 0 at http://127.0.0.1:\d+: its server exited with code 3; .*no memory"),
        ("silent", r"engine 0 at .* did not answer within 0.5 s: it answered 503"),
    ],
)
@pytest.mark.spec("update.node-engines")
async def test_a_server_that_does_not_start_says_why(
    behaviour: str, wanted: str, model: Path
) -> None:
    seconds = 0.5 if behaviour == "silent" else 20.0
    engine = node_engine(model, behaviour=behaviour, start_seconds=seconds)
    with pytest.raises(EngineDeadError, match=wanted):
        await engine.start()
    await engine.close()


async def test_without_a_model_no_process_starts(tmp_path: Path) -> None:
    engine = node_engine(tmp_path / "nowhere")
    with pytest.raises(EngineDeadError, match="model folder not found"):
        await engine.start()


OWNER = """
import asyncio, sys
from pathlib import Path
sys.path[:0] = {paths!r}
from test_node_engine import ask, node_engine

async def main():
    engine = node_engine(Path({model!r}))
    await engine.start()
    print(await ask(engine), flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.spec("update.node-engines")
def test_a_server_ends_with_its_trainer_however_that_ends(model: Path) -> None:
    paths = [str(Path(__file__).parent), str(SERVER.parent)]
    script = OWNER.format(paths=paths, model=str(model))
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    assert is_running(pid)
    owner.kill()
    owner.wait()
    deadline = time.monotonic() + 20
    while is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def config_of(model: Path, *overrides: str) -> Config:
    needed = [
        "data.train_data=[a.jsonl]",
        f"trainer.policy.model.path={model}",
        f"trainer.run_path={model.parent}/run",
        "trainer.device=cpu",
    ]
    return load_config(None, [*needed, *overrides])


@pytest.mark.spec("update.node-engines")
def test_engines_share_gpus_and_threads(model: Path) -> None:
    key = "generator.inference_engine"
    (one,) = make_engines(config_of(model), str(model))
    assert isinstance(one, VllmEngine)
    config = config_of(model, f"{key}.num_engines=2")
    config.generator.inference_engine.gpu_ids = [4, 5, 6, 7]
    config.generator.inference_engine.tensor_parallel_size = 2
    engines = make_engines(config, str(model))
    assert [engine.name for engine in engines] == ["engine 0", "engine 1"]
    setups = [engine.setup for engine in engines if isinstance(engine, NodeEngine)]
    assert [setup.engine.gpu_ids for setup in setups] == [[4, 5], [6, 7]]
    logs = [f"{model.parent}/run/engine_{number}.log" for number in range(2)]
    assert [setup.log_file for setup in setups] == logs
    keys = {engine.access.key for engine in engines if isinstance(engine, NodeEngine)}
    assert len(keys) == 2
    assert len(make_untrained_engines(config, str(model))) == 2
