"""Fixtures that every test module shares."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import settings

# Timings on shared machines vary; a slow example is no failure.
settings.register_profile("default", deadline=None, max_examples=60)
settings.register_profile("thorough", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip GPU tests, with the reason, where there is no GPU."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no NVIDIA GPU here")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(params=["native", "torch"])
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend that runs on the CPU."""
    return request.param
