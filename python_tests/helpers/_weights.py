"""Scripted workers that load weights for real, engines of them, and updates with a probe."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import torch

from skyrl_fast.config import InferenceEngineConfig
from skyrl_fast.rollout.engine.vllm_engine import VllmEngine
from skyrl_fast.rollout.engine.vllm_start import VllmSetup
from skyrl_fast.rollout.engine.weights.probe import WeightProbe, WeightSyncReport
from skyrl_fast.rollout.engine.weights.receipt import SentWeights
from skyrl_fast.rollout.engine.weights.transfer import Weights, WorkerCall, transfer_weights
from skyrl_fast.rollout.engine.weights.transports.file import send_by_file
from skyrl_fast.rollout.engine.weights.worker import WeightUpdateExtension

CPU = torch.device("cpu")


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
        self.rank, self.device = rank, CPU
        self.model = Model()
        self.model_config = SimpleNamespace(dtype=dtype)
        self.model_runner = SimpleNamespace(get_model=lambda: self.model)

    def reload_weights(self, weights_iterator: Any) -> None:
        self.model.load_weights(weights_iterator)


class Llm:
    """vLLM's AsyncLLM whose workers are threads; `fault` is what their next call does."""

    def __init__(self, *, num_workers: int = 2) -> None:
        self.errored = False
        self.calls: list[str] = []
        self.fault = ""
        self.workers = [Worker(rank) for rank in range(num_workers)]

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
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
        calls = (asyncio.to_thread(getattr(worker, method), *args) for worker in self.workers)
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


class ScriptedEngine(VllmEngine):
    """An engine of such workers, connected for real."""

    def __init__(self, backend: str = "gloo") -> None:
        super().__init__(VllmSetup("model", InferenceEngineConfig(weight_sync_backend=backend)))
        self.llms: list[Llm] = []

    async def start(self) -> None:
        self._llm = Llm()
        self.llms.append(self._llm)
        if self._setup.engine.weight_sync_backend == "gloo":
            await self._join_workers(len(self._llm.workers))

    async def prompt_logprobs(self, token_ids: Any) -> list[float]:
        return [0.0] * (len(token_ids) - 1)


def make_probe(engine: Any) -> WeightProbe:
    """Return a probe that all engines pass whose logprobs are 0."""
    return WeightProbe(engine, probe=[[1, 2]], trainer_logprobs=lambda probe: [([0.0], 1.0)])


def file_call(path: Any) -> WorkerCall:
    """Return the call that loads a file without tensors."""
    return WorkerCall("load_weights_file", [str(path)], SentWeights())


async def update_engine(engine: Any, probe: WeightProbe, weights: Weights) -> WeightSyncReport:
    """Load the weights by a file, and verify them."""
    started = time.perf_counter()
    async with transfer_weights(send_by_file, weights, engine.weights_dtype) as call:
        await engine.load_weights(call)
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
