"""Scripted workers that load weights for real, engines of them, and updates with a probe."""

import asyncio
import contextlib
import copy
import json
import os
import signal
import time
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import torch

from examples.asynchronous.soak import children, command_of
from skyrl_fast.config import InferenceEngineConfig
from skyrl_fast.config.settings import LoraConfig
from skyrl_fast.rollout.engine.protocol import Engine
from skyrl_fast.rollout.engine.remote import COMPLETIONS, LOAD_ADAPTER, RemoteEngine, ServerLimits
from skyrl_fast.rollout.engine.vllm_engine import Vllm, VllmEngine
from skyrl_fast.rollout.engine.vllm_patches.packed_weights import renew_packed_weights
from skyrl_fast.rollout.engine.vllm_start import VllmSetup
from skyrl_fast.rollout.engine.weights.group import GroupSeconds
from skyrl_fast.rollout.engine.weights.probe import WeightProbe, WeightSyncReport
from skyrl_fast.rollout.engine.weights.receipt import SentWeights
from skyrl_fast.rollout.engine.weights.transfer import Weights, WorkerCall, transfer_weights
from skyrl_fast.rollout.engine.weights.transports.broadcast import receive_by_broadcast
from skyrl_fast.rollout.engine.weights.transports.file import send_by_file
from skyrl_fast.rollout.engine.weights.worker import WeightUpdateExtension
from skyrl_fast.rollout.trajectory import Trajectory
from skyrl_fast.train.model.lora import add_adapter, merge
from skyrl_fast.train.model.policy import Policy

CPU = torch.device("cpu")
CHOICE = {"token_ids": [5], "logprobs": {"token_logprobs": [-0.5]}, "finish_reason": "stop"}
TOLERANCE = 1e-3  # float32 on both sides, as in LIMITS


class Model(torch.nn.Module):
    """vLLM's model, which keeps what its loader takes."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: dict[str, torch.Tensor] = {}
        self.w = torch.nn.Parameter(torch.zeros(1))

    def load_weights(self, weights: Any) -> set[str]:
        self.loaded = dict(weights)
        return {*self.loaded}


class Worker(WeightUpdateExtension):
    """The attributes of vLLM's worker that a load uses."""

    def __init__(self, rank: int = 0, dtype: torch.dtype = torch.float32) -> None:
        self.parallel_config = SimpleNamespace(world_size=1)
        self.rank, self.device = rank, CPU
        self.model = Model()
        with renew_packed_weights(self.model):
            pass  # what a load imports of vLLM takes seconds, which no limit is to count
        self.model_config = SimpleNamespace(dtype=dtype)
        adapters = SimpleNamespace(remove_all_adapters=self.model.loaded.clear)
        self.model_runner = SimpleNamespace(
            get_model=lambda: self.model, lora_manager=SimpleNamespace(_adapter_manager=adapters)
        )

    def _load_adapter(
        self, matrices: dict[str, torch.Tensor], config: dict[str, Any], version: int
    ) -> list[str]:
        self.model.loaded = matrices
        return []

    def reload_weights(self, weights_iterator: Any) -> None:
        self.model.load_weights(weights_iterator)


