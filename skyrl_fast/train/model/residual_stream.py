"""A residual stream in autocast's dtype: half the memory between layers, at more rounding.

Under autocast, products are computed in 16 bits, but embeddings are float32, and so is every sum of
them and a layer's 16-bit output. If embeddings are rounded, these sums are in 16 bits: all of them,
unless layers return float32, as those of some mixtures of experts do. Frozen embeddings below an
adapter are in 16 bits themselves: they are converted to float32, unless they are to be rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def round_residual_stream(model: torch.nn.Module) -> None:
    """Make the model's embeddings return autocast's dtype, wherever autocast is enabled."""
    _hook_embeddings(model, _rounded)


def widen_residual_stream(model: torch.nn.Module) -> None:
    """Make the model's embeddings return float32, wherever autocast is enabled; norms have it."""
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if all(parameter.dim() < 2 for parameter in own):  # kernels take no others next to sums
            for parameter in own:
                parameter.data = parameter.data.float()
    _hook_embeddings(model, _widened)


def _hook_embeddings(model: torch.nn.Module, hook: Callable[..., torch.Tensor]) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            module.register_forward_hook(hook)


def _rounded(_: torch.nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
    device = output.device.type
    if not torch.is_autocast_enabled(device):
        return output
    return output.to(torch.get_autocast_dtype(device))


def _widened(_: torch.nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
    if torch.is_autocast_enabled(output.device.type):
        return output.float()
    return output
