"""How a run finds its cluster: by RAY_ADDRESS, on this machine without it, as a Ray job."""

import importlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")
from _fakes import tiny_model
from ray.util import get_node_ip_address

from skyrl_fast.train.checkpoint.local import newest_intact

ROOT = Path(__file__).resolve().parents[2]
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
START_SECONDS = 120  # of a node, on a loaded machine
pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(600)]


@dataclass(frozen=True, slots=True)
class Running:
    """A cluster of a head without CPUs and two nodes, which asks for a token.

    Args:
        environment: of processes on its machine, without RAY_ADDRESS.
        address: of the cluster.
        dashboard: its URL.
    """

    environment: Mapping[str, str]
    address: str
    dashboard: str


def free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    folder = tempfile.mkdtemp(prefix="ray")  # short: it has sockets, whose paths are limited
    address, dashboard = f"{get_node_ip_address()}:{free_port()}", free_port()
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    environment = {**os.environ, **token, "RAY_TMPDIR": folder, "PYTHONPATH": path}
    environment.pop("RAY_ADDRESS", None)
    head = ["--head", f"--port={address.rpartition(':')[2]}", f"--dashboard-port={dashboard}"]
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        nodes = [[*head, "--num-cpus=0"], *2 * [[f"--address={address}", "--num-cpus=1"]]]
        for number, node in enumerate(nodes, start=1):
            command = [*RAY, "start", "--block", *node]
            process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
            stack.callback(process.wait, 30)
            stack.callback(process.terminate)
            wait_for_nodes(number, address, environment)  # two at once disturb each other
        yield Running(environment, address, f"http://127.0.0.1:{dashboard}")


def wait_for_nodes(number: int, address: str, environment: Mapping[str, str]) -> None:
    deadline = time.monotonic() + START_SECONDS
    command = [*RAY, "status", f"--address={address}"]
    while True:
        status = subprocess.run(command, env=environment, capture_output=True, text=True)
        if status.stdout.count(" 1 node_") == number:
            return
        assert time.monotonic() < deadline, status.stderr
        time.sleep(0.5)


@pytest.fixture
def command(tmp_path: Path, tiny_tokenizer: Any) -> list[str]:
    """Return a command that trains two ranks on two nodes."""
    model = tiny_model()
    model.resize_token_embeddings(len(tiny_tokenizer))
    for part in (model, tiny_tokenizer):
        part.save_pretrained(tmp_path / "model")
    (tmp_path / "chats.jsonl").write_text(
        8 * (json.dumps({"prompt": "x", "completion": "yz"}) + "\n")
    )
    settings = {
        "data.train_data": f"[{tmp_path}/chats.jsonl]",
        "trainer.run_path": tmp_path / "run",
        "trainer.policy.model.path": tmp_path / "model",
        "trainer.train_batch_size": 4,
        "trainer.policy_mini_batch_size": 4,
        "trainer.epochs": 2,
        "trainer.device": "cpu",
        "trainer.plot": "false",
        "trainer.placement.policy_num_nodes": 2,
    }
    (tmp_path / "config.yaml").write_text("{}")
    overrides = [f"{name}={value}" for name, value in settings.items()]
    return [sys.executable, "-m", "skyrl_fast", "sft", f"{tmp_path}/config.yaml", *overrides]


@pytest.mark.spec("update.cluster-found")
@pytest.mark.parametrize("way", ["RAY_ADDRESS", "this machine", "job"])
def test_run_uses_the_running_cluster(
    running: Running, command: list[str], tmp_path: Path, way: str
) -> None:
    environment = dict(running.environment)
    if way == "RAY_ADDRESS":
        environment["RAY_ADDRESS"] = running.address
    if way == "job":
        try:
            importlib.import_module("ray.dashboard.optional_deps")
        except ImportError:
            pytest.skip("needs ray[default]")
        command = [*RAY, "job", "submit", f"--address={running.dashboard}", "--", *command]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    newest, damaged = newest_intact(tmp_path / "run/checkpoints")
    assert newest is not None and damaged == []
    assert newest.name == "step_000004"
    shards = sorted(path.name for path in (newest / "optimizer").glob("shard-*"))
    assert [name[:11] for name in shards] == ["shard-00001", "shard-00002"]  # both nodes
