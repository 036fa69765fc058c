"""A model's weights, gradients and AdamW's moments in parts, one on each rank (torch's FSDP2).

A layer's weights are whole on every rank only while the layer computes. Gradients are summed over
the ranks, so that a sum of losses over all ranks' micro-batches is what is minimised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from skyrl_fast.train.parallel.ranks import Ranks, mirrored

T = TypeVar("T")
METHOD = "run_whole"


def shard(model: Any, ranks: Ranks) -> None:
    """Keep only this rank's part of the weights; with one rank, all of them.

    Args:
        model: transformers' or with one inside; its layers are those that transformers keeps in
            one piece.

    Raises:
        ValueError: a torch whose FSDP2 cannot sum.
    """
    if ranks.size == 1:
        return
    from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

    if not hasattr(FSDPModule, "set_force_sum_reduction_for_comms"):
        raise ValueError(
            "trainer.placement.policy_num_gpus_per_node: several need torch 2.9 or newer, "
            f"got {torch.__version__}"
        )
    kept = {
        name
        for module in model.modules()
        for name in getattr(module, "_no_split_modules", ()) or ()
    }
    layers = [module for module in model.modules() if type(module).__name__ in kept]
    for module in (*reversed(layers), model):  # a layer may lie in another
        fully_shard(module, mesh=ranks.mesh)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    setattr(model, METHOD, _run)
    register_fsdp_forward_method(model, METHOD)


def run_whole(model: Any, work: Callable[[], T]) -> T:
    """Return what the work returns, which may use all weights of the model, as its forward may."""
    method: Callable[[Callable[[], T]], T] | None = getattr(model, METHOD, None)
    if method is None:
        return work()
    result = method(work)
    if not torch.is_grad_enabled():
        model.reshard()  # else what stands outside the layers stayed whole
    return result


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a weight, moment or norm; all ranks must ask."""
    full: Callable[[], torch.Tensor] | None = getattr(tensor, "full_tensor", None)
    return tensor if full is None else full()


def weights_of(model: Any) -> list[tuple[str, torch.Tensor]]:
    """Return what a checkpoint of the model holds, under its own names, tied weights once."""
    saved = set(model.state_dict())
    buffers = [(name, value) for name, value in model.named_buffers() if name in saved]
    return [*model.named_parameters(remove_duplicate=True), *buffers]


def all_whole(items: Iterable[tuple[str, torch.Tensor]], ranks: Ranks) -> dict[str, torch.Tensor]:
    """Return the whole tensors by their names; all ranks must ask.

    Of several ranks, rank 0 has them in main memory, so that its GPU holds one at a time, and the
    others have none. One rank alone has them where they are.
    """
    if ranks.size == 1:
        return {name: tensor.detach() for name, tensor in items}
    found = {}
    for name, tensor in items:
        value = whole(tensor.detach())
        if ranks.rank == 0:
            found[name] = value.cpu()
    return found


@mirrored
def whole_weights(owner: Any) -> dict[str, torch.Tensor]:
    """Return the whole weights of a policy's or critic's model, as `weights_of` names them."""
    return all_whole(weights_of(owner.model), owner.ranks)


def part_of(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, divided as `like` is; every rank has all of it."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def _run(work: Callable[[], Any]) -> Any:
    result = work()  # FSDP2 hangs its hooks on it, which views may lose
    return tuple(x.clone() for x in result) if isinstance(result, tuple) else result.clone()
