"""Models for the tests of ranks, built identically on each rank."""

from dataclasses import dataclass
from typing import Any

import torch
from _fakes import tiny_model
from _moe import tiny_moe
from _vision_language import vision_language_model

from skyrl_fast.config import OptimizerConfig
from skyrl_fast.config.settings import LoraConfig
from skyrl_fast.train.model.critic import Critic, ValueModel, add_to_base
from skyrl_fast.train.model.loading import checkpoint_gradients
from skyrl_fast.train.model.lora import add_adapter
from skyrl_fast.train.model.optimizer import Optimizer
from skyrl_fast.train.model.policy import Policy
from skyrl_fast.train.parallel.ranks import Ranks, run_on_all_ranks

BUDGET = 40  # tokens of a micro-batch: several for each rank


@dataclass(slots=True)
class Models:
    """The models of one rank: every kind of policy with its optimizer, a reference, a critic."""

    ranks: Ranks
    policies: dict[str, Policy]
    optimizers: dict[str, Optimizer]
    reference: Policy
    critic: Critic
    adapter_critic: Critic | None = None


def nested(model: Any) -> Any:
    """Return the model, with two nested classes in its no-split modules, as Mamba has."""
    layer = model.base_model.layers[0]
    model._no_split_modules = [type(layer).__name__, type(layer.mlp).__name__]
    return model


def checkpointed(model: Any) -> Any:
    """Return the model with activation checkpointing."""
    checkpoint_gradients(model)
    return model.train()


def measured(ranks: Ranks) -> Policy:
    """Return a policy that has measured the layouts of rows, in bfloat16."""
    options: Any = {"tree": None, "dtype": torch.bfloat16, "max_tokens_per_microbatch": 64}
    return Policy(tiny_model(), ranks=ranks, **options)


def adapted(model: Any) -> Any:
    """Return the model with a LoRA adapter."""
    torch.manual_seed(0)
    add_adapter(model, LoraConfig(rank=4, alpha=8, init_method="gaussian"), base="")
    return model


def with_critic(model: Any) -> Any:
    """Return the model with adapters of a policy and a critic, and the critic's head."""
    model = adapted(model)
    add_to_base(model, LoraConfig(rank=4, alpha=8, init_method="gaussian"), base="")
    return model


def loaded(model: Any) -> Any:
    """Return the model as if it were loaded from a folder, which has other names for weights."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    model._weight_conversions = get_model_conversion_mapping(model)
    return model


def make_models(ranks: Ranks) -> Models:
    """Return all models, with the same weights on every rank and for any number of ranks."""
    return models_of(
        ranks,
        {
            "tied": (tiny_model(tied=True), {}),
            "untied": (tiny_model(seed=1), {}),
            "nested": (nested(tiny_model(seed=4)), {}),
            "tree": (tiny_model(seed=2), {"tree": True}),
            "experts": (tiny_moe(), {"router_replay": True}),
            "vision": (loaded(vision_language_model("internvl")), {"tree": True}),
            "adapter": (adapted(tiny_model(seed=5)), {}),
            "critic on the base": (with_critic(tiny_model(seed=7)), {}),
            "frozen bfloat16": (
                adapted(tiny_model(seed=6).to(torch.bfloat16)),
                {"dtype": torch.bfloat16},
            ),
            "checkpointed": (checkpointed(tiny_moe()), {"router_replay": True}),
        },
    )


@run_on_all_ranks
def hold_gradients(owner: Policy | Critic, holds: bool) -> None:
    """Say on every rank whether there is memory for a model's full gradients."""
    owner.ranks.holds_gradients = holds


_profiles: list[torch.profiler.profile] = []  # of this rank


@run_on_all_ranks
def watch_collectives(owner: Policy) -> None:
    """Note on every rank which collectives follow, until `collectives_since`."""
    _profiles.append(torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]))
    _profiles[-1].start()


@run_on_all_ranks
def collectives_since(owner: Policy) -> list[set[str]]:
    """Return the names of each rank's collectives since `watch_collectives`."""
    profile = _profiles.pop()
    profile.stop()
    names = {event.key for event in profile.key_averages()}
    collectives = {name for name in names if name.startswith(("c10d::", "_c10d_functional::"))}
    return owner.ranks.gather([collectives], from_each=True)


def models_of(
    ranks: Ranks, trained: dict[str, tuple[Any, dict[str, Any]]], *, critic_on_trees: bool = False
) -> Models:
    """Return policies with their optimizers, a reference and a critic.

    Args:
        trained: models, and options of their policies, by name.
    """
    device = "cpu" if ranks.mesh is None else ranks.mesh.device_type

    def policy(model: Any, **options: Any) -> Policy:
        return Policy(model.to(device), max_tokens_per_microbatch=BUDGET, ranks=ranks, **options)

    policies = {name: policy(model, **options) for name, (model, options) in trained.items()}
    config = OptimizerConfig(lr=1e-2)
    optimizers = {name: Optimizer(p, config, total_steps=9) for name, p in policies.items()}
    reference = policy(tiny_model(seed=5).requires_grad_(False))
    torch.manual_seed(0)
    value_model = ValueModel(tiny_model(seed=6).base_model)
    critic = Critic(
        value_model.to(device),
        config,
        total_steps=9,
        mini_batch_size=2,
        max_tokens_per_microbatch=BUDGET,
        tree=critic_on_trees,
        ranks=ranks,
    )
    on_base = policies.get("critic on the base")
    adapter_critic = None
    if on_base is not None:
        adapter_critic = Critic(
            ValueModel(on_base.backbone),
            config,
            total_steps=9,
            mini_batch_size=2,
            max_tokens_per_microbatch=BUDGET,
            ranks=ranks,
            policy=on_base,
        )
    return Models(ranks, policies, optimizers, reference, critic, adapter_critic)
