"""Kernels compute a first derivative only: differentiating it again is an error, never a number."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

Backward = Callable[..., tuple[Any, ...]]


def first_derivative_only(
    op: str, instead: str = "backend='torch'"
) -> Callable[[Backward], Backward]:
    """Return a decorator for the backward of an autograd function.

    torch's `once_differentiable` detects a second derivative only where the incoming gradients have
    a graph; that of a loss is the constant 1. Here a saved tensor with a graph, an input or an
    output, is enough.

    Args:
        instead: what the error recommends.
    """

    def decorate(backward: Backward) -> Backward:
        @functools.wraps(backward)
        def run(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
            # AOT autograd refuses it itself.
            if not torch.is_grad_enabled() or torch.compiler.is_compiling():
                with torch.no_grad():
                    return backward(ctx, *grads)
            saved = ctx.saved_tensors  # before `backward`, which may overwrite one
            with torch.no_grad():
                gradients = backward(ctx, *grads)
            return refuse_second_derivative(op, (*saved, *grads), gradients, instead)

        return run

    return decorate


def refuse_second_derivative(
    op: str,
    sources: Iterable[torch.Tensor | None],
    gradients: tuple[Any, ...],
    instead: str = "backend='torch'",
) -> tuple[Any, ...]:
    """Return gradients whose backward raises a RuntimeError, if they are part of a graph.

    Args:
        sources: what they were computed from; those with a graph lead an autograd pass here.
    """
    if not torch.is_grad_enabled():
        return gradients
    connected = []
    for x in sources:
        if x is not None and x.requires_grad:
            connected.append(x)
    message = f"{op}: no second derivative; use {instead}"
    found: tuple[Any, ...] = _Refused.apply(message, len(connected), *connected, *gradients)
    return found


class _Refused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, message: str, num_sources: int, *tensors: Any) -> tuple[Any, ...]:
        ctx.message = message
        return tuple(None if x is None else x.detach() for x in tensors[num_sources:])

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> None:
        raise RuntimeError(ctx.message)
