"""Step-wise reinforcement learning of language-model agents.

Ops and batches (docs/reference/ops_api.md), and all names of `skyrl_fast.train`.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

try:
    from skyrl_fast import _C as _C
except ImportError as error:
    from skyrl_fast.system.importing import find_hidden_package

    if _hidden := find_hidden_package(__path__[0], "_C*.so"):
        raise ImportError(
            f"skyrl_fast: {__path__[0]} has no compiled extension and hides the installed package "
            f"{_hidden}; run Python from another folder, or `pip install -e .` here"
        ) from None
    raise ImportError(
        f"skyrl_fast: the compiled extension does not load ({error}); build it with a C++ "
        "compiler: `pip install .`, or `make setup` in a source tree"
    ) from error

if _simd_level := os.environ.get("SKYRL_FAST_SIMD"):
    _C.set_simd_level(_simd_level)

__version__ = "0.1.0"

from skyrl_fast.train import _HOMES as _TRAINER_HOMES

# Imported on first use: commands and processes of environments start without torch. Type checkers
# read __init__.pyi.
_NAMES = {
    "skyrl_fast.batch": ("PaddedBatch", "StepBatch"),
    "skyrl_fast.batch.generator_merge": ("merge_stepwise_output",),
    "skyrl_fast.batch.token_counts": ("TokenCounts", "token_counts"),
    "skyrl_fast.ops._backend": ("set_page_pool_limit",),
    "skyrl_fast.ops._ragged": ("Concat", "Ragged"),
    "skyrl_fast.ops.advantage.decoupled": ("gdpo_advantage",),
    "skyrl_fast.ops.advantage.group": ("group_advantage",),
    "skyrl_fast.ops.advantage.tokens": ("gae", "reinforce_plus_plus"),
    "skyrl_fast.ops.advantage.turns": (
        "gigpo_advantage",
        "turn_group_advantage",
        "turn_level_returns",
    ),
    "skyrl_fast.ops.logprob.gathered": ("gathered_logprob",),
    "skyrl_fast.ops.logprob.linear": ("linear_logprob",),
    "skyrl_fast.ops.logprob.masked_loss": ("masked_logprob_loss",),
    "skyrl_fast.ops.logprob.selected": ("selected_logprob",),
    "skyrl_fast.ops.merge.steps": ("MergePlan", "merge_steps"),
    "skyrl_fast.ops.pack.batch_tensors": (
        "convert_prompts_responses_to_batch_tensors",
        "router_padding_mask",
    ),
    "skyrl_fast.ops.pack.padding_rows": (
        "pad_batch",
        "pad_training_input_batch",
        "padding_metadata",
    ),
    "skyrl_fast.ops.pack.routed_experts": ("append_rollout_expert_indices",),
    "skyrl_fast.ops.pack.steps": ("pack_steps",),
    "skyrl_fast.ops.pack.varlen": ("Varlen", "padded_to_varlen", "varlen_to_padded"),
    "skyrl_fast.ops.policy_loss.custom": ("CustomLoss",),
    "skyrl_fast.ops.policy_loss.loss": (
        "PolicyLoss",
        "kl_penalty",
        "off_policy_correction",
        "policy_loss",
        "reduction_weights",
    ),
    "skyrl_fast.ops.policy_loss.losses": (
        "Cispo",
        "ClipCov",
        "CrossEntropy",
        "Dppo",
        "DualClip",
        "Gspo",
        "ImportanceSampling",
        "KlCov",
        "Regular",
        "RolloutIs",
        "Sapo",
    ),
    "skyrl_fast.ops.prefix_tree.attention": (
        "TreeAttention",
        "plan_tree_attention",
        "tree_attention",
    ),
    "skyrl_fast.ops.prefix_tree.tree": ("PrefixTree", "build_prefix_tree", "prefix_tree_size"),
}
_HOMES = dict(_TRAINER_HOMES)
for _module, _names in _NAMES.items():
    for _name in _names:
        _HOMES[_name] = _module

__all__ = sorted([*_HOMES, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = importlib.import_module(_HOMES[name])
    value = getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
