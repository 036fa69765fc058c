"""Settings with which a run that does not fit into its memory would.

Every combination of the values below is planned, the mildest first, so that what is proposed was
planned itself, and "nothing fits" was looked for in the whole grid. Measuring activations takes
most of the time: a combination that does not fit without them is not planned with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Protocol

import torch

from skyrl_fast.config import Config
from skyrl_fast.config.modes import EnginePlace
from skyrl_fast.train.memory.device_plan import MemoryPlan, Remedies
from skyrl_fast.train.memory.parts import dtype_of, planned_device, row_length
from skyrl_fast.train.model.loading import recomputes_activations

PROPOSED_RANK = 16  # rank of a proposed adapter
SHORTER = (2, 4, 8)  # divisors of the lengths of prompts and answers
SERVER = "http://HOST:8000"
ENGINE = "generator.inference_engine"
MAX_GPUS = 8  # to propose
PLACEMENT = "trainer.placement.policy_num_gpus_per_node"

Settings = dict[str, Any]


class PlanSettings(Protocol):
    """Plans the run with settings changed."""

    def __call__(self, settings: Settings, *, with_activations: bool = True) -> MemoryPlan | None:
        """Return the plan, without activations a lower bound; None: they exclude each other."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One thing to change, with its values from the mildest to the strongest.

    Args:
        is_last: changed only where all others together are not enough.
    """

    name: str
    values: Sequence[Settings]
    is_last: bool = False


def find_remedies(
    config: Config, axes: Sequence[Axis], plan: PlanSettings, *, is_on_gpus: bool
) -> Remedies:
    """Return what makes the run fit: settings alone, else together; by LoRA; with shorter rows.

    Args:
        axes: what may be changed, in the order in which it is preferred.
    """
    tried = tuple(axis.name for axis in axes)
    nearest = _Nearest()
    found = _alone([axis for axis in axes if not axis.is_last], plan)
    if not found:
        found = _together({}, axes, plan, nearest)
    by_lora: list[Settings] = []
    trains_all = is_on_gpus and not config.trains_adapter
    if trains_all:
        tried += ("LoRA",)
        adapter = {"trainer.policy.model.lora.rank": PROPOSED_RANK}
        by_lora = _together(adapter, axes, plan, nearest)
    shorter: list[Settings] = []
    if not found and not by_lora:
        tried += ("shorter rows",)
        shorter = _with_shorter_rows(config, axes, plan, nearest, by_lora=trains_all)
    if not (found or by_lora or shorter):
        nearest.settle(plan)
    return Remedies(
        tuple(map(join_overrides, found)),
        tuple(map(join_overrides, by_lora)),
        tuple(map(join_overrides, shorter)),
        tried,
        join_overrides(nearest.settings),
        nearest.lacking_bytes,
    )


def _alone(axes: Sequence[Axis], plan: PlanSettings) -> list[Settings]:
    """Return the mildest value of each axis that is enough alone."""
    found = []
    for axis in axes:
        enough = (values for values in axis.values if _fits(plan, values))
        first = next(enough, None)
        if first is not None:
            found.append(first)
    return found


class _Nearest:
    """The combination that lacks least."""

    def __init__(self) -> None:
        self.settings: Settings = {}
        self.lacking_bytes = 0
        self._bounded: list[tuple[int, Settings]] = []  # bytes that each lacks at least

    def see(self, settings: Settings, plan: MemoryPlan) -> None:
        lacking = plan.lacking_bytes
        if not self.lacking_bytes or lacking < self.lacking_bytes:
            self.settings = settings
            self.lacking_bytes = lacking

    def see_bound(self, settings: Settings, bound: MemoryPlan) -> None:
        self._bounded.append((bound.lacking_bytes, settings))

    def settle(self, plan: PlanSettings) -> None:
        """Plan those of which only a bound is known, as far as they may lack less."""
        for at_least, settings in sorted(self._bounded, key=lambda bounded: bounded[0]):
            if self.lacking_bytes and at_least >= self.lacking_bytes:
                return
            planned = plan(settings)
            if planned is not None:
                self.see(settings, planned)


def _together(
    base: Settings, axes: Sequence[Axis], plan: PlanSettings, nearest: _Nearest
) -> list[Settings]:
    """Return the combination that fits and changes least, added to `base`; [] if there is none."""

    def strength(indices: tuple[int, ...]) -> tuple[int, int, int, list[int]]:
        """Return whether a last resort is taken, how many axes change, how far, and which."""
        last = 0
        for axis, index in zip(axes, indices, strict=True):
            if axis.is_last:
                last += index
        num_changed = sum(index > 0 for index in indices)
        preferred_first = [-index for index in indices]
        return last, num_changed, sum(indices), preferred_first

    choices = [range(len(axis.values) + 1) for axis in axes]  # 0: unchanged
    for indices in sorted(product(*choices), key=strength):
        settings = dict(base)
        for axis, index in zip(axes, indices, strict=True):
            if index:
                settings |= axis.values[index - 1]
        bound = plan(settings, with_activations=False)
        if bound is None:
            continue
        if not bound.fits:
            nearest.see_bound(settings, bound)
            continue
        planned = plan(settings)
        assert planned is not None
        if planned.fits:
            return [settings]
        nearest.see(settings, planned)
    return []


def _with_shorter_rows(
    config: Config,
    axes: Sequence[Axis],
    plan: PlanSettings,
    nearest: _Nearest,
    *,
    by_lora: bool,
) -> list[Settings]:
    """Return what fits with the longest rows that fit."""
    generator = config.generator
    prompt = generator.max_input_length
    answer = generator.sampling_params.max_generate_length
    bases: list[Settings] = [{}]
    if by_lora:
        bases.append({"trainer.policy.model.lora.rank": PROPOSED_RANK})

    def shorter(divisor: int) -> list[Settings]:
        lengths = {
            "generator.max_input_length": max(1, prompt // divisor),
            "generator.sampling_params.max_generate_length": max(1, answer // divisor),
        }
        found = (_together(base | lengths, axes, plan, nearest) for base in bases)
        return next(filter(None, found), [])

    shortest = shorter(SHORTER[-1])  # each length takes seconds: none is tried where this fails
    if not shortest:
        return []
    longest = next(filter(None, map(shorter, SHORTER[:-1])), [])
    return longest or shortest


def _fits(plan: PlanSettings, settings: Settings) -> bool:
    bound = plan(settings, with_activations=False)
    if bound is None or not bound.fits:
        return False
    planned = plan(settings)
    return planned is not None and planned.fits


def join_overrides(settings: Settings) -> str:
    """Return the settings as words of a command line."""
    return " ".join(f"{key}={_value_text(value)}" for key, value in settings.items())


def _value_text(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    return str(value)


def with_settings(config: Config, settings: Settings) -> Config:
    """Return a copy with the settings of dotted names changed."""

    def change(section: Any, names: list[str], value: Any) -> Any:
        first, *rest = names
        if rest:
            inner = change(getattr(section, first), rest, value)
        else:
            inner = value
        return replace(section, **{first: inner})

    for key, value in settings.items():
        config = change(config, key.split("."), value)
    return config


def one_setting(key: str, values: Sequence[Any]) -> Iterator[Settings]:
    """Yield the settings of an axis that is one setting."""
    for value in values:
        yield {key: value}


def axes_of(config: Config, with_engine: bool, max_gpus: int) -> Iterator[Axis]:
    """Yield what may be changed for a run to fit, in the order in which it is preferred."""
    trainer = config.trainer
    engine = config.generator.inference_engine
    device = planned_device(config)
    on_gpus = device.type == "cuda"
    if not recomputes_activations(trainer, device):
        values = one_setting("trainer.gradient_checkpointing", [True])
        yield Axis("gradient checkpointing", [*values])
    can_sleep = on_gpus and with_engine and not config.max_staleness
    if can_sleep and engine.enable_sleep_mode is False:
        values = one_setting(f"{ENGINE}.enable_sleep_mode", [None])
        yield Axis("a sleeping engine", [*values])
    if with_engine and engine.gpu_memory_utilization is not None:
        values = one_setting(f"{ENGINE}.gpu_memory_utilization", [None])
        yield Axis("the engine's share", [*values])
    length = row_length(config)
    budget = trainer.max_tokens_per_microbatch
    # Shorter rows, which are tried last, take smaller micro-batches.
    least = max(1, length // max(SHORTER))
    smaller = []
    for n in range(1, budget.bit_length()):
        if budget >> n >= least:
            smaller.append(budget >> n)
    if smaller:
        values = one_setting("trainer.max_tokens_per_microbatch", smaller)
        yield Axis("smaller micro-batches", [*values])
    is_rounded = dtype_of(trainer.policy.dtype) != torch.float32
    if trainer.residual_dtype == "float32" and is_rounded:
        yield Axis("residual_dtype", [*one_setting("trainer.residual_dtype", ["auto"])])
    if on_gpus:
        yield from _axes_of_gpus(config, with_engine, max_gpus)
    if with_engine and config.engine_place is not EnginePlace.SERVERS:
        values = one_setting(f"{ENGINE}.external_server_urls", [[SERVER]])
        yield Axis("engines on servers", [*values], is_last=True)


def _axes_of_gpus(config: Config, with_engine: bool, max_gpus: int) -> Iterator[Axis]:
    trainer = config.trainer
    engine = config.generator.inference_engine
    if trainer.policy.optimizer_config.optimizer == "adamw":
        name = "trainer.policy.optimizer_config.optimizer"
        yield Axis("8-bit moments", [*one_setting(name, ["adamw_8bit"])])
    if trainer.policy.optimizer_config.offload_after_step is False:
        name = "trainer.policy.optimizer_config.offload_after_step"
        yield Axis("moments in main memory", [*one_setting(name, [True])])
    if with_engine and trainer.placement.offload_weights is False:
        values = one_setting("trainer.placement.offload_weights", [True])
        yield Axis("weights in main memory", [*values])
    powers = [n for n in (2, 4, MAX_GPUS) if n <= max_gpus]
    more = [n for n in powers if n > trainer.placement.ranks_per_node]
    if more:
        yield Axis("more GPUs", [*one_setting(PLACEMENT, more)])
    if with_engine and config.engine_place.is_here:
        sizes = [n for n in powers if n > engine.tensor_parallel_size]
        if sizes:
            values = one_setting(f"{ENGINE}.tensor_parallel_size", sizes)
            yield Axis("tensor parallelism of the engine", [*values])
    shared = trainer.policy.sequence_parallel_size
    if row_length(config) > trainer.max_tokens_per_microbatch * shared:
        nodes = trainer.placement.policy_num_nodes
        most = max_gpus * nodes
        sizes = [n for n in (2, 4, MAX_GPUS) if shared < n <= most]
        if sizes:
            values = one_setting("trainer.policy.sequence_parallel_size", sizes)
            yield Axis("sequence parallelism", [*values])
