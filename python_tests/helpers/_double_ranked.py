"""Models in float64, in which several ranks train as one to the tenth digit and beyond."""

from dataclasses import dataclass

import torch
from _fakes import tiny_model
from _moe import tiny_moe

from skyrl_fast.config import OptimizerConfig
from skyrl_fast.config.settings import LoraConfig
from skyrl_fast.train.model.critic import Critic, ValueModel
from skyrl_fast.train.model.lora import add_adapters
from skyrl_fast.train.model.policy import Policy
from skyrl_fast.train.parallel.ranks import Ranks, run_on_all_ranks
from skyrl_fast.train.parallel.sharding import full_weight
from skyrl_fast.train.parallel.traffic import GRADIENTS

BUDGET = 40  # tokens of a micro-batch: several for each rank
NAMES = ("planner", "worker")


@dataclass(slots=True)
class DoubleModels:
    """The models of one rank."""

    ranks: Ranks
    policies: dict[str, Policy]
    critic: Critic


def double_models(ranks: Ranks) -> DoubleModels:
    """Return the models, with the same weights on every rank and for any number of ranks."""
    torch.set_num_threads(1)
    with_adapters = tiny_model(seed=3, dtype=torch.float64)
    torch.manual_seed(0)
    add_adapters(with_adapters, LoraConfig(rank=3, alpha=4, policies=list(NAMES)), base="base")
    for name, parameter in with_adapters.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.2)
    options = {"max_tokens_per_microbatch": BUDGET, "ranks": ranks}
    policies = {
        "sequences": Policy(tiny_model(dtype=torch.float64), **options),
        "trees": Policy(tiny_model(seed=1, dtype=torch.float64), tree=True, **options),
        # Grouped products of experts have no float64.
        "routes": Policy(tiny_moe(), router_replay=True, tree=True, **options),
    }
    several = Policy(with_adapters, **options)
    policies |= {name: several.with_adapter(name) for name in NAMES}
    torch.manual_seed(0)
    critic = Critic(
        ValueModel(tiny_model(seed=6, dtype=torch.float64).base_model).double(),
        OptimizerConfig(),
        total_steps=9,
        mini_batch_size=2,
        **options,
    )
    return DoubleModels(ranks, policies, critic)


def double_models_by_twos(ranks: Ranks) -> DoubleModels:
    """Return the models of ranks of which each two share sequences."""
    if ranks.size > 1:
        ranks.share_sequences(2)
    return double_models(ranks)


@run_on_all_ranks
def take_gradients(owner: Policy | Critic) -> dict[str, torch.Tensor]:
    """Return the full gradients by name, and clear them."""
    found = {}
    for name, parameter in owner.trained_parameters():
        if parameter.grad is not None:
            found[name] = full_weight(parameter.grad, owner.ranks, GRADIENTS).clone()
            parameter.grad = None
    return found