class Llm:
    """vLLM's AsyncLLM whose workers are threads; `fault` is what their next call does."""

    def __init__(self, *, num_workers: int = 2) -> None:
        self.errored = False
        self.calls: list[str] = []
        self.fault = ""
        self.workers = [Worker(rank) for rank in range(num_workers)]

    async def collective_rpc(
        self, method: str, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        self.calls.append(method)
        loading = method.startswith("load")
        if loading and self.fault == "dies":
            self.errored = True
            for worker in self.workers:
                vars(worker).pop("weights_group", None)
            await asyncio.Event().wait()
        if loading and self.fault == "hangs":
            await asyncio.Event().wait()
        if loading and self.fault == "refuses":
            raise ValueError("unknown layer")
        options = kwargs or {}
        calls = (asyncio.to_thread(getattr(w, method), *args, **options) for w in self.workers)
        return await asyncio.gather(*calls)

    async def wake_up(self, tags: list[str]) -> None:
        self.calls.append(f"wake_up {tags[0]}")

    async def sleep(self, level: int, mode: str) -> None:
        if self.fault == "cannot sleep":
            raise RuntimeError("Memory usage increased after sleeping.")
        self.calls.append(f"sleep {level} {mode}")

    async def reset_prefix_cache(self) -> None:
        self.calls.append("reset_prefix_cache")

    def shutdown(self, seconds: float) -> None:
        self.calls.append("shutdown")


FEW_SECONDS = GroupSeconds(notice=2.0)


class ScriptedEngine(VllmEngine):
    """An engine of such workers, connected for real."""

    def __init__(self, backend: str = "gloo", *, seconds: GroupSeconds = FEW_SECONDS) -> None:
        setup = VllmSetup("model", InferenceEngineConfig(weight_sync_backend=backend))
        super().__init__(setup, group_seconds=seconds)
        self.backend = backend
        self.llms: list[Llm] = []

    async def start(self) -> None:
        llm = Llm()
        self.llms.append(llm)
        self.vllm = Vllm(llm, dict, dict, None, (ValueError,), KeyError)
        if self.backend == "gloo":
            await self._join_workers(self.backend, len(llm.workers))

    async def prompt_logprobs(self, token_ids: Any) -> list[float]:
        return [0.0] * (len(token_ids) - 1)


class Server(RemoteEngine):
    """A server of such workers, with the client that is connected to it for real.

    Attributes:
        asked: the update's calls so far: paths, or methods of workers.
        fault_at: number of the call that has a fault, and its kind.
        adapters: names of those that it was given.
        sampled: the model of each request for tokens that it answered.
    """

    def __init__(
        self,
        url: str = "http://a:1",
        dtype: str = "float32",
        weight_sync: str = "gloo",
        adapter: dict[str, Any] | None = None,
        seconds: GroupSeconds = FEW_SECONDS,
    ) -> None:
        options: dict[str, Any] = {"weight_sync": weight_sync, "adapter": adapter}
        options["limits"] = ServerLimits(group=seconds)
        transport = httpx.MockTransport(self.respond)
        super().__init__(url, trainer="127.0.0.1", transport=transport, **options)
        self.adapters: list[str] = []
        self.asked: list[str] = []
        self.sampled: list[str] = []
        self.fault_at: tuple[int, str] | None = None
        self.paused = False
        self.llm = Llm()
        self.serves: str | None = None  # name of its adapter
        self.healthy = True
        self.dtype = dtype

    def kill(self) -> None:
        """Lose all that the process has; the next request fails, then another process serves."""
        self.llm, self.healthy = Llm(), False
        self.serves = None
        self.fault_at = len(self.asked), "reset"

    async def respond(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        call = json.loads(request.content) if request.content else {}
        number = len(self.asked)
        if path != "/health":
            self.asked.append(call.get("method", path))
        if self.fault_at is None or number != self.fault_at[0]:
            return await self._respond(path, call)
        kind = self.fault_at[1]
        self.fault_at = None
        if kind == "500":
            return httpx.Response(500, text="out of memory")
        if kind == "reset":
            self.healthy = False
            raise httpx.ReadError("connection reset")
        if kind == "hang":
            await asyncio.Event().wait()
        answer = await self._respond(path, call)
        if kind == "half":
            return httpx.Response(200, content=b'{"results": [{"dig')
        results = answer.json()["results"]  # "wrong digest"
        results[0]["digests"]["w"] = "0" * 16
        return httpx.Response(200, json={"results": results})

    async def _respond(self, path: str, call: dict[str, Any]) -> httpx.Response:
        if path in ("/pause", "/resume"):
            self.paused = path == "/pause"
        if path == LOAD_ADAPTER:
            self.adapters.append(call["lora_name"])
            self.serves = call["lora_name"]
            return httpx.Response(200)
        if path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        if path == "/health" and not self.healthy:
            self.healthy = True  # the next time
            return httpx.Response(503)
        if path == COMPLETIONS:
            if call["model"] != self.serves:
                return httpx.Response(404, text=f"The model {call['model']} does not exist.")
            self.sampled.append(call["model"])
            return httpx.Response(200, json={"choices": [CHOICE]})
        if path != "/collective_rpc":
            return httpx.Response(200, json={})
        method = call["method"]
        if method in ("apply_patches", "weights_dtype"):
            answer = self.dtype if method == "weights_dtype" else None
            return httpx.Response(200, json={"results": [answer] * 2})
        if method.startswith("load") and self.llm.fault == "dies in a bucket":
            self.llm.fault, self.healthy = "", False
            await asyncio.gather(*(asyncio.to_thread(die, w) for w in self.llm.workers))
            raise httpx.ReadError("connection lost")
        try:
            options = call.get("kwargs")
            results = await self.llm.collective_rpc(method, tuple(call["args"]), options)
        except ValueError as error:
            return httpx.Response(500, text=str(error))
        return httpx.Response(200, json={"results": results})

    async def prompt_logprobs(self, token_ids: Any) -> list[float]:
        return [0.0] * (len(token_ids) - 1)


def die(worker: Any) -> None:
    """Receive one bucket, then close the connections."""
    with contextlib.suppress(RuntimeError):  # the other one died before
        next(receive_by_broadcast(worker.weights_group))
    del worker.weights_group


def make_probe(engine: Any) -> WeightProbe:
    """Return a probe that all engines pass whose logprobs are 0."""
    return WeightProbe(engine, probe=[[1, 2]], trainer_logprobs=lambda probe: [([0.0], 1.0)])


def file_call(path: Any) -> WorkerCall:
    """Return the call that loads a file without tensors."""
    return WorkerCall("file", [str(path)], SentWeights())


async def update_engine(
    engine: Any, probe: WeightProbe, weights: Weights, frozen: Collection[str] = ()
) -> WeightSyncReport:
    """Load the weights by a file, and verify them."""
    started = time.perf_counter()
    async with transfer_weights(send_by_file, weights, engine.weights_dtype, frozen) as call:
        await engine.load_weights(call)
        await engine.resume()  # as a pool does
    seconds = time.perf_counter() - started
    return await probe.verify(update_seconds=seconds, num_bytes=call.sent.num_bytes)


def no_sending_thread() -> bool:
    """Return whether the threads that send end, within a time for a loaded machine."""
    import threading

    deadline = time.monotonic() + 30
    while any(thread.name == "weights" for thread in threading.enumerate()):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


class Versions:
    """The model of each policy version, each slightly different."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()]

    def another(self) -> None:
        model = copy.deepcopy(self.models[-1])
        torch.manual_seed(len(self.models))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
        self.models.append(model)

    @torch.no_grad()
    def logprobs(self, version: int, ids: list[int]) -> torch.Tensor:
        """Return the logprob of each token but the first."""
        rows = torch.tensor([ids])
        values = self.models[version](rows).logits[0, :-1].float().log_softmax(-1)
        return values.gather(1, rows[0, 1:, None])[:, 0]

    def weights(self) -> Any:
        """Return what an engine gets of the last version."""
        return dict(self.models[-1].named_parameters())

    def make_probe(self, engine: Engine) -> WeightProbe:
        return WeightProbe(
            engine,
            probe=[[5, 6, 7, 8, 9]],
            trainer_logprobs=lambda probe: [
                (self.logprobs(len(self.models) - 1, ids).tolist(), 1.0) for ids in probe
            ],
        )


LORA = LoraConfig(rank=6, alpha=12)
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTER = {"r": 6, "lora_alpha": 12, "target_modules": MODULES, "bias": "none"}  # of an engine


class AdapterVersions(Versions):
    """The same of an adapter; `models` have it merged in."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        model = copy.deepcopy(self.models[0])
        torch.manual_seed(0)
        add_adapter(model, LORA, base=str(folder))
        self.policy = Policy(model)

    def another(self) -> None:
        change_adapter(self.policy)
        model = copy.deepcopy(self.models[-1])
        model.load_state_dict(merge(self.policy.model, self.policy.model.state_dict()))
        self.models.append(model)

    def weights(self) -> Any:
        return self.policy.named_weights(adapter=True)


def change_adapter(policy: Policy) -> None:
    """Change all trained parameters, as an optimizer step does."""
    for _, parameter in policy.trained_parameters():
        parameter.data.add_(0.01 * torch.randn_like(parameter))


def wrong_tokens(versions: Versions, trajectories: list[Trajectory]) -> tuple[int, int, float]:
    """Return the number of tokens with a wrong logprob, of all tokens, and the largest error."""
    wrong, total, largest = 0, 0, 0.0
    for trajectory in trajectories:
        for step in trajectory.steps:
            ids = [*step.prompt_token_ids, *step.response_ids]
            start = len(step.prompt_token_ids)
            assert step.rollout_logprobs is not None
            for version in set(step.versions):
                exact = versions.logprobs(version, ids)[start - 1 :].tolist()
                for own, mask, a, b in zip(
                    step.versions, step.loss_mask, exact, step.rollout_logprobs, strict=True
                ):
                    if own == version and mask:
                        total += 1
                        wrong += abs(a - b) > TOLERANCE
                        largest = max(largest, abs(a - b))
    return wrong, total, largest


def engine_process() -> int:
    (core,) = [pid for pid in children(os.getpid()) if "EngineCore" in command_of(pid)]
    return core


def kill_engine_process() -> None:
    """Kill it as the OOM killer would."""
    os.kill(engine_process(), signal.SIGKILL)
