"""The memory plan: sums, what does not fit, what to set, and the published recipes."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from _memory import allocated_peak
from _memory import config_of as architecture_of
from _training import folder as folder
from _training import settings

from scripts import hardware_page
from scripts.published_models import BILLIONS, model_folder
from skyrl_fast.cli import main
from skyrl_fast.commands.plan import num_bytes
from skyrl_fast.config import Config, ConfigError
from skyrl_fast.config.loading import as_config, load_config
from skyrl_fast.ops._backend import main_memory
from skyrl_fast.ops.logprob.linear import linear_logprob
from skyrl_fast.rollout.engine import vllm_start
from skyrl_fast.rollout.engine.from_settings import make_vllm_setup
from skyrl_fast.rollout.engine.weights.buckets import BUCKET_BYTES
from skyrl_fast.rollout.engine.weights.receipt import WeightSyncError
from skyrl_fast.rollout.engine.weights.transports import ipc
from skyrl_fast.train.flow.vllm_rollouts import VllmRollouts
from skyrl_fast.train.memory import measurements
from skyrl_fast.train.memory.activations import ModelSize, load_model_config, model_size
from skyrl_fast.train.memory.device_plan import GIB, Item, MemoryPlan
from skyrl_fast.train.memory.parts import engine_bytes, head_bytes
from skyrl_fast.train.memory.plan import (
    gpu_memory,
    memory_in_use,
    plan_memory,
    plan_with_remedies,
    settle_ranks,
)
from skyrl_fast.train.model.loading import recomputes_activations
from skyrl_fast.train.model.policy import Policy
from skyrl_fast.train.run import RunParts, RunRequest, run_request
from skyrl_fast.train.setup import model_checks
from skyrl_fast.train.setup.errors import SetupError
from skyrl_fast.train.setup.given_objects import GivenObjects, with_absolute_paths

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
GPU = num_bytes("79GiB")  # of an "80 GB" GPU
RECIPES = [path for path in sorted(EXAMPLES.glob("*/*.yaml")) if "of 80 GB:" in path.read_text()]
IPC = "generator.inference_engine.weight_sync_backend=ipc"
PUBLIC_TASKS = EXAMPLES.parent / "docs/guide/public_tasks.md"


@dataclasses.dataclass(frozen=True)
class FakeGpus:
    """GPUs of these sizes, all free by default."""

    sizes: tuple[int, ...] = (GPU,)
    free: tuple[int, ...] | None = None
    fault: str = ""

    def free_bytes(self, gpu: int) -> int:
        return (self.free or self.sizes)[gpu]

    def ipc_fault(self) -> str:
        return self.fault


def plan_on(
    gpus: FakeGpus, config: Config, checkpoint: Path | None = None, *, with_engine: bool = True
) -> MemoryPlan | None:
    return model_checks.plan_run_memory(config, checkpoint, with_engine=with_engine, gpus=gpus)


def run_with(config: Config, parts: RunParts, *, reward: Any = None) -> None:
    """Run as `train_agent` does, with these parts."""
    given = GivenObjects("train_agent", reward=reward)
    run_request(config, given, RunRequest(parts=parts))


def on_gpus(gpus: FakeGpus, make_models: Any) -> RunParts:
    """Return the parts of a run that plans for these GPUs."""
    plan = functools.partial(model_checks.plan_run_memory, gpus=gpus)
    return RunParts(plan, make_models, check_rollouts=lambda *_: None)


@pytest.fixture(scope="module", autouse=True)
def measured_once() -> Iterator[None]:
    """Measure each model and setting once; the tests plan most of them again."""

    def remembering(measure: Callable[..., Any]) -> Callable[..., Any]:
        found: dict[str, Any] = {}

        def remembered(config: Any, *arguments: Any, **options: Any) -> Any:
            key = f"{config.to_json_string()} {arguments} {options}"
            if key not in found:
                found[key] = measure(config, *arguments, **options)
            return found[key]

        return remembered

    with pytest.MonkeyPatch.context() as patch:
        for name in ("activation_memory", "model_size"):
            patch.setattr(measurements, name, remembering(getattr(measurements, name)))
        yield


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("small"), "Qwen/Qwen2.5-0.5B-Instruct")


STAYS = "trainer.policy.optimizer_config.offload_after_step=false"


def config_of(model: Path, *overrides: str) -> Config:
    names = ["data.train_data=[none]", f"trainer.policy.model.path={model}"]
    return load_config(None, [*names, *overrides])


def sizes(plan: MemoryPlan, device: int = 0) -> dict[str, int]:
    return {item.name: item.num_bytes for item in plan.devices[device].items}


@pytest.mark.spec("memory.plan")
def test_sum_of_weights_gradients_and_moments(small: Path) -> None:
    plan = plan_memory(config_of(small, "trainer.algorithm.use_kl_loss=true"), capacity=GPU)
    parts, parameters = sizes(plan), 494_032_768
    assert parts["weights, float32"] == 4 * parameters
    assert parts["gradients"] == 4 * parameters
    assert parts["AdamW's moments"] == 8 * parameters
    assert parts["reference model"] == 4 * parameters
    assert plan.host_bytes == 2 * parameters  # a sleeping engine's, in bfloat16
    file = "generator.inference_engine.weight_sync_backend=file"
    assert plan_memory(config_of(small, file), capacity=GPU).host_bytes == 3 * 2 * parameters
    assert plan.fits
    assert plan.devices[0].total == sum(parts.values()) <= GPU


@pytest.mark.spec("memory.plan", "lora.critic", "update.8-bit")
def test_a_critic_on_the_base_has_an_adapter_and_moments_of_8_bits_a_quarter(small: Path) -> None:
    changes = ["trainer.policy.model.lora.rank=16", "trainer.algorithm.advantage_estimator=gae"]
    changes += [f"trainer.critic.model.path={small}"]
    parts = sizes(plan_memory(config_of(small, *changes), capacity=GPU))
    adapter = 4 * 8_798_208  # rank 16 of all linear modules
    assert parts["adapter, float32"] == adapter
    assert parts["AdamW's moments"] == 2 * adapter
    assert parts["critic's adapter, head"] == adapter + 4 * 896
    assert parts["critic's AdamW's moments"] == 2 * (adapter + 4 * 896)
    assert not any(name.startswith(("critic's gradients", "critic's weights")) for name in parts)
    for of in ("policy", "critic"):
        changes.append(f"trainer.{of}.optimizer_config.optimizer=adamw_8bit")
    parts = sizes(plan_memory(config_of(small, *changes), capacity=GPU))
    bits = 2 + 2 * 4 / 256  # bytes of a parameter: two codes, and two scales for 256
    assert parts["AdamW's moments"] == math.ceil(bits * adapter / 4)
    assert parts["critic's AdamW's moments"] == math.ceil(bits * (adapter / 4 + 896))


@pytest.mark.spec("memory.plan")
def test_activations_of_the_token_budget(small: Path) -> None:
    """1.53 MiB per token were measured for this model in bfloat16, and 0.67 GiB of weights."""
    off = "trainer.gradient_checkpointing=false"
    parts = sizes(plan_memory(config_of(small, off), capacity=4 * GPU))
    name = "activations of 16,384 tokens, without checkpointing"
    assert parts[name] == pytest.approx((16384 * 1.53 / 1024 + 0.67) * GIB, rel=0.01)
    twice = config_of(small, off, "trainer.max_tokens_per_microbatch=32768")
    more = sizes(plan_memory(twice, capacity=4 * GPU))[name.replace("16,384", "32,768")]
    assert more - parts[name] == pytest.approx(16384 * 1.53 / 1024 * GIB, rel=0.01)


@pytest.mark.spec("memory.measured")
def test_head_is_not_underestimated() -> None:
    """In float32 the CPU's `linear_logprob` allocates what the GPU's does."""
    tokens, vocab, hidden_size = 256, 1536, 128
    hidden = torch.randn(tokens, hidden_size, requires_grad=True)
    weight = torch.randn(vocab, hidden_size, requires_grad=True)
    weight.grad = torch.zeros_like(weight)
    targets = torch.arange(tokens)

    def run() -> None:
        selected = hidden.index_select(0, targets)
        result = linear_logprob(selected, weight, targets, return_entropy=True)
        result[0].sum().backward()

    sizes = {"vocab_size": vocab, "hidden_size": hidden_size, "kv_values": 0}
    size = ModelSize(0, 0, 0, 0, 0, 0, **sizes)
    measured, planned = allocated_peak(run), head_bytes(size, tokens, torch.float32)
    assert measured <= planned <= 1.5 * measured


def test_a_gpus_attention_saves_no_product_of_rows_whatever_its_heads(tmp_path: Path) -> None:
    architecture_of("deepseek_v3", num_hidden_layers=1).save_pretrained(tmp_path)

    def backward_bytes(device: str, length: int) -> int:
        row = f"generator.max_input_length={length - 512}"
        row_settings = [row, "generator.sampling_params.max_generate_length=512"]
        row_settings += [f"trainer.device={device}", "trainer.max_tokens_per_microbatch=1024"]
        config = config_of(tmp_path, *row_settings, "trainer.gradient_checkpointing=true")
        parts = sizes(plan_memory(config, capacity=GPU))
        return next(
            size for name, size in parts.items() if name.endswith("a layer's backward pass")
        )

    short, long = backward_bytes("auto", 1024), backward_bytes("auto", 4096)
    assert long == pytest.approx(4 * short, rel=0.05)  # of the layer's weights
    assert backward_bytes("cpu", 4096) > 4 * long  # whose kernel takes heads of one size


def test_gpus_share_all_but_activations(small: Path) -> None:
    one = sizes(plan_memory(config_of(small), capacity=GPU))
    four = "trainer.placement.policy_num_gpus_per_node=4"
    each = plan_memory(config_of(small, four), capacity=GPU)
    names = [device.name for device in each.devices]
    assert names == ["each of GPU 0 to 3, update", "each of GPU 0 to 3, generation"]
    assert "engine  0  1  2  3\n" in str(each)
    single = "generator.inference_engine.num_engines=1"
    plan = plan_memory(config_of(small, four, single), capacity=GPU)
    assert "engine  0  .  .  .\n" in str(plan)
    assert each.host_bytes - plan.host_bytes == 3 * 2 * 494_032_768  # asleep, in bfloat16
    assert each.engine_share == plan.engine_share
    first = sizes(plan)
    assert first["AdamW's moments"] == one["AdamW's moments"] // 4
    same = "activations of 16,384 tokens, with checkpointing"
    assert first[same] == one[same]
    names = [device.name for device in plan.devices]
    assert names == ["GPU 0, update", "GPU 0, generation", "each of GPU 1 to 3"]
    others = sizes(plan, 2)
    assert set(first) - set(others) == {"sleeping engine: CUDA context and graphs"}
    assert "gathered weights and gradients" in others


def test_ranks_of_all_nodes_share_weights_and_long_rows(small: Path) -> None:
    eight = ["trainer.placement.policy_num_gpus_per_node=4", "trainer.placement.policy_num_nodes=2"]
    long = ["trainer.max_tokens_per_microbatch=4096", "generator.max_input_length=512"]
    long += ["generator.sampling_params.max_generate_length=30208"]
    eight.append(STAYS)
    plan = plan_with_remedies(config_of(small, *eight, *long), capacity=GPU // 8)
    assert sizes(plan)["AdamW's moments"] == 8 * 494_032_768 // 8
    assert "activations of 30,720 tokens, with checkpointing" in sizes(plan)
    assert not plan.fits
    shared = "trainer.policy.sequence_parallel_size=2"
    assert shared in plan.remedies.settings
    with pytest.raises(ConfigError, match="sequence_parallel_size: wanted a divisor of 14 heads"):
        plan_memory(config_of(small, *eight, *long, shared[:-1] + "4"), capacity=GPU // 8)
    plan = plan_memory(config_of(small, *eight, *long, shared), capacity=GPU // 8)
    assert "activations of 15,360 tokens, with checkpointing" in sizes(plan)
    assert plan.fits
    longer = [*long, "generator.sampling_params.max_generate_length=122368"]  # too long for two
    plan = plan_with_remedies(config_of(small, *eight, *longer), capacity=GPU // 8)
    assert not any("sequence_parallel_size" in remedy for remedy in plan.remedies.settings)


@pytest.mark.spec("memory.offload")
def test_moments_leave_the_gpu_where_they_do_not_fit(small: Path) -> None:
    parameters = 494_032_768
    plan = plan_memory(config_of(small), capacity=GPU)
    largest = max(device.total for device in plan.devices if device.name.endswith("update"))
    tight = largest - GIB
    offloaded = plan_memory(config_of(small), capacity=tight)
    assert offloaded.fits and offloaded.offloads_moments and not plan.offloads_moments
    assert "AdamW's moments are in main memory between steps" in str(offloaded)
    assert "AdamW's moments" not in sizes(offloaded) | sizes(offloaded, 1)
    in_step = "AdamW's moments in a step, beyond what passes take"
    update = sizes(offloaded)
    passes = update["activations of 16,384 tokens, with checkpointing"]
    passes += update["LM head: chunks of logits and gradients"]
    assert update[in_step] == 8 * parameters - passes > 0
    assert offloaded.host_bytes == plan.host_bytes + 8 * parameters
    stays = plan_with_remedies(config_of(small, STAYS), capacity=tight)
    assert not stays.fits
    on = "trainer.policy.optimizer_config.offload_after_step=true"
    assert on in stays.remedies.settings
    assert sizes(plan_memory(config_of(small, on), capacity=GPU))["gradients"] == 4 * parameters
    config = config_of(small)
    assert plan_on(FakeGpus((tight,)), config) is not None
    assert config.trainer.policy.optimizer_config.offload_after_step is True
    roomy = config_of(small)
    assert plan_on(FakeGpus(), roomy) is not None
    assert roomy.trainer.policy.optimizer_config.offload_after_step is None


@pytest.mark.spec("memory.offload-weights")
def test_weights_leave_the_gpu_where_generation_does_not_fit(small: Path) -> None:
    parameters = 494_032_768
    capacity = num_bytes("40GiB")
    share = "generator.inference_engine.gpu_memory_utilization=0.82"
    stay = "trainer.placement.offload_weights=false"
    kept = plan_memory(config_of(small, share, stay, STAYS), capacity=capacity)
    assert not kept.fits
    plan = plan_memory(config_of(small, share), capacity=capacity)
    assert plan.fits and plan.offloads_weights and not plan.offloads_moments
    assert "weights are in main memory while the engine generates" in str(plan)
    update, generation = sizes(plan), sizes(plan, 1)
    assert update["weights, float32"] == 4 * parameters
    assert set(update) & set(generation) == {"AdamW's moments"}
    # Their copies, and a file for the engine with what it is made from, in bfloat16.
    assert plan.host_bytes == kept.host_bytes + 4 * parameters + 2 * 2 * parameters
    config = config_of(small, share)
    assert plan_on(FakeGpus((capacity,)), config) is not None
    assert config.trainer.placement.offload_weights is True
    assert config.generator.inference_engine.weight_sync_backend == "file"
    on = "trainer.placement.offload_weights=true"
    two = "trainer.placement.policy_num_gpus_per_node=2"
    several = plan_memory(config_of(small, on, two), capacity=GPU, num_gpus=2)
    names = [device.name.rpartition(", ")[2] for device in several.devices]
    assert names == ["update", "generation", "hand-over"]
    both = sizes(several, 2)
    assert both["weights, float32"] == both["engine: weights"] == 2 * parameters


@pytest.mark.spec("memory.offload-weights")
def test_weights_are_not_offloaded_for_engines_on_other_gpus(small: Path) -> None:
    apart = "generator.inference_engine.gpu_ids=[1]"
    share = "generator.inference_engine.gpu_memory_utilization=0.82"
    plan = plan_memory(config_of(small, share, apart), capacity=num_bytes("6GiB"), num_gpus=2)
    assert not plan.fits and not plan.offloads_weights


def test_nodes_are_planned_alike(small: Path) -> None:
    placement = "trainer.placement.policy_num"
    nodes = [f"{placement}_nodes=2", f"{placement}_gpus_per_node=2"]
    plan = plan_memory(config_of(small, *nodes), capacity=GPU, num_gpus=2)
    names = [device.name for device in plan.devices]
    assert names == ["each of GPU 0 to 1, update", "each of GPU 0 to 1, generation"]
    assert sizes(plan)["weights, float32"] == 494_032_768  # of four ranks
    assert str(plan).startswith("the first of 2 nodes; the others are like it\nGPU     0  1\n")


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
    base, adapter = 494_032_768, 8_798_208
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


@pytest.mark.spec("memory.free")
def test_unused_memory_is_returned_before_the_engine_starts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(policy: Policy) -> None:
        raise LookupError("no engine yet")

    async def start(*arguments: object) -> None:
        raise AssertionError("the engine started first")

    monkeypatch.setattr(Policy, "free_cached_memory", stop)
    monkeypatch.setattr(VllmRollouts, "start", start)
    parts = RunParts(check_rollouts=lambda *_: None)
    with pytest.raises(LookupError, match="no engine yet"):
        run_with(settings(folder, "run"), parts, reward=lambda answer, row: 0.0)


@pytest.mark.spec("memory.main-memory")
def test_on_a_cpu_trainer_and_engine_have_the_main_memory(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parts(*overrides: str) -> dict[str, int]:
        cpu = config_of(small, "trainer.device=cpu", *overrides)
        return sizes(plan_memory(cpu, capacity=64 * GIB))

    parameters, adapter = 494_032_768, 8_798_208
    weights = "engine: weights, and their copy in the kernels' layout"
    plain = parts()
    assert plain["trainer: weights, float32"] == 4 * parameters
    assert plain["trainer: AdamW's moments"] == 8 * parameters
    assert plain[weights] == 2 * 4 * parameters  # an engine's dtype is float32 here, too
    assert plain["engine: KV cache (VLLM_CPU_KVCACHE_SPACE)"] == GIB
    activations = "trainer: activations of 16,384 tokens, without checkpointing"
    recomputed = parts("trainer.gradient_checkpointing=true")
    with_checkpointing = activations.replace("without", "with")
    assert recomputed[with_checkpointing] < 0.2 * plain[activations]
    bfloat16 = parts("trainer.policy.dtype=bfloat16", "trainer.policy.model.lora.rank=16")
    assert bfloat16["trainer: frozen weights, bfloat16"] == 2 * parameters
    assert bfloat16["trainer: adapter, float32"] == 4 * adapter
    assert bfloat16[weights] == 2 * 4 * parameters
    file = "weights for the engine, and their file"
    two = parts("trainer.placement.policy_num_gpus_per_node=2")
    assert two["2 ranks: weights, float32"] == 4 * parameters  # half of them each
    assert two[file] == 2 * 4 * parameters and file not in plain.keys() | bfloat16.keys()
    servers = "generator.inference_engine.external_server_urls=[http://127.0.0.1:1]"
    elsewhere = parts("generator.inference_engine.run_engines_locally=false", servers)
    assert all(name.startswith("trainer: ") for name in elsewhere)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "3")
    assert parts()["engine: KV cache (VLLM_CPU_KVCACHE_SPACE)"] == 3 * GIB


@pytest.mark.spec("memory.main-memory")
def test_what_makes_a_run_fit_into_main_memory(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("data: {train_data: [none]}\ntrainer: {device: cpu}\n")
    command = ["plan", str(path), f"trainer.policy.model.path={small}"]
    assert main([*command, "--device-memory", "20GiB"]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith("main memory: ")
    remedies = printed.split("it would fit with:\n")[1].partition("for example:")[0].split()
    assert remedies == ["trainer.gradient_checkpointing=true"]
    assert main([*command, *remedies, "--device-memory", "20GiB"]) == 0
    main(command)
    assert f" of {main_memory() / GIB:,.1f} GiB\n" in capsys.readouterr().out


@pytest.mark.spec("memory.main-memory")
def test_a_machine_without_a_gpu_is_planned_by_its_main_memory(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.device_count():
        pytest.skip("this machine has a GPU")
    path = tmp_path / "config.yaml"
    path.write_text(f"trainer: {{policy: {{model: {{path: {small}}}}}}}\n")  # without data
    command = ["plan", str(path), "trainer.max_tokens_per_microbatch=256"]
    main(command)
    printed = capsys.readouterr()
    assert f" of {main_memory() / GIB:,.1f} GiB\n" in printed.out
    assert printed.out.startswith("main memory: ")
    assert "--device-memory 79GiB plans for a GPU" in printed.err
    for described in (
        ["--device-memory", "79GiB"],
        ["--num-gpus", "1"],
        ["trainer.device=cuda"],
        ["trainer.placement.policy_num_gpus_per_node=2"],
    ):
        main([*command, *described])
        printed = capsys.readouterr()
        assert "GPU 0" in printed.out and " of 79.0 GiB\n" in printed.out
        assert "plans for a GPU" not in printed.err


@pytest.mark.spec("memory.cpu-warning")
def test_a_run_on_a_cpu_is_warned_of_more_memory_than_there_is(
    small: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(model_checks, "PLANNED_BYTES", 0)
    config = config_of(small, "trainer.device=cpu", "trainer.max_tokens_per_microbatch=256")
    for memory, is_warned in ((64 * GIB, False), (2 * GIB, True)):
        caplog.clear()
        plan = model_checks.plan_run_memory(config, None, with_engine=True, memory=memory)
        assert plan is None
        assert bool(caplog.messages) is is_warned
    (warning,) = caplog.messages
    assert warning.startswith("the run may need more memory than this machine has:\nmain memory: ")
    assert "does not fit: main memory lacks" in warning
    assert config.trainer.device == "cpu"


@pytest.mark.spec("memory.mini-batch")
@pytest.mark.parametrize(
    ("overrides", "tokens"),
    [
        (["generator.max_turns=3"], 2 * 4 * (64 + 20)),  # a growing context: one sequence
        (
            ["generator.max_turns=1", "trainer.row_layout=tree"],
            2 * (64 + 4 * 20),
        ),  # the prompt once
        (["generator.max_turns=3", "trainer.row_layout=tree"], 2 * 4 * (64 + 20)),
        (["generator.max_turns=3", "generator.context=retemplate"], 2 * 4 * 3 * (64 + 20)),
        (["trainer.max_tokens_per_microbatch=300"], 300),
    ],
)
def test_a_pass_has_at_most_the_tokens_of_a_mini_batch(
    small: Path, overrides: list[str], tokens: int
) -> None:
    lengths = ["generator.max_input_length=64", "generator.sampling_params.max_generate_length=20"]
    batch = ["trainer.policy_mini_batch_size=2", "generator.n_samples_per_prompt=4"]
    plan = plan_memory(config_of(small, *lengths, *batch, *overrides), capacity=GPU)
    assert f"activations of {tokens:,} tokens, with checkpointing" in sizes(plan)


@pytest.mark.spec("memory.saved-logits")
def test_logits_are_saved_where_an_update_leaves_room(small: Path) -> None:
    def saved(capacity: str, *overrides: str) -> int:
        plan = plan_memory(config_of(small, *overrides), capacity=num_bytes(capacity))
        return plan.saved_logits_bytes

    every = 16384 * 151936 * 2
    assert saved("79GiB") == every
    assert saved("79GiB", "trainer.max_tokens_per_microbatch=8192") == every // 2
    assert saved("79GiB", "trainer.policy.lm_head_dtype=float32") == every * 2
    tight = plan_memory(config_of(small), capacity=num_bytes("16GiB"))
    left = tight.devices[0].capacity - tight.devices[0].total
    assert 0 < left < every
    assert tight.saved_logits_bytes == int(left / 1.1)  # the allocator's blocks
    assert str(tight).endswith(f"; the rest holds up to {left / 1.1 / GIB:.1f} GiB of saved logits")
    assert saved("8GiB") == 0
    # an engine that is awake has been given the rest
    assert saved("40GiB", "generator.inference_engine.enable_sleep_mode=false") < 0.4 * GIB
    two = plan_memory(config_of(small), capacity=GPU, num_gpus=2)
    assert two.saved_logits_bytes == every


@pytest.mark.spec("memory.held-gradients")
def test_ranks_hold_full_gradients_where_an_update_leaves_room(small: Path) -> None:
    two = "trainer.placement.policy_num_gpus_per_node=2"

    def planned(capacity: int, *overrides: str) -> MemoryPlan:
        return plan_memory(config_of(small, *overrides), capacity=capacity)

    full = 4 * 494_032_768
    roomy = planned(GPU, two)
    assert roomy.held_gradient_bytes == full
    held = "the rest holds 1.8 GiB of gradients to reduce and up to 4.6 GiB of saved logits"
    assert str(roomy).endswith(held)
    assert planned(GPU).held_gradient_bytes == 0  # one rank has nothing to reduce
    used = roomy.devices[0].total
    least, fewer = (planned(used + more, two) for more in (full, full - 1))
    assert (least.held_gradient_bytes, least.saved_logits_bytes) == (full, 0)
    assert fewer.held_gradient_bytes == 0
    assert fewer.saved_logits_bytes > 0
    assert fewer.fits


@pytest.mark.spec("memory.saved-logits")
def test_train_saves_the_logits_of_the_plan(folder: Path) -> None:
    found: list[Any] = []

    def stop(*arguments: Any, saved_logits_bytes: int | None, **options: bool) -> None:
        found.append(saved_logits_bytes)
        assert not any(options.values())  # of one rank, without an adapter
        raise ValueError("stop here")

    short = ("generator.max_input_length=40", "generator.sampling_params.max_generate_length=16")
    chosen = settings(folder, "run", *short, "generator.chat_template=plain")
    with pytest.raises(SetupError, match="stop here"):
        run_with(chosen, on_gpus(FakeGpus(), stop), reward=lambda answer, row: 0.0)
    config = with_absolute_paths(as_config(chosen))
    plan = plan_on(FakeGpus(), config)
    assert plan is not None and found == [plan.saved_logits_bytes] and found[0] > 0


def test_undivided_losses_ignore_the_budget(small: Path) -> None:
    config = config_of(
        small,
        "trainer.algorithm.policy_loss_type=kl_cov",
        "trainer.train_batch_size=8",
        "trainer.policy_mini_batch_size=8",
        "generator.sampling_params.max_generate_length=512",
    )
    rows = 8 * 5 * (512 + 512)
    names = sizes(plan_memory(config, capacity=4 * GPU))
    assert f"activations of {rows:,} tokens, with checkpointing" in names


@pytest.mark.spec("memory.remedies")
def test_names_the_setting_that_makes_it_fit(small: Path) -> None:
    budget = "trainer.max_tokens_per_microbatch=65536"
    config = config_of(small, "trainer.gradient_checkpointing=false", budget)
    plan = plan_with_remedies(config, capacity=GPU)
    assert not plan.fits
    assert "trainer.gradient_checkpointing=true" in plan.remedies.settings
    assert "trainer.max_tokens_per_microbatch=32768" in plan.remedies.settings
    for remedy in plan.remedies.settings:
        changed = config_of(small, "trainer.gradient_checkpointing=false", budget, remedy)
        assert plan_memory(changed, capacity=GPU).fits


@pytest.mark.spec("memory.residual-dtype")
def test_rounded_residual_stream_halves_checkpointed_activations(small: Path) -> None:
    """Measured for this model: 94.5 KiB per token, and 50.8 with sums in bfloat16."""
    name = "activations of 16,384 tokens, with checkpointing"
    for value, kib in (("float32", 94.5), ("auto", 50.8)):
        config = config_of(small, f"trainer.residual_dtype={value}")
        found = sizes(plan_memory(config, capacity=GPU))[name]
        assert found == pytest.approx(16384 * kib * 1024, rel=0.01)
    tight = num_bytes("13.5GiB")
    assert (
        "trainer.residual_dtype=auto"
        in plan_with_remedies(config_of(small, STAYS), capacity=tight).remedies.settings
    )


@pytest.mark.spec("memory.remedies")
def test_combines_settings_where_none_is_enough(small: Path) -> None:
    config = config_of(
        small,
        "trainer.gradient_checkpointing=false",
        "generator.inference_engine.gpu_memory_utilization=0.8",
        STAYS,
    )
    plan = plan_with_remedies(config, capacity=num_bytes("20GiB"))
    assert plan.remedies.settings == (
        "trainer.gradient_checkpointing=true "
        "generator.inference_engine.gpu_memory_utilization=null",
    )
    nccl = config_of(small, "generator.inference_engine.weight_sync_backend=nccl", STAYS)
    plan = plan_with_remedies(nccl, capacity=num_bytes("10GiB"), num_gpus=2)
    found = plan.remedies.settings
    assert found and not any("num_gpus" in remedy for remedy in found)


@pytest.mark.spec("memory.nearest")
def test_where_nothing_fits_the_nearest_is_named(small: Path) -> None:
    plan = plan_with_remedies(config_of(small), capacity=num_bytes("1GiB"), num_gpus=1)
    found = plan.remedies
    assert (found.settings, found.by_lora, found.shorter) == ((), (), ())
    assert "nothing fits; tried: smaller micro-batches, residual_dtype, 8-bit moments" in str(plan)
    changed = config_of(small, *found.nearest.split())
    nearest = plan_memory(changed, capacity=num_bytes("1GiB"))
    lacking = max(device.total - device.capacity for device in nearest.devices)
    assert lacking == found.lacking_bytes > 0
    assert f"the nearest lacks {lacking / GIB:.1f} GiB: {found.nearest}" in str(plan)


def count_proposals(model: Path, memory: str, num_gpus: int, *overrides: str) -> int:
    """Plan each proposal by itself, and return their number; -1: the run fits as it is."""
    capacity = num_bytes(memory)
    plan = plan_with_remedies(config_of(model, *overrides), capacity=capacity, num_gpus=num_gpus)
    if plan.remedies is None:
        return -1
    for proposal in plan.remedies.proposals:
        changed = config_of(model, *overrides, *proposal.split())
        assert plan_memory(changed, capacity=capacity, num_gpus=num_gpus).fits, proposal
        assert changed.trainer.placement.policy_num_gpus_per_node <= num_gpus
        assert changed.generator.inference_engine.tensor_parallel_size <= num_gpus
    return len(plan.remedies.proposals)


@pytest.mark.spec("memory.remedies")
@pytest.mark.parametrize(
    ("memory", "overrides", "num_gpus"),
    [
        ("8GiB", [], 1),  # all weights do not fit
        ("5GiB", ["trainer.policy.model.lora.rank=8"], 1),
        ("7GiB", ["generator.max_input_length=8192"], 4),
        # No adapter is proposed: ranks hand over none.
        ("9GiB", [IPC, "trainer.placement.policy_num_gpus_per_node=2"], 2),
        pytest.param(  # with shorter rows
            "3GiB", ["generator.max_input_length=8192"], 1, marks=pytest.mark.slow
        ),
    ],
)
def test_each_proposal_fits_and_takes_no_more_gpus(
    memory: str, overrides: list[str], num_gpus: int, small: Path
) -> None:
    assert count_proposals(small, memory, num_gpus, *overrides) > 0


@pytest.mark.spec("memory.remedies")
@pytest.mark.parametrize(
    ("rank", "num_gpus"),
    [
        (0, 2),
        (8, 1),
        pytest.param(0, 1, marks=pytest.mark.slow),
        pytest.param(0, 4, marks=pytest.mark.slow),
    ],
)
def test_proposals_of_many_machines(rank: int, num_gpus: int, small: Path) -> None:
    adapter = f"trainer.policy.model.lora.rank={rank}"
    memories = ("6GiB", "9GiB", "12GiB", "14GiB", "80GiB")
    counts = [count_proposals(small, memory, num_gpus, adapter) for memory in memories]
    assert all(counts), dict(zip(memories, counts, strict=True))
    assert counts[-1] == -1 and max(counts) > 0


QUESTIONS = {  # model, memory, GPUs, lengths of prompt and answer
    "7B on 24 GB": ("Qwen/Qwen2.5-Coder-7B-Instruct", "24GiB", 1, 3072, 1024),
    "32B on 8 x 80 GB": ("Qwen/Qwen2.5-32B-Instruct", "79GiB", 8, 14000, 4000),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("question", QUESTIONS)
def test_what_people_ask_has_an_answer(question: str, tmp_path: Path) -> None:
    name, memory, num_gpus, prompt, answer = QUESTIONS[question]
    lengths = (
        f"generator.max_input_length={prompt}",
        f"generator.sampling_params.max_generate_length={answer}",
    )
    model = model_folder(tmp_path, name)
    assert count_proposals(model, memory, num_gpus, *lengths) > 0


ALWAYS = ("multi_turn_qwen2.5_0.5b", "qwen2.5_coder_7b")  # one GPU, and several


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(p, marks=() if p.stem in ALWAYS else pytest.mark.slow) for p in RECIPES],
    ids=lambda path: path.stem,
)
def test_published_recipes_fit_the_gpus_that_they_name(recipe: Path, tmp_path: Path) -> None:
    config = load_config(recipe, [])
    name = str(config.trainer.policy.model.path)
    config.trainer.policy.model.path = str(model_folder(tmp_path, name))
    plan = plan_memory(config, capacity=GPU)
    assert plan.fits, str(plan)
    assert plan.engine_share is not None and plan.engine_share >= 0.25
    num_gpus = config.trainer.placement.policy_num_gpus_per_node
    parameters = sizes(plan)["weights, float32"] * num_gpus / 4e9
    assert parameters == pytest.approx(BILLIONS[name], rel=0.001)
    words, each = {1: "One GPU", 2: "Two GPUs", 4: "Four GPUs"}, " on each" * (num_gpus > 1)
    needs = f"an update needs {plan.devices[0].total / GIB:.0f} GiB{each}, while the engine sleeps."
    assert f"# {words[num_gpus]} of 80 GB: by `skyrl-fast plan` {needs}" in recipe.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("files", "capacity", "row"),
    [
        (["qwen3_4b"], 22 * GIB, "| qwen3_4b.yaml | one of 24 GB |"),
        (["qwen3_4b"], 44 * GIB, "| qwen3_4b.yaml | one of 48 GB |"),
        (["qwen3_4b", "eight_gpus"], 44 * GIB, "| with eight_gpus.yaml | eight of 48 GB |"),
    ],
)
def test_larger_models_of_public_tasks_need_what_their_page_says(
    files: list[str], capacity: int, row: str, tmp_path: Path
) -> None:
    paths = [EXAMPLES / f"bfcl/{name}.yaml" for name in files]
    config = load_config(paths[0], [str(path) for path in paths[1:]])
    name = str(config.trainer.policy.model.path)
    config.trainer.policy.model.path = str(model_folder(tmp_path, name))
    plan = plan_memory(config, capacity=capacity)
    assert plan.fits, str(plan)
    update = plan.devices[0].total / GIB
    cache = sizes(plan, 1)["engine: weights and KV cache"] / GIB
    assert f"{row} {update:.1f} | {cache:.1f} |" in PUBLIC_TASKS.read_text()
    assert f"an update needs {update:.1f} GiB" in paths[-1].read_text()


def test_command(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        f"data: {{train_data: [x]}}\ntrainer: {{policy: {{model: {{path: {small}}}}}}}\n"
    )
    assert main(["plan", str(file), "--device-memory", "80GiB"]) == 0
    assert "fits; gpu_memory_utilization=0.90" in capsys.readouterr().out
    assert main(["plan", str(file), "--device-memory", "8GiB"]) == 1
    out = capsys.readouterr().out
    assert "does not fit: GPU 0, update lacks" in out
    command = out.splitlines()[-1].removeprefix("for example: skyrl-fast train ")
    assert command.startswith(f"{file} trainer.")
    assert main(["plan", *command.split(), "--device-memory", "8GiB"]) == 0
    assert "fits" in capsys.readouterr().out
    assert main(["plan", str(file), "trainer.policy.model.path=/nowhere"]) == 2
    assert "model folder not found: /nowhere" in capsys.readouterr().err
    for option, value in [
        ("--device-memory", "80"),
        ("--device-memory", "0GiB"),
        ("--num-gpus", "0"),
        ("--num-gpus", "-3"),
    ]:
        with pytest.raises(SystemExit, match="2"):
            main(["plan", str(file), f"{option}={value}"])
        assert f"{option}: expected a " in capsys.readouterr().err


@pytest.mark.spec("memory.refused")
def test_train_refuses_on_a_gpu(folder: Path) -> None:
    parts = on_gpus(FakeGpus((num_bytes("1MiB"),)), lambda *_: pytest.fail("models were loaded"))
    with pytest.raises(SetupError, match=r"(?s)more memory than its GPUs have.*lacks .* GiB"):
        run_with(settings(folder, "run"), parts)


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


@pytest.mark.spec("memory.unmeasurable")
def test_a_model_that_reads_values_is_trained_without_a_plan(
    small: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

    def reads_a_value(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden if float(hidden.sum()) > 0 else -hidden

    monkeypatch.setattr(Qwen2MLP, "forward", reads_a_value)
    # No other test measures this.
    config = config_of(small, "generator.max_input_length=333")
    assert plan_on(FakeGpus(), config) is None
    assert config.generator.inference_engine.gpu_memory_utilization == 0.5
    assert "no memory plan: the model's memory cannot be measured" in caplog.text


def test_a_resumed_run_is_planned_from_its_checkpoint(small: Path, tmp_path: Path) -> None:
    model_folder(tmp_path / "policy", "Qwen/Qwen2.5-0.5B-Instruct")
    config = config_of(tmp_path / "deleted")
    assert plan_on(FakeGpus(), config, tmp_path) is not None
    assert config.trainer.policy.model.path == str(tmp_path / "deleted")
    assert config.trainer.ref.model.path is None


@pytest.mark.spec("memory.device-defaults")
def test_defaults_by_device() -> None:
    trainer = Config().trainer
    assert recomputes_activations(trainer, torch.device("cuda"))
    assert not recomputes_activations(trainer, torch.device("cpu"))
    for chosen in (True, False):
        fixed = dataclasses.replace(trainer, gradient_checkpointing=chosen)
        assert recomputes_activations(fixed, torch.device("cuda")) is chosen
    setup = vllm_start.VllmSetup("model", max_model_len=64, on_cpu=True)
    assert vllm_start.engine_args(setup)["enforce_eager"] is True
    setup = dataclasses.replace(setup, on_cpu=False)
    on_gpu = vllm_start.engine_args(setup)
    assert on_gpu["enforce_eager"] is False
    assert on_gpu["gpu_memory_utilization"] == 0.9
    setup.engine.enforce_eager = True
    setup.engine.gpu_memory_utilization = 0.5
    fixed_args = vllm_start.engine_args(setup)
    assert (fixed_args["enforce_eager"], fixed_args["gpu_memory_utilization"]) == (True, 0.5)


def ranks_by_plan(model: Path, memory: str, *overrides: str) -> int | None:
    """Return the ranks of a machine of eight GPUs where the setting is null."""
    config = config_of(model, "trainer.placement.policy_num_gpus_per_node=null", *overrides)
    settle_ranks(config, capacity=num_bytes(memory), num_gpus=8)
    return config.trainer.placement.policy_num_gpus_per_node


@pytest.mark.spec("memory.ranks")
def test_the_plan_divides_a_machine(small: Path) -> None:
    asynchronous = "trainer.fully_async.enabled=true"
    assert ranks_by_plan(small, "79GiB") == 8
    assert ranks_by_plan(small, "79GiB", asynchronous) == 4
    engines = "generator.inference_engine.num_engines=2"
    assert ranks_by_plan(small, "79GiB", asynchronous, engines) == 6
    assert ranks_by_plan(small, "2GiB", asynchronous) == 7  # none fits: the most that share weights
    assert ranks_by_plan(small, "79GiB", "trainer.device=cpu") == 1
    engines = "generator.inference_engine.num_engines=8"
    assert ranks_by_plan(small, "79GiB", IPC, engines) == 8
    top_k = (
        "trainer.algorithm.distillation.teachers={default: 'http://127.0.0.1:8000'}",
        "trainer.algorithm.distillation.top_k=8",
    )
    with pytest.raises(ConfigError, match="sampled one are computed by one rank"):
        ranks_by_plan(small, "79GiB", *top_k)


def test_a_run_draws_how_its_gpus_are_divided(small: Path) -> None:
    null = "trainer.placement.policy_num_gpus_per_node=null"
    config = config_of(small, null, "trainer.fully_async.enabled=true")
    plan = plan_on(FakeGpus((GPU,) * 4), config)
    assert plan is not None
    assert "rank    0  1  .  .\nengine  .  .  0  1" in str(plan)
    assert config.trainer.placement.policy_num_gpus_per_node == 2
    assert config.generator.inference_engine.gpu_ids == [2, 3]


@pytest.mark.slow
def test_hardware_page_is_up_to_date() -> None:
    """Two of its rows; all take a minute."""
    page = hardware_page.PAGE.read_text(encoding="utf-8")
    for name in ("Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen2.5-Coder-7B-Instruct"):
        for row in hardware_page.rows_of(name):
            assert row in page, "run python -m scripts.hardware_page"
