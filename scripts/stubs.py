"""Write the package's stubs: `python scripts/stubs.py`.

`__init__.pyi` lists the public names of a package, which it imports on first use; `_C.pyi` the
bindings of the built extension, which must hold the CUDA kernels.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
STUB = ROOT / "skyrl_fast" / "_C.pyi"
PACKAGES = ("skyrl_fast", "skyrl_fast.train")
PLAIN_TYPES = {
    "typing.SupportsInt | typing.SupportsIndex": "int",
    "typing.SupportsFloat | typing.SupportsIndex": "float",
}
BUILD_ATTRIBUTES = {"compiler": "str", "cuda_archs": "str | None"}


def main() -> None:
    """Write all stubs."""
    from skyrl_fast import _C

    for package in PACKAGES:
        stub_of(package).write_text(package_stub(package), encoding="utf-8")
    if _C.cuda_archs is None:
        sys.exit("stubs: expected an extension with CUDA kernels (SKYRL_FAST_CUDA=on), got none")
    STUB.write_text(generated_stub(), encoding="utf-8")


def stub_of(package: str) -> Path:
    """Return the path of a package's stub."""
    return ROOT / package.replace(".", "/") / "__init__.pyi"


def package_stub(package: str) -> str:
    """Return the stub of a package that imports its public names on first use."""
    module = importlib.import_module(package)
    names = sorted(module._HOMES.items(), key=lambda item: (item[1], item[0]))
    imports = [f"from {home} import {name} as {name}" for name, home in names]
    others = ["", "__version__: str"] if hasattr(module, "__version__") else []
    return "\n".join(["# Written by scripts/stubs.py.", *imports, *others, ""])


def generated_stub() -> str:
    """Return the stub of the extension that is installed, formatted."""
    quiet: dict[str, Any] = {"capture_output": True}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pybind11_stubgen", "skyrl_fast._C", "-o", folder]
        subprocess.run(command, check=True, cwd=ROOT, **quiet)
        path = Path(folder) / "skyrl_fast" / "_C.pyi"
        text = path.read_text(encoding="utf-8")
        for general, plain in PLAIN_TYPES.items():
            text = text.replace(general, plain)
        for name, annotation in BUILD_ATTRIBUTES.items():  # their values differ between builds
            text = re.sub(rf"(?m)^{name}: .*$", f"{name}: {annotation}", text)
        path.write_text(text, encoding="utf-8")
        ruff = [sys.executable, "-m", "ruff"]
        subprocess.run([*ruff, "check", "--select=I", "--fix", str(path)], check=True, **quiet)
        subprocess.run([*ruff, "format", "--line-length=100", str(path)], check=True, **quiet)
        return path.read_text(encoding="utf-8")


if __name__ == "__main__":
    main()
