"""README.md: its Python code runs, its tables name what is there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import skyrl_fast
from skyrl_fast.config.loading import build_config

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_python_block_runs(number: int, tmp_path: Path) -> None:
    if "skyrl_gym" in blocks("python")[number]:
        pytest.importorskip("skyrl_gym")
    script = tmp_path / "block.py"
    script.write_text(blocks("python")[number], encoding="utf-8")
    command = [sys.executable, "-W", "error::SyntaxWarning", str(script)]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=240, env=_environment(), check=False
    )
    assert result.returncode == 0, result.stderr


def test_use_of_the_ops_is_fifteen_lines() -> None:
    code = [line for line in blocks("python")[0].splitlines() if line.strip()]
    assert len(code) <= 17, len(code)  # two of them are continued lines


def test_advantages_of_the_example_are_those_of_its_comment() -> None:
    names: dict[str, object] = {}
    exec(blocks("python")[0], names)
    rows = names["advantages"].sum(dim=1) / names["response_mask"].sum(dim=1)  # type: ignore
    assert rows.tolist() == pytest.approx([0.7071, 0.7071, -0.7071], abs=1e-4)
    assert float(names["logits"].grad.abs().sum()) > 0  # type: ignore


def test_yaml_blocks_are_valid_settings() -> None:
    assert blocks("yaml")
    for text in blocks("yaml"):
        build_config(yaml.safe_load(text))


def test_api_table_names_everything_that_is_public() -> None:
    table = README.split("<!-- api:begin -->")[1].split("<!-- api:end -->")[0]
    first_cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    names = set(re.findall(r"`(\w+)`", " ".join(first_cells)))
    assert names == set(skyrl_fast.__all__) - {"__version__"}


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", README):
        if not target.startswith("http"):
            assert (ROOT / target).exists(), target


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"(?:`|^)make ([a-z][a-z0-9-]*)", README, flags=re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}
