"""A residual stream in autocast's dtype: half the memory between layers, at more rounding.

Under autocast, products are computed in 16 bits, but embeddings are float32, and so is every sum of
them and a layer's 16-bit output. If embeddings are rounded, these sums are in 16 bits: all of them,
unless layers return float32, as those of some mixtures of experts do.
"""

from __future__ import annotations

from typing import Any

import torch


def round_residual_stream(model: torch.nn.Module) -> None:
    """Make the model's embeddings return autocast's dtype, wherever autocast is enabled."""
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            module.register_forward_hook(_rounded)


def _rounded(_: torch.nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
    device = output.device.type
    if not torch.is_autocast_enabled(device):
        return output
    return output.to(torch.get_autocast_dtype(device))
