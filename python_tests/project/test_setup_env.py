"""The script that creates the virtual environment."""

from __future__ import annotations

import sys
import venv
from pathlib import Path

import pytest

from scripts import setup_env


def test_incomplete_environment_is_recreated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "environment"
    made: list[tuple[str, ...]] = []
    monkeypatch.setattr(sys, "argv", ["setup_env.py", "--venv", str(folder)])
    monkeypatch.setattr(setup_env, "run", lambda *command: made.append(command))
    monkeypatch.setattr(setup_env, "install_dependencies", lambda python, gpu: None)
    monkeypatch.setattr(setup_env, "install_package", lambda python: None)
    venv.create(folder, with_pip=False)  # as left by an interruption before pip is installed
    setup_env.main()
    assert made == [(sys.executable, "-m", "venv", str(folder))]
    (folder / "bin/pip").touch()
    setup_env.main()
    assert len(made) == 1
