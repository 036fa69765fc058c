"""The memory plan of engines: shared GPUs, others, buckets of weights."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from _planned import GPU, STAYS, FakeGpus, config_of, plan_on, sizes
from _planned import measured_once as measured_once
from _planned import small as small

from skyrl_fast.commands.plan import num_bytes
from skyrl_fast.rollout.engine.from_settings import make_vllm_setup
from skyrl_fast.rollout.engine.weights.buckets import BUCKET_BYTES
from skyrl_fast.rollout.engine.weights.receipt import WeightSyncError
from skyrl_fast.rollout.engine.weights.transports import ipc
from skyrl_fast.train.memory.activations import load_model_config, model_size
from skyrl_fast.train.memory.device_plan import GIB, Item, MemoryPlan
from skyrl_fast.train.memory.parts import engine_bytes
from skyrl_fast.train.memory.plan import gpu_memory, memory_in_use, plan_memory, plan_with_remedies
from skyrl_fast.train.setup.errors import SetupError


@pytest.mark.spec("memory.sleep")
def test_a_sleeping_engine_leaves_the_update_its_memory(small: Path) -> None:
    """The phases share weights and moments; each has what the other frees."""
    off = "generator.inference_engine.enable_sleep_mode=false"
    capacity = num_bytes("40GiB")
    awake = plan_memory(config_of(small, off), capacity=capacity)
    plan = plan_memory(config_of(small), capacity=capacity)
    update, generation = sizes(plan), sizes(plan, 1)
    assert [device.name for device in plan.devices] == ["GPU 0, update", "GPU 0, generation"]
    assert set(update) & set(generation) == {"weights, float32", "AdamW's moments"}
    assert update["sleeping engine: CUDA context and graphs"] == 2 * GIB
    assert generation["engine: CUDA context"] == GIB
    head = 151936 * 896 * 2
    assert generation["CUDA context, the LM head's copy for the probe"] == GIB + head
    resident = 12 * 494_032_768 + 2 * GIB + head
    assert plan.engine_share == int(100 * (capacity - resident) / capacity) / 100 == 0.8
    assert [device.name for device in awake.devices] == ["GPU 0"]
    assert awake.engine_share is not None and awake.engine_share < 0.7
    tight = num_bytes("16GiB")
    assert plan_memory(config_of(small), capacity=tight).fits
    refused = plan_with_remedies(config_of(small, off, STAYS), capacity=tight)
    assert not refused.fits
    assert "generator.inference_engine.enable_sleep_mode=null" in refused.remedies.settings


def test_an_adapters_base_and_the_engine_have_the_gpu_by_turns(small: Path) -> None:
    lora = ["trainer.policy.model.lora.rank=16"]
    base = 494_032_768
    adapter = 8_798_208
    plan = plan_memory(config_of(small, *lora), capacity=GPU)
    update, generation = sizes(plan), sizes(plan, 1)
    frozen = "frozen weights, bfloat16"
    assert update[frozen] == 2 * base and frozen not in generation
    kept = {"adapter, float32": 4 * adapter, "AdamW's moments": 8 * adapter}
    assert kept.items() <= generation.items() and kept.items() <= update.items()
    # the trainer's copy, and the sleeping engine's, which has room for an adapter
    assert plan.host_bytes == 2 * base + 2 * (base + adapter)
    merged = plan_memory(
        config_of(small, *lora, "trainer.policy.model.lora.weight_sync=merged"), capacity=GPU
    )
    assert sizes(merged, 1)[frozen] == 2 * base
    awake = "generator.inference_engine.enable_sleep_mode=false"
    assert sizes(plan_memory(config_of(small, *lora, awake), capacity=GPU))[frozen] == 2 * base


@pytest.mark.spec("memory.engine-gpus")
def test_an_engine_with_a_gpu_of_its_own_has_its_own_part(small: Path) -> None:
    plan = plan_memory(config_of(small), capacity=GPU, num_gpus=2)
    assert [device.name for device in plan.devices] == ["GPU 0", "GPU 1"]
    assert not any("engine" in name for name in sizes(plan))
    embedding = 2 * 151936 * 896  # more than 128 MiB, so it is sent alone
    sent = "buckets of weights that are broadcast"
    assert sizes(plan)[sent] == 2 * embedding  # one on its way, one being packed
    assert sizes(plan, 1) == {
        "engine: CUDA context, buckets": GIB + 3 * embedding,
        "engine: weights and KV cache": int(0.9 * GPU),
    }
    assert plan.engine_share == 0.9
    assert plan.host_bytes == 0  # by NCCL
    file = config_of(small, "generator.inference_engine.weight_sync_backend=file")
    by_file = plan_memory(file, capacity=GPU, num_gpus=2)
    assert by_file.host_bytes == 2 * 2 * 494_032_768
    assert sent not in sizes(by_file)
    cluster = "trainer.placement.colocate_all=false"
    on_cluster = plan_memory(config_of(small, cluster), capacity=GPU, num_gpus=2)
    assert sizes(on_cluster)[sent] == 2 * embedding
    by_gloo = config_of(small, cluster, "generator.inference_engine.weight_sync_backend=gloo")
    assert sent not in sizes(plan_memory(by_gloo, capacity=GPU, num_gpus=2))
    assert sizes(by_file, 1)["engine: CUDA context"] == GIB
    two = "generator.inference_engine.engine_init_kwargs={tensor_parallel_size: 2}"
    parallel = plan_memory(config_of(small, two), capacity=GPU, num_gpus=2)
    names = [device.name for device in parallel.devices]
    assert names == ["GPU 0, update", "GPU 0, generation", "GPU 1"]  # no third GPU: shared


def test_the_smallest_gpu_in_use_counts(small: Path) -> None:
    gpus = FakeGpus((80 * GIB, 40 * GIB, 24 * GIB))

    def smallest(*overrides: str, with_engine: bool = True) -> int | None:
        return gpu_memory(config_of(small, *overrides), with_engine=with_engine, gpus=gpus)

    key = "generator.inference_engine"
    assert smallest() == 24 * GIB  # the engine gets the last one
    assert smallest(f"{key}.gpu_ids=[1]") == 40 * GIB
    assert smallest(f"{key}.gpu_ids=[0]") == 80 * GIB
    assert smallest(with_engine=False) == 80 * GIB
    servers = f"{key}.external_server_urls=[http://127.0.0.1:1]"
    assert smallest(f"{key}.run_engines_locally=false", servers) == 80 * GIB


@pytest.mark.spec("memory.free")
def test_memory_in_use_is_not_planned_for_the_engine(small: Path) -> None:
    size = 24 * GIB
    gpus = FakeGpus((size,), free=(21 * GIB,))
    awake = "generator.inference_engine.enable_sleep_mode=false"
    config = config_of(small, awake)
    assert memory_in_use(config, gpus=gpus) == 3 * GIB
    plan = plan_on(gpus, config)
    assert plan is not None
    (device,) = plan.devices
    assert device.items[0] == Item("in use before the run", 3 * GIB)
    share = config.generator.inference_engine.gpu_memory_utilization
    empty = plan_memory(config_of(small, awake), capacity=24 * GIB)
    assert share is not None and empty.engine_share is not None and share < empty.engine_share
    # The share is of all memory, as vLLM's setting is; it is rounded down to hundredths.
    assert device.total <= 24 * GIB
    assert device.total - 3 * GIB + 0.01 * 24 * GIB > 20 * GIB

    sleeping = plan_memory(config_of(small), capacity=24 * GIB, in_use=3 * GIB)
    assert [part.items[0].num_bytes for part in sleeping.devices] == [3 * GIB] * 2
    frozen = ("trainer.policy.model.lora.rank=8", "trainer.policy.optimizer_config.lr=1e-4")
    adapted = plan_memory(config_of(small, *frozen), capacity=24 * GIB, in_use=3 * GIB)
    assert [part.items[0].num_bytes for part in adapted.devices] == [3 * GIB] * 2
    apart = plan_memory(config_of(small), capacity=24 * GIB, in_use=3 * GIB, num_gpus=2)
    assert [part.items[0].num_bytes for part in apart.devices] == [3 * GIB] * 2
    two = FakeGpus((size, size), free=(21 * GIB, 23 * GIB))
    assert memory_in_use(config_of(small), gpus=two) == 3 * GIB  # of the fuller one

    assert "3.0 GiB  in use before the run" in str(plan)


@pytest.mark.spec("memory.ipc-contexts")
def test_workers_on_other_gpus_have_contexts_on_the_trainers(small: Path) -> None:
    name = "engine: CUDA contexts of {} workers on other GPUs"
    two = "generator.inference_engine.tensor_parallel_size=2"
    alone = plan_memory(config_of(small), capacity=GPU, num_gpus=1)
    assert name.format(1) not in sizes(alone)
    shared = plan_memory(config_of(small, two), capacity=GPU, num_gpus=2)
    assert shared.devices[0].name == "GPU 0, update"
    for device in shared.devices[:2]:
        assert {i.name: i.num_bytes for i in device.items}[name.format(1)] == GIB
    assert not any(item.name == name.format(1) for item in shared.devices[2].items)
    apart = config_of(small, two, "generator.inference_engine.weight_sync_backend=ipc")
    plan = plan_memory(apart, capacity=GPU, num_gpus=3)
    assert sizes(plan)[name.format(2)] == 2 * GIB
    by_file = config_of(small, two, "generator.inference_engine.weight_sync_backend=file")
    assert name.format(1) not in sizes(plan_memory(by_file, capacity=GPU, num_gpus=2))


@pytest.mark.spec("async.rank-ipc", "memory.plan")
def test_buckets_of_ranks_are_next_to_their_engines(small: Path) -> None:
    two = "trainer.placement.policy_num_gpus_per_node=2"
    by_file = "generator.inference_engine.weight_sync_backend=file"
    plan = plan_memory(config_of(small, two), capacity=GPU, num_gpus=2)
    other = plan_memory(config_of(small, two, by_file), capacity=GPU, num_gpus=2)
    name = "buckets of weights for engines"
    bucket = 2 * 151_936 * 896  # the embedding in bfloat16, which is larger than 128 MiB
    assert [device.name for device in plan.devices] == [
        "each of GPU 0 to 1, update",
        "each of GPU 0 to 1, generation",
    ]
    for device, without in zip(plan.devices, other.devices, strict=True):
        found = {item.name: item.num_bytes for item in device.items}
        assert found[name] == 2 * bucket
        assert name not in {item.name for item in without.items}
    assert found["engine: CUDA context, buckets"] == GIB + 3 * bucket
    leaving = config_of(small, two, "trainer.placement.offload_weights=true")
    both = plan_memory(leaving, capacity=GPU, num_gpus=2).devices[-1]
    assert both.name == "each of GPU 0 to 1, hand-over"
    names = {item.name for item in both.items}
    assert {name, "a layer that is handed over"} <= names
    assert plan.host_bytes < other.host_bytes  # no file


@pytest.mark.spec("memory.plan")
def test_an_engine_that_comes_back_gets_weights_next_to_full_caches(small: Path) -> None:
    name = "CUDA context, a layer for an engine that comes back"
    two = "trainer.placement.policy_num_gpus_per_node=2"
    size = model_size(load_model_config(str(small)))
    embedding = size.vocab_size * size.hidden_size
    # bfloat16, and the largest weight in float32 while it is cast.
    layer = 2 * size.layer_parameters + (4 + 2) * embedding
    for backend in ("auto", "file"):
        by = f"generator.inference_engine.weight_sync_backend={backend}"
        plan = plan_memory(config_of(small, two, by), capacity=GPU, num_gpus=2)
        assert sizes(plan, 1)[name] == GIB + layer
    # The only engine has lost its cache when it comes back.
    one = "generator.inference_engine.tensor_parallel_size=2"
    plan = plan_memory(config_of(small, two, one), capacity=GPU, num_gpus=2)
    assert name not in sizes(plan, 1)


@pytest.mark.spec("async.rank-ipc")
def test_weights_go_by_file_where_buckets_leave_no_room(small: Path) -> None:
    two = "trainer.placement.policy_num_gpus_per_node=2"
    key = "generator.inference_engine.weight_sync_backend"

    def planned(backend: str, capacity: int) -> MemoryPlan:
        config = config_of(small, two, f"{key}={backend}", STAYS)
        return plan_memory(config, capacity=capacity, num_gpus=2)

    lacks = 0
    least = GPU
    while least - lacks > BUCKET_BYTES:  # at least two buckets less than with them
        middle = (lacks + least) // 2
        if planned("file", middle).fits:
            least = middle
        else:
            lacks = middle
    assert not planned("ipc", least).fits
    plan = planned("auto", least)
    assert plan.fits and plan.sends_files
    assert "engines get their weights by file" in str(plan)
    assert not planned("auto", GPU).sends_files
    config = config_of(small, two, STAYS)
    plan_on(FakeGpus((least, least)), config)
    assert config.generator.inference_engine.weight_sync_backend == "file"


@pytest.mark.spec("sync.ipc-missing")
def test_several_ranks_send_a_file_where_cuda_does_not_share(
    small: Path, caplog: pytest.LogCaptureFixture
) -> None:
    two = "trainer.placement.policy_num_gpus_per_node=2"
    shares = config_of(small, two)
    plan_on(FakeGpus((GPU, GPU)), shares)
    engine = shares.generator.inference_engine
    assert (engine.weight_sync_backend, engine.num_engines) == ("ipc", 2)
    config = config_of(small, two)
    plan_on(FakeGpus((GPU, GPU), fault="CUDA error: operation not supported"), config)
    engine = config.generator.inference_engine
    assert (engine.weight_sync_backend, engine.num_engines) == ("file", 2)
    assert caplog.text.count("by file, as CUDA does not share") == 1


@pytest.mark.spec("sync.ipc-missing")
def test_without_cuda_ipc_weights_go_by_file(small: Path, caplog: pytest.LogCaptureFixture) -> None:
    key = "generator.inference_engine.weight_sync_backend"
    works = config_of(small)
    plan_on(FakeGpus(), works)
    assert works.generator.inference_engine.weight_sync_backend == "ipc"
    without = FakeGpus(fault="CUDA error: operation not supported")
    config = config_of(small)
    plan = plan_on(without, config)
    assert plan is not None and plan.host_bytes > 0
    assert config.generator.inference_engine.weight_sync_backend == "file"
    assert "by file, as CUDA does not share" in caplog.text
    assert "here: CUDA error: operation not supported\n" in caplog.text + "\n"
    asked = config_of(small, f"{key}=ipc")
    with pytest.raises(SetupError, match=r"=ipc: CUDA does not share .* not supported. Set it to"):
        plan_on(without, asked)


@pytest.mark.spec("sync.ipc-missing")
def test_a_fault_of_cuda_ipc_is_one_line() -> None:
    def refuse(*arguments: object) -> None:
        raise RuntimeError("CUDA error: operation not supported\nCUDA kernel errors might be ...")

    class Refusing(ipc.CudaIpc):
        def synchronize(self) -> None:
            """There is no GPU."""

        def reduce(self, tensor: torch.Tensor) -> None:
            refuse()

    assert ipc.find_ipc_fault(lambda: None, {}) == ""
    segments = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"}
    wanted = "PYTORCH_CUDA_ALLOC_CONF asks for expandable segments"
    assert ipc.find_ipc_fault(lambda: None, segments) == wanted
    assert ipc.find_ipc_fault(refuse) == "CUDA error: operation not supported"
    on_gpu = SimpleNamespace(device=torch.device("cuda"), detach=lambda: None)
    refused = "ipc: CUDA does not share .*: CUDA error: operation not supported. Set it to file"
    sending = ipc.send_by_ipc({"a": on_gpu}, cuda=Refusing())  # type: ignore[dict-item]
    with pytest.raises(WeightSyncError, match=refused), sending:
        pass


@pytest.mark.spec("memory.engine-share")
def test_engine_gets_what_the_trainer_leaves(small: Path) -> None:
    config = config_of(small)
    plan = plan_on(FakeGpus(), config)
    engine = config.generator.inference_engine
    share = engine.gpu_memory_utilization
    assert share is not None and plan is not None
    assert (engine.enable_sleep_mode, engine.gpu_ids) == (True, [0])
    generation = plan.devices[1]
    trainer = generation.total - generation.items[-1].num_bytes
    assert 0 <= GPU - trainer - share * GPU < 0.01 * GPU
    asynchronous = config_of(small, "trainer.fully_async.enabled=true")
    assert plan_on(FakeGpus(), asynchronous) is not None
    assert asynchronous.generator.inference_engine.enable_sleep_mode is False
    apart = config_of(small)
    plan_on(FakeGpus((GPU, GPU)), apart)
    engine = apart.generator.inference_engine
    chosen = (engine.enable_sleep_mode, engine.gpu_ids, engine.gpu_memory_utilization)
    assert chosen == (False, [1], 0.9)
    without = config_of(small)
    assert plan_on(FakeGpus(), without, with_engine=False) is not None
    assert without.generator.inference_engine.gpu_memory_utilization is None


@pytest.mark.spec("memory.engine-share")
def test_engine_has_room_for_the_longest_response_of_an_evaluation(small: Path) -> None:
    size = model_size(load_model_config(str(small)))
    of_training = engine_bytes(config_of(small), size)
    longer = config_of(small, "generator.eval_sampling_params.max_generate_length=9000")
    tokens = make_vllm_setup(longer, str(small)).max_model_len
    assert tokens == 512 + 9000
    each = 2 * size.kv_values  # bytes of a token
    assert engine_bytes(longer, size) - of_training == each * (tokens - 1536)
    chosen = "generator.inference_engine.engine_init_kwargs={max_model_len: 20000}"
    fixed = config_of(small, chosen)
    assert engine_bytes(fixed, size) - of_training == each * (20000 - 1536)


def test_sleep_mode_ipc_and_nccl_need_a_gpu(small: Path) -> None:
    for name, value in (
        ("enable_sleep_mode", "true"),
        ("weight_sync_backend", "ipc"),
        ("weight_sync_backend", "nccl"),
    ):
        asked = config_of(small, f"generator.inference_engine.{name}={value}")
        wanted = f"{name}: expected .*, as the trainer computes on the CPU, got {value}"
        with pytest.raises(SetupError, match=wanted):
            plan_on(FakeGpus(()), asked)
    assert plan_on(FakeGpus(()), config_of(small)) is None
