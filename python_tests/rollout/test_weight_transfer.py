"""Handing weights over: casts, small shared memory, and the arguments of CUDA IPC."""

from __future__ import annotations

import inspect
import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from _weights import Worker
from safetensors.torch import load_file
from torch.multiprocessing import reductions

from skyrl_fast.config import ConfigError
from skyrl_fast.config.loading import load_config
from skyrl_fast.rollout.engine.from_settings import choose_transport
from skyrl_fast.rollout.engine.weights.group import BACKENDS
from skyrl_fast.rollout.engine.weights.receipt import (
    Receipt,
    WeightSyncError,
    find_common_dtype,
    read_receipts,
)
from skyrl_fast.rollout.engine.weights.transfer import WorkerCall
from skyrl_fast.rollout.engine.weights.transports.broadcast import send_by_broadcast
from skyrl_fast.rollout.engine.weights.transports.file import (
    SHARED_MEMORY,
    WeightPlaces,
    free_bytes,
    send_by_file,
)
from skyrl_fast.rollout.engine.weights.transports.ipc import CudaIpc, receive_by_ipc, send_by_ipc
from skyrl_fast.rollout.engine.weights.transports.rank_ipc import send_by_rank_ipc
from skyrl_fast.rollout.engine.weights.worker import WeightUpdateExtension
from skyrl_fast.train.parallel.ranks import Ranks
from skyrl_fast.train.parallel.sharding import full_tensors

WEIGHTS = {"a": torch.linspace(-1, 1, 7), "b": torch.arange(3)}


@pytest.mark.spec("async.weight-transfer")
def test_weights_are_cast_to_the_engines_dtype() -> None:
    with send_by_file(WEIGHTS, torch.bfloat16) as call:
        assert call.method == "load_weights_file"
        found = load_file(call.arguments[0])
    assert torch.equal(found["a"], WEIGHTS["a"].bfloat16())
    assert torch.equal(found["b"], WEIGHTS["b"]) and found["b"].dtype == torch.int64
    assert not Path(call.arguments[0]).exists()
    with send_by_file(WEIGHTS, None) as call:
        assert load_file(call.arguments[0])["a"].dtype == torch.float32


def test_temporary_tensors_at_the_same_address_are_not_taken_for_tied_ones() -> None:
    temporary = ((str(i), torch.full((1000,), float(i))) for i in range(20))
    with send_by_file(temporary, torch.bfloat16) as call:
        found = load_file(call.arguments[0])
    assert {name: float(value[0]) for name, value in found.items()} == {
        str(i): float(i) for i in range(20)
    }


def test_sharded_weights_are_cast_before_they_are_moved() -> None:
    moved = []

    class Sharded(torch.Tensor):
        def cpu(self) -> Any:
            moved.append(self.dtype)
            return super().cpu()

    items = [(name, value.as_subclass(Sharded)) for name, value in WEIGHTS.items()]
    full_tensors(items, Ranks(0, 2), torch.bfloat16)
    assert moved == [torch.bfloat16, torch.int64]
    moved.clear()
    full_tensors(items, Ranks(0, 2))
    assert moved == [torch.float32, torch.int64]


READ = """
import sys
from safetensors.torch import load_file
print(sum(float(value.sum()) for value in load_file(sys.argv[1]).values()))
"""


def free_of_a_container(folder: Path) -> int:
    """Shared memory is too small for any weights."""
    return 10 if folder == SHARED_MEMORY else free_bytes(folder)


def test_small_shared_memory_is_replaced_by_an_unnamed_file(tmp_path: Path) -> None:
    places = WeightPlaces(free_bytes=free_of_a_container)
    with send_by_file({"w": torch.ones(1000)}, unnamed=True, places=places) as call:
        assert call.arguments[0].startswith("/proc/")
        command = [sys.executable, "-c", READ, call.arguments[0]]
        assert subprocess.run(command, capture_output=True, check=True).stdout == b"1000.0\n"
    assert not Path(call.arguments[0]).exists()
    options: dict[str, Any] = {"folder": str(tmp_path), "unnamed": True, "places": places}
    with send_by_file({"w": torch.ones(1000)}, **options) as call:
        assert Path(call.arguments[0]).is_relative_to(tmp_path)  # as asked for


