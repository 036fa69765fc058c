"""The notebooks run from top to bottom, as Python and in a Jupyter kernel."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

NOTEBOOKS = Path(__file__).parents[2] / "examples/notebooks"


def run_cells(name: str) -> dict[str, Any]:
    cells = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert all(not cell.get("outputs") for cell in cells)
    names: dict[str, Any] = {}
    for source in sources:
        if not source.startswith("%pip"):
            exec(compile(source, name, "exec"), names)
    return names


def test_ops() -> None:
    names = run_cells("ops")
    torch.testing.assert_close(  # the mean of 1 and 0 is 1/2, their sample deviation sqrt(1/2)
        names["advantages"][:, -1], torch.tensor([1, 1, -1]) * 0.5**0.5, atol=1e-5, rtol=0
    )
    assert names["logits"].grad.abs().sum() > 0


@pytest.mark.vllm
@pytest.mark.slow
def test_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the notebook changes it again
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        result = run_cells("train")["result"]
    assert result.after > result.before + 0.2
    assert "rewards: 0 0.75" in output.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
@pytest.mark.timeout(1200)  # training, and the start of an engine, on two busy cores
def test_in_a_kernel(path: Path, tmp_path: Path) -> None:
    """A kernel runs an event loop, and the cells in its main thread."""
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    if path.stem == "train":
        pytest.importorskip("vllm")
    notebook = nbformat.read(path, as_version=4)
    cells = [cell for cell in notebook.cells if not cell.source.startswith("%pip")]
    assert len(cells) == len(notebook.cells) - 1  # it is installed
    notebook.cells = cells
    client = nbclient.NotebookClient(
        notebook,
        timeout=None,
        kernel_name="python3",  # of this environment, whatever kernels a user has
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute()  # raises where a cell does
    executed = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert executed == list(range(1, len(executed) + 1))
