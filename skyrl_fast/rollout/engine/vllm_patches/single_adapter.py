"""Products with a LoRA adapter on a CPU, where an engine has one at a time.

vLLM gathers the adapter's matrix of every token: 1,000 tokens, 1,536 outputs and rank 16 make 98 MB
in each layer. All tokens have the same adapter here, so that one matrix product does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# Of vLLM's operations, the position of what names each token's adapter; those of prefills have five
# more arguments for lengths.
_BY_TOKEN, _BY_SEQUENCE = slice(3, 4), slice(3, 9)


def multiply_at_once() -> None:
    """Replace vLLM's operations in this process; with several adapters they are as before."""
    from vllm.lora.punica_wrapper import punica_cpu

    for kind, indices in (("bgmv", _BY_TOKEN), ("sgmv", _BY_SEQUENCE)):
        for name, compute in (("shrink", _shrink), ("expand", _expand), ("expand_slice", _expand)):
            usual = getattr(punica_cpu, f"{kind}_{name}")
            setattr(punica_cpu, f"{kind}_{name}", _choose(usual, compute, indices))


def _choose(
    usual: Callable[..., None], compute: Callable[..., None], indices: slice
) -> Callable[..., None]:
    def run(inputs: torch.Tensor, matrices: torch.Tensor, output: torch.Tensor, *rest: Any) -> None:
        if len(matrices) > 1:
            usual(inputs, matrices, output, *rest)
            return
        matrix = matrices.flatten(0, -3)[0].to(output.dtype)  # (outputs, inputs)
        compute(inputs.to(output.dtype) @ matrix.T, output, *rest[indices.stop - 3 :])

    return run


def _shrink(product: torch.Tensor, output: torch.Tensor, scaling: float = 1.0) -> None:
    output[:, : product.shape[1]] = scaling * product


def _expand(product: torch.Tensor, output: torch.Tensor, *rest: Any) -> None:
    """Write or add a product, into all columns or, given their start and number, into some."""
    *part, adds = rest
    start, size = part or (0, min(product.shape[1], output.shape[1]))  # either may be padded
    columns = output[:, start : start + size]
    if adds:
        columns += product[:, :size]
    else:
        columns.copy_(product[:, :size])
