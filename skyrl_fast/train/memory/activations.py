"""Memory of a forward and backward pass, measured without memory, from a model's config.

The backbone runs on torch's fake tensors: shapes, dtypes and storages are those of a real pass, but
nothing is allocated or computed. All layers of a kind use the same memory, so only one or two of
each run; the sums for all layers and sequences are linear in both. n sequences of length L.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from skyrl_fast.config.model_folder import find_auto_class, model_folder
from skyrl_fast.config.settings import LoraConfig
from skyrl_fast.train.model.lm_head import backbone, freeze_other_parts, layers_of
from skyrl_fast.train.model.loading import checkpoint_gradients, remove_dropout
from skyrl_fast.train.model.lora import add_adapters
from skyrl_fast.train.parallel.sharding import rounded_parameters, trained_parameters

FLOAT32_BYTES = 4
# Layers that store nothing per token: their state has a fixed size, or they have no attention.
TYPES_WITHOUT_KV = frozenset({"linear_attention", "mamba", "conv", "moe", "mlp"})


class UnmeasurableError(ValueError):
    """A model whose code does not run on fake tensors, such as one that reads their values."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Numbers of a model that its config determines.

    Args:
        parameters: parameters of the model, tied ones once, with those of its adapter.
        trained_parameters: parameters that optimizer steps change: of LoRA the adapters'.
        root_parameters: parameters outside the layers: embeddings, head, last norm.
        layer_parameters: parameters of the largest layer.
        rounded_parameters: of all layers, those that ranks gather in 16 bits where they compute in
            bfloat16.
        rounded_layer_parameters: of them, those of the largest layer.
        kv_values: elements that the engine's KV cache stores per token, in all layers.
    """

    parameters: int
    trained_parameters: int
    root_parameters: int
    layer_parameters: int
    rounded_parameters: int
    rounded_layer_parameters: int
    vocab_size: int
    hidden_size: int
    kv_values: int

    @property
    def frozen_parameters(self) -> int:
        return self.parameters - self.trained_parameters


@dataclass(frozen=True, slots=True)
class PassMemory:
    """Bytes of a pass of n sequences: `fixed + n * per_sequence`.

    Args:
        fixed: such as the weights' copies in the dtype of autocast.
        per_sequence: bytes of L tokens.
    """

    fixed: float
    per_sequence: float

    def of(self, sequences: float) -> int:
        """Return the bytes for a number of sequences, which need not be an integer."""
        return math.ceil(self.fixed + sequences * self.per_sequence)

    def __add__(self, other: PassMemory) -> PassMemory:
        return PassMemory(self.fixed + other.fixed, self.per_sequence + other.per_sequence)

    def __mul__(self, factor: float) -> PassMemory:
        return PassMemory(self.fixed * factor, self.per_sequence * factor)


@dataclass(frozen=True, slots=True)
class ActivationMemory:
    """Memory of the backbone's forward and backward pass, next to weights and gradients.

    Args:
        saved: held at the end of the forward pass, for the backward pass.
        workspace: further bytes at the peak of the backward pass: a layer's gradients and, with
            checkpointing, its recomputed activations.
    """

    saved: PassMemory
    workspace: PassMemory


class StorageTracker(TorchDispatchMode):
    """Counts bytes of storages that ops allocate in its context, besides `existing`."""

    def __init__(self, existing: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in existing}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.prim.device.default and hasattr(args[0], "fake_device"):
            return _fake_device(args[0])  # two of three calls, which allocate nothing
        output = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(output):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return output

    def _count(self, storage: Any) -> None:
        key = storage._cdata
        size = storage.nbytes()
        if key in self._known:
            return
        # Views share a storage, which counts once, until Python frees it.
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def _fake_device(tensor: Any) -> torch.device:
    """Return the device of a fake tensor, as its mode does, without another dispatch."""
    if tensor.fake_mode.in_kernel_invocation:
        return torch.device("meta")
    device: torch.device = tensor.fake_device
    return device


def load_model_config(path: str) -> Any:
    """Return the transformers config of a model folder or hub name."""
    from transformers import AutoConfig

    folder = model_folder(path, with_weights=False)
    try:
        return AutoConfig.from_pretrained(str(folder))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: config.json cannot be read: {error}") from error


def model_size(config: Any, lora: LoraConfig | None = None) -> ModelSize:
    """Return the sizes of the causal LM that a transformers config describes.

    Raises:
        UnmeasurableError: transformers cannot create it.
    """
    with _named_errors():
        model = _make_without_memory(find_auto_class(config), config, torch.float32, lora)
        layers = layers_of(backbone(model))
        of_layers = []
        rounded = []
        for layer in layers:
            of_layers.append(sum(p.numel() for p in layer.parameters()))
            rounded.append(rounded_parameters(layer, torch.bfloat16))
        largest = of_layers.index(max(of_layers))
        sizes = [parameter.numel() for parameter in model.parameters()]
        vocab, hidden = model.get_output_embeddings().weight.shape
        kv_values = _kv_values(config.get_text_config())
    return ModelSize(
        parameters=sum(sizes),
        trained_parameters=sum(p.numel() for _, p in trained_parameters(model)),
        root_parameters=sum(sizes) - sum(of_layers),
        layer_parameters=of_layers[largest],
        rounded_parameters=sum(rounded),
        rounded_layer_parameters=rounded[largest],
        vocab_size=vocab,
        hidden_size=hidden,
        kv_values=kv_values,
    )


def _kv_values(text: Any) -> int:
    """Return the elements that vLLM stores per token, with sliding windows as full attention."""
    layers = getattr(text, "per_layer_config", None) or [text] * text.num_hidden_layers
    types = getattr(text, "layer_types", None) or ["full_attention"] * len(layers)
    stored = len(layers) - (getattr(text, "num_kv_shared_layers", None) or 0)  # the last ones share
    return sum(
        _layer_kv_values(layers[n]) for n in range(stored) if types[n] not in TYPES_WITHOUT_KV
    )


def _layer_kv_values(layer: Any) -> int:
    head_dim = getattr(layer, "head_dim", None)
    if getattr(layer, "kv_lora_rank", None) is not None:  # MLA
        if layer.model_type != "minicpm3":  # vLLM stores its heads
            return layer.kv_lora_rank + layer.qk_rope_head_dim
        head_dim = layer.qk_nope_head_dim + layer.qk_rope_head_dim
    heads = getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads
    return 2 * heads * (head_dim or layer.hidden_size // layer.num_attention_heads)


@dataclass(frozen=True, slots=True, eq=False)
class FakeBackbone:
    """A model without LM head on fake tensors, with the first two layers of each kind.

    Args:
        module: the transformers model.
        kinds: numbers of its layers, of those that are left out as well, for each kind.
        config: the model's, whose id `FakeBackbones` knows it by.
    """

    module: Any
    kinds: list[list[int]]
    config: Any


class FakeBackbones:
    """Models without LM head on fake tensors, which take seconds to make, each made once."""

    def __init__(self) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._made: dict[tuple[Any, ...], FakeBackbone] = {}

    @property
    def num_made(self) -> int:
        """Number of models that were made."""
        return len(self._made)

    @contextlib.contextmanager
    def fake_tensors(self) -> Iterator[None]:
        """Return a context in which tensors are fake, and may meet those of the models."""
        with _named_errors(), self._mode:
            yield

    def get(
        self, config: Any, dtype: torch.dtype, checkpointed: bool, lora: LoraConfig | None
    ) -> FakeBackbone:
        """Return the backbone of a transformers config, whose LM head `linear_logprob` decides."""
        from transformers import AutoModel

        key = (id(config), dtype, checkpointed, repr(lora))
        if key not in self._made:
            model, kinds = _make_fake(AutoModel, config, dtype, lora)
            owner = backbone(model)
            if checkpointed:
                checkpoint_gradients(owner)
                # As when it is trained: layers are recomputed in training mode only.
                remove_dropout(owner.train())
            else:
                owner.eval()
            self._made[key] = FakeBackbone(owner, kinds, config)
        return self._made[key]


def activation_memory(
    config: Any,
    length: int,
    *,
    dtype: torch.dtype,
    gradient_checkpointing: bool,
    residual_dtype: torch.dtype = torch.float32,
    lora: LoraConfig | None = None,
    on_gpu: bool = False,
    backbones: FakeBackbones | None = None,
) -> ActivationMemory:
    """Return the memory of the backbone's passes over sequences of `length` tokens.

    Args:
        dtype: dtype of autocast; float32: none. Also of the weights below an adapter.
        residual_dtype: dtype of the embeddings' output and the sums that follow.
        on_gpu: count attention as a GPU's kernels compute it.
        backbones: of earlier measurements, which share them; None: it is made.

    Raises:
        UnmeasurableError: the model's code does not run on fake tensors.
    """
    shared = backbones or FakeBackbones()
    weights_dtype = torch.float32 if lora is None else dtype
    with shared.fake_tensors(), _trace_like_real_tensors(on_gpu):
        made = shared.get(config, weights_dtype, gradient_checkpointing, lora)
        shortest = [layers[0] for layers in made.kinds]
        dtypes = dtype, residual_dtype
        # The backward pass works on one layer at a time, so that few layers show its peak.
        saved, workspace = _measure(made.module, sorted(shortest), length, *dtypes)
        total = saved
        for layers in made.kinds:
            if len(layers) > 1:
                longer = sorted([*shortest, layers[1]])
                more = _measure_saved(made.module, longer, length, *dtypes)
                # One more layer of a kind costs what it adds to the shortest model.
                total += (more + saved * -1) * (len(layers) - 1)
    return ActivationMemory(total, workspace)


def _measure(
    backbone: Any,
    numbers: Sequence[int],
    length: int,
    dtype: torch.dtype,
    residual_dtype: torch.dtype,
) -> tuple[PassMemory, PassMemory]:
    """Return (bytes saved for backward, extra peak bytes) of a model cut to these layers."""
    dtypes = dtype, residual_dtype
    of_one = _pass_bytes(backbone, numbers, 1, length, *dtypes)
    of_two = _pass_bytes(backbone, numbers, 2, length, *dtypes)
    saved = _line_through(of_one[0], of_two[0])
    peak = _line_through(of_one[1], of_two[1])
    return saved, peak + saved * -1


def _measure_saved(
    backbone: Any,
    numbers: Sequence[int],
    length: int,
    dtype: torch.dtype,
    residual_dtype: torch.dtype,
) -> PassMemory:
    """Return the bytes saved for backward, without a backward pass, which takes longest."""
    dtypes = dtype, residual_dtype
    of_one, _ = _pass_bytes(backbone, numbers, 1, length, *dtypes, with_backward=False)
    of_two, _ = _pass_bytes(backbone, numbers, 2, length, *dtypes, with_backward=False)
    return _line_through(of_one, of_two)


def _line_through(of_one: int, of_two: int) -> PassMemory:
    """Return the line through the bytes of a pass of one sequence, and of two."""
    return PassMemory(2 * of_one - of_two, of_two - of_one)


def _pass_bytes(
    backbone: Any,
    numbers: Sequence[int],
    sequences: int,
    length: int,
    dtype: torch.dtype,
    residual_dtype: torch.dtype,
    *,
    with_backward: bool = True,
) -> tuple[int, int]:
    """Return the bytes held after the forward pass, and at the peak of both.

    Args:
        with_backward: False: the peak is that of the forward pass.
    """
    embeddings = torch.empty(
        sequences, length, backbone.config.get_text_config().hidden_size, requires_grad=True
    )
    with _only_layers(backbone, numbers):
        parameters = list(backbone.parameters())
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        for parameter in trained:  # as in the second micro-batch of an optimizer step
            parameter.grad = torch.empty_like(parameter)
        existing = [*parameters, *(p.grad for p in trained), *backbone.buffers()]
        autocast: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if dtype != torch.float32:
            autocast = torch.autocast("cpu", dtype=dtype, cache_enabled=False)
        with StorageTracker(existing) as tracker:
            # The output of the embedding needs memory, too.
            hidden = embeddings.clone().to(residual_dtype)
            with autocast:
                output = backbone(inputs_embeds=hidden, use_cache=False).last_hidden_state
            del hidden
            saved = tracker.live
            if with_backward:
                output.backward(torch.empty_like(output))
        for parameter in parameters:
            parameter.grad = None
    return saved, max(tracker.peak, saved)


def _kinds_of_layers(backbone: Any) -> list[list[int]]:
    """Return the numbers of the layers by attention and shapes, which determine their memory."""
    types = getattr(backbone.config.get_text_config(), "layer_types", None)
    kinds: dict[Any, list[int]] = {}
    for number, layer in enumerate(layers_of(backbone)):
        shapes = tuple((name, tuple(value.shape)) for name, value in layer.named_parameters())
        kinds.setdefault((types and types[number], shapes), []).append(number)
    return list(kinds.values())


@contextlib.contextmanager
def _only_layers(backbone: Any, numbers: Sequence[int]) -> Iterator[None]:
    layers = layers_of(backbone)
    config = backbone.config.get_text_config()
    owner, name = next(
        (module, name)
        for module in backbone.modules()
        for name, child in module.named_children()
        if child is layers
    )
    types = getattr(config, "layer_types", None)
    setattr(owner, name, torch.nn.ModuleList([layers[number] for number in numbers]))
    if types:
        config.layer_types = [types[number] for number in numbers]
    try:
        yield
    finally:
        setattr(owner, name, layers)
        if types:
            config.layer_types = types


def _make_without_memory(
    kind: Any, config: Any, dtype: torch.dtype, lora: LoraConfig | None
) -> Any:
    with torch.device("meta"):
        model = kind.from_config(config, dtype=dtype)
        freeze_other_parts(model)
        if lora is not None:
            add_adapters(model, lora, base="")
    return model


def _make_fake(
    kind: Any, config: Any, dtype: torch.dtype, lora: LoraConfig | None
) -> tuple[Any, list[list[int]]]:
    """Return the model with the first two layers of each kind, and the numbers of all by kind."""
    # PEFT moves modules, which those of fake tensors do not survive: they are replaced afterwards.
    if lora is not None and _names_layers(lora):
        model = _make_without_memory(kind, config, dtype, lora)
        kinds = _kinds_of_layers(backbone(model))
        _leave_out_layers(backbone(model), kinds)
    else:
        model = _make_without_memory(kind, config, dtype, None)
        kinds = _kinds_of_layers(backbone(model))
        _leave_out_layers(backbone(model), kinds)  # adapters of all of them take seconds
        if lora is not None:
            with torch.device("meta"):
                add_adapters(model, lora, base="")
    fakes: dict[torch.Tensor, torch.Tensor] = {}  # tied weights stay tied

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if tensor not in fakes:
            value = torch.empty_like(tensor, device="cpu")
            if isinstance(tensor, torch.nn.Parameter):
                value = torch.nn.Parameter(value, requires_grad=tensor.requires_grad)
            fakes[tensor] = value
        return fakes[tensor]

    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            tensors.update({n: fake(t) for n, t in tensors.items() if t is not None})
    return model, kinds


def _names_layers(lora: LoraConfig) -> bool:
    """Return whether layers of one kind may differ by their adapters."""
    return any("." in name for name in (*lora.target_modules, *lora.exclude_modules))


def _leave_out_layers(backbone: Any, kinds: Sequence[Sequence[int]]) -> None:
    """Replace all but the first two layers of each kind; the others keep their numbers."""
    layers = layers_of(backbone)
    for numbers in kinds:
        for number in numbers[2:]:
            layers[number] = torch.nn.Identity()


@contextlib.contextmanager
def _named_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        name = type(error).__name__
        raise UnmeasurableError(
            f"the model's memory cannot be measured: {name}: {error}"
        ) from error


@contextlib.contextmanager
def _trace_like_real_tensors(on_gpu: bool) -> Iterator[None]:
    """Let transformers choose masks and products as for real tensors, whose values it can read.

    On a GPU attention saves no product of all queries and keys, whatever the sizes of heads.
    """
    from transformers import masking_utils

    replacements: list[tuple[Any, str, Any]] = [
        # Of positions that it can read, it finds one sequence in each row, which needs no mask.
        (masking_utils, "find_packed_sequence_indices", lambda *_, **__: None)
    ]
    with contextlib.suppress(ImportError):
        from transformers.integrations import moe

        replacements.append((moe, "_can_use_grouped_mm", lambda *_: False))
    if on_gpu:
        attend = functional.scaled_dot_product_attention
        replacements.append((functional, attend.__name__, partial(_attend_padded, attend)))
    before = [(module, name, getattr(module, name, None)) for module, name, _ in replacements]
    for module, name, value in replacements:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def _attend_padded(
    attend: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *arguments: Any,
    **options: Any,
) -> torch.Tensor:
    """Compute attention with heads of one size; MLA's keys are larger than its values.

    Kernels of GPUs take two sizes. The CPU's kernel, which fake tensors follow, takes one: without
    padding it would save products of all queries and keys. Padding counts a few percent more.
    """
    if key.shape[-1] == value.shape[-1]:
        return attend(query, key, value, *arguments, **options)
    size = max(key.shape[-1], value.shape[-1])
    missing = [size - tensor.shape[-1] for tensor in (query, key, value)]
    padded = [
        functional.pad(tensor, (0, n)) if n else tensor
        for tensor, n in zip((query, key, value), missing, strict=True)
    ]
    return attend(*padded, *arguments, **options)[..., : value.shape[-1]]
