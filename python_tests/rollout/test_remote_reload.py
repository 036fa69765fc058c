"""A real `vllm serve`: weight updates through its reload of a folder, and attacks on its guard."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import httpx
import pytest
import torch
from _weights import TOLERANCE, Versions, update_engine

from examples.asynchronous.two_servers import end, free_ports
from skyrl_fast.config import InferenceEngineConfig, SamplingParams
from skyrl_fast.rollout.engine.remote import RemoteEngine
from skyrl_fast.rollout.engine.serve_vllm import serve_command, serve_environment
from skyrl_fast.rollout.engine.vllm_start import VllmSetup
from skyrl_fast.rollout.engine.weights.receipt import WeightSyncError

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


KEY = "k" * 32


@contextmanager
def server(model: Path, log: Path, *without: str) -> Iterator[str]:
    """`vllm serve` without these options, which have a value each; its address."""
    (port,) = free_ports(1)
    config = VllmSetup(str(model), InferenceEngineConfig(num_threads=1), max_model_len=256)
    command = serve_command(config, host="127.0.0.1", port=port)
    for option in without:
        at = command.index(option)
        del command[at : at + 2]
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=file,
            env=serve_environment(config, os.environ, key=KEY),
            start_new_session=True,
        )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        end(process)


def plain_server(model: Path, log: Path) -> AbstractContextManager[str]:
    """`vllm serve` as without this package."""
    return server(model, log, "--worker-extension-cls", "--middleware")


def untied(model: Path, folder: Path) -> Path:
    """Return the same model with an untied output head."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    copy = AutoModelForCausalLM.from_pretrained(model, tie_word_embeddings=False)
    copy.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


@pytest.mark.spec("async.server-weights")
def test_weights_reach_a_server_through_vllm_reload(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    folder = untied(tiny_model_folder, tmp_path / "model")
    versions = Versions(folder)

    async def go(url: str) -> None:
        async with RemoteEngine(url, weight_sync="reload") as engine:
            probe = versions.make_probe(engine)
            await probe.verify()
            for version in range(1, 4):
                versions.another()
                weights = dict(versions.models[-1].named_parameters())
                report = await update_engine(engine, probe, weights)
                assert report.difference.maximum < TOLERANCE < report.max_change
                sampling = SamplingParams(max_generate_length=20)
                got = await engine.generate(
                    [5, 6, 7], sampling, session_id="a", policy_version=version, seed=version
                )
                exact = versions.logprobs(version, [5, 6, 7, *got.token_ids])[2:].tolist()
                assert got.logprobs == pytest.approx(exact, abs=TOLERANCE)

    with plain_server(folder, tmp_path / "server.log") as url:
        asyncio.run(go(url))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the packed copy is that of CPU kernels")
@pytest.mark.spec("async.server-weights")
def test_reload_that_does_not_update_a_tied_head_is_refused(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    versions = Versions(tiny_model_folder)

    async def go(url: str) -> None:
        async with RemoteEngine(url, weight_sync="reload") as engine:
            probe = versions.make_probe(engine)
            await probe.verify()
            versions.another()
            with pytest.raises(WeightSyncError, match="take weight_sync_backend=file"):
                await update_engine(engine, probe, dict(versions.models[-1].named_parameters()))

    with plain_server(tiny_model_folder, tmp_path / "server.log") as url:
        asyncio.run(go(url))


@pytest.mark.spec("engine.guard")
def test_attacks_on_a_real_server_are_refused(tiny_model_folder: Path, tmp_path: Path) -> None:
    versions = Versions(tiny_model_folder)
    stolen = tmp_path / "stolen"

    async def go(url: str) -> None:
        async with RemoteEngine(url, api_key=KEY) as engine:
            async with httpx.AsyncClient(base_url=url) as other:
                await attack(other)
            async with httpx.AsyncClient(base_url=url, headers=engine._headers) as trainer:
                for method in ("save_sharded_state", "__class__"):
                    call = {"method": method, "args": [str(stolen)]}
                    answer = await trainer.post("/collective_rpc", json=call)
                    assert answer.status_code == 403
            probe = versions.make_probe(engine)
            await probe.verify()
            versions.another()
            report = await update_engine(
                engine, probe, dict(versions.models[-1].named_parameters())
            )
            assert report.difference.maximum < TOLERANCE < report.max_change

    async def attack(client: httpx.AsyncClient) -> None:
        """Send what a web page or another user could."""
        call = f'{{"method": "save_sharded_state", "args": ["{stolen}"]}}'
        text = {"content-type": "text/plain"}
        page = {**text, "origin": "http://evil.example", "authorization": f"Bearer {KEY}"}
        for headers, status in ((text, 401), (page, 403)):
            for path in ("/collective_rpc", "/pause?mode=abort", "/sleep", "/v1/completions"):
                answer = await client.post(path, content=call, headers=headers)
                assert answer.status_code == status, path
            for path in ("/health", "/metrics", "/openapi.json", "/version"):
                assert (await client.get(path, headers=headers)).status_code == status, path

    with server(tiny_model_folder, tmp_path / "server.log") as url:
        asyncio.run(go(url))
    assert not stolen.exists()
