"""AdamW with warm-up, schedule and gradient clipping; its state is saved by parameter name.

Moments are float32, or torchao's 8-bit blocks of 256 values: one code per value, one scale per
block.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file

from skyrl_fast.config import OptimizerConfig
from skyrl_fast.rollout.engine.weights.tensor_file import (
    METADATA,
    StoredTensor,
    list_tensors,
    read_header,
)
from skyrl_fast.train.checkpoint.local import damage_error
from skyrl_fast.train.checkpoint.optimizer_shards import (
    SHARDED,
    check_moments,
    check_step_count,
    load_shards,
    queue_shards,
)
from skyrl_fast.train.model.offload import OffloadedStorages
from skyrl_fast.train.parallel.ranks import Ranks, run_on_all_ranks
from skyrl_fast.train.parallel.sharding import (
    full_norm,
    like_shard,
    local_tensor,
    shard_rows,
)

logger = logging.getLogger(__name__)

MOMENTS = ("exp_avg", "exp_avg_sq", "step")  # AdamW's state of a parameter
ANOTHER = "of another model or optimizer?"
FILE, SHARDS = "optimizer.safetensors", "optimizer"  # names for one rank, and for several
INSTALL_HINT = (
    "optimizer_config.optimizer=adamw_8bit: expected a torchao for torch "
    f"{torch.__version__}: pip install 'skyrl-fast[torchao]'"
)


class Trainable(Protocol):
    """A `Policy` or a `Critic`."""

    @property
    def ranks(self) -> Ranks: ...

    def trained_parameters(self) -> list[tuple[str, torch.Tensor]]:
        """Return the parameters that optimizer steps change, by name."""
        ...


@dataclass(frozen=True, slots=True)
class StepNumbers:
    """AdamW's numbers of one step, where each step has its own.

    Args:
        lr: learning rate; no warm-up and no schedule apply.
        weight_decay: of matrices.
        max_grad_norm: maximum norm of the gradient; 0: no clipping.
    """

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    max_grad_norm: float


class Optimizer:
    """AdamW with warm-up and clipping over a model's parameters; state is saved by name.

    Args:
        policy: policy or critic to optimize; parameters with one dimension get no weight decay.
        total_steps: optimizer steps of the full run, for decaying schedules.
    """

    def __init__(self, policy: Trainable, config: OptimizerConfig, *, total_steps: int) -> None:
        self.step_count = 0
        self.ranks = policy.ranks
        self.ranks.register(self)
        self._config = config
        self._is_8bit = config.optimizer == "adamw_8bit"
        self._total_steps = total_steps
        self.named_parameters = policy.trained_parameters()
        decayed = [p for _, p in self.named_parameters if p.dim() > 1]
        plain = [p for _, p in self.named_parameters if p.dim() <= 1]
        groups = [
            {"params": decayed, "weight_decay": config.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        self.adamw = _make_adamw([group for group in groups if group["params"]], config)
        self._offloaded: OffloadedStorages | None = None  # moments, once they have left
        self._num_offloaded = 0  # parameters that they are of

    @run_on_all_ranks
    def zero_grad(self) -> None:
        self.adamw.zero_grad(set_to_none=True)

    @run_on_all_ranks
    def step(self, numbers: StepNumbers | None = None) -> dict[str, float]:
        """Clip, update the weights, and return gradient norm and learning rate.

        Args:
            numbers: of this step and those after it, in place of the settings' and the schedule's.
        """
        parameters = []
        for _, p in self.named_parameters:
            if p.grad is not None:
                parameters.append(p)
        if numbers is None:
            limit = self._config.max_grad_norm or math.inf
        else:
            limit = numbers.max_grad_norm or math.inf
        norm = 0.0
        if parameters:
            norm = float(full_norm(torch.nn.utils.clip_grad_norm_(parameters, limit)))
        if numbers is None:
            rate = learning_rate(self.step_count, self._config, total_steps=self._total_steps)
        else:
            rate = numbers.lr
            self._set_numbers(numbers)
        if math.isfinite(norm):
            for group in self.adamw.param_groups:
                if self._is_8bit:  # a tensor, or the compiled step would be of one rate
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate
            self._load_moments()
            self.adamw.step()
            self._offload_moments()
        else:
            # It counts as a step: the schedule has as many as the run has mini-batches.
            logger.warning("optimizer step %d skipped: gradient norm %s", self.step_count, norm)
        self.step_count += 1
        # Freed, not only cleared: an engine that slept meanwhile wakes up into this memory.
        self.adamw.zero_grad(set_to_none=True)
        skipped = float(not math.isfinite(norm))
        metrics = {
            "policy/grad_norm": norm,
            "policy/lr": rate,
            "policy/nonfinite_steps_skipped": skipped,
        }
        if self._offloaded is not None:
            metrics["policy/offloaded_bytes"] = float(self._offloaded.num_bytes)
        return metrics

    def _offload_moments(self) -> None:
        """Move the moments to main memory until the next step, if the settings say so."""
        if not self._config.offload_after_step:
            return
        states = dict(self._states())
        if self._offloaded is None or len(states) != self._num_offloaded:
            moments = []
            for state in states.values():
                for key in SHARDED:
                    moments += [value for _, value in _local_parts(key, state[key])]
            self._offloaded = OffloadedStorages(moments)
            self._num_offloaded = len(states)
        self._offloaded.offload()

    def _load_moments(self) -> None:
        if self._offloaded is not None:
            self._offloaded.load()

    def _on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a local moment in main memory, wherever it is."""
        if self._offloaded is None:
            return tensor.to("cpu", copy=True)
        return self._offloaded.on_host(tensor)

    def _set_numbers(self, numbers: StepNumbers) -> None:
        assert not self._is_8bit
        for group in self.adamw.param_groups:
            group["betas"] = numbers.betas
            group["eps"] = numbers.eps
            # Parameters with one dimension get none, as at the start.
            is_matrix = group["params"][0].dim() > 1
            group["weight_decay"] = numbers.weight_decay if is_matrix else 0.0

    def save(self, folder: Path) -> None:
        """Write the moments of every parameter by name (safetensors), as `optimizer.safetensors`.

        Several ranks queue their shards in `ranks.files`, in the folder `optimizer`.
        """
        if self.ranks.size > 1:
            (folder / SHARDS).mkdir()
            self._queue_shards(folder / SHARDS)
            return
        tensors = {}
        for name, value in self._local_tensors():
            tensors[name] = self._on_host(value).contiguous()
        save_file(tensors, str(folder / FILE), metadata=self._metadata())

    @run_on_all_ranks
    def load(self, folder: Path) -> None:
        """Load what `save` wrote, with any number of ranks; 8-bit moments with the same number.

        Raises:
            CheckpointError: the file is damaged, or has values that AdamW cannot have written.
            ValueError: a parameter is missing or has another shape, or the state is of another
                optimizer.
        """
        self._load_states(folder)
        self._offload_moments()

    def _load_states(self, folder: Path) -> None:
        if self._is_8bit:
            self._load_8bit(folder)
            return
        if any((folder / SHARDS).glob("rank-*")):
            raise ValueError(f"{folder}: expected moments of adamw, got those of adamw_8bit")
        if (folder / SHARDS).is_dir():
            self.step_count, states = load_shards(folder / SHARDS, self.named_parameters)
            self.adamw.state.update(
                {dict(self.named_parameters)[name]: s for name, s in states.items()}
            )
            return
        path = folder / FILE
        tensors, step_count, unmoved = _read(path)
        for name, parameter in ((n, p) for n, p in self.named_parameters if n not in unmoved):
            if f"{name}.exp_avg" not in tensors:
                raise ValueError(f"{path}: no optimizer state for {name}: {ANOTHER}")
            if list(tensors[f"{name}.exp_avg"].shape) != list(parameter.shape):
                raise ValueError(f"{path}: optimizer state of {name} has another shape")
            self.adamw.state[parameter] = _read_state(name, tensors, parameter, path)
        self.step_count = step_count

    @run_on_all_ranks
    def _queue_shards(self, folder: Path) -> None:
        if not self._is_8bit:
            queue_shards(
                folder,
                self.step_count,
                dict(self._states()),
                self._unmoved(),
                self.ranks,
                on_host=self._on_host,
            )
            return
        # Blocks of one number of ranks are none of another's, so that each rank has a file.
        tensors = {}
        for name, value in self._local_tensors():
            tensors[name] = self._on_host(value)
        path = self._local_file(folder.parent)
        metadata = self._metadata()

        def write() -> list[Path]:
            save_file(tensors, str(path), metadata=metadata)
            return [path]

        self.ranks.files.queue(write)

    def _load_8bit(self, folder: Path) -> None:
        path = self._local_file(folder)
        if not path.is_file():
            raise ValueError(
                f"{path}: expected the moments of adamw_8bit, which are loaded with as many ranks "
                f"as wrote them, got none for {self.ranks.size}"
            )
        tensors, step_count, unmoved = _read(path)
        for name, parameter in ((n, p) for n, p in self.named_parameters if n not in unmoved):
            # Only torchao knows which parameters have moments in 8 bits.
            state = {
                "exp_avg": self.adamw._new_buffer(parameter.detach(), True),
                "exp_avg_sq": self.adamw._new_buffer(parameter.detach(), False),
                "step": torch.tensor(0.0),
            }
            for part, own in (part for key in MOMENTS for part in _local_parts(key, state[key])):
                if f"{name}.{part}" not in tensors:
                    raise ValueError(f"{path}: no {part} for {name}: {ANOTHER}")
                saved = tensors[f"{name}.{part}"].read()
                if saved.shape != own.shape or saved.dtype != own.dtype:
                    raise ValueError(f"{path}: {part} of {name} has another shape or dtype")
                own.copy_(saved)
            scales = {key: _local_parts(key, value)[-1][1] for key, value in state.items()}
            check_moments(name, scales, path)
            self.adamw.state[parameter] = state
        self.step_count = step_count

    def _local_file(self, folder: Path) -> Path:
        rank = self.ranks.rank
        size = self.ranks.size
        if size == 1:
            return folder / FILE
        return folder / SHARDS / f"rank-{rank + 1:05d}-of-{size:05d}.safetensors"

    def _local_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, state in self._states():
            for key in MOMENTS:
                for part, value in _local_parts(key, state[key]):
                    yield f"{name}.{part}", value

    def _metadata(self) -> dict[str, str]:
        metadata = {"step_count": str(self.step_count)}
        if unmoved := self._unmoved():
            # usually absent: the order of several metadata entries varies between files
            metadata["without_gradient"] = json.dumps(unmoved)
        return metadata

    def _states(self) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
        """Yield AdamW's state of each parameter that has had a gradient."""
        for name, parameter in self.named_parameters:
            if parameter in self.adamw.state:
                yield name, self.adamw.state[parameter]

    def _unmoved(self) -> list[str]:
        result: list[str] = []
        for name, parameter in self.named_parameters:
            if parameter not in self.adamw.state:
                result.append(name)
        return result


