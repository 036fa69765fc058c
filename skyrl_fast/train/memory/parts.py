"""What takes memory in a run: each part of a plan, by formula, from settings and measurements.

Weights, gradients and moments follow from the model's config, activations from `Measurements`. What
FSDP2, the CUDA context and the engine need is estimated.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from skyrl_fast.config import Config, policy_loss_spec
from skyrl_fast.config.modes import EngineWeights
from skyrl_fast.config.settings import OptimizerConfig, max_response_length
from skyrl_fast.ops.logprob.linear_rows import COLUMN_MULTIPLE, default_chunk_rows
from skyrl_fast.rollout.engine.vllm_start import CPU_CACHE_GIB, CPU_CACHE_VARIABLE
from skyrl_fast.rollout.engine.weights.buckets import BUCKET_BYTES
from skyrl_fast.rollout.engine.weights.receipt import dtype_name
from skyrl_fast.train.memory.activations import FLOAT32_BYTES, ModelSize
from skyrl_fast.train.memory.device_plan import GIB, DevicePlan, Item
from skyrl_fast.train.memory.measurements import Measurements, trained_adapter
from skyrl_fast.train.model.loading import recomputes_activations
from skyrl_fast.train.placement import EnginePlacement

WEIGHT_BYTES, GRADIENT_BYTES, MOMENT_BYTES = 4, 4, 8  # per parameter; AdamW has two moments
BLOCK_VALUES = 256  # block of torchao's 8-bit moments, which share a float32 scale
# FSDP2 gathers a layer's weights, and reduces its gradients, through buffers of the same size, for
# one layer while the next one arrives. Weights outside the layers stay gathered during a pass, and
# their gradients are reduced at its end, when the activations are freed.
# Bytes of a gathered parameter: its weight, its gradient, and in a layer a buffer. Gathered in 16
# bits, its gradient has these, too, and the buffer, in which gradients are reduced, is float32.
LAYER_BYTES, ROOT_BYTES = 12, 8
ROUNDED_LAYER_BYTES = 8
GATHERED_LAYERS = 2
CONTEXT_BYTES = GIB  # a process's CUDA context and libraries
# Memory of a process without a GPU, as measured for a trainer and an engine of a tiny model.
CPU_TRAINER_BYTES = 800 << 20
CPU_ENGINE_BYTES = 900 << 20
# Buckets of a broadcast that exist at a time: one on its way, and one being packed; one being
# received, one being loaded, and one of whose layer not all was loaded.
SENT_BUCKETS = 2
RECEIVED_BUCKETS = 3
ASLEEP_BYTES = 2 * GIB  # memory of a sleeping engine: its context, CUDA graphs, libraries
# Share of activations: blocks that the caching allocator cannot reuse, and the holes of a CPU's
# heap, which were measured as 0.03 to 0.6.
FRAGMENTATION = 0.1
CPU_FRAGMENTATION = 0.3
ENGINE_LIMIT = 0.9  # largest share that is computed for the engine; vLLM's default
ENGINE_SLACK = 2 * GIB  # within its share: CUDA graphs, activations of a step
LOGIT_COPIES = 4  # float32 logits of one engine step: sorted, their probabilities, ...


def planned_device(config: Config) -> torch.device:
    """Return the kind of device that is planned for: GPUs, unless the settings name the CPU."""
    return torch.device("cpu" if config.trainer.device == "cpu" else "cuda")


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of this name; `auto` is that of GPUs."""
    if name == "auto":
        dtype = torch.bfloat16
    else:
        dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def row_length(config: Config) -> int:
    """Return the tokens of the longest row: prompt and response."""
    return config.generator.max_input_length + config.generator.sampling_params.max_generate_length


def total_bytes(items: Iterable[Item]) -> int:
    return sum(item.num_bytes for item in items)


def host_bytes(config: Config, size: ModelSize, engine: EnginePlacement) -> int:
    """Return the main memory of a file's weights, and of those of a sleeping engine."""
    item = dtype_of(config.engine_dtype).itemsize
    sends_adapter = config.engine_weights is EngineWeights.ADAPTER
    sent = size.trained_parameters if sends_adapter else size.parameters
    parameters = 0
    if engine.weight_sync == "file":  # a copy in this process, and the file in shared memory
        parameters += 2 * sent
    if engine.sleeps:
        parameters += len(engine.engines) * size.parameters
    return item * parameters + offloaded_bytes(config, size)


