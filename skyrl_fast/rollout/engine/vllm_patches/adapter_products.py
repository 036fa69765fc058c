"""Products with LoRA adapters on a CPU: one for each adapter, of all its tokens.

vLLM gathers the adapter's matrix of every token: 1,000 tokens, 1,536 outputs and rank 16 make 98 MB
in each layer. And a token without an adapter, whose number is -1, gets the last one next to tokens
that have one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# Of vLLM's operations, the number of arguments that name each token's adapter: its number; or of
# each run of tokens start, length and adapter, and three sizes.
_BY_TOKEN = 1
_BY_SEQUENCE = 6


def multiply_by_adapter() -> None:
    from vllm.lora.punica_wrapper import punica_cpu

    for kind, number in (("bgmv", _BY_TOKEN), ("sgmv", _BY_SEQUENCE)):
        for name, compute in (("shrink", _shrink), ("expand", _expand), ("expand_slice", _expand)):
            setattr(punica_cpu, f"{kind}_{name}", _make_operation(compute, number))


def _make_operation(compute: Callable[..., None], number: int) -> Callable[..., None]:
    def run(inputs: torch.Tensor, matrices: torch.Tensor, output: torch.Tensor, *rest: Any) -> None:
        names = rest[:number]
        options = rest[number:]
        if len(matrices) == 1:  # every request of the engine has it
            _multiply(compute, inputs, matrices, 0, output, options)
            return
        if number == _BY_TOKEN:
            adapters = names[0]
        else:
            adapters = names[2].repeat_interleave(names[1])
        for adapter in adapters.unique().tolist():
            if adapter < 0:
                continue
            rows = (adapters == adapter).nonzero()[:, 0]
            part = output[rows]
            _multiply(compute, inputs[rows], matrices, adapter, part, options)
            output[rows] = part

    return run


def _multiply(
    compute: Callable[..., None],
    inputs: torch.Tensor,
    matrices: torch.Tensor,
    adapter: int,
    output: torch.Tensor,
    options: tuple[Any, ...],
) -> None:
    matrix = matrices.flatten(0, -3)[adapter].to(output.dtype)  # (outputs, inputs)
    compute(inputs.to(output.dtype) @ matrix.T, output, *options)


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
