"""Weights, gradients and AdamW's moments of a model, sharded over the ranks by torch's FSDP2.

A layer's full weights are on a rank only while the layer computes. Gradients are summed over the
ranks, so that the sum of losses over all ranks' micro-batches is minimised; a rank first adds up
those of its own micro-batches, if they fit into memory (docs/design/020-several-gpus.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch

from skyrl_fast.rollout.engine.model_layers import named_layers
from skyrl_fast.train.model.offload import OffloadedStorages
from skyrl_fast.train.parallel.ranks import Ranks, run_on_all_ranks
from skyrl_fast.train.parallel.traffic import (
    ENGINE,
    CountedGather,
    CountedReduction,
    all_gather,
)

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
METHOD = "with_full_params"
VALUE_HEAD = "value_head"  # in a policy's backbone: that of a critic on the same base


class SizedIterable(Protocol[T_co]):
    """Passes of a known number, each made when it is reached."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[T_co]: ...


def shard(model: Any, ranks: Ranks, *, dtype: torch.dtype = torch.float32) -> None:
    """Shard the weights over the ranks, in place; does nothing with one rank.

    Args:
        model: a transformers model or a module that contains one; its layers are those named in
            `_no_split_modules`.
        dtype: that autocast computes linear modules in; those of layers are cast to it before they
            are gathered, where they are float32.

    Raises:
        ValueError: the FSDP2 of this torch cannot sum gradients.
    """
    if ranks.size == 1:
        return
    from torch.distributed.fsdp import (
        FSDPModule,
        MixedPrecisionPolicy,
        fully_shard,
        register_fsdp_forward_method,
    )

    if not hasattr(FSDPModule, "set_force_sum_reduction_for_comms"):
        raise ValueError(
            "trainer.placement.policy_num_gpus_per_node: several need torch 2.9 or newer, "
            f"got {torch.__version__}"
        )
    # Autocast makes the same numbers of a linear module's weights, and the same gradients. What is
    # not multiplied by it stays float32: norms, for which the layer gathers twice.
    rounded = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    layers = [module for _, module in named_layers(model)]
    for module in (*reversed(layers), model):  # layers may be nested
        groups: list[tuple[Any, MixedPrecisionPolicy]] = [(module, MixedPrecisionPolicy())]
        others = _exact_modules(module, dtype) if module is not model else None
        if others is not None:
            groups = [(module, rounded)]
            if others:
                groups.insert(0, (others, MixedPrecisionPolicy()))
        for group, policy in groups:
            fully_shard(group, mesh=ranks.mesh, mp_policy=policy)
            if isinstance(group, list):
                first = group[0]
            else:
                first = group
            first.set_custom_all_gather(CountedGather(ranks.traffic))
            first.set_custom_reduce_scatter(CountedReduction(ranks.traffic))
            # Summed, not averaged: a token's weight has the mini-batch's denominator already.
            first.set_gradient_divide_factor(1.0)
            first.set_force_sum_reduction_for_comms(True)
    # A method of the module, so that FSDP's hooks gather its weights around any code.
    setattr(model, METHOD, _run)
    register_fsdp_forward_method(model, METHOD)


def _exact_modules(layer: Any, dtype: torch.dtype) -> list[Any] | None:
    """Return a layer's modules whose weights are gathered as they are, next to its linear ones.

    None: all of them are, as the layer has no float32 linear module, or a module with linear ones
    inside has weights of its own, with which FSDP2 would take theirs.
    """
    if dtype == torch.float32:
        return None
    exact = []
    has_linear = False
    for module in layer.modules():
        weights = list(module.parameters(recurse=False))
        if not weights:
            continue
        if any(weight.dtype != torch.float32 for weight in weights):
            return None
        if type(module) is torch.nn.Linear:
            has_linear = True
        elif any(True for child in module.children() for _ in child.parameters()):
            return None
        else:
            exact.append(module)
    if has_linear:
        return exact
    return None


def rounded_parameters(layer: Any, dtype: torch.dtype) -> int:
    """Return how many parameters of a layer `shard` gathers in this dtype of autocast."""
    exact = _exact_modules(layer, dtype)
    if exact is None:
        return 0
    others = 0
    for module in exact:
        others += sum(weight.numel() for weight in module.parameters(recurse=False))
    return sum(weight.numel() for weight in layer.parameters()) - others


