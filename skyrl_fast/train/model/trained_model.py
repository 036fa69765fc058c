"""What a policy and a critic have in common: a model with forward passes, on one rank or several.

A response tokens of a batch, M trained tokens of a pass, n sequences of length L, T nodes of trees,
H hidden size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from skyrl_fast.batch import StepBatch
from skyrl_fast.batch.step_batch import OPTIONAL
from skyrl_fast.rollout.engine.weights.transports.ipc import CUDA, CudaIpc
from skyrl_fast.train.model.lora import adapter_of, save_adapter, use_adapter
from skyrl_fast.train.model.micro_batch import (
    MicroBatch,
    MicroBatches,
    plan_micro_batches,
)
from skyrl_fast.train.model.offload import OffloadedStorages
from skyrl_fast.train.model.rope_limits import rope_limits
from skyrl_fast.train.model.row_layout import LayoutCosts, cheapest_layout, supports_trees
from skyrl_fast.train.model.tree_forward import last_hidden_states
from skyrl_fast.train.parallel.export import save_pretrained
from skyrl_fast.train.parallel.per_rank import PerRank
from skyrl_fast.train.parallel.rank_buckets import OutgoingBuckets
from skyrl_fast.train.parallel.rank_shares import Share, share_passes
from skyrl_fast.train.parallel.ranks import Ranks, run_on_all_ranks
from skyrl_fast.train.parallel.sharding import (
    full_state_dict,
    gathered_outside_layers,
    local_tensor,
    shard,
    trained_parameters,
    weights_of,
    with_full_params,
)
from skyrl_fast.train.parallel.stored_weights import read_shards

# Positions among the response tokens of a batch, and a float32 value of each.
TokenValues = tuple[torch.Tensor, torch.Tensor]
# Of the columns that a batch may lack.
_READ_BY_PASSES = ("cross_entropy_weights", "expert_indices", "num_kept", "kept_ids")


class TrainedModel:
    """A transformers model, the passes that visit a batch, and its files.

    Args:
        root: module whose weights the ranks share.
        pretrained: the transformers model in it that `save_weights` writes.
        backbone: the part of it that computes hidden states.
        max_tokens_per_microbatch: most padded tokens of one forward pass.
        dtype: of the forward pass.
        adapter: adapter of the passes; None: the model has none.
    """

    tree: bool  # whether rows may be laid out as prefix trees
    layout_costs: LayoutCosts | None = None  # decide for each group of rows; None: all alike
    refused_tokens: tuple[int, ...] = ()  # ids that no row may have
    idle: OffloadedStorages | None = None  # weights, once they have left the device
    outgoing: OutgoingBuckets | None = None  # once engines have read weights from this device
    cuda_ipc: CudaIpc = CUDA

    def __init__(
        self,
        root: Any,
        *,
        pretrained: Any,
        backbone: Any,
        max_tokens_per_microbatch: int,
        dtype: torch.dtype,
        ranks: Ranks,
        adapter: str | None = None,
    ) -> None:
        self.root = root
        self.pretrained = pretrained
        self.backbone = backbone
        self.max_tokens_per_microbatch = max_tokens_per_microbatch
        self.dtype = dtype
        self.ranks = ranks
        self.adapter = adapter
        self.rope_limits = rope_limits(pretrained.config)

    def distribute(self) -> None:
        """Shard the weights over the ranks, which call this together, and read those of this rank.

        From here on parts of the model are called in `gathered_outside_layers`.
        """
        shard(self.root, self.ranks, dtype=self.dtype)
        read_shards(self.root)
        self.ranks.register(self)

    def choose_layout(self, tree: bool | None) -> None:
        """Prepare the layout of rows; all ranks call this together.

        Args:
            tree: rows as prefix trees; None: where the model supports it and it takes less time.

        Raises:
            ValueError: the model does not support trees.
        """
        with gathered_outside_layers(self.root):
            self.tree = supports_trees(self.backbone, tree, self.ranks.sequence)
        if self.tree and tree is None:
            self.tree, self.layout_costs = cheapest_layout(
                self.backbone,
                self.device,
                self.ranks,
                dtype=self.dtype,
                most_tokens=self.max_tokens_per_microbatch,
                autocast=self.autocast,
                # Each pass gathers the weights, which a backward pass frees.
                gathered=partial(with_full_params, self.root),
            )

    def share(self, other: TrainedModel) -> None:
        """Take over layout and shards from another one with the same root, in place of
        `distribute` and `choose_layout`.
        """
        self.tree = other.tree
        self.layout_costs = other.layout_costs
        self.ranks.register(self)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(self.root.parameters()).device

    @run_on_all_ranks
    def move_to_host(self) -> None:
        """Copy the weights to main memory, and free the device's; each rank those of its shard."""
        if self.idle is None:
            weights = list(self.root.parameters())
            is_constant = not any(weight.requires_grad for weight in weights)
            local = [local_tensor(weight).detach() for weight in weights]
            self.idle = OffloadedStorages(local, is_constant=is_constant)
        self.idle.offload()

    @run_on_all_ranks
    def move_to_device(self) -> None:
        """Get them back, in place."""
        if self.idle is not None:
            self.idle.load()

    @property
    def router_replay(self) -> bool:
        """Whether passes replay recorded routes."""
        return False

    def passes(self, batch: StepBatch) -> MicroBatches:
        """Return the forward passes that visit every trained token of the batch.

        A pass has at most `max_tokens_per_microbatch` tokens, unless one row is longer;
        `response_positions(batch, micro)` tells which of the batch's tokens it visits. With one
        rank only: several share the passes.
        """
        assert self.ranks.size == 1
        return self.plan(batch, self.max_tokens_per_microbatch)

    def plan(self, batch: StepBatch, token_budget: int, **options: Any) -> MicroBatches:
        """Return passes of at most so many tokens.

        Args:
            options: of `plan_micro_batches`, in place of this model's.
        """
        of_model: dict[str, Any] = {
            "router_replay": self.router_replay,
            "tree": self.tree,
            "costs": self.layout_costs,
            "limits": self.rope_limits,
            "refused_tokens": self.refused_tokens,
        }
        chosen = of_model | options
        if not chosen["router_replay"]:
            # Other ranks would get them, too.
            batch = batch.with_(expert_indices=None, cu_experts=None)
        return plan_micro_batches(batch, token_budget, **chosen)

    def shares(
        self, batch: StepBatch, *, reads: Sequence[str] = (), **options: Any
    ) -> PerRank[Share]:
        """Return the passes that visit every trained token of the batch, divided over the ranks.

        Args:
            reads: optional columns of the batch that the loss reads. Others are not sent.
            options: see `plan`.
        """
        unread = OPTIONAL.difference(_READ_BY_PASSES, reads)
        read = batch.with_(stop_reasons=None, **dict.fromkeys(unread))
        plan = partial(self.plan, read, **options)
        return share_passes(plan, self.max_tokens_per_microbatch, self.ranks)

    def hidden_states(self, micro: MicroBatch) -> torch.Tensor:
        """Return (n * L, H) last hidden states of sequences, or (T', H) of trees, T' at least T.

        Where the weights are sharded, this is called in `with_full_params`.
        """
        # A backward pass in a backward pass gathers no shards of weights, and routes are of passes.
        undivided = self.ranks.size == 1 and not self.router_replay
        most_nodes = self.max_tokens_per_microbatch if undivided else None
        with self.autocast():
            return last_hidden_states(self.backbone, micro, self.device, most_nodes=most_nodes)

    def values_of_share(
        self, share: Share, compute: Callable[[MicroBatch], torch.Tensor]
    ) -> list[TokenValues]:
        """Return values of the trained tokens of each pass, without gradients.

        All ranks call this together; rank 0 has the values of all.

        Args:
            compute: returns the (M,) values of a pass's trained tokens.
        """
        local = []
        with torch.no_grad():
            for micro in share.passes:
                values = compute(micro).float().cpu()
                local.append((share.positions_of(micro), values))
        return self.ranks.gather(local)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which the layers compute in the dtype of the passes."""
        if self.dtype == torch.float32 or self.pretrained.dtype == torch.float64:
            return contextlib.nullcontext()
        # Its cache would keep all weights in that dtype until the pass ends; each is cast once.
        return torch.autocast(self.device.type, dtype=self.dtype, cache_enabled=False)

    def use_adapter(self) -> None:
        """Compute with the adapter of the passes, which another one's may have replaced."""
        if self.adapter is not None:
            use_adapter(self.root, self.adapter)

    def trained_parameters(self) -> list[tuple[str, torch.Tensor]]:
        """Return the parameters that optimizer steps change, by name."""
        result: list[tuple[str, torch.Tensor]] = []
        for name, value in trained_parameters(self.root):
            if self.owns(name):
                result.append((name, value))
        return result

    def owns(self, name: str) -> bool:
        """Return whether a parameter is of this model's adapter; without one all of it are."""
        return adapter_of(name) == self.adapter

    def adapter_weights(
        self, name: str, dtype: torch.dtype | None = None
    ) -> dict[str, torch.Tensor]:
        """Return an adapter's full matrices, by the model's names."""
        # Not of the state dict: to read it reshards the model, in which another call may compute.
        names = []
        for key, _ in self.root.named_parameters():
            if adapter_of(key) == name:
                names.append(key)
        return full_state_dict(self, dtype, names)

    def save_adapter(self, name: str, folder: Path) -> None:
        """Write an adapter as PEFT does."""
        save_adapter(self.root, self.adapter_weights(name), folder, name)

    def save_weights(self, folder: Path) -> None:
        """Write the model in Hugging Face format; several ranks queue it in `ranks.files`."""
        if self.ranks.size > 1:
            save_pretrained(self, folder)
            return
        weights = {}
        for name, value in weights_of(self.pretrained):
            if self.idle is None:
                weights[name] = value.detach().cpu()
            else:
                weights[name] = self.idle.on_host(value.detach())
        self.pretrained.save_pretrained(folder, state_dict=weights)


def per_token(batch: StepBatch, values: Sequence[TokenValues]) -> torch.Tensor:
    """Return (A,) float32 values of the batch's trained tokens, 0 elsewhere."""
    result = torch.zeros(batch.loss_mask.shape[0])
    for positions, of_pass in values:
        result[positions] = of_pass
    return result
