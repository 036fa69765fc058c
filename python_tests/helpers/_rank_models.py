"""A policy and a critic for the tests of checkpoints of several ranks, new or from a checkpoint."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _fakes import tiny_model
from _moe import tiny_moe

from skyrl_fast.config import OptimizerConfig
from skyrl_fast.train.model.critic import Critic, ValueModel, load_value_model
from skyrl_fast.train.model.loading import load_model
from skyrl_fast.train.model.optimizer import Optimizer
from skyrl_fast.train.model.policy import Policy
from skyrl_fast.train.parallel.ranks import Ranks, run_on_all_ranks
from skyrl_fast.train.parallel.sharding import (
    full_tensors,
    like_shard,
    shard,
    shard_rows,
    weights_of,
)

CPU = torch.device("cpu")


@dataclass(slots=True)
class Saved:
    """What a checkpoint has of the models."""

    ranks: Ranks
    policy: Policy
    optimizer: Optimizer
    critic: Critic

    def __post_init__(self) -> None:
        self.ranks.register(self)

    def save(self, folder: Path) -> None:
        """Write all files; several ranks queue the large ones."""
        self.policy.save(folder / "policy")
        self.optimizer.save(folder)
        self.critic.save(folder / "critic")

    def restore(self, folder: Path) -> None:
        """Load the optimizers' states."""
        self.optimizer.load(folder)
        self.critic.restore(folder / "critic")

    @run_on_all_ranks
    def step(self, seed: int) -> None:
        """Take optimizer steps along random gradients, the same for any number of ranks."""
        for owner, optimizer in self._models():
            generator = torch.Generator().manual_seed(seed)
            for _, value in weights_of(owner.model):
                if value.requires_grad:
                    full = torch.randn(value.shape, generator=generator)
                    rows = shard_rows(value)
                    own = full if rows is None else full[rows]
                    value.grad = like_shard(own, value)
            type(optimizer).step.__wrapped__(optimizer)  # type: ignore[attr-defined]

    @run_on_all_ranks
    def values(self) -> dict[str, torch.Tensor]:
        """Return all weights and moments on rank 0."""
        found = {}
        for number, (owner, optimizer) in enumerate(self._models()):
            states = optimizer.adamw.state
            items = [
                *weights_of(owner.model),
                *(
                    (f"{n}.{k}", v)
                    for n, p in optimizer.named_parameters
                    for k, v in states[p].items()
                ),
            ]
            values = full_tensors(items, self.ranks)
            found |= {f"{number}.{name}": value.clone() for name, value in values.items()}
        return found

    @run_on_all_ranks
    def processes(self) -> list[int]:
        """Return the processes of all ranks on rank 0."""
        return self.ranks.gather([os.getpid()])

    @run_on_all_ranks
    def queue(self, rank: int, write: Callable[[], list[Path]]) -> None:
        """Queue another write on a rank."""
        if self.ranks.rank == rank:
            self.ranks.files.queue(write)

    def _models(self) -> list[tuple[Policy | Critic, Optimizer]]:
        return [(self.policy, self.optimizer), (self.critic, self.critic.optimizer)]


def saved_models(
    ranks: Ranks,
    *,
    checkpoint: Path | None = None,
    experts: bool = False,
    optimizer_name: str = "adamw",
    offload: bool = False,
) -> Saved:
    """Return the models, with weights of a checkpoint if there is one; not yet restored."""
    config = OptimizerConfig(
        optimizer=optimizer_name,
        lr=1e-2,
        # Nothing is clipped: the norm is a sum in the order of the ranks.
        max_grad_norm=1e9,
        offload_after_step=offload,
    )
    if checkpoint is None and optimizer_name == "adamw_8bit":
        # Only larger matrices have moments in 8 bits.
        model, value_model = wide_model(), ValueModel(wide_model().base_model)
    elif checkpoint is None:
        model = tiny_moe() if experts else tiny_model(tied=True)
        torch.manual_seed(0)
        value_model = ValueModel(tiny_model(seed=6).base_model)
    else:
        model = load_model(str(checkpoint / "policy"), device=CPU, ranks=ranks)
        value_model = load_value_model(str(checkpoint / "critic"), device=CPU, ranks=ranks)
    policy = Policy(model, ranks=ranks)
    optimizer = Optimizer(policy, config, total_steps=9)
    critic = Critic(value_model, config, total_steps=9, mini_batch_size=2, ranks=ranks)
    return Saved(ranks, policy, optimizer, critic)


def resumed_models(ranks: Ranks, *, checkpoints: Sequence[Path]) -> list[Saved]:
    """Return the models of each checkpoint, with its weights; not yet restored."""
    return [saved_models(ranks, checkpoint=path) for path in checkpoints]


@dataclass(slots=True)
class Wide:
    """A policy with more bytes of weights and tokens than of what goes with them."""

    ranks: Ranks
    policy: Policy
    optimizer: Optimizer


def wide_model() -> Any:
    """Return a model whose sizes are multiples of 8, so that shards need no padding."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            tie_word_embeddings=False,
        )
    )


def wide_models(ranks: Ranks) -> Wide:
    """Return the models."""
    return _wide(ranks, Policy)


def wide_models_in_bfloat16(ranks: Ranks) -> dict[str, Wide]:
    """Return the models twice: as they are, and with weights that are gathered in float32."""
    options = {"dtype": torch.bfloat16}
    return {
        "rounded": _wide(ranks, Policy, **options),
        "exact": _wide(ranks, GatheredInFloat32, **options),
    }


class GatheredInFloat32(Policy):
    """A policy whose weights autocast rounds, and no gather.

    FSDP2 puts a node into autograd's graph before the first module of a group: a layer's first
    norm, where linear modules are gathered in 16 bits and norms are a group of their own. It has
    one here, too: a residual stream's gradient is the same sum in the same order then.
    """

    def distribute(self) -> None:
        shard(self.root, self.ranks)
        self.ranks.register(self)
        for layer in self.model.model.layers:
            layer.input_layernorm.register_forward_pre_hook(_with_a_node)


def _with_a_node(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> Any:
    return tuple(value.view_as(value) for value in inputs)


def _wide(ranks: Ranks, kind: type[Policy], **options: Any) -> Wide:
    torch.set_num_threads(1)
    policy = kind(wide_model(), max_tokens_per_microbatch=1600, ranks=ranks, **options)
    return Wide(ranks, policy, Optimizer(policy, OptimizerConfig(lr=1e-3), total_steps=9))
