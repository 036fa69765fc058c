"""The layers of a transformers model, and the linear modules in them, which may have an adapter."""

from __future__ import annotations

from typing import Any

import torch

BASE_LAYER = "base_layer"  # PEFT's name of a module inside the one with its adapters


def named_layers(model: Any) -> list[tuple[str, Any]]:
    """Return the layers of a model by name, those that contain others first."""
    # A part of the model may be the transformers model that names its layers.
    layer_types: set[str] = set()
    for module in model.modules():
        layer_types.update(getattr(module, "_no_split_modules", None) or ())
    layers = []
    for name, module in model.named_modules():
        # FSDP2 gives a module a class of another name.
        kind = type(module).__name__.removeprefix("FSDP")
        if kind in layer_types:
            layers.append((name, module))
    return layers


def linear_modules(model: Any) -> list[tuple[str, str]]:
    """Return what `all-linear` means: the linear modules of the language model's layers.

    Each as the layer's path, and the path inside it. A module that has adapters is one of them.
    """
    language_model = model
    if model.config.get_text_config() is not model.config:  # a vision-language model
        language_model = model.get_decoder()
    inside = {*language_model.modules()}
    found = []
    for layer_path, layer in named_layers(model):
        if layer not in inside:
            continue
        adapted: list[str] = []
        for path, module in layer.named_modules():
            if path.startswith(tuple(adapted)):  # its base, or a matrix of an adapter
                continue
            if hasattr(module, BASE_LAYER):
                adapted.append(f"{path}.")
            base = getattr(module, BASE_LAYER, module)
            if isinstance(base, torch.nn.Linear):
                found.append((layer_path, path))
    return found


def linear_names(model: Any) -> list[str]:
    """Return the last parts of the paths of `linear_modules`."""
    names = set()
    for _, path in linear_modules(model):
        names.add(path.rpartition(".")[2])
    return sorted(names)