def offloaded_bytes(config: Config, size: ModelSize) -> int:
    """Return the main memory of the policy's moments that leave the GPUs of a machine."""
    optimizer = config.trainer.policy.optimizer_config
    if not optimizer.offload_after_step:
        return 0
    share = size.trained_parameters / config.trainer.placement.policy_num_nodes
    return math.ceil(share * moment_bytes(optimizer))


def _share_bytes(config: Config, name: str, parameters: int, each: float) -> Item:
    """Return a part of `each` bytes a parameter, of which every rank has its share."""
    by_gpus = ("trainer.placement.policy_num_gpus_per_node",)
    num_ranks = config.trainer.placement.num_ranks
    return Item(name, math.ceil(parameters * each / num_ranks), by_gpus)


def resident_items(config: Config, measure: Measurements) -> list[Item]:
    """Return what a rank holds throughout: the policy's weights and moments come first."""
    weights = all_weights(config, measure)
    moments = resident_moments(config, measure)
    number = len(_weight_items(config, measure.policy_size(config)))
    return [*weights[:number], *moments, *weights[number:]]


def all_weights(config: Config, measure: Measurements) -> list[Item]:
    """Return a rank's weights of the policy, then those of the other models."""
    trainer = config.trainer
    algorithm = config.trainer.algorithm
    policy = str(trainer.policy.model.path)
    size = measure.policy_size(config)
    items = _weight_items(config, size)
    if (algorithm.use_kl_loss or algorithm.use_kl_in_reward) and not config.shares_reference:
        reference = measure.size(trainer.ref.model.path or policy).parameters
        items.append(_share_bytes(config, "reference model", reference, WEIGHT_BYTES))
    if trainer.critic.model.path is not None:
        weights = measure.size(trainer.critic.model.path).parameters
        name = "weights"
        if config.shares_critic:
            weights = size.trained_parameters + size.hidden_size
            name = "adapter, head"
        items.append(_share_bytes(config, f"critic's {name}", weights, WEIGHT_BYTES))
    return items


def resident_moments(config: Config, measure: Measurements) -> list[Item]:
    """Return a rank's moments that stay on its GPU between steps."""
    trainer = config.trainer
    size = measure.policy_size(config)
    items = []
    if not trainer.policy.optimizer_config.offload_after_step:
        items.append(_moments_item(config, "", size.trained_parameters))
    path = trainer.critic.model.path
    if path is not None and not trainer.critic.optimizer_config.offload_after_step:
        parameters = measure.size(path).parameters
        if config.shares_critic:
            parameters = size.trained_parameters + size.hidden_size
        items.append(_moments_item(config, "critic's ", parameters))
    return items


def _moments_item(config: Config, whose: str, parameters: int) -> Item:
    trainer = config.trainer
    model = trainer.critic if whose else trainer.policy
    each = moment_bytes(model.optimizer_config)
    return _share_bytes(config, f"{whose}AdamW's moments", parameters, each)


def moment_bytes(config: OptimizerConfig) -> float:
    """Return the bytes of AdamW's moments, per parameter."""
    if config.optimizer == "adamw":
        return MOMENT_BYTES
    return 2 * (1 + FLOAT32_BYTES / BLOCK_VALUES)


def _weight_items(config: Config, size: ModelSize) -> list[Item]:
    """Return the policy's weights on one GPU; those below an adapter are frozen."""
    if not config.trains_adapter:
        return [_share_bytes(config, "weights, float32", size.parameters, WEIGHT_BYTES)]
    dtype = dtype_of(config.trainer.policy.dtype)
    frozen = size.frozen_parameters
    if config.policies:
        kind = f"{len(config.policies)} adapters"
    else:
        kind = "adapter"
    return [
        _share_bytes(config, f"frozen weights, {dtype_name(dtype)}", frozen, dtype.itemsize),
        _share_bytes(config, f"{kind}, float32", size.trained_parameters, WEIGHT_BYTES),
    ]


