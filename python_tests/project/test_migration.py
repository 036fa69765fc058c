"""MIGRATION.md: every setting that it names on our side exists."""

import re
from dataclasses import is_dataclass
from pathlib import Path

import pytest

from skyrl_fast.config import Config

PAGE = Path(__file__).resolve().parents[2] / "MIGRATION.md"


def ours() -> list[str]:
    """Return the dotted settings in the last column of the tables."""
    rows = re.findall(r"^\| .* \| (.*) \|$", PAGE.read_text("utf-8"), flags=re.MULTILINE)
    return sorted({name for cell in rows for name in re.findall(r"`([a-z_0-9]+\.[\w.]+)`", cell)})


def test_tables_are_read() -> None:
    assert len(ours()) > 40


@pytest.mark.parametrize("name", ours())
def test_setting_exists(name: str) -> None:
    value: object = Config()
    for part in name.split("."):
        assert hasattr(value, part), name
        value = getattr(value, part)
    assert not is_dataclass(value), f"{name} is a section"
