"""README.md and the docs pages: their code runs, their tables match the package."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import skyrl_fast
from scripts import settings_page
from skyrl_fast.config.loading import build_config

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "docs/training.md", "docs/custom_algorithms.md", "docs/api.md")
README = (ROOT / "README.md").read_text(encoding="utf-8")

# Blocks that train: the call is checked against the signature and the settings, but not run.
CHECKED_TRAIN = """
import inspect
from unittest.mock import MagicMock
import skyrl_fast
signature = inspect.signature(skyrl_fast.train)
skyrl_fast.train = lambda *args, **kwargs: signature.bind(*args, **kwargs) and MagicMock()
"""


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


PYTHON = [(page, n) for page in PAGES for n in range(len(blocks(page, "python")))]


@pytest.mark.parametrize(("page", "number"), PYTHON)
def test_python_block_runs(page: str, number: int, tmp_path: Path) -> None:
    code = blocks(page, "python")[number]
    if "skyrl_gym" in code:
        pytest.importorskip("skyrl_gym")
    script = tmp_path / "block.py"
    script.write_text(CHECKED_TRAIN + code if "skyrl_fast.train(" in code else code, "utf-8")
    command = [sys.executable, "-W", "error::SyntaxWarning", str(script)]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=240, env=_environment(), check=False
    )
    assert result.returncode == 0, result.stderr


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= 180


def test_agent_example_is_ten_lines_and_ops_example_fifteen() -> None:
    agent, ops = (
        [line for line in code.splitlines() if line.strip()]
        for code in blocks("README.md", "python")
    )
    assert len(agent) <= 10, len(agent)
    assert len(ops) <= 17, len(ops)  # two of them are continued lines


def test_ops_example_gives_the_advantages_of_its_comment() -> None:
    names: dict[str, object] = {}
    exec(blocks("README.md", "python")[1], names)
    rows = names["advantages"].sum(dim=1) / names["response_mask"].sum(dim=1)  # type: ignore
    assert rows.tolist() == pytest.approx([0.7071, 0.7071, -0.7071], abs=1e-4)
    assert float(names["logits"].grad.abs().sum()) > 0  # type: ignore


def test_yaml_blocks_are_valid_settings() -> None:
    blocks_found = [text for page in PAGES for text in blocks(page, "yaml")]
    assert blocks_found
    for text in blocks_found:
        build_config(yaml.safe_load(text))


def test_settings_pages_are_up_to_date() -> None:
    for path, text in settings_page.pages().items():
        assert path.read_text(encoding="utf-8") == text, "run python -m scripts.settings_page"


def test_api_table_lists_every_public_name() -> None:
    page = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    table = page.split("<!-- api:begin -->")[1].split("<!-- api:end -->")[0]
    first_cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    names = set(re.findall(r"`(\w+)`", " ".join(first_cells)))
    assert names == set(skyrl_fast.__all__) - {"__version__"}


def test_readme_benchmark_table_matches_the_benchmarks_page() -> None:
    page = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    tables = [text.split("<!-- bench:begin -->")[1].split("<!-- bench:end -->")[0].strip()
              for text in (README, page)]  # fmt: skip
    (headlines, machine), (summary, same_machine) = (t.split("\n\n") for t in tables)
    assert machine == same_machine
    cells = {row.split(" | ")[0]: row.strip("|").split("|") for row in summary.splitlines()}
    for row in headlines.splitlines()[2:]:
        work, medium, large = (cell.strip() for cell in row.strip("|").split("|"))
        assert [medium, large] == [cells[f"| {work}"][column].strip() for column in (2, 4)]


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}
