"""Experts without adapters on a CPU, next to modules that have some.

Runs in the engine's process. As soon as adapters are enabled for any module, vLLM computes a
mixture's experts by Triton, which could add the experts' own adapters, and which a CPU has not: the
engine starts, and dies at its first request.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any


def use_cpu_experts(model: Any) -> bool:
    """Compute experts by vLLM's kernels for CPUs; return whether there are any.

    Called once, before the first request: the weights are those that were loaded, which Triton's
    kernels take as they are.
    """
    try:
        from vllm.model_executor.layers.fused_moe.oracle.unquantized import (
            UnquantizedMoeBackend,
            select_unquantized_moe_backend,
        )
    except ImportError:  # another version, which chooses in another place
        return False

    is_changed = False
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        backend = getattr(method, "unquantized_backend", None)
        if backend is not UnquantizedMoeBackend.TRITON:
            continue
        config = replace(method.moe, is_lora_enabled=False)
        method.unquantized_backend, method.experts_cls = select_unquantized_moe_backend(config)
        method.moe = layer.moe_config = config
        method.moe_kernel = None
        method.process_weights_after_loading(layer)
        is_changed = True
    return is_changed
