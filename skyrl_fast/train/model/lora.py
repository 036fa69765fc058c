"""LoRA: PEFT adapters on the policy's linear layers, whose matrices are all that is trained.

A layer computes W x + s B A x with s = alpha / rank, or alpha / sqrt(rank) with rsLoRA (Hu et al.,
2021; Kalajdzievski, 2023). R rank, I inputs and O outputs of a layer: A (R, I), B (O, R), W (O, I).
W is frozen, in the dtype of the forward pass; A and B are float32. A run of several policies has an
adapter for each, and a pass computes with one of them.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from skyrl_fast.config.settings import ALL_LINEAR, LoraConfig
from skyrl_fast.rollout.engine.model_layers import linear_modules, linear_names, named_layers
from skyrl_fast.train.model.base_weights import base_weights_digest, sort_metadata
from skyrl_fast.train.model.lm_head import freeze_other_parts
from skyrl_fast.train.model.offload import SMALL_PART, OffloadedStorages
from skyrl_fast.train.parallel.sharding import local_tensor
from skyrl_fast.train.parallel.stored_weights import without_memory

logger = logging.getLogger(__name__)

SETTING = "trainer.policy.model.lora"
INSTALL_HINT = f"{SETTING}: PEFT is not installed: pip install 'skyrl-fast[train]'"
NAME = "default"  # PEFT's name of a model's only adapter, if it is of no named policy
CRITIC = "@critic"  # adapter of a critic on the policy's base; no name of a policy
PREFIX = "base_model.model."  # prefix of names in PEFT's files
WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
BASE_DIGEST = "base_weights"  # key of the weights file's metadata
_BASE = ".base_layer."
_MATRIX = re.compile(r"\.lora_(?P<matrix>[AB])\.(?P<adapter>[^.]+)\.")
# Fields of an adapter's config: what the layers' forward pass here and in the engine does not have.
_UNSUPPORTED = {
    "use_dora": False,
    "bias": "none",
    "modules_to_save": None,
    "target_parameters": None,
    "trainable_token_indices": None,
    "layer_replication": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "lora_bias": False,
    "lora_dropout": 0.0,
}
_KEEP_BASE = (True, False, "gaussian", "orthogonal", "eva")  # leave the base unchanged


def add_adapters(model: Any, lora: LoraConfig, *, base: str, folder: Path | None = None) -> None:
    """Add the adapters of the settings to a model; see `add_adapter`."""
    if not lora.policies:
        add_adapter(model, lora, base=base, folder=folder)
    for name in lora.policies:
        # A checkpoint has a folder for each named policy's adapter.
        if folder is None:
            of_policy = None
        else:
            of_policy = folder / name
        add_adapter(model, lora, base=base, folder=of_policy, name=name)
    if lora.policies:
        use_adapter(model, lora.policies[0])


def add_adapter(
    model: Any, lora: LoraConfig, *, base: str, folder: Path | None = None, name: str = NAME
) -> None:
    """Add an adapter to a transformers model, in place, and freeze the model's own parameters.

    Args:
        base: folder or hub name of the model, for the adapter's files.
        folder: PEFT adapter that training continues from; None: a new one, whose B is 0.
        name: another one than those of the adapters before it.

    Raises:
        ValueError: PEFT is missing, a target module is none of the layers' linear modules, or the
            folder holds another adapter than the settings say.
    """
    try:
        import peft
    except ImportError as error:
        raise ValueError(INSTALL_HINT) from error
    if folder is None:
        config = _make_config(lora, base, freeze_other_parts(model))
        if lora.target_modules == [ALL_LINEAR]:
            _name_all_linear(config, model)
    else:
        config = _read_config(folder, lora, base)
    digest = base_weights_digest(base)
    if folder is not None:
        _warn_of_another_base(folder, base, digest, config.base_model_name_or_path)
    config.base_model_name_or_path = base
    config.base_weights = digest  # is in none of PEFT's files; for `save_adapter`
    try:
        with warnings.catch_warnings(), without_memory(model):
            # That there is an adapter already, whose layers get another one.
            warnings.filterwarnings("ignore", "Already found a `peft_config`")
            peft.inject_adapter_in_model(config, model, name)
    except ValueError as error:  # no module has such a name
        known = ", ".join(linear_names(model))
        raise ValueError(
            f"{SETTING}.target_modules: expected names of linear modules ({known}) or "
            f"{ALL_LINEAR}, got {', '.join(lora.target_modules)}"
        ) from error
    _check_targets(model, lora, name)
    for layer in _adapted_layers(model):
        layer.forward = MethodType(_forward, layer)
    for key, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(key))
        if is_adapter(key):
            # A small step would vanish in 16 bits.
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
    if folder is not None:
        _load(model, folder, name)


def check_adapters_called(model: Any, compute: Callable[[], Any]) -> None:
    """Raise ValueError for modules with an adapter, by the last part of their names, of which none
    is called by `compute`, a forward pass.

    Some models read such a module's weight and multiply by it themselves: its adapter would have
    no gradient.
    """
    modules = dict(model.named_modules()).items()
    layers = _adapted_layers(model)
    named = {layer: name.rpartition(".")[2] for name, layer in modules if layer in layers}
    called: set[str] = set()
    with ExitStack() as hooks:
        for layer, name in named.items():
            hook = layer.register_forward_hook(lambda *_, name=name: called.add(name))
            hooks.callback(hook.remove)
        compute()
    if left := sorted({*named.values()} - called):
        raise ValueError(
            f"{SETTING}.target_modules: expected modules that {type(model).__name__} calls, got "
            f"{', '.join(left)}, whose adapters would not be trained: name them in exclude_modules"
        )


def is_adapter(name: str) -> bool:
    """Return whether a parameter of a model is one of an adapter's matrices."""
    return adapter_of(name) is not None