def with_full_params(model: Any, work: Callable[[], T]) -> T:
    """Return the result of `work`, which may use the model's full weights, as its forward may."""
    method: Callable[[Callable[[], T]], T] | None = getattr(model, METHOD, None)
    if method is None:
        return work()
    result = method(work)
    if not torch.is_grad_enabled():
        model.reshard()  # else weights outside the layers would stay gathered
    return result


@contextmanager
def gathered_outside_layers(model: Any) -> Iterator[None]:
    """Hold the full weights outside the layers in the context: any part of the model may be called
    there, whose layers gather their own. All ranks call the same parts.
    """
    if getattr(model, METHOD, None) is None:
        yield
        return
    # FSDP2 takes the first module that computes for the one that contains all others.
    with_full_params(model, lambda: torch.zeros(()))
    model.unshard()
    try:
        yield
    finally:
        model.reshard()


def reduce_at_last(model: Any, passes: SizedIterable[T], ranks: Ranks) -> Iterator[T]:
    """Yield the passes; the ranks' gradients are summed by the backward pass of the last one."""
    # Each rank has the same number of them, and holds the model's full gradients in between.
    # Without memory for these, every pass sums them.
    for number, one in enumerate(passes, 1):
        if ranks.size > 1:
            is_last = number == len(passes)
            model.set_requires_gradient_sync(is_last or not ranks.holds_gradients)
        yield one


def full_norm(tensor: torch.Tensor) -> torch.Tensor:
    """Return the norm of which each rank has its part; must be called on all ranks."""
    full: Callable[[], torch.Tensor] | None = getattr(tensor, "full_tensor", None)
    return tensor if full is None else full()


def full_weight(
    tensor: torch.Tensor, ranks: Ranks, kind: str, idle: OffloadedStorages | None = None
) -> torch.Tensor:
    """Return the full weight, as traffic of this kind; must be called on all ranks.

    Args:
        idle: of the model, if its weights may be in main memory; there the full one is made then.
    """
    rows = local_tensor(tensor.detach())
    ranks.traffic.add(kind, tensor.nbytes - rows.nbytes)
    if idle is not None and not idle.is_loaded:
        rows = idle.on_host(rows)
    if shard_rows(tensor) is None:
        return rows
    return _gather_rows(rows, tensor.shape, ranks.size)


def _gather_rows(rows: torch.Tensor, shape: torch.Size, num_ranks: int) -> torch.Tensor:
    """Return the full weight of which each rank has these rows.

    `DTensor.full_tensor` would use a coalesced gather, in which gloo can crash (torch 2.13): its
    threads assign the name of the work that has ended to one string without a lock, and two that
    assign a name of more than 15 characters at once both free the characters of the one before.
    """
    most = math.ceil(shape[0] / num_ranks)  # of a rank; the last ones may have fewer
    if len(rows) < most:
        padded = rows.new_zeros(most, *shape[1:])
        padded[: len(rows)] = rows
        rows = padded
    full = rows.new_empty(num_ranks * most, *shape[1:])
    all_gather(full, rows.contiguous())
    return full[: shape[0]]


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a weight or moment, or the tensor if it is not sharded."""
    local: Callable[[], torch.Tensor] | None = getattr(tensor, "to_local", None)
    return tensor if local is None else local()


def shard_rows(tensor: torch.Tensor) -> slice | None:
    """Return the rows of the full weight or moment that this rank's shard has; None: it has all."""
    chunks: Any = getattr(tensor, "__create_chunk_list__", None)  # DTensor's interface for DCP
    if chunks is None:
        return None
    (chunk,) = chunks()
    return slice(chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0])


def weights_of(model: Any) -> list[tuple[str, torch.Tensor]]:
    """Return the model's parameters (tied ones once) and persistent buffers, by name."""
    # Buffers that are not persistent are computed by the model, not stored.
    saved = set(model.state_dict())
    buffers = []
    for name, value in model.named_buffers():
        if name in saved:
            buffers.append((name, value))
    return [*model.named_parameters(remove_duplicate=True), *buffers]


