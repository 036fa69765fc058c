"""What the command refuses before it loads anything."""

import json
from pathlib import Path

import pytest

from skyrl_fast.tinker import start


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts", "n_routed_experts"])
@pytest.mark.parametrize("is_nested", [False, True])
def test_a_mixture_of_experts_needs_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, is_nested: bool
) -> None:
    values = {key: 8}
    config = {"text_config": values} if is_nested else values
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(start, "on_cpu", lambda: False)
    start.check_engine(str(tmp_path))
    monkeypatch.setattr(start, "on_cpu", lambda: True)
    with pytest.raises(ValueError, match="expected a dense model, or a GPU, got a mixture"):
        start.check_engine(str(tmp_path))


def test_a_dense_model_needs_none(tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "on_cpu", lambda: True)
    start.check_engine(str(tiny_model_folder))
