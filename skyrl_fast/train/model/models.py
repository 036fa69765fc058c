"""The models of a run, created on every rank: policy, reference, critic and optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os.path import expanduser
from pathlib import Path
from typing import Any

import torch

from skyrl_fast.config import Config
from skyrl_fast.train.data.random_state import seed_everything
from skyrl_fast.train.data.schedule import total_optimizer_steps
from skyrl_fast.train.model.critic import Critic, add_to_base, make_critic
from skyrl_fast.train.model.lora import add_adapters
from skyrl_fast.train.model.optimizer import Optimizer
from skyrl_fast.train.model.policy import (
    Policy,
    Reference,
    WithoutAdapter,
    hide_progress_bars,
    load_model,
    recomputes_activations,
)
from skyrl_fast.train.model.residual_stream import round_residual_stream, widen_residual_stream
from skyrl_fast.train.model.row_layout import uses_trees
from skyrl_fast.train.parallel.ranks import Ranks


def model_path(config: Config, checkpoint: Path | None) -> str:
    """Return the folder or hub name that the policy is loaded from; with LoRA its base."""
    start_path = config.trainer.policy.model.path
    assert start_path is not None
    if checkpoint is None or config.trains_adapter:
        return start_path
    return str(checkpoint / "policy")


@dataclass(frozen=True, slots=True)
class TrainedPolicy:
    """A policy and its optimizer; named policies share a model, of which each has an adapter."""

    policy: Policy
    optimizer: Optimizer


@dataclass(frozen=True, slots=True)
class Models:
    """The models of a run; reference and critic only if the algorithm uses them."""

    trained: Mapping[str | None, TrainedPolicy]  # by name; None: that of a single policy
    reference: Reference | None
    critic: Critic | None


def make_models(
    config: Config,
    checkpoint: Path | None,
    num_prompts: int,
    ranks: Ranks,
    *,
    saved_logits_bytes: int | None = None,
    holds_gradients: bool = True,
    offloads_base: bool = False,
) -> Models:
    """Create the models from the settings or a checkpoint, in the same order on every rank.

    Args:
        num_prompts: training prompts, for the length of the learning-rate schedule.
        saved_logits_bytes: of a policy; see `Policy`.
        holds_gradients: whether a rank has memory for a model's full gradients.
        offloads_base: leave the memory of the policy's frozen weights to the engine, which starts
            next.
    """
    settings = config.trainer
    ranks.share_sequences(settings.policy.sequence_parallel_size)
    ranks.holds_gradients = holds_gradients
    _set_threads(settings.num_threads, ranks)
    # Each rank keeps its shard of what it creates: new weights must be equal on all.
    seed_everything(settings.seed)
    hide_progress_bars()
    device = find_device(settings.device)
    dtype, head = _dtype(settings.policy.dtype, device), settings.policy.lm_head_dtype

    def policy_of(path: str, *, trained: bool) -> Policy:
        has_adapter = trained and config.trains_adapter
        model = load_model(
            path,
            device=device,
            dtype=dtype if has_adapter else torch.float32,
            gradient_checkpointing=trained and recomputes_activations(settings, device),
        ).requires_grad_(trained)
        if has_adapter:
            _add_adapters(model, config, checkpoint)
        if settings.residual_dtype == "auto":
            round_residual_stream(model)
        elif has_adapter:
            widen_residual_stream(model)
        return Policy(
            model,
            temperature=config.generator.sampling_params.temperature,
            max_tokens_per_microbatch=settings.max_tokens_per_microbatch,
            dtype=dtype,
            head_dtype=dtype if head == "auto" else getattr(torch, head),
            # The reference routes freely: its own log-probabilities are wanted.
            router_replay=trained and settings.policy.moe_enable_routing_replay,
            tree=uses_trees(settings.rows),
            saved_logits_bytes=saved_logits_bytes,
            ranks=ranks,
        )

    policy = policy_of(model_path(config, checkpoint), trained=True)
    reference: Reference | None = None
    if uses_reference(config) and config.shares_reference:
        reference = WithoutAdapter(policy)
    elif uses_reference(config):
        # The model that the run began with, also if it resumes from a checkpoint.
        reference = policy_of(settings.ref.model.path or model_path(config, None), trained=False)
    policies: dict[str | None, Policy] = {
        name: policy.with_adapter(name) for name in config.policies
    } or {None: policy}
    optimizer, steps = settings.policy.optimizer_config, total_optimizer_steps(config, num_prompts)
    trained = {
        name: TrainedPolicy(one, Optimizer(one, optimizer, total_steps=steps))
        for name, one in policies.items()
    }
    critic = None
    if settings.critic.model.path is not None:
        source = settings.critic.model.path if checkpoint is None else str(checkpoint / "critic")
        critic = make_critic(
            config,
            source,
            device,
            dtype,
            num_prompts=num_prompts,
            ranks=ranks,
            policy=policy if config.shares_critic else None,
        )
    if offloads_base:
        policy.frozen_base.offload()
    return Models(trained, reference, critic)


def uses_reference(config: Config) -> bool:
    """Return whether the algorithm has a KL term."""
    algorithm = config.trainer.algorithm
    return algorithm.use_kl_loss or algorithm.use_kl_in_reward


def _add_adapters(model: Any, config: Config, checkpoint: Path | None) -> None:
    lora = config.trainer.policy.model.lora
    folder = checkpoint / "policy" if checkpoint is not None else None
    if folder is None and lora.path is not None:
        folder = Path(expanduser(lora.path))
    base = model_path(config, None)
    add_adapters(model, lora, base=base, folder=folder)
    if config.shares_critic:
        of_critic = None if checkpoint is None else checkpoint / "critic"
        add_to_base(model, lora, base=base, folder=of_critic)


def _set_threads(chosen: int | None, ranks: Ranks) -> None:
    if chosen is None and ranks.size > 1:
        # Ranks of a machine share its cores.
        chosen = max(1, torch.get_num_threads() // ranks.size)
    if chosen is not None:
        torch.set_num_threads(chosen)


def find_device(name: str) -> torch.device:
    """Return the device of `trainer.device`; ValueError if it is "cuda" and there is no GPU."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ValueError("trainer.device: wanted cuda, but torch finds no GPU")
    return torch.device("cuda" if name != "cpu" and available else "cpu")


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
