"""Runs whose engines are scripted servers instead of vLLM: their tokens are the same to the bit."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from _cluster_run import processes, share_of_e

from skyrl_fast.config import Config
from skyrl_fast.rollout.engine import from_settings
from skyrl_fast.rollout.engine.engine_server import EngineServer, ServerAccess
from skyrl_fast.rollout.engine.ray_engine import RayEngine
from skyrl_fast.rollout.engine.started_engine import NodeEngine
from skyrl_fast.rollout.engine.vllm_start import VllmSetup
from skyrl_fast.train.flow.event_loop import StopSignals
from skyrl_fast.train.parallel.rank_processes import RankStarter
from skyrl_fast.train.run import RunRequest
from skyrl_fast.train.setup.given_objects import GivenObjects

SERVER = Path(__file__).parent / "_scripted_server.py"


def scripted_command(setup: VllmSetup, *, host: str, port: int) -> list[str]:
    return [sys.executable, str(SERVER), host, str(port), setup.model]


def scripted_server(make_setup: Callable[[], VllmSetup], access: ServerAccess) -> EngineServer:
    return EngineServer(make_setup, access, command=scripted_command)


def use_scripted_engines() -> None:
    """Let the runs of this process start scripted servers."""
    names: Any = from_settings
    names.NodeEngine = partial(NodeEngine, make_server=scripted_server)
    names.RayEngine = partial(RayEngine, make_server=scripted_server)


def scripted_servers() -> list[int]:
    """Return the processes of this test's scripted servers."""
    name = str(SERVER).encode()
    return processes(lambda command: name in command.split(b"\0"))


class ScriptedRun:
    """Runs rank 0 where it is called, with scripted engines; picklable."""

    def __call__(self, config: Config, signals: StopSignals, starter: RankStarter) -> Any:
        use_scripted_engines()
        make_env = GivenObjects("train_agent", reward=share_of_e).write_into(config)
        return RunRequest(make_env=make_env).run_here(config, signals, starter)
