"""Models whose ranks share the tokens of a pass by twos."""

from __future__ import annotations

from typing import Any

import _ranked
import torch
from _fakes import tiny_model
from _moe import tiny_moe

from skyrl_fast.config import OptimizerConfig
from skyrl_fast.train.model.critic import Critic, ValueModel
from skyrl_fast.train.model.optimizer import Optimizer
from skyrl_fast.train.model.policy import Policy
from skyrl_fast.train.parallel.ranks import Ranks

SHARED = 2  # ranks that share a pass
BUDGET = 40  # tokens of a rank


def make_models(ranks: Ranks) -> _ranked.Models:
    """Return models of one rank, or of several that share sequences."""
    device = "cpu" if ranks.mesh is None else ranks.mesh.device_type
    if ranks.size > 1:
        ranks.share_sequences(SHARED)

    def policy(model: Any, **options: Any) -> Policy:
        return Policy(model.to(device), max_tokens_per_microbatch=BUDGET, ranks=ranks, **options)

    policies = {
        "one key head": policy(tiny_model(tied=True)),
        "tree": policy(tiny_model(seed=2), tree=True),
        "experts": policy(tiny_moe(), router_replay=True),
        "experts on trees": policy(tiny_moe(seed=1), router_replay=True, tree=True),
        "checkpointed": policy(_ranked.checkpointed(tiny_moe()), router_replay=True),
    }
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
        tree=True,
        ranks=ranks,
    )
    return _ranked.Models(ranks, policies, optimizers, reference, critic)