def largest_update(config: Config, measure: Measurements) -> list[Item]:
    """Return the trainer's further parts on one GPU, at the peak of an update."""
    # Policy and critic are updated one after the other; a critic on the policy's base has the same
    # layers and no LM head.
    trainer = config.trainer
    paths = [str(trainer.policy.model.path)]
    if trainer.critic.model.path is not None and not config.shares_critic:
        paths.append(trainer.critic.model.path)
    updates = []
    for path in paths:
        is_policy = path == paths[0]
        updates.append(_update_items(config, measure, path, is_policy))
    largest = max(updates, key=total_bytes)
    context = CONTEXT_BYTES
    share = FRAGMENTATION
    kind = "CUDA context"
    if planned_device(config).type == "cpu":
        context = CPU_TRAINER_BYTES
        share = CPU_FRAGMENTATION
        kind = "libraries"
    passes = total_bytes(largest[1:])
    slack = context + math.ceil(share * passes)
    return [*largest, Item(f"{kind}, and blocks that the allocator cannot reuse", slack)]


def _update_items(
    config: Config,
    measure: Measurements,
    path: str,
    is_policy: bool,
) -> list[Item]:
    """Return the parts of the update of policy or critic: gradients first, then activations."""
    trainer = config.trainer
    lora = trained_adapter(config) if is_policy else None
    size = measure.size(path, lora)
    dtype = dtype_of(trainer.policy.dtype)
    device = planned_device(config)
    checkpointing = recomputes_activations(trainer, device)
    length = row_length(config)
    tokens, by_tokens = _pass_tokens(config, length)
    if trainer.residual_dtype == "auto":
        residual = dtype
    else:
        residual = torch.float32
    memory = measure.activations(
        path,
        length,
        dtype=dtype,
        gradient_checkpointing=checkpointing,
        residual_dtype=residual,
        lora=lora,
        on_gpu=device.type == "cuda",
    )
    whose = "" if is_policy else "critic's "
    items = [_share_bytes(config, f"{whose}gradients", size.trained_parameters, GRADIENT_BYTES)]
    if trainer.placement.num_ranks > 1:
        of_layer = gathered_layer_bytes(size, dtype)
        of_root = ROOT_BYTES
        if lora is not None:
            # A frozen weight has no gradient: it and a layer's buffer, in its own dtype.
            of_root = 2 * dtype.itemsize
            of_layer = of_root * size.layer_parameters
        gathered = GATHERED_LAYERS * of_layer + of_root * size.root_parameters
        items.append(Item(f"{whose}gathered weights and gradients", gathered))
    kind = "with" if checkpointing else "without"
    items.append(
        Item(
            f"{whose}activations of {tokens:,} tokens, {kind} checkpointing",
            memory.saved.of(tokens / length),
            (by_tokens, *(() if checkpointing else ("trainer.gradient_checkpointing",))),
        )
    )
    head = 0
    layer = memory.workspace.of(tokens / length)
    if is_policy:
        options = {"trained": lora is None, "on_gpu": device.type == "cuda"}
        head = head_bytes(size, tokens, _head_dtype(config), **options)
    # One after the other. The embeddings' gradient comes last, when the activations are freed.
    name = "LM head: chunks of logits and gradients" if head > layer else "a layer's backward pass"
    items.append(Item(f"{whose}{name}", max(head, layer), (by_tokens,)))
    model = trainer.policy if is_policy else trainer.critic
    if model.optimizer_config.offload_after_step:
        # They are on the GPU for the step, when what the passes took is free.
        moments = _moments_item(config, whose, size.trained_parameters)
        beyond = max(0, moments.num_bytes - total_bytes(items[1:]))
        name = f"{whose}AdamW's moments in a step, beyond what passes take"
        items.append(replace(moments, name=name, num_bytes=beyond))
    return items


def gathered_layer_bytes(size: ModelSize, dtype: torch.dtype) -> int:
    """Return the bytes of the largest layer while it is gathered, with its gradients and buffer.

    Args:
        dtype: that the forward pass computes in.
    """
    rounded = 0
    if dtype != torch.float32:
        rounded = size.rounded_layer_parameters
    exact = size.layer_parameters - rounded
    return LAYER_BYTES * exact + ROUNDED_LAYER_BYTES * rounded


