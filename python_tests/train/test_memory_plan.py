"""The memory plan of a GPU: weights, moments, activations, and what leaves it."""

import math
from pathlib import Path

import pytest
import torch
from _memory import allocated_peak
from _memory import config_of as architecture_of
from _planned import GPU, STAYS, FakeGpus, config_of, plan_on, sizes
from _planned import measured_once as measured_once
from _planned import small as small

from skyrl_fast.commands.plan import num_bytes
from skyrl_fast.config import ConfigError
from skyrl_fast.ops.logprob.linear import linear_logprob
from skyrl_fast.train.memory.activations import ModelSize
from skyrl_fast.train.memory.device_plan import GIB, MemoryPlan
from skyrl_fast.train.memory.parts import head_bytes
from skyrl_fast.train.memory.plan import plan_memory, plan_with_remedies


@pytest.mark.spec("memory.plan")
def test_sum_of_weights_gradients_and_moments(small: Path) -> None:
    plan = plan_memory(config_of(small, "trainer.algorithm.use_kl_loss=true"), capacity=GPU)
    parts = sizes(plan)
    parameters = 494_032_768
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
