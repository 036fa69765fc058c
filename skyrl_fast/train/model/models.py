"""The models of a run, created on every rank: policy, reference, critic and optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os.path import expanduser
from pathlib import Path
from typing import Any

import torch

from skyrl_fast.config import Config
from skyrl_fast.config.settings import TrainerConfig
from skyrl_fast.train.data.random_state import seed_everything
from skyrl_fast.train.data.schedule import total_optimizer_steps
from skyrl_fast.train.model.critic import Critic, add_to_base, make_critic
from skyrl_fast.train.model.loading import hide_progress_bars, load_model, recomputes_activations
from skyrl_fast.train.model.lora import add_adapters
from skyrl_fast.train.model.optimizer import Optimizer
from skyrl_fast.train.model.policy import Policy, Reference, WithoutAdapter
from skyrl_fast.train.model.residual_stream import round_residual_stream, widen_residual_stream
from skyrl_fast.train.model.row_layout import uses_trees
from skyrl_fast.train.model.trained_model import TrainedModel
from skyrl_fast.train.parallel.ranks import SINGLE_RANK, Ranks


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

    @property
    def policy(self) -> Policy:
        """The first policy, whose model all share."""
        return next(iter(self.trained.values())).policy


def make_models(
    config: Config,
    checkpoint: Path | None,
    num_prompts: int,
    ranks: Ranks,
    *,
    saved_logits_bytes: int | None = None,
    holds_gradients: bool = True,
    offloads_base: bool = False,
    offloads_weights: bool = False,
) -> Models:
    """Create the models from the settings or a checkpoint, in the same order on every rank.

    Args:
        num_prompts: training prompts, for the length of the learning-rate schedule.
        saved_logits_bytes: of a policy; see `Policy`.
        holds_gradients: whether a rank has memory for a model's full gradients.
        offloads_base: leave the memory of the policy's frozen weights to the engine, which starts
            next.
        offloads_weights: leave it that of all models' weights.
    """
    settings = config.trainer
    ranks.share_sequences(settings.policy.sequence_parallel_size)
    ranks.holds_gradients = holds_gradients
    _set_threads(settings.num_threads, ranks)
    # Each rank keeps its shard of what it creates: new weights must be equal on all.
    seed_everything(settings.seed)
    hide_progress_bars()
    policy = load_policy(config, checkpoint, ranks=ranks, saved_logits_bytes=saved_logits_bytes)
    reference: Reference | None = None
    if uses_reference(config) and config.shares_reference:
        reference = WithoutAdapter(policy)
    elif uses_reference(config):
        # The model that the run began with, also if it resumes from a checkpoint.
        path = settings.ref.model.path or model_path(config, None)
        reference = _load_reference(config, path, ranks, saved_logits_bytes)
    policies: dict[str | None, Policy] = {
        name: policy.with_adapter(name) for name in config.policies
    } or {None: policy}
    steps = total_optimizer_steps(config, num_prompts)
    trained = {
        name: TrainedPolicy(
            one, Optimizer(one, settings.policy.optimizer_config, total_steps=steps)
        )
        for name, one in policies.items()
    }
    critic = None
    if settings.critic.model.path is not None:
        if checkpoint is None:
            source = settings.critic.model.path
        else:
            source = str(checkpoint / "critic")
        critic = make_critic(
            config,
            source,
            find_device(settings.device),
            _dtype(settings),
            num_prompts=num_prompts,
            ranks=ranks,
            policy=policy if config.shares_critic else None,
        )
    ranks.traffic.take()  # what checks have gathered is of no step
    if offloads_base:
        policy.frozen_base.offload()
    if offloads_weights:
        others = [one for one in (reference, critic) if isinstance(one, TrainedModel)]
        policy.leaving = (policy, *others)
        policy.offload_weights()
    return Models(trained, reference, critic)


def load_policy(
    config: Config,
    checkpoint: Path | None = None,
    *,
    ranks: Ranks | None = None,
    saved_logits_bytes: int | None = None,
) -> Policy:
    """Return the policy of the settings or of a checkpoint, with the adapters of a run with LoRA.

    Args:
        config: settings of the policy, its rows and its device.
        checkpoint: folder of a run's checkpoint; None: the model of the settings.
        ranks: those that share the model; None: this process alone.
        saved_logits_bytes: see `Policy`.

    Raises:
        ValueError: there is no usable model, or the settings do not fit it.
    """
    settings = config.trainer
    device = find_device(settings.device)
    model = load_model(
        model_path(config, checkpoint),
        device=device,
        dtype=_dtype(settings) if config.trains_adapter else torch.float32,
        gradient_checkpointing=recomputes_activations(settings, device),
        ranks=ranks or SINGLE_RANK,
    ).requires_grad_(True)
    if config.trains_adapter:
        _add_adapters(model, config, checkpoint)
    if settings.residual_dtype == "auto":
        round_residual_stream(model)
    elif config.trains_adapter:
        widen_residual_stream(model)
    replays = settings.policy.moe_enable_routing_replay
    return _policy_of(
        model, config, ranks or SINGLE_RANK, saved_logits_bytes, router_replay=replays
    )


def load_base_policy(config: Config) -> Policy:
    """Return the settings' model, frozen, for adapters that `Policy.add_adapter` adds later.

    Raises:
        ValueError: there is no usable model, or the settings do not fit it.
    """
    settings = config.trainer
    _set_threads(settings.num_threads, SINGLE_RANK)
    device = find_device(settings.device)
    model = load_model(
        model_path(config, None),
        device=device,
        dtype=_dtype(settings),
        gradient_checkpointing=recomputes_activations(settings, device),
    ).requires_grad_(False)
    if settings.residual_dtype == "auto":
        round_residual_stream(model)
    else:
        widen_residual_stream(model)
    return _policy_of(model, config, SINGLE_RANK, None, router_replay=False)


def _load_reference(
    config: Config, path: str, ranks: Ranks, saved_logits_bytes: int | None
) -> Policy:
    device = find_device(config.trainer.device)
    model = load_model(path, device=device, dtype=torch.float32, ranks=ranks).requires_grad_(False)
    if config.trainer.residual_dtype == "auto":
        round_residual_stream(model)
    # The reference routes freely: its own log-probabilities are wanted.
    return _policy_of(model, config, ranks, saved_logits_bytes, router_replay=False)


def _policy_of(
    model: Any,
    config: Config,
    ranks: Ranks,
    saved_logits_bytes: int | None,
    *,
    router_replay: bool,
) -> Policy:
    settings = config.trainer
    dtype = _dtype(settings)
    head = settings.policy.lm_head_dtype
    if head == "auto":
        head_dtype = dtype
    else:
        head_dtype = getattr(torch, head)
    return Policy(
        model,
        temperature=config.generator.sampling_params.temperature,
        max_tokens_per_microbatch=settings.max_tokens_per_microbatch,
        dtype=dtype,
        head_dtype=head_dtype,
        router_replay=router_replay,
        tree=uses_trees(settings.row_layout),
        saved_logits_bytes=saved_logits_bytes,
        ranks=ranks,
    )


def uses_reference(config: Config) -> bool:
    """Return whether the algorithm has a KL term."""
    algorithm = config.trainer.algorithm
    return algorithm.use_kl_loss or algorithm.use_kl_in_reward


def _add_adapters(model: Any, config: Config, checkpoint: Path | None) -> None:
    lora = config.trainer.policy.model.lora
    if checkpoint is not None:
        folder = checkpoint / "policy"
    else:
        folder = None
    if folder is None and lora.path is not None:
        folder = Path(expanduser(lora.path))
    base = model_path(config, None)
    add_adapters(model, lora, base=base, folder=folder)
    if config.shares_critic:
        if checkpoint is None:
            of_critic = None
        else:
            of_critic = checkpoint / "critic"
        add_to_base(model, lora, base=base, folder=of_critic)


def _set_threads(chosen: int | None, ranks: Ranks) -> None:
    if chosen is None and ranks.size > 1:
        # Ranks of a machine share its cores.
        chosen = max(1, torch.get_num_threads() // ranks.size)
    if chosen is not None:
        torch.set_num_threads(chosen)


def find_device(name: str, *, has_gpu: bool | None = None) -> torch.device:
    """Return the device of `trainer.device`; ValueError if it is "cuda" and there is no GPU.

    Args:
        has_gpu: whether there is one; None: as torch says.
    """
    available = torch.cuda.is_available() if has_gpu is None else has_gpu
    if name == "cuda" and not available:
        raise ValueError("trainer.device: wanted cuda, but torch finds no GPU")
    return torch.device("cuda" if name != "cpu" and available else "cpu")


def _dtype(settings: TrainerConfig) -> torch.dtype:
    """Return the dtype of forward passes."""
    name = settings.policy.dtype
    if name == "auto":
        on_cpu = find_device(settings.device).type == "cpu"
        return torch.float32 if on_cpu else torch.bfloat16
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