def head_bytes(
    size: ModelSize, tokens: int, dtype: torch.dtype, *, trained: bool = True, on_gpu: bool = True
) -> int:
    """Return the bytes of `linear_logprob`'s backward pass, all tokens trained."""
    vocab = size.vocab_size
    hidden = size.hidden_size
    item = dtype.itemsize
    rows = default_chunk_rows(
        torch.empty(vocab, 1, dtype=dtype, device="meta"), tokens, on_gpu=on_gpu
    )
    by_rows = min(rows, tokens) * vocab
    by_columns = min(COLUMN_MULTIPLE, vocab) * tokens
    logits = max(by_rows, by_columns) * item
    copied = 0 if dtype == torch.float32 else vocab * hidden * item  # copy of the weight
    gradient = vocab * hidden * (item + FLOAT32_BYTES)  # gradient of the weight, then in its dtype
    # Selected and converted hidden states, their float32 gradient and its conversion.
    states = tokens * hidden * 2 * (FLOAT32_BYTES + item)
    # A frozen weight is in the dtype of the product, and has no gradient.
    return logits + states + trained * (copied + gradient)


def spare_bytes(
    config: Config, measure: Measurements, updates: Iterable[DevicePlan]
) -> tuple[int, int]:
    """Return what is put into the memory that updates leave: held gradients, then saved logits."""
    # The gradients are those of policy or critic, all or none; the logits at most those of all
    # tokens of a pass.
    trainer = config.trainer
    policy = str(trainer.policy.model.path)
    left = min(device.capacity - device.total for device in updates)
    held = 0
    if trainer.placement.num_ranks > 1:
        models = [measure.policy_size(config)]
        if trainer.critic.model.path is not None and not config.shares_critic:
            models.append(measure.size(trainer.critic.model.path))
        held = GRADIENT_BYTES * max(model.trained_parameters for model in models)
    held = held if held <= left else 0
    tokens, _ = _pass_tokens(config, row_length(config))
    vocab = measure.size(policy).vocab_size
    most = tokens * vocab * _head_dtype(config).itemsize
    spare = math.floor((left - held) / (1 + FRAGMENTATION))
    return held, max(0, min(most, spare))


def probe_item(config: Config, size: ModelSize) -> Item:
    head = size.vocab_size * size.hidden_size * _head_dtype(config).itemsize
    return Item("CUDA context, the LM head's copy for the probe", CONTEXT_BYTES + head)


def engine_item(
    config: Config, size: ModelSize, num_gpus: int, capacity: int, used: int
) -> tuple[Item, float]:
    engine = config.generator.inference_engine
    key = "generator.inference_engine.gpu_memory_utilization"
    least = math.ceil(engine_bytes(config, size) / num_gpus)
    chosen = engine.engine_init_kwargs.get("gpu_memory_utilization", engine.gpu_memory_utilization)
    if chosen is None:
        left = max(0, capacity - used)
        percent = math.floor(100 * left / capacity)
        share = min(ENGINE_LIMIT, percent / 100)
        if share * capacity >= least:
            return Item("engine: weights and KV cache", math.floor(share * capacity)), share
        return Item("engine, at least", least), share
    given = math.ceil(chosen * capacity)
    if given >= least:
        item = Item(f"engine: {chosen:.2f} of the GPU", given, (key,))
    else:
        item = Item(f"engine, at least (more than {key}={chosen:g})", least, (key,))
    return item, chosen


def engine_bytes(config: Config, size: ModelSize) -> int:
    """Estimate the least bytes of the engine: weights, the longest sequence's keys and values."""
    engine = config.generator.inference_engine
    item = dtype_of(config.engine_dtype).itemsize
    logits = FLOAT32_BYTES * engine.max_num_seqs * size.vocab_size * LOGIT_COPIES
    keys_and_values = item * size.kv_values * _engine_length(config)
    return engine_weight_bytes(config, size) + keys_and_values + logits + ENGINE_SLACK


def engine_weight_bytes(config: Config, size: ModelSize) -> int:
    return dtype_of(config.engine_dtype).itemsize * size.parameters


def returning_item(config: Config, size: ModelSize) -> Item:
    """Return what ranks need next to generation to give the weights to an engine that comes back.

    The probe of new weights needs less, and comes after it.
    """
    layer = handed_over_item(config, size).num_bytes
    return Item("CUDA context, a layer for an engine that comes back", CONTEXT_BYTES + layer)


