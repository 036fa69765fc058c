"""Faults planted in the launchers of GPU kernels, compiled ones and Triton's."""

from collections.abc import Callable
from typing import Any

import torch

Kernel = Callable[..., Any]


def negate(outputs: list[torch.Tensor]) -> None:
    for out in outputs:
        out.neg_() if out.is_floating_point() else out.add_(1)


def shift_rows(outputs: list[torch.Tensor]) -> None:
    for out in outputs:
        out.copy_(out.roll(1, 0))


def reinterpret(outputs: list[torch.Tensor]) -> None:
    """Write what a kernel of another dtype of that size would."""
    for out in outputs:
        if out.dtype == torch.float32:
            out.copy_(out.view(torch.int32).to(torch.float32))
        elif out.element_size() == 2:
            other = torch.float16 if out.dtype == torch.bfloat16 else torch.bfloat16
            out.copy_(out.view(other).to(out.dtype))
        elif out.dtype == torch.float64:
            values = out.flatten().to(torch.float32)
            out.view(-1).view(torch.float32)[: values.numel()] = values
        else:
            out.add_(1)


# Kernel: the op whose first use runs it, its outputs' and its mask's places among the arguments.
KERNELS: dict[str, tuple[str, tuple[int, ...], int | None]] = {
    "selected_logprob": ("selected_logprob", (6, 8), 2),
    "selected_logprob_backward": ("selected_logprob", (10,), 2),
    "masked_logprob_loss": ("masked_logprob_loss", (16, 18), 2),
    "policy_loss": ("policy_loss", (15,), 3),
    "delta_sums": ("policy_loss", (4,), 2),
    "kl_penalty": ("kl_penalty", (5,), 2),
    "group_advantage": ("group_advantage", (10,), 4),
    "padded_to_flat": ("padded_to_varlen", (3,), None),
    "flat_to_padded": ("varlen_to_padded", (4,), None),
    "scale_cells": ("policy_loss", (0,), None),
    "scale_rows": ("masked_logprob_loss", (0,), None),
}
FAULTS = {"sign": negate, "row": shift_rows, "dtype": reinterpret, "mask": None}


def faulty(kernel: Kernel, name: str, fault: str) -> Kernel:
    """Return the kernel with a fault."""
    _, places, mask = KERNELS[name]

    def run(*arguments: Any) -> None:
        if fault == "mask":
            assert mask is not None
            ones = None if arguments[mask] is None else torch.ones_like(arguments[mask])
            arguments = (*arguments[:mask], ones, *arguments[mask + 1 :])
        kernel(*arguments)
        change = FAULTS[fault]
        if change is not None:
            change([arguments[i] for i in places if arguments[i] is not None])

    return run


def planted(names: tuple[str, ...] = tuple(KERNELS)) -> list[tuple[str, str]]:
    return [(n, f) for n in names for f in FAULTS if f != "mask" or KERNELS[n][2] is not None]
