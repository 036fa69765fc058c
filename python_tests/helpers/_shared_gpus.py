"""GPUs for CUDA IPC whose memory is shared memory of the CPU, and engines that read them.

The workers of an engine are processes; each loads weights as vLLM's do, and keeps them.
"""

import asyncio
import contextlib
import multiprocessing
import os
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from _fakes import tiny_model
from _weights import FEW_SECONDS, Model, Worker

from skyrl_fast.config import InferenceEngineConfig
from skyrl_fast.rollout.engine.vllm_engine import Vllm, VllmEngine
from skyrl_fast.rollout.engine.vllm_start import VllmSetup
from skyrl_fast.rollout.engine.weights import worker as worker_module
from skyrl_fast.rollout.engine.weights.transports.ipc import CudaIpc
from skyrl_fast.train.model.policy import Policy
from skyrl_fast.train.parallel.ranks import Ranks

DTYPE = torch.bfloat16  # of the engines
KILLED = 9  # exit code of a worker


class SharedGpu(CudaIpc):
    """The GPU of a process.

    Args:
        gpu: its UUID.
        dies_at: number of the wait for it at which the process is killed; 0: none.
    """

    def __init__(self, gpu: str, *, dies_at: int = 0) -> None:
        self.gpu = gpu
        self.opened: list[str] = []  # handles of memory
        self.shared: list[int] = []  # bytes of memory
        self._dies_at = dies_at
        self._waits = 0

    def synchronize(self) -> None:
        self._waits += 1
        if self._waits == self._dies_at:
            os._exit(KILLED)

    def reduce(self, tensor: torch.Tensor) -> Any:
        """Move the tensor's memory, in place, to where other processes find it."""
        storage: Any = tensor.untyped_storage()
        self.shared.append(storage.nbytes())
        manager, handle, size = storage._share_filename_cpu_()
        shape = (torch.Tensor, tensor.size(), tensor.stride(), tensor.storage_offset())
        shared = (7, handle, size, 0, False, manager, 0, b"event", False)  # 7: number of a device
        return None, (*shape, torch.TypedStorage, tensor.dtype, *shared)

    def rebuild(self, *arguments: Any) -> torch.Tensor:
        _, size, stride, offset, _, dtype, device, handle, num_bytes, *_, counter = arguments[:12]
        assert device != 7  # it is the other process's number
        self.opened.append(handle.hex())
        storage = torch.UntypedStorage._new_shared_filename_cpu(counter, handle, num_bytes)
        return torch.empty(0, dtype=dtype).set_(storage, offset, size, stride)

    def collect(self) -> None:
        """The CPU's memory counts its readers."""

    def name_gpu(self, device: torch.device) -> str:
        return self.gpu


def make_policy(ranks: Ranks) -> Policy:
    """Return a policy on the GPU with the rank's number."""
    policy = Policy(tiny_model(seed=3), ranks=ranks)
    policy.cuda_ipc = SharedGpu(f"GPU-{ranks.rank}")
    return policy


class GpuWorker(Worker):
    """The attributes of vLLM's worker that a load uses, on a shared GPU."""

    def __init__(self, rank: int, cuda: SharedGpu) -> None:
        self.parallel_config = SimpleNamespace(world_size=1)
        self.rank = rank
        self.device = torch.device("cpu")
        self.cuda_ipc = cuda
        self.model = Model()
        del self.model.w  # no weight of the policy
        self.model_config = SimpleNamespace(dtype=DTYPE)
        self.model_runner = SimpleNamespace(get_model=lambda: self.model)


def serve_worker(calls: Connection, rank: int, gpu: str, dies_at: int) -> None:
    """Make the calls of a worker until there are no more; it says "ready" first."""
    torch.set_num_threads(1)
    cuda = SharedGpu(gpu, dies_at=dies_at)
    worker = GpuWorker(rank, cuda)
    calls.send("ready")
    # There is nothing packed, and importing vLLM takes long.
    with patch.object(worker_module, "renew_packed_weights", contextlib.nullcontext):
        while (call := calls.recv()) is not None:
            method, arguments = call
            try:
                if method == "loaded":
                    tensors = worker.model.loaded.items()
                    values = {name: value.view(torch.uint8).numpy() for name, value in tensors}
                    calls.send((cuda.opened, values))
                else:
                    calls.send(getattr(worker, method)(*arguments))
            except Exception as error:
                calls.send(error)


class ProcessLlm:
    """vLLM's AsyncLLM, with a process for each worker."""

    def __init__(self, gpus: tuple[str, ...], *, dies_at: int = 0) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.errored = False
        self._calls: list[Any] = []
        self._processes: list[Any] = []
        for rank, gpu in enumerate(gpus):
            here, there = spawn.Pipe()
            arguments = (there, rank, gpu, dies_at)
            process = spawn.Process(target=serve_worker, args=arguments, daemon=True)
            process.start()
            there.close()
            self._calls.append(here)
            self._processes.append(process)
        for calls in self._calls:
            assert calls.recv() == "ready"

    async def collective_rpc(
        self, method: str, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        assert not kwargs
        asked = (asyncio.to_thread(self._ask, calls, method, args) for calls in self._calls)
        return await asyncio.gather(*asked)

    def _ask(self, calls: Any, method: str, args: tuple[Any, ...]) -> Any:
        try:
            calls.send((method, args))
            answer = calls.recv()
        except (EOFError, OSError) as error:
            self.errored = True
            raise RuntimeError("a worker has died") from error
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def reset_prefix_cache(self) -> None:
        """There is none."""

    def shutdown(self, seconds: float) -> None:
        for process in self._processes:
            process.kill()
            process.join()


class ProcessEngine(VllmEngine):
    """An engine of such workers, one on each of its GPUs.

    Args:
        dies_at: of the first start's workers, see `SharedGpu`.
    """

    weights_dtype = DTYPE

    def __init__(self, *gpus: str, dies_at: int = 0) -> None:
        settings = InferenceEngineConfig(weight_sync_backend="ipc")
        setup = VllmSetup("model", settings, reads_ranks=True)
        super().__init__(setup, group_seconds=FEW_SECONDS)
        self.gpus = gpus
        self._dies_at = dies_at

    async def start(self) -> None:
        llm = await asyncio.to_thread(ProcessLlm, self.gpus, dies_at=self._dies_at)
        self._dies_at = 0
        self.vllm = Vllm(llm, dict, dict, None, (ValueError,), KeyError)
        assert self._setup.weights_group == "ipc"
        await self._join_workers("ipc", len(self.gpus))

    async def prompt_logprobs(self, token_ids: Any) -> list[float]:
        return [0.0] * (len(token_ids) - 1)

    async def loaded(self) -> list[tuple[list[str], dict[str, np.ndarray]]]:
        """Return of each worker the handles that it has opened, and the bytes of its weights."""
        found: list[Any] = await self._get_llm().collective_rpc("loaded")
        return found