def test_servers_get_a_file_on_disk_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    places = WeightPlaces(temporary=tmp_path, free_bytes=free_of_a_container)
    sending = send_by_file({"w": torch.ones(1 << 20)}, places=places)
    with caplog.at_level(logging.WARNING), sending as call:
        assert Path(call.arguments[0]).is_relative_to(tmp_path)
    assert (
        f"/dev/shm has no room for 0.0 GiB of weights: every update writes them to {tmp_path}"
        in (caplog.text)
    )
    assert "docker run --shm-size" in caplog.text


# --- CUDA IPC, with fakes of torch's functions ---------------------------------------------------

STORAGE = {
    "storage_device": 0,
    "storage_handle": b"\x00handle\xff",
    "storage_size_bytes": 512,
    "storage_offset_bytes": 1024,
    "requires_grad": False,
    "ref_counter_handle": b"/counter",
    "ref_counter_offset": 3,
    "event_handle": b"event",
    "event_sync_required": True,
}


SIGNATURE = inspect.signature(reductions.rebuild_cuda_tensor)


class OnGpu:
    """A tensor on GPU 0, as far as `send_by_ipc` looks at it."""

    device = torch.device("cuda", 0)

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.on_cpu = torch.zeros(shape, dtype=torch.float32)

    def detach(self) -> OnGpu:
        return self

    def contiguous(self) -> torch.Tensor:
        return self.on_cpu  # for its digest

    @property
    def dtype(self) -> torch.dtype:
        return self.on_cpu.dtype

    @property
    def shape(self) -> torch.Size:
        return self.on_cpu.shape

    @property
    def nbytes(self) -> int:
        return self.on_cpu.nbytes