def handed_over_item(config: Config, size: ModelSize) -> Item:
    """Return a layer as the engine gets it, and the largest weight in float32 while it is cast."""
    item = dtype_of(config.engine_dtype).itemsize
    largest = (FLOAT32_BYTES + item) * size.vocab_size * size.hidden_size
    return Item("a layer that is handed over", item * size.layer_parameters + largest)


def broadcast_bytes(config: Config, size: ModelSize) -> int:
    """Return the bytes of the largest bucket of a broadcast."""
    item = dtype_of(config.engine_dtype).itemsize
    # A larger tensor is a bucket by itself; the embedding is the largest of these policies.
    return max(BUCKET_BYTES, item * size.vocab_size * size.hidden_size)


def cpu_engine_items(config: Config, size: ModelSize) -> Iterator[Item]:
    item = dtype_of(config.engine_dtype).itemsize
    if config.trains_adapter:
        base = size.frozen_parameters
    else:
        base = size.parameters
    number = config.num_engines
    whose = "engine" if number == 1 else f"{number} engines"
    yield Item(f"{whose}: libraries", number * CPU_ENGINE_BYTES)
    weights = number * 2 * item * base
    yield Item(f"{whose}: weights, and their copy in the kernels' layout", weights)
    gibs = os.environ.get(CPU_CACHE_VARIABLE, CPU_CACHE_GIB)
    cache = number * round(float(gibs) * GIB)
    yield Item(f"{whose}: KV cache ({CPU_CACHE_VARIABLE})", cache)
    logits = FLOAT32_BYTES * config.generator.inference_engine.max_num_seqs * size.vocab_size
    by_seqs = ("generator.inference_engine.max_num_seqs",)
    yield Item(f"{whose}: logits", number * LOGIT_COPIES * logits, by_seqs)
    one_rank = config.trainer.placement.num_ranks == 1
    in_memory = one_rank and number == 1 and not config.trains_adapter
    if not in_memory and config.engine_weights is not EngineWeights.ADAPTER:
        yield Item("weights for the engine, and their file", 2 * item * base)


def _head_dtype(config: Config) -> torch.dtype:
    chosen = config.trainer.policy
    return dtype_of(chosen.dtype if chosen.lm_head_dtype == "auto" else chosen.lm_head_dtype)


def _engine_length(config: Config) -> int:
    """Return the engine's `max_model_len`: that of `make_vllm_setup`, or of engine_init_kwargs."""
    chosen = config.generator.inference_engine.engine_init_kwargs.get("max_model_len")
    if isinstance(chosen, int):
        return chosen
    return config.generator.max_input_length + max_response_length(config)


def _pass_tokens(config: Config, length: int) -> tuple[int, str]:
    """Return the most tokens of a pass on a rank, and the setting that they follow from."""
    trainer = config.trainer
    generator = config.generator
    scope = policy_loss_spec(trainer.algorithm).scope
    # Rows of a context that only grows share a sequence.
    grows = generator.context != "retemplate" and not config.agent.is_set
    rows = 1 if grows else generator.turn_limit
    ranks = trainer.policy.sequence_parallel_size  # that share a pass
    prompts = trainer.policy_mini_batch_size
    samples = generator.n_samples_per_prompt
    mini_batch = prompts * samples * rows * length
    if scope == "mini_batch":
        return math.ceil(mini_batch / ranks), "trainer.policy_mini_batch_size"
    together = scope == "sequence" and trainer.algorithm.sequence_scope == "trajectory"
    longest = math.ceil((rows * length if together else length) / ranks)
    if longest > trainer.max_tokens_per_microbatch:
        return longest, "generator.max_input_length"
    # A pass has rows of one mini-batch; a tree of answers has their prompt once.
    if trainer.row_layout == "tree" and grows and generator.turn_limit == 1:
        mini_batch -= prompts * (samples - 1) * config.generator.max_input_length
    if mini_batch < trainer.max_tokens_per_microbatch:
        return mini_batch, "trainer.policy_mini_batch_size"
    return trainer.max_tokens_per_microbatch, "trainer.max_tokens_per_microbatch"
