"""Write skyrl_fast/_C.pyi from the built extension: `python scripts/stubs.py`.

The extension must hold the CUDA kernels, so that their bindings are in the stub.
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
PLAIN_TYPES = {
    "typing.SupportsInt | typing.SupportsIndex": "int",
    "typing.SupportsFloat | typing.SupportsIndex": "float",
}
BUILD_ATTRIBUTES = {"compiler": "str", "cuda_archs": "str | None"}


def main() -> None:
    """Write the stub."""
    from skyrl_fast import _C

    if _C.cuda_archs is None:
        sys.exit("stubs: wanted an extension with CUDA kernels (SKYRL_FAST_CUDA=on), got none")
    STUB.write_text(generated_stub(), encoding="utf-8")


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