def _make_adamw(groups: list[dict[str, Any]], config: OptimizerConfig) -> Any:
    beta1, beta2 = config.adam_betas
    if config.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=config.lr, betas=(beta1, beta2), fused=True)
    try:
        from torchao.optim import AdamW8bit
    except (AttributeError, ImportError) as error:  # its versions are for versions of torch
        raise ValueError(INSTALL_HINT) from error
    return AdamW8bit(groups, lr=config.lr, betas=(beta1, beta2))


def _local_parts(key: str, moment: Any) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors of this rank's part of a moment, by name: one, or codes and scales."""
    with torch.no_grad():
        local = local_tensor(moment)
    codes = getattr(local, "codes", None)
    if codes is None:
        return [(key, local)]
    # As they are: by way of float32 a resumed run would not have the same bits.
    return [(f"{key}.codes", codes), (f"{key}.scale", local.scale)]  # type: ignore[attr-defined]


def _read(path: Path) -> tuple[dict[str, StoredTensor], int, set[str]]:
    """Return the stored tensors by name, the step count, and the parameters without state."""
    try:
        tensors = list_tensors(path)
        metadata = read_header(path)[0][METADATA]
        step_count = int(metadata["step_count"])
        unmoved = set(json.loads(metadata.get("without_gradient", "[]")))
    except (
        AttributeError,
        LookupError,
        OSError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        raise damage_error(path, f"no optimizer state: {type(error).__name__}: {error}") from error
    check_step_count(step_count, path)
    return tensors, step_count, unmoved


def _read_state(
    name: str, tensors: dict[str, StoredTensor], parameter: torch.Tensor, path: Path
) -> dict[str, torch.Tensor]:
    """Return AdamW's state of a parameter, of which a rank reads the rows of its shard.

    Raises:
        CheckpointError: AdamW cannot have written it.
    """
    missing = [key for key in MOMENTS if f"{name}.{key}" not in tensors]
    if missing:
        raise damage_error(path, f"{name}: no {', '.join(missing)}")
    stored = {key: tensors[f"{name}.{key}"] for key in MOMENTS}
    same = stored["exp_avg_sq"].shape == stored["exp_avg"].shape
    if not same or torch.Size(stored["step"].shape).numel() != 1:
        raise damage_error(path, f"{name}: shapes of different parameters")
    rows = shard_rows(parameter)
    moments = {}
    for key in SHARDED:
        moments[key] = like_shard(stored[key].read(rows).to(parameter.device), parameter)
    state = {**moments, "step": stored["step"].read().to(parameter.device)}
    check_moments(name, state, path)
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
        return config.lr * 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr
