"""Products with LoRA adapters on a CPU: one for each adapter, of all its tokens.

vLLM gathers the adapter's matrix of every token: 1,000 tokens, 1,536 outputs and rank 16 make 98 MB
in each layer. And a token without an adapter, whose number is -1, gets the last one next to tokens
that have one. Which tokens an adapter has is found once for a step: to find it in each product
takes as long as a small product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch

Rows = slice | torch.Tensor
Compute = Callable[..., None]


def multiply_by_adapter() -> None:
    from vllm.lora.punica_wrapper import punica_cpu

    operations = {
        "shrink": _shrink,
        "expand": _expand,
        "expand_slice": _expand,
    }
    for name, compute in operations.items():
        setattr(punica_cpu, f"bgmv_{name}", partial(_run_by_token, compute))
        setattr(punica_cpu, f"sgmv_{name}", partial(_run_by_sequence, compute))


def _run_by_token(
    compute: Compute,
    inputs: torch.Tensor,
    matrices: torch.Tensor,
    output: torch.Tensor,
    adapters: torch.Tensor,
    *options: Any,
) -> None:
    """Compute one of vLLM's operations that are given the adapter of each token."""
    lengths = (1,) * len(adapters)
    rows = _find_rows(tuple(adapters.tolist()), lengths)
    _run(compute, inputs, matrices, output, rows, options)


def _run_by_sequence(
    compute: Compute,
    inputs: torch.Tensor,
    matrices: torch.Tensor,
    output: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    adapters: torch.Tensor,
    num_runs: int,
    max_length: int,
    num_tokens: int,
    *options: Any,
) -> None:
    """Compute one of vLLM's operations that are given runs of tokens with one adapter."""
    rows = _find_rows(tuple(adapters.tolist()), tuple(lengths.tolist()))
    _run(compute, inputs, matrices, output, rows, options)


def _run(
    compute: Compute,
    inputs: torch.Tensor,
    matrices: torch.Tensor,
    output: torch.Tensor,
    rows_of_adapters: Sequence[tuple[int, Rows]],
    options: tuple[Any, ...],
) -> None:
    for adapter, rows in rows_of_adapters:
        part = output[rows]
        _multiply(compute, inputs[rows], matrices, adapter, part, options)
        if not isinstance(rows, slice):  # else the part is a view
            output[rows] = part


@lru_cache(maxsize=4)  # of a step all products have the same runs
def _find_rows(adapters: tuple[int, ...], lengths: tuple[int, ...]) -> list[tuple[int, Rows]]:
    """Return the rows of each adapter: a slice if they follow one another, else their numbers.

    Args:
        adapters: of each run of tokens; -1: none.
        lengths: of the runs.
    """
    counts = torch.tensor(lengths)
    adapter_of_row = torch.tensor(adapters).repeat_interleave(counts)
    found: list[tuple[int, Rows]] = []
    for adapter in sorted(set(adapters)):
        if adapter < 0:
            continue
        rows = (adapter_of_row == adapter).nonzero().flatten()
        first = int(rows[0])
        end = int(rows[-1]) + 1
        if end - first == len(rows):
            found.append((adapter, slice(first, end)))
        else:
            found.append((adapter, rows))
    return found


def _multiply(
    compute: Compute,
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
    if part:
        start, size = part
    else:
        start = 0
        size = min(matrix.shape[1], output.shape[1])  # either may be padded
    columns = output[:, start : start + size]
    columns.addmm_(inputs, matrix[:, :size], beta=int(adds))
