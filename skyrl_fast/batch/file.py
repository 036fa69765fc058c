"""Batch files: one safetensors file, with non-tensor fields as JSON in its header."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

FORMAT = "skyrl_fast.StepBatch/1"


def write_batch_file(
    path: str | os.PathLike[str], tensors: dict[str, torch.Tensor], others: dict[str, Any]
) -> None:
    """Write the file atomically: to a temporary file next to `path`, which is then renamed."""
    from safetensors.torch import save_file  # only these two functions need the package

    target = Path(path)
    name = f"{target.name}.{os.getpid()}.partial"
    partial = target.with_name(name)
    try:
        columns: dict[str, torch.Tensor] = {}
        written: set[int] = set()  # safetensors refuses memory that two columns share
        for name, tensor in tensors.items():
            column = tensor.detach().cpu().contiguous()
            if column.data_ptr() in written:
                columns[name] = column.clone()
            else:
                columns[name] = column
            written.add(column.data_ptr())
        header = {"format": FORMAT, "facts": json.dumps(others)}
        save_file(columns, partial, metadata=header)
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def read_batch_file(path: str | os.PathLike[str], names: set[str]) -> dict[str, Any]:
    """Return all tensors and other values by name."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            given = header.get("format")
            if given != FORMAT:
                raise ValueError(f"StepBatch.load: {path}: expected format {FORMAT}, got {given!r}")
            found: dict[str, Any] = {}
            for name in file.keys():  # noqa: SIM118
                found[name] = file.get_tensor(name)
    except SafetensorError as error:
        raise ValueError(f"StepBatch.load: {path} is not a safetensors file: {error}") from error
    others = json.loads(header["facts"])
    for name, value in others.items():
        if isinstance(value, list):
            found[name] = tuple(value)
        else:
            found[name] = value
    unknown = found.keys() - names
    if unknown:
        raise ValueError(
            f"StepBatch.load: {path}: expected columns of a batch, got {sorted(unknown)}"
        )
    return found
