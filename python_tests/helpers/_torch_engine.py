"""A fixture: runs sample with transformers in this process instead of vLLM."""

import pytest

from bench.gpu.torch_engine import TorchEngine


@pytest.fixture
def torch_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make runs use `TorchEngine` instead of vLLM."""
    monkeypatch.setattr("skyrl_fast.rollout.engine.from_settings.VllmEngine", TorchEngine)
