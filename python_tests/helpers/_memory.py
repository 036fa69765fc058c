"""Small real models of several architectures, and memory measured on them."""

import contextlib
import time
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from skyrl_fast.train.model.loading import checkpoint_gradients
from skyrl_fast.train.model.residual_stream import round_residual_stream
from skyrl_fast.train.parallel.sharding import local_tensor

COMMON = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"num_hidden_layers": 3}),
    "qwen2": ("Qwen2", {"num_hidden_layers": 4, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"num_hidden_layers": 3}),
    "gemma3": ("Gemma3Text", {"num_hidden_layers": 7, "sliding_window": 64}),
    "mistral": ("Mistral", {"num_hidden_layers": 3, "sliding_window": 96}),
    "phi3": ("Phi3", {"num_hidden_layers": 2}),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "num_hidden_layers": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 96,
            "mlp_only_layers": [0],
        },
    ),
    "deepseek_v3": (  # MLA: keys and queries of 64, values of 32
        "DeepseekV3",
        {
            "num_hidden_layers": 3,
            "num_key_value_heads": 4,
            "q_lora_rank": None,
            "kv_lora_rank": 48,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 32,
            "v_head_dim": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 96,
            "first_k_dense_replace": 1,
        },
    ),
}


def config_of(name: str, **others: Any) -> Any:
    """Return the transformers config of an architecture, or with other settings of a family."""
    import transformers

    family, changes = ARCHITECTURES.get(name, (name, {}))
    return getattr(transformers, f"{family}Config")(**{**COMMON, **changes, **others})


def saved_bytes(
    config: Any,
    *,
    sequences: int,
    length: int,
    gradient_checkpointing: bool,
    dtype: torch.dtype,
    residual_dtype: torch.dtype = torch.float32,
) -> int:
    """Return the bytes that a real forward pass of the backbone saves for the backward pass.

    Measured by hooks on saved tensors: storages once, without parameters. Checkpointing keeps its
    layers' inputs where those hooks do not see them, so they are counted at the layers.
    """
    from transformers import AutoModel

    backbone: Any = AutoModel.from_config(config, dtype=torch.float32)
    if gradient_checkpointing:
        checkpoint_gradients(backbone)
        backbone.train()
    if residual_dtype != torch.float32:
        round_residual_stream(backbone)
    storages: dict[int, torch.UntypedStorage] = {}
    parameters = {p.untyped_storage().data_ptr() for p in backbone.parameters()}
    parameters |= {b.untyped_storage().data_ptr() for b in backbone.buffers()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage  # held, so that its address is not reused
        return tensor

    def inputs(_: Any, arguments: Any, keywords: Any) -> None:
        for value in torch.utils._pytree.tree_leaves((arguments, keywords)):
            if isinstance(value, torch.Tensor):
                pack(value)

    if gradient_checkpointing:
        for module in backbone.modules():
            if type(module).__name__ in backbone._no_split_modules:
                module.register_forward_pre_hook(inputs, with_kwargs=True)
    autocast: Any = contextlib.nullcontext()
    if dtype != torch.float32:
        autocast = torch.autocast("cpu", dtype=dtype, cache_enabled=False)
    ids = torch.randint(config.vocab_size, (sequences, length))
    with autocast, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = backbone(input_ids=ids, use_cache=False).last_hidden_state
    pack(output)
    return sum(storage.nbytes() for storage in storages.values())


def peak_bytes(
    config: Any,
    *,
    sequences: int,
    length: int,
    gradient_checkpointing: bool,
    dtype: torch.dtype,
    residual_dtype: torch.dtype = torch.float32,
) -> int:
    """Return the peak of the CPU allocator in a second forward and backward pass of the backbone.

    Measured by torch's profiler, from the start of the pass.
    """
    from transformers import AutoModel

    backbone: Any = AutoModel.from_config(config, dtype=torch.float32)
    if gradient_checkpointing:
        checkpoint_gradients(backbone)
        backbone.train()
    autocast: Any = torch.autocast("cpu", dtype=dtype, cache_enabled=False)
    embeddings = torch.randn(sequences, length, config.hidden_size, requires_grad=True)

    def run() -> None:
        with autocast:
            rounded = embeddings.clone().to(residual_dtype)
            hidden = backbone(inputs_embeds=rounded, use_cache=False).last_hidden_state
            del rounded
        hidden.backward(torch.ones_like(hidden))

    run()  # creates the gradients
    embeddings.grad = None
    return allocated_peak(run)


MOMENT = 0.05  # seconds


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that operators of a thread make, while any thread holds them.

    torch's profiler does not see what another thread frees, such as gloo's, which does so a moment
    after the operator has returned.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self._before: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for storage in _storages((args, kwargs)):
            reference = StorageWeakRef(storage)
            if not self._has(self._made.get(reference.cdata, (None, 0))[0]):
                self._before[reference.cdata] = reference
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            reference = StorageWeakRef(storage)
            if not self._has(self._before.get(reference.cdata)):
                self._made[reference.cdata] = (reference, storage.nbytes())
        deadline = time.monotonic() + MOMENT
        while (live := self._live()) > self.peak and time.monotonic() < deadline:
            time.sleep(MOMENT / 10)
        self.peak = max(self.peak, live)
        return result

    def _live(self) -> int:
        for key, (reference, _) in list(self._made.items()):
            if reference.expired():
                del self._made[key]
        return sum(size for _, size in self._made.values())

    @staticmethod
    def _has(reference: StorageWeakRef | None) -> bool:
        return reference is not None and not reference.expired()


def _storages(values: Any) -> list[torch.UntypedStorage]:
    found = []
    for value in torch.utils._pytree.tree_leaves(values):
        if isinstance(value, torch.Tensor):
            # A collective's result that is waited for when it is used.
            local = getattr(local_tensor(value), "elem", local_tensor(value))
            if local.device.type == "cpu":
                found.append(local.untyped_storage())
    return found


def allocated_peak(run: Callable[[], None], mapped: Collection[int] = ()) -> int:
    """Return the peak of the CPU allocator's bytes during a call, from its start.

    Args:
        mapped: sizes of files whose mapping torch reports, too, though it takes no memory.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    live = peak = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]" and abs(event.nbytes()) not in mapped:
            live += event.nbytes()
            peak = max(peak, live)
    return peak
