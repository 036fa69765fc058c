"""The faults that `make mutations` plants are of lines that exist."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_every_fault_replaces_a_text_that_occurs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    faults = importlib.import_module("mutation_check").FAULTS
    assert len(faults) > 80
    for fault in faults:
        text = (ROOT / fault.path).read_text(encoding="utf-8")
        assert text.count(fault.right) == 1, f"{fault.what}: {fault.path}"
        assert fault.wrong != fault.right
        for name in fault.tests:
            file, _, test = name.partition("::")
            path = ROOT / "python_tests" / file
            assert path.exists(), name
            if test:
                assert f"def {test}(" in path.read_text(encoding="utf-8"), name
