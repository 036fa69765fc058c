"""The Triton kernels: in Triton's interpreter here, compiled where there is a GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from skyrl_fast import selected_logprob

CASES = Path(__file__).parent / "triton_cases.py"
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


def run_cases(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES)]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, cwd=CASES.parent.parent
    )


@needs_triton
def test_in_the_interpreter() -> None:
    """In a process of its own: Triton decides at its import how kernels run."""
    done = run_cases(os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout


@needs_triton
@pytest.mark.gpu
def test_compiled() -> None:
    done = run_cases({k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"})
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_on_the_cpu_triton_is_refused_unless_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="backend 'triton' cannot run on cpu"):
        selected_logprob(torch.zeros(1, 4), torch.tensor([0]), backend="triton")