class FakeCuda(CudaIpc):
    """`events` gets the names of calls, or the arguments of a rebuilt tensor."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def synchronize(self) -> None:
        self.events.append("synchronize")

    def reduce(self, tensor: Any) -> Any:
        self.events.append("handle")
        of = tensor.on_cpu
        shape = (torch.Tensor, of.size(), of.stride(), of.storage_offset())
        arguments = (*shape, torch.TypedStorage, of.dtype, *STORAGE.values())
        assert [*SIGNATURE.bind(*arguments).arguments][6:] == [*STORAGE]
        return None, arguments

    def rebuild(self, *arguments: Any) -> Any:
        bound = SIGNATURE.bind(*arguments).arguments
        self.events.append(bound)
        return torch.zeros(bound["tensor_size"], dtype=bound["dtype"])

    def collect(self) -> None:
        self.events.append("collect")


def send_from_gpu(cuda: FakeCuda) -> WorkerCall:
    weights: Any = {"model.a": OnGpu((2, 3)), "model.b": OnGpu((4,))}
    with send_by_ipc(weights, torch.bfloat16, cuda=cuda) as call:
        cuda.events.append("loaded")
    return call


def test_ipc_sends_handles_after_the_weights_are_complete() -> None:
    cuda = FakeCuda()
    call = send_from_gpu(cuda)
    assert cuda.events == ["synchronize", "handle", "handle", "loaded", "collect"]
    assert call.method == "load_weights_ipc"
    assert call.arguments[0] == [
        ["model.a", [2, 3], [3, 1], 0, "float32", *STORAGE.values()],
        ["model.b", [4], [1], 0, "float32", *STORAGE.values()],
    ]


def test_the_engine_rebuilds_what_was_handed_over() -> None:
    call = send_from_gpu(FakeCuda())
    cuda = FakeCuda()
    names = [name for name, _ in receive_by_ipc(call.arguments[0], cuda)]
    assert names == ["model.a", "model.b"]
    tensor = {
        "tensor_cls": torch.Tensor,
        "tensor_size": torch.Size([2, 3]),
        "tensor_stride": (3, 1),
        "tensor_offset": 0,
        "storage_cls": torch.TypedStorage,
        "dtype": torch.float32,
    }
    assert cuda.events[0] == {**tensor, **STORAGE}


@pytest.mark.vllm
def test_vllm_sends_handles_without_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    monkeypatch.delenv("VLLM_ALLOW_INSECURE_SERIALIZATION", raising=False)
    call = send_from_gpu(FakeCuda())
    sent = MsgpackDecoder().decode(MsgpackEncoder().encode((call.method, call.arguments)))
    assert sent == [call.method, call.arguments]


@pytest.mark.vllm
def test_the_engine_has_read_all_before_the_trainer_continues() -> None:
    call = send_from_gpu(FakeCuda())
    cuda = FakeCuda()
    worker = Worker(dtype=torch.bfloat16)
    worker.cuda_ipc = cuda
    (receipt,) = read_receipts([worker.load_weights_ipc(*call.arguments)])
    assert receipt == Receipt(dict(call.sent.digests), ["w"], "bfloat16")
    assert [event if isinstance(event, str) else "read" for event in cuda.events] == [
        *("read", "read", "synchronize", "collect")
    ]


def test_ipc_needs_weights_on_a_gpu() -> None:
    with pytest.raises(
        WeightSyncError, match=r"needs all weights on a GPU; not there: \['a', 'b'\]"
    ):
        send_by_ipc(WEIGHTS).__enter__()


# --- which dtype, which transfer -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ([torch.bfloat16, torch.bfloat16], "bfloat16"),
        ([torch.bfloat16, torch.float32], None),  # such as a router's: its digits are kept
    ],
)
def test_weights_of_several_dtypes_are_not_cast(
    dtypes: list[torch.dtype], expected: str | None
) -> None:
    worker = WeightUpdateExtension()
    model = torch.nn.ParameterList([torch.zeros(1, dtype=dtype) for dtype in dtypes])
    worker.model_runner = SimpleNamespace(get_model=lambda: model)
    assert worker.weights_dtype() == expected


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (["bfloat16"] * 2, torch.bfloat16),
        (["bfloat16", "float32"], None),
        ([None], None),
        (["save"], None),
        ([], None),
    ],
)
def test_dtype_that_all_workers_name(answers: list[Any], expected: torch.dtype | None) -> None:
    assert find_common_dtype(answers) is expected


def test_the_setting_chooses_the_transfer() -> None:
    needed = ["data.train_data=[x]", "trainer.policy.model.path=m"]
    key = "generator.inference_engine"
    servers = [f"{key}.run_engines_locally=false", f"{key}.external_server_urls=[http://a:1]"]

    def engine(*overrides: str) -> Any:
        return load_config(None, [*needed, *overrides])

    by_ipc = f"{key}.weight_sync_backend=ipc"
    assert choose_transport(engine(by_ipc)) is send_by_ipc
    ranks = "trainer.placement.policy_num_gpus_per_node=2"
    assert choose_transport(engine(by_ipc, ranks)) is send_by_rank_ipc
    assert choose_transport(engine(by_ipc, ranks, f"{key}.num_engines=2")) is send_by_rank_ipc
    with pytest.raises(ConfigError, match=r"several engines need a rank on each of their GPUs"):
        engine(by_ipc, f"{key}.num_engines=2")
    for backend in BACKENDS:
        chosen = engine(f"{key}.weight_sync_backend={backend}")
        assert choose_transport(chosen) is send_by_broadcast
    on_cluster = "trainer.placement.colocate_all=false"
    assert choose_transport(engine(on_cluster)) is send_by_broadcast
    shared = [on_cluster, f"{key}.weight_sync_backend=file", f"{key}.weight_sync_path=/shared"]
    assert choose_transport(engine(*shared)) is not send_by_broadcast
    assert choose_transport(engine()) not in (send_by_ipc, send_by_broadcast)
    engine(*servers, f"{key}.weight_sync_backend=reload")
    for overrides, wanted in (
        (
            [f"{key}.weight_sync_backend=reload"],
            "external_server_urls: expected at least one .*load,",
        ),
        ([*servers, f"{key}.weight_sync_backend=ipc"], "backend: expected auto or file with"),
        ([*servers, f"{key}.weight_sync_backend=nccl"], "backend: expected auto or file with"),
    ):
        with pytest.raises(ConfigError, match=wanted):
            engine(*overrides)
    replicas = f"{key}.engine_init_kwargs={{data_parallel_size: 2}}"
    engine(replicas)
    with pytest.raises(
        ConfigError, match=r"\{.data_parallel_size.: 2\}, as .* one replica, got gloo"
    ):
        engine(f"{key}.weight_sync_backend=gloo", replicas)
