"""Products with LoRA adapters on a CPU: one for each adapter, of all its tokens.

vLLM gathers the adapter's matrix of every token: 1,000 tokens, 1,536 outputs and rank 16 make 98 MB
in each layer. And a token without an adapter, whose number is -1, gets the last one next to tokens
that have one. Which tokens an adapter has is found once for a step: to find it in each product
takes as long as a small product.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

# Of vLLM's operations, the number of arguments that name each token's adapter: its number; or of
# each run of tokens start, length and adapter, and three sizes.
_BY_TOKEN = 1
_BY_SEQUENCE = 6

Rows = slice | torch.Tensor


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
        for adapter, rows in _rows_of_adapters(names):
            if isinstance(rows, slice):
                _multiply(compute, inputs[rows], matrices, adapter, output[rows], options)
                continue
            part = output[rows]
            _multiply(compute, inputs[rows], matrices, adapter, part, options)
            output[rows] = part

    return run


def _rows_of_adapters(names: tuple[Any, ...]) -> tuple[tuple[int, Rows], ...]:
    """Return the rows of each adapter that some token has."""
    if len(names) == _BY_TOKEN:
        adapters = names[0].tolist()
        return _rows_of_runs(tuple(adapters), (1,) * len(adapters))
    return _rows_of_runs(tuple(names[2].tolist()), tuple(names[1].tolist()))


@lru_cache(maxsize=4)  # of a step all products have the same runs
def _rows_of_runs(
    adapters: tuple[int, ...], lengths: tuple[int, ...]
) -> tuple[tuple[int, Rows], ...]:
    """Return the rows of each adapter: a slice if they follow one another, else their numbers."""
    by_row = torch.tensor(adapters).repeat_interleave(torch.tensor(lengths))
    found: list[tuple[int, Rows]] = []
    for adapter in sorted(set(adapters)):
        if adapter < 0:
            continue
        rows = (by_row == adapter).nonzero()[:, 0]
        first = int(rows[0])
        last = int(rows[-1])
        if last - first + 1 == len(rows):
            found.append((adapter, slice(first, last + 1)))
        else:
            found.append((adapter, rows))
    return tuple(found)


def _multiply(
    compute: Callable[..., None],
    inputs: torch.Tensor,
    matrices: torch.Tensor,
    adapter: int,
    output: torch.Tensor,
    options: tuple[Any, ...],
) -> None:
    matrix = matrices.flatten(0, -3)[adapter].to(output.dtype)  # (outputs, inputs)
    compute(inputs.to(output.dtype), matrix.T, output, *options)


def _shrink(
    inputs: torch.Tensor, matrix: torch.Tensor, output: torch.Tensor, scaling: float = 1.0
) -> None:
    output[:, : matrix.shape[1]].addmm_(inputs, matrix, beta=0, alpha=scaling)


def _expand(inputs: torch.Tensor, matrix: torch.Tensor, output: torch.Tensor, *rest: Any) -> None:
    """Write or add a product, into all columns or, given their start and number, into some."""
    *part, adds = rest
    # Either may be padded.
    start, size = part or (0, min(matrix.shape[1], output.shape[1]))
    columns = output[:, start : start + size]
    columns.addmm_(inputs, matrix[:, :size], beta=int(adds))