def trained_parameters(model: Any) -> list[tuple[str, torch.Tensor]]:
    """Return the parameters that optimizer steps change, by name; tied ones once."""
    result: list[tuple[str, torch.Tensor]] = []
    for name, value in model.named_parameters():
        if value.requires_grad:
            result.append((name, value))
    return result


def full_tensors(
    items: Iterable[tuple[str, torch.Tensor]],
    ranks: Ranks,
    dtype: torch.dtype | None = None,
    idle: OffloadedStorages | None = None,
) -> dict[str, torch.Tensor]:
    """Return the full tensors by name; must be called on all ranks.

    With several ranks, rank 0 gets them in main memory, so that its GPU holds one at a time, and
    the others get none. A single rank gets them on their device, or where they are in main memory,
    copies there.

    Args:
        dtype: that floating-point tensors are cast to before they are moved; None: as they are.
        idle: as of `full_weight`.
    """
    if ranks.size == 1 and (idle is None or idle.is_loaded):
        return {name: tensor.detach() for name, tensor in items}
    found = {}
    for name, tensor in items:
        # Without a name, which would hold it while the next one is gathered.
        if ranks.rank == 0:
            found[name] = _on_host(full_weight(tensor, ranks, ENGINE, idle), dtype)
        else:
            full_weight(tensor, ranks, ENGINE, idle)
    return found


def _on_host(value: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    # Cast on the GPU, so that fewer bytes are copied to main memory.
    return cast_weight(value, dtype).cpu()


def cast_weight(value: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Return the weight in this dtype, if it is floating-point; None: as it is."""
    if dtype is not None and value.is_floating_point():
        return value.to(dtype)
    return value


@run_on_all_ranks
def full_state_dict(
    owner: Any, dtype: torch.dtype | None = None, names: Sequence[str] | None = None
) -> dict[str, torch.Tensor]:
    """Return full weights of a policy's or critic's model, under the names of `weights_of`."""
    items = weights_of(owner.root)
    if names is not None:
        weights = dict(items)
        items = [(name, weights[name]) for name in names]
    return full_tensors(items, owner.ranks, dtype, owner.idle)


@run_on_all_ranks
def weight_names(owner: Any) -> list[list[str]]:
    """Return the `names_by_layer` of a policy's model, without groups of untrained parameters.

    With an adapter only a policy's frozen parts are left out, and the head of a critic: an engine
    gets a language model's weights all at once or not at all.
    Reading a model's state dict reshards it, so this must not run while another call computes.
    """
    parts = tuple(f"{part}." for part in owner.frozen_parts)
    groups = [
        names
        for names in names_by_layer(owner.model)
        if not all(f"{name}.".startswith(parts) or f".{VALUE_HEAD}." in name for name in names)
    ]
    if owner.has_adapter:
        return groups
    untrained = {name for name, _ in owner.model.named_parameters()}
    untrained -= {name for name, _ in owner.trained_parameters()}
    return [names for names in groups if not untrained.issuperset(names)]


@run_on_all_ranks
def empty_weights(owner: Any, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return weights of a policy's model without values: of the shapes and dtypes of the full ones.

    Reading a model's state dict reshards it, so this must not run while another call computes.
    """
    weights = dict(weights_of(owner.model))
    empty = {}
    for name in names:
        tensor = weights[name]
        empty[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return empty


def names_by_layer(model: Any) -> list[list[str]]:
    """Return the names of `weights_of` in groups: of a layer, or one outside the layers."""
    # A layer is not divided, as a weight of a checkpoint may be made from several of the layer.
    layers = [name for name, _ in named_layers(model)]
    groups: dict[str, list[str]] = {}
    for name, _ in weights_of(model):
        layer = next((prefix for prefix in layers if name.startswith(f"{prefix}.")), name)
        groups.setdefault(layer, []).append(name)
    return list(groups.values())


def like_shard(rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the sharded tensor of which this rank has these rows, with the placement of `like`."""
    from torch.distributed.tensor import DTensor

    if not isinstance(like, DTensor):
        return rows
    return DTensor.from_local(
        rows,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def _run(work: Callable[[], Any]) -> Any:
    result = work()  # FSDP2 attaches hooks to it, which views can lose
    if isinstance(result, tuple):
        return tuple(x.clone() for x in result)
    return result.clone()
