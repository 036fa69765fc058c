"""The machine code of the extension."""

import platform
import re
import shutil
import subprocess

import pytest

from skyrl_fast import _C


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="not an x86 CPU")
@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump")
def test_no_function_uses_mmx_registers() -> None:
    """They are those of the x87 unit: code that leaves them in use makes others compute NaN."""
    assert _C.__file__ is not None
    command = ["objdump", "-d", "--no-show-raw-insn", _C.__file__]
    code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert len(code) > 100_000
    assert re.findall(r".*%mm[0-7].*", code) == []
