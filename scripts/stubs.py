"""Write the package's stubs: `python scripts/stubs.py`.

`__init__.pyi` lists the public names, which the package imports on first use; `_C.pyi` the bindings
of the built extension, which must hold the CUDA kernels.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
STUB = ROOT / "skyrl_fast" / "_C.pyi"
PACKAGE_STUB = ROOT / "skyrl_fast" / "__init__.pyi"
PLAIN_TYPES = {
    "typing.SupportsInt | typing.SupportsIndex": "int",
    "typing.SupportsFloat | typing.SupportsIndex": "float",
}
BUILD_ATTRIBUTES = {"compiler": "str", "cuda_archs": "str | None"}


def main() -> None:
    """Write both stubs."""
    from skyrl_fast import _C

    PACKAGE_STUB.write_text(package_stub(), encoding="utf-8")
    if _C.cuda_archs is None:
        sys.exit("stubs: expected an extension with CUDA kernels (SKYRL_FAST_CUDA=on), got none")
    STUB.write_text(generated_stub(), encoding="utf-8")


def package_stub() -> str:
    """Return the stub of `skyrl_fast` itself."""
    import skyrl_fast

    names = sorted(skyrl_fast._HOMES.items(), key=lambda item: (item[1], item[0]))
    imports = [f"from {module} import {name} as {name}" for name, module in names]
    return "\n".join(["# Written by scripts/stubs.py.", *imports, "", "__version__: str", ""])


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
