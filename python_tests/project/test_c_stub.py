"""The stubs match the package and the built extension."""

import ast

import pytest

from scripts import stubs
from skyrl_fast import _C


def signatures(stub: str) -> dict[str, str]:
    """Return the code of each top-level definition and attribute, keyed by name."""
    found: dict[str, str] = {}
    for node in ast.parse(stub).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found[node.name] = ast.unparse(node)
        elif isinstance(node, ast.AnnAssign) and ast.unparse(node.target) != "__all__":
            found[ast.unparse(node.target)] = ast.unparse(node)
    return found


def test_stub_has_every_signature_of_the_extension() -> None:
    pytest.importorskip("pybind11_stubgen")
    written = signatures(stubs.STUB.read_text(encoding="utf-8"))
    built = signatures(stubs.generated_stub())
    assert {name: written.get(name) for name in built} == built, "run: python scripts/stubs.py"
    if _C.cuda_archs is not None:
        assert set(written) == set(built), "run: python scripts/stubs.py"


@pytest.mark.parametrize("package", stubs.PACKAGES)
def test_stub_of_a_package_has_its_public_names(package: str) -> None:
    written = stubs.stub_of(package).read_text(encoding="utf-8")
    assert written == stubs.package_stub(package), "run: python scripts/stubs.py"


def test_every_argument_has_a_name() -> None:
    assert "arg0" not in stubs.STUB.read_text(encoding="utf-8")


def test_wrong_call_error_lists_the_expected_arguments() -> None:
    with pytest.raises(TypeError, match="cells: object, divisors: object, out: object"):
        _C.divide_rows(1)  # type: ignore[call-arg]
