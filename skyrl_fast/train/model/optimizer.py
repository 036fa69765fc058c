"""AdamW with warm-up, schedule and gradient clipping; its state is saved by parameter name."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from skyrl_fast.config import OptimizerConfig
from skyrl_fast.train.output.checkpoint import damaged
from skyrl_fast.train.parallel.ranks import Ranks, run_on_all_ranks
from skyrl_fast.train.parallel.sharding import full_tensor, full_tensors, shard_like

logger = logging.getLogger(__name__)

COSINE_END = 0.0  # share of the learning rate at the end
MAX_STEPS = 2**53  # float64 counts up to here
MOMENTS = ("exp_avg", "exp_avg_sq", "step")  # AdamW's state of a parameter


class HasModel(Protocol):
    """A `Policy` or a `Critic`."""

    model: Any
    ranks: Ranks


class Optimizer:
    """AdamW with warm-up and clipping over a model's parameters; state is saved by name.

    Args:
        policy: policy or critic to optimize; parameters with one dimension get no weight decay.
        config: SkyRL's optimizer settings.
        total_steps: optimizer steps of the full run, for decaying schedules.
    """

    def __init__(self, policy: HasModel, config: OptimizerConfig, *, total_steps: int) -> None:
        self.step_count = 0
        self.ranks = policy.ranks
        self.ranks.register(self)
        self._config = config
        self._total_steps = total_steps
        self._named = [(n, p) for n, p in policy.model.named_parameters() if p.requires_grad]
        decayed = [p for _, p in self._named if p.dim() > 1]
        plain = [p for _, p in self._named if p.dim() <= 1]
        groups = [
            {"params": decayed, "weight_decay": config.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        beta1, beta2 = config.adam_betas
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.lr,
            betas=(beta1, beta2),
            fused=True,
        )

    @run_on_all_ranks
    def zero_grad(self) -> None:
        """Clear the gradients."""
        self._adamw.zero_grad(set_to_none=True)

    @run_on_all_ranks
    def step(self) -> dict[str, float]:
        """Clip, update the weights, and return gradient norm and learning rate.

        A non-finite gradient skips the update, but is counted as a step and reported.
        """
        parameters = [p for _, p in self._named if p.grad is not None]
        limit = self._config.max_grad_norm or math.inf
        norm = 0.0
        if parameters:
            norm = float(full_tensor(torch.nn.utils.clip_grad_norm_(parameters, limit)))
        rate = learning_rate(self.step_count, self._config, total_steps=self._total_steps)
        if math.isfinite(norm):
            for group in self._adamw.param_groups:
                group["lr"] = rate
            self._adamw.step()
        else:
            logger.warning("optimizer step %d skipped: gradient norm %s", self.step_count, norm)
        self.step_count += 1
        self._adamw.zero_grad(set_to_none=True)
        skipped = float(not math.isfinite(norm))
        return {
            "policy/grad_norm": norm,
            "policy/lr": rate,
            "policy/nonfinite_steps_skipped": skipped,
        }

    def save(self, path: Path) -> None:
        """Write the moments of every parameter by name (safetensors)."""
        tensors = {name: moment.cpu().contiguous() for name, moment in self._moments().items()}
        unmoved = [name for name, parameter in self._named if parameter not in self._adamw.state]
        metadata = {"step_count": str(self.step_count)}
        if unmoved:  # usually absent: the order of several metadata entries varies between files
            metadata["without_gradient"] = json.dumps(unmoved)
        save_file(tensors, str(path), metadata=metadata)

    @run_on_all_ranks
    def _moments(self) -> dict[str, torch.Tensor]:
        moments = (
            (f"{name}.{key}", self._adamw.state[parameter][key])
            for name, parameter in self._named
            if parameter in self._adamw.state
            for key in MOMENTS
        )
        return full_tensors(moments, self.ranks)

    @run_on_all_ranks
    def load(self, path: Path) -> None:
        """Load what `save` wrote.

        Raises:
            CheckpointError: the file is damaged, or has values that AdamW cannot have written.
            ValueError: a parameter is missing or has another shape.
        """
        tensors, step_count, unmoved = _read(path)
        for name, parameter in ((n, p) for n, p in self._named if n not in unmoved):
            if tensors and f"{name}.exp_avg" not in tensors:
                raise ValueError(f"{path}: no optimizer state for {name}: of another model?")
            if tensors and tensors[f"{name}.exp_avg"].shape != parameter.shape:
                raise ValueError(f"{path}: optimizer state of {name} has another shape")
            if tensors:
                state = _state_of(name, tensors, path)
                for key in ("exp_avg", "exp_avg_sq"):
                    state[key] = shard_like(state[key].to(parameter.device), parameter)
                state["step"] = state["step"].to(parameter.device)
                self._adamw.state[parameter] = state
        self.step_count = step_count


def _read(path: Path) -> tuple[dict[str, torch.Tensor], int, set[str]]:
    """Return the tensors by name, the step count, and the parameters without state."""
    try:
        tensors = load_file(str(path))
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata()
        step_count = int(metadata["step_count"])
        unmoved = set(json.loads(metadata.get("without_gradient", "[]")))
    except (
        *(AttributeError, LookupError, OSError, RecursionError),
        *(SafetensorError, TypeError, ValueError),
    ) as error:
        raise damaged(path, f"no optimizer state: {type(error).__name__}: {error}") from error
    if not 0 <= step_count < MAX_STEPS:
        raise damaged(path, f"step_count: wanted 0 to 2^53, got {step_count}")
    return tensors, step_count, unmoved


def _state_of(name: str, tensors: dict[str, torch.Tensor], path: Path) -> dict[str, torch.Tensor]:
    """Return AdamW's state of a parameter; CheckpointError if AdamW cannot have written it."""
    missing = [key for key in MOMENTS if f"{name}.{key}" not in tensors]
    if missing:
        raise damaged(path, f"{name}: no {', '.join(missing)}")
    state = {key: tensors[f"{name}.{key}"] for key in MOMENTS}
    if state["exp_avg_sq"].shape != state["exp_avg"].shape or state["step"].numel() != 1:
        raise damaged(path, f"{name}: shapes of different parameters")
    if bool(state["exp_avg"].isnan().any()):
        raise damaged(path, f"{name}.exp_avg: wanted numbers, got NaN")
    for key in ("exp_avg_sq", "step"):
        if not bool((state[key] >= 0).all()):
            raise damaged(path, f"{name}.{key}: wanted no negative values, and no NaN")
    return state


def learning_rate(step: int, config: OptimizerConfig, *, total_steps: int) -> float:
    """Return the rate of optimizer step `step` (from 0): linear warm-up, then the schedule.

    Example:
        >>> config = OptimizerConfig(lr=1.0, num_warmup_steps=4)
        >>> [learning_rate(step, config, total_steps=10) for step in range(5)]
        [0.25, 0.5, 0.75, 1.0, 1.0]
    """
    warmup = config.num_warmup_steps
    if step < warmup:
        return config.lr * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    if config.scheduler == "linear":
        return config.lr * (1.0 - progress)
    if config.scheduler == "cosine":
        return config.lr * (
            COSINE_END + (1 - COSINE_END) * 0.5 * (1 + math.cos(math.pi * progress))
        )
    return config.lr
