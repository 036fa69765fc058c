"""Sizes of models and memory of their passes, each measured once for many plans."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from skyrl_fast.config import Config
from skyrl_fast.config.settings import LoraConfig
from skyrl_fast.train.memory.activations import (
    ActivationMemory,
    FakeBackbones,
    ModelSize,
    PassMemory,
    activation_memory,
    load_model_config,
    model_size,
)


def trained_adapter(config: Config) -> LoraConfig | None:
    if config.trains_adapter:
        return config.trainer.policy.model.lora
    return None


@dataclass(slots=True)
class Measurements:
    """Sizes and activations by model, each measured once; plans of one process may share them.

    Models are told apart by their path, and their config.json is read once.
    """

    _configs: dict[str, Any] = field(default_factory=dict)
    _sizes: dict[tuple[str, str], ModelSize] = field(default_factory=dict)
    _activations: dict[tuple[Any, ...], ActivationMemory] = field(default_factory=dict)
    _backbones: FakeBackbones = field(default_factory=FakeBackbones)

    def config(self, path: str) -> Any:
        if path not in self._configs:
            self._configs[path] = load_model_config(path)
        return self._configs[path]

    def size(self, path: str, lora: LoraConfig | None = None) -> ModelSize:
        key = path, repr(lora)
        if key not in self._sizes:
            self._sizes[key] = model_size(self.config(path), lora)
        return self._sizes[key]

    def policy_size(self, config: Config) -> ModelSize:
        path = str(config.trainer.policy.model.path)
        return self.size(path, trained_adapter(config))

    def activations(self, path: str, length: int, **options: Any) -> ActivationMemory:
        key = (path, length, *map(repr, options.values()))
        if key not in self._activations:
            self._activations[key] = activation_memory(
                self.config(path), length, backbones=self._backbones, **options
            )
        return self._activations[key]

    def without_activations(self) -> Measurements:
        """Return the same sizes, with activations of 0 bytes."""
        return _SizesOnly(self._configs, self._sizes)


class _SizesOnly(Measurements):
    def activations(self, path: str, length: int, **options: Any) -> ActivationMemory:
        return ActivationMemory(PassMemory(0, 0), PassMemory(0, 0))
