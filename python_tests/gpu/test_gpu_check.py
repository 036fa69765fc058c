"""The GPU check script with fake programs: what it runs, and what it prints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from scripts import gpu_check

PYTHON = """#!/bin/sh
echo "python $@"
echo "3 passed"
"""
SANITIZER = """#!/bin/sh
echo "no caching: $PYTORCH_NO_CUDA_MEMORY_CACHING"
echo "$@"
echo "ERROR SUMMARY"
test "$2" != racecheck || exit 9
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fake Python and sanitizer that print their arguments; the sanitizer reports a race."""
    for name, text in (("venv/bin/python", PYTHON), ("bin/compute-sanitizer", SANITIZER)):
        program = tmp_path / name
        program.parent.mkdir(parents=True)
        program.write_text(text)
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setattr(gpu_check, "why_not", lambda python: None)
    monkeypatch.setattr(gpu_check, "BUILD", gpu_check.ROOT / "build" / "gpu_check" / tmp_path.name)
    return tmp_path


def check(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", ["gpu_check.py", *arguments])
    gpu_check.main()


def test_every_tool_runs_and_findings_set_the_exit_status(
    programs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        check(monkeypatch, "--venv", str(programs / "venv"), "-k", "advantage")
    assert stop.value.code == 1
    said = capsys.readouterr().out
    assert "pytest -m gpu: passed" in said and "memcheck: passed" in said
    assert "initcheck: passed" in said and "racecheck: failed with status 9" in said
    logs = {path.stem: path.read_text() for path in gpu_check.BUILD.glob("*.log")}
    assert logs.keys() == {"pytest", *gpu_check.TOOLS}
    assert "-m pytest -q -m gpu -k advantage\n" in logs["pytest"]
    for tool in gpu_check.TOOLS:
        assert "no caching: 1" in logs[tool] and f"--tool {tool} --error-exitcode 9" in logs[tool]
        assert "(advantage) and not graph" in logs[tool]
        assert "python_tests/gpu/test_logprob_cuda.py" in logs[tool]


def test_exit_status_is_zero_if_all_passed(
    programs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check(monkeypatch, "--venv", str(programs / "venv"), "--tools", "memcheck")
    assert "memcheck: passed" in capsys.readouterr().out


def test_missing_sanitizer_is_a_failure(
    programs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    if gpu_check.shutil.which("compute-sanitizer"):
        pytest.skip("it is there")
    with pytest.raises(SystemExit):
        check(monkeypatch, "--venv", str(programs / "venv"))
    assert "compute-sanitizer: is not on PATH" in capsys.readouterr().out


def test_check_without_a_gpu_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit, match="there is no GPU here; nothing was checked"):
        check(monkeypatch)
