"""Long rows on several ranks: each computes a part of a pass's tokens, and of the heads.

DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv:2309.14509): all parts of a layer but its attention
look at one token at a time, so a rank holds a part of the tokens. For the attention the ranks
exchange tokens for heads: each computes all tokens of its heads, sequences and prefix trees alike.
Log-probabilities are computed where their hidden states are, and then joined.

n sequences of length L, S ranks that share them, H heads of size D, M trained tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from skyrl_fast.ops import _backend
from skyrl_fast.setting import ConfigError
from skyrl_fast.train.parallel.traffic import SEQUENCES, Traffic

SETTING = "trainer.policy.sequence_parallel_size"


@dataclass(frozen=True, slots=True)
class SequenceRanks:
    """This rank's place among those that share the tokens of a pass.

    Args:
        rank, size: number of this rank, and number of ranks.
        group: their process group; None with one rank.
    """

    rank: int = 0
    size: int = 1
    group: Any = None
    traffic: Traffic = field(default_factory=Traffic)

    def share_random_state(self, device: torch.device) -> None:
        """Give all ranks the first one's random state: a loss that draws tokens draws the same."""
        if self.size == 1:
            return
        # Broadcasts name their source by its rank among all.
        first = dist.get_global_rank(self.group, 0)
        state = torch.get_rng_state()
        dist.broadcast(state, first, group=self.group)
        torch.set_rng_state(state)
        if device.type == "cuda":
            state = torch.cuda.get_rng_state(device)
            dist.broadcast(state, first, group=self.group)
            torch.cuda.set_rng_state(state, device)

    def heads_for_tokens(self, x: Tensor) -> Tensor:
        """Return (n, H / S, L, D) of all tokens, from (n, H, L / S, D) of all heads."""
        return torch.cat(self._exchange(x.chunk(self.size, dim=1)), dim=2)

    def tokens_for_heads(self, x: Tensor) -> Tensor:
        """Return (n, H, L / S, D) of all heads, from (n, H / S, L, D) of all tokens."""
        return torch.cat(self._exchange(x.chunk(self.size, dim=2)), dim=1)

    def _exchange(self, parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        result: Tensor = _Exchange.apply(torch.stack(parts), self)
        return result.unbind()

    def exchange(self, parts: Tensor) -> Tensor:
        """Send (S, ...) parts, one to each rank; return those received."""
        # Contiguous, as the collective writes one part after the other.
        received = torch.empty_like(parts, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, parts.contiguous(), group=self.group)
        self.traffic.add(SEQUENCES, parts.nbytes * (self.size - 1) // self.size)
        return received


SINGLE = SequenceRanks()


@dataclass(frozen=True, slots=True)
class SequencePart:
    """Which tokens of a micro-batch this rank computes.

    Args:
        first: position of its first token in each sequence, or number of its first node.
        places: int64 into the M entries of the undivided `hidden_index`: those computed here.
    """

    ranks: SequenceRanks
    first: int
    places: Tensor
    num_entries: int

    def joined(self, values: Tensor) -> Tensor:
        """Return (M,) values of all ranks; each rank's gradient is that of its values."""
        # All ranks compute the same loss, and each propagates the gradient of its part.
        if self.num_entries == 0:
            return values
        places = _backend.to_device_of(self.places, values)
        full = values.new_zeros(self.num_entries).index_put((places,), values)
        result: Tensor = _Sum.apply(full, self.ranks.group)
        return result


class _Exchange(torch.autograd.Function):
    """Send part i to rank i, and receive one from each; backwards the gradients return."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, ranks: SequenceRanks) -> Tensor:
        ctx.ranks = ranks
        return ranks.exchange(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.exchange(gradients[0]), None


class _Sum(torch.autograd.Function):
    """Add up over the ranks; the gradient of a rank's addend is that of the sum."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        total = value.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def check_heads(config: Any, size: int) -> None:
    """Raise ConfigError unless so many ranks can share the query heads of a model's config."""
    if size == 1:  # layers of some models differ in their heads
        return
    heads = getattr(config, "num_attention_heads", 1)
    if heads % size:
        raise ConfigError(f"{SETTING}: wanted a divisor of {heads} heads, got {size}")
