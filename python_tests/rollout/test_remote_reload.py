"""A real `vllm serve`: weight updates through its reload of a folder, and attacks on its guard."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from _served import KEY, plain_server, server
from _weights import ADAPTER, TOLERANCE, AdapterVersions, Versions, update_engine

from skyrl_fast.config import SamplingParams
from skyrl_fast.rollout.engine.remote import RemoteEngine
from skyrl_fast.rollout.engine.weights.receipt import WeightSyncError

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]


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


@pytest.mark.spec("lora.servers")
@pytest.mark.parametrize("weight_sync", ["file", "reload"])
def test_adapters_reach_a_server(tiny_model_folder: Path, tmp_path: Path, weight_sync: str) -> None:
    """Its cached keys and values of one prompt are those of one version, never of the one before.

    The second trainer begins with the numbers of the first again.
    """
    versions = AdapterVersions(tiny_model_folder)
    options: dict[str, Any] = {"weight_sync": weight_sync, "adapter": ADAPTER}
    prompt, sampling = list(range(40, 140)), SamplingParams(max_generate_length=20)

    async def go(url: str) -> list[str]:
        async with RemoteEngine(url, api_key=KEY, **options) as engine:
            probe, names = versions.make_probe(engine), []
            for _ in range(3):
                versions.another()
                version = len(versions.models) - 1
                report = await update_engine(engine, probe, versions.weights())
                assert report.difference.maximum < TOLERANCE
                assert report.num_bytes == sum(t.nbytes for _, t in versions.weights())
                names.append(str(engine.adapter_name))
                for _ in range(2):
                    # the salt stays, as that of two trainers' versions may be the same
                    got = await engine.generate(
                        prompt, sampling, session_id="a", policy_version=0, seed=1
                    )
                    exact = versions.logprobs(version, [*prompt, *got.token_ids])
                    exact = exact[len(prompt) - 1 :].tolist()
                    assert got.logprobs == pytest.approx(exact, abs=TOLERANCE)
            async with httpx.AsyncClient(base_url=url, headers=engine.headers) as client:
                models = (await client.get("/v1/models")).json()
            served = {model["id"] for model in models["data"][1:]}
            assert served & {*names} == {names[-1]}
            assert len(served) == 1 or weight_sync == "reload"  # which keeps another trainer's
        return names

    start = server if weight_sync == "file" else plain_server
    with start(tiny_model_folder, tmp_path / "server.log", adapter=ADAPTER) as url:
        first, second = asyncio.run(go(url)), asyncio.run(go(url))
    assert len({*first, *second}) == 6


def test_an_adapter_with_another_scale_than_the_servers_is_refused(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    versions = AdapterVersions(tiny_model_folder)

    async def go(url: str) -> None:
        for adapter in ({**ADAPTER, "lora_alpha": 24}, None):
            async with RemoteEngine(url, api_key=KEY, adapter=adapter) as engine:
                with pytest.raises(WeightSyncError, match="with the same settings of LoRA"):
                    await update_engine(engine, versions.make_probe(engine), versions.weights())

    with server(tiny_model_folder, tmp_path / "server.log", adapter=ADAPTER) as url:
        asyncio.run(go(url))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the packed copy is that of CPU kernels")
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
            async with httpx.AsyncClient(base_url=url, headers=engine.headers) as trainer:
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