def adapter_of(name: str) -> str | None:
    """Return the adapter that a parameter of a model belongs to; None: it is the model's own.

    Example:
        >>> adapter_of("layers.0.q_proj.lora_A.planner.weight")
        'planner'
    """
    match = _MATRIX.search(name)
    if match is None:
        return None
    return match["adapter"]


def adapters_of(model: Any) -> tuple[str, ...]:
    """Return the names of a model's adapters, in the order in which they were added."""
    found = (adapter_of(name) for name, _ in model.named_parameters())
    return tuple(dict.fromkeys(name for name in found if name is not None))


def remove_adapter(model: Any, name: str) -> None:
    """Remove an adapter from a model; the layers stay those of the others."""
    with warnings.catch_warnings():
        # Every pass says which adapter it computes with.
        warnings.filterwarnings("ignore", "Adapter .* was active which is now deleted")
        for layer in _adapted_layers(model):
            if name in layer.lora_A:
                layer.delete_adapter(name)
    del model.peft_config[name]


def adapter_names(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the matrices of one adapter under their names in PEFT's files."""
    result: dict[str, torch.Tensor] = {}
    for name, value in weights.items():
        if is_adapter(name):
            result[PREFIX + _MATRIX.sub(r".lora_\g<matrix>.", name)] = value
    return result


def merge(
    model: Any, weights: Mapping[str, torch.Tensor], adapter: str = NAME
) -> dict[str, torch.Tensor]:
    """Return W + s B A of the layers with an adapter, and the other weights, by the model's names.

    Merged weights are in at least float32, the others as they are.

    Args:
        weights: full weights of some layers, under the names of the model with its adapters.
    """
    merged = {}
    for name, value in weights.items():
        if is_adapter(name):
            continue
        module, is_base, parameter = name.partition(_BASE)
        a, b = (weights.get(f"{module}.lora_{matrix}.{adapter}.{parameter}") for matrix in "AB")
        if is_base and a is not None and b is not None:
            scale = model.get_submodule(module).scaling[adapter]
            dtype = torch.promote_types(value.dtype, torch.float32)
            value = torch.addmm(value.to(dtype), b.to(dtype), a.to(dtype), alpha=scale)
        merged[f"{module}.{parameter}" if is_base else name] = value
    return merged


class FrozenBase:
    """A model's frozen weights, which leave their device while an engine generates there.

    A rank's are its shards. Their copies in main memory are made once, as they never change.

    Args:
        model: with its adapter, which stays on the device.
        small_part: bytes of a pinned copy that may be rounded up.
    """

    def __init__(self, model: Any, *, small_part: int = SMALL_PART) -> None:
        self._model = model
        self._small_part = small_part
        self.storages: OffloadedStorages | None = None  # once they have left

    def offload(self) -> None:
        if self.storages is None:
            frozen = []
            for p in self._model.parameters():
                if not p.requires_grad:
                    frozen.append(local_tensor(p).detach())
            self.storages = OffloadedStorages(frozen, is_constant=True, small_part=self._small_part)
        self.storages.offload()

    def load(self) -> None:
        if self.storages is not None:
            self.storages.load()


@contextmanager
def adapter_off(model: Any) -> Iterator[None]:
    """Compute as the model did without its adapter, in the context."""
    layers = _adapted_layers(model)
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
            _train_all(layer)


def use_adapter(model: Any, name: str) -> None:
    """Compute with this one of the model's adapters from now on."""
    for layer in _adapted_layers(model):
        if layer.active_adapters != [name]:
            layer.set_adapter(name)
            _train_all(layer)


def _train_all(layer: Any) -> None:
    # PEFT freezes the adapters that are not used. They are in no graph anyway, and FSDP2 looks at
    # what is frozen only once, when it first gathers a layer.
    for matrices in (layer.lora_A, layer.lora_B):
        matrices.requires_grad_(True)


def _forward(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Return W x + s B A x, (..., I) -> (..., O), as PEFT's layer does."""
    # A linear layer's output of more than two dimensions may be a view, whose gradient is copied
    # where it is changed in place.
    rows = x.flatten(0, -2)
    out = layer.base_layer(rows)
    (name,) = layer.active_adapters
    if not layer.disable_adapters and name in layer.lora_A:  # else of another policy only
        a = layer.lora_A[name].weight
        b = layer.lora_B[name].weight
        inner = torch.nn.functional.linear(rows, a.to(rows.dtype))
        # In place: PEFT's three temporary tensors of this size leave holes in a CPU's heap, which
        # small tensors saved for the backward pass keep apart.
        out.addmm_(inner, b.to(out.dtype).t(), alpha=layer.scaling[name])
    return out.view(*x.shape[:-1], -1)


def _adapted_layers(model: Any) -> list[Any]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [module for module in model.modules() if isinstance(module, BaseTunerLayer)]


def save_adapter(
    model: Any, weights: Mapping[str, torch.Tensor], folder: Path, name: str = NAME
) -> None:
    """Write an adapter as PEFT does, for `PeftModel.from_pretrained` and vLLM.

    Args:
        weights: its full matrices, by the model's names.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model.peft_config[name].save_pretrained(str(folder))
    tensors = {name: value.cpu().contiguous() for name, value in adapter_names(weights).items()}
    metadata = {"format": "pt"}
    digest = getattr(model.peft_config[name], "base_weights", "")
    if digest:
        metadata[BASE_DIGEST] = digest
    save_file(tensors, str(folder / WEIGHTS), metadata=metadata)
    sort_metadata(folder / WEIGHTS)


def _make_config(lora: LoraConfig, base: str, frozen_parts: Sequence[str]) -> Any:
    from peft import LoraConfig as PeftConfig

    excluded: Any = list(lora.exclude_modules) or None
    if frozen_parts:  # names there may be those of the language model
        of_parts = [f"{re.escape(part)}\\..*" for part in frozen_parts]
        named = []
        for name in lora.exclude_modules:
            named.append(f"(.*\\.)?{re.escape(name)}")
        excluded = "|".join([*of_parts, *named])  # for PEFT a regular expression
    init: Any = True if lora.init_method == "kaiming" else lora.init_method
    target_modules: str | list[str] = list(lora.target_modules)
    if target_modules == [ALL_LINEAR]:
        target_modules = ALL_LINEAR
    return PeftConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=target_modules,
        exclude_modules=excluded,
        init_lora_weights=init,
        use_rslora=lora.use_rslora,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
    )


def _name_all_linear(config: Any, model: Any) -> None:
    """Replace all-linear by the modules that it means here.

    Modules that are named as a mixture's experts were in transformers 4 are left out: PEFT takes
    their names for those of experts, also when it loads the adapter.
    """
    paths = {f"{layer}.{path}" for layer, path in linear_modules(model)}
    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:  # an older one
        config.target_modules = paths
        return
    convert_peft_config_for_transformers(config, model, None)
    if not config.target_parameters:
        config.target_modules = paths
        return
    config.target_modules &= set(linear_names(model))
    config.target_parameters = None
    config.rank_pattern = {}
    config.alpha_pattern = {}


def _read_config(folder: Path, lora: LoraConfig, base: str) -> Any:
    from peft import PeftConfig

    try:
        config: Any = PeftConfig.from_pretrained(str(folder))
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(f"{folder}: no PEFT adapter: {error}") from error
    if str(getattr(config.peft_type, "value", config.peft_type)) != "LORA":
        raise ValueError(f"{folder}/{CONFIG}: peft_type: expected LORA, got {config.peft_type}")
    variants = []
    for field in fields(config):
        if field.metadata.get("is_lora_variant"):
            variants.append(field.name)
    for name, supported in (dict.fromkeys(variants) | _UNSUPPORTED).items():
        got = getattr(config, name, supported)
        if got != supported and (got or supported):
            raise ValueError(f"{folder}/{CONFIG}: {name}: expected {supported}, got {got}")
    if config.init_lora_weights not in _KEEP_BASE:
        raise ValueError(
            f"{folder}/{CONFIG}: init_lora_weights: expected one that does not change the base "
            f"({', '.join(map(str, _KEEP_BASE))}), got {config.init_lora_weights}"
        )
    for name, key in (("rank", "r"), ("alpha", "lora_alpha"), ("use_rslora", "use_rslora")):
        expected = getattr(config, key)
        got = getattr(lora, name)
        if expected != got:
            raise ValueError(f"{SETTING}.{name}: expected {expected}, as {folder} has, got {got}")
    config.inference_mode = False
    return config


def _warn_of_another_base(folder: Path, base: str, digest: str, named: str | None) -> None:
    """Warn if an adapter is loaded on other weights than it was trained on, by their digest.

    Adapters of others have no digest; the name of their base decides.
    """
    trained_on = _metadata(folder / WEIGHTS).get(BASE_DIGEST)
    if trained_on and digest:
        if trained_on != digest:
            logger.warning(
                "%s was trained on other base weights than those of %s now (%s): its products are "
                "wrong with them",
                folder,
                base,
                f"then of {named}" if named and named != base else "which have changed",
            )
    elif named and named != base:
        logger.warning(
            "%s was trained on the base model %s, and is loaded on %s: its products are right only "
            "where both have the same weights",
            folder,
            named,
            base,
        )


def _metadata(path: Path) -> dict[str, str]:
    try:
        with safe_open(str(path), framework="pt") as file:
            return file.metadata() or {}
    except (OSError, SafetensorError):
        return {}  # `_load` says why


def _check_targets(model: Any, lora: LoraConfig, adapter: str) -> None:
    """Raise ValueError unless an adapter's modules are those of the settings, in the layers."""
    modules = dict(model.named_modules())
    # Not its matrices: those of an embedding, which is refused, have other names.
    layers_with_it = {layer for layer in _adapted_layers(model) if adapter in layer.r}
    adapted = {n: m for n, m in modules.items() if m in layers_with_it}
    layers = [f"{name}." for name, _ in named_layers(model)]
    for name, module in adapted.items():
        kind = type(module.get_base_layer())
        if kind is not torch.nn.Linear or not any(map(name.startswith, layers)):
            raise ValueError(
                f"{SETTING}.target_modules: expected linear modules of the model's layers, such as "
                f"q_proj, and no experts, got {name} ({kind.__name__})"
            )
    weights = {id(module.get_base_layer().weight) for module in adapted.values()}
    if len(weights) < len(adapted):
        raise ValueError(
            f"{SETTING}: expected layers with weights of their own, got {type(model).__name__}, "
            "some of which share a weight: merged weights could not have the adapters of all"
        )
    last_parts = ", ".join(sorted({name.rpartition(".")[2] for name in adapted}))
    everywhere = lora.target_modules == [ALL_LINEAR]  # also: those of an adapter's folder
    targets = [] if everywhere else lora.target_modules
    leaves = [name for name, m in modules.items() if name in adapted or not any(m.children())]
    for setting, names, among in (
        ("target_modules", targets, list(adapted)),
        ("exclude_modules", lora.exclude_modules, leaves),
    ):
        for one in names:
            if not any(_is_named(name, one) for name in among):
                raise ValueError(
                    f"{SETTING}.{setting}: expected names of linear modules, got {one}; the "
                    f"adapter has {last_parts}"
                )
    for name in adapted:
        is_target = everywhere or any(_is_named(name, target) for target in targets)
        if not is_target or any(_is_named(name, other) for other in lora.exclude_modules):
            setting = "exclude_modules" if is_target else "target_modules"
            raise ValueError(
                f"{SETTING}.{setting}: expected those of the adapter, which has {name}, got "
                f"{', '.join(getattr(lora, setting))}"
            )


def _is_named(module: str, name: str) -> bool:
    """Return whether PEFT finds a module by this name."""
    return module == name or module.endswith(f".{name}")


def _load(model: Any, folder: Path, name: str) -> None:
    """Copy the matrices of an adapter's folder into a model that has the same one, of this name."""
    path = folder / WEIGHTS
    try:
        tensors = load_file(str(path))
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: no PEFT adapter: {error}") from error
    own = {}
    for n, p in model.named_parameters():
        if adapter_of(n) == name:
            own[n] = p.data
    parameters = adapter_names(own)
    if different := sorted(parameters.keys() ^ tensors.keys()):
        raise ValueError(
            f"{path}: expected the matrices of this model's adapter, got other names: "
            f"{', '.join(different[:4])}"
        )
    for key, parameter in parameters.items():
        if parameter.shape != tensors[key].shape:
            raise ValueError(
                f"{path}: {key}: expected shape {list(parameter.shape)}, got "
                f"{list(tensors[key].shape)}"
            )
        parameter.copy_(tensors[key])
