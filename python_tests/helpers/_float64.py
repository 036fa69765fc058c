"""A model of transformers that computes in float64 throughout."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from scripts.models_page import WithFloat64


@contextlib.contextmanager
def float64_throughout(model: Any, *, tensors: bool = True) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in {type(part).__module__ for part in model.modules()}:
            if name.startswith("transformers."):
                patch.setattr(sys.modules[name], "torch", WithFloat64())
        if tensors:
            patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield
