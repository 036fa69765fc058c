"""The layers of a transformers model, and the linear modules in them, which may have an adapter."""

from __future__ import annotations

from typing import Any

import torch

BASE_LAYER = "base_layer"  # PEFT's name of a module inside the one with its adapters


def named_layers(model: Any) -> list[tuple[str, Any]]:
    """Return the layers of a model by name, those that contain others first."""
    # A part of the model may be the transformers model that names its layers.
    layer_types = {
        name
        for module in model.modules()
        for name in getattr(module, "_no_split_modules", ()) or ()
    }
    # FSDP2 gives a module a class of another name.
    return [
        (name, module)
        for name, module in model.named_modules()
        if type(module).__name__.removeprefix("FSDP") in layer_types
    ]


def linear_modules(model: Any) -> list[tuple[str, str]]:
    """Return what `all-linear` means: the linear modules of the language model's layers.

    Each as the layer's path, and the path inside it. A module that has adapters is one of them.
    """
    is_part = model.config.get_text_config() is not model.config  # of a vision-language model
    language_model = model.get_decoder() if is_part else model
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
            if isinstance(getattr(module, BASE_LAYER, module), torch.nn.Linear):
                found.append((layer_path, path))
    return found


def linear_names(model: Any) -> list[str]:
    """Return the last parts of the paths of `linear_modules`."""
    return sorted({path.rpartition(".")[2] for _, path in linear_modules(model)})
