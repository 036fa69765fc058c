"""safetensors files, of which a tensor at a time, or rows of one, are in memory.

The header of a file comes first and says where each tensor is: to write tensors that exist one
after another, their names, dtypes and shapes must be known before.

Design: docs/design/007-rollout-and-weight-sync.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, runtime_checkable

import torch

from skyrl_fast.rollout.engine.weights.buckets import TensorInfo, dtype_of
from skyrl_fast.rollout.engine.weights.receipt import dtype_name

HEADER_ALIGNMENT = 8  # bytes
LENGTH_BYTES = 8  # that hold the length of the header
MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
METADATA = "__metadata__"
# Names of dtypes in safetensors' headers.
DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
NAMES = {kind: name for name, kind in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a file.

    Args:
        kind: its dtype, by safetensors' name.
        first, end: its bytes in the file.
    """

    file: Path
    kind: str
    shape: Sequence[int]
    first: int
    end: int

    @property
    def dtype(self) -> torch.dtype:
        """dtype of torch; KeyError if it is none of `DTYPES`."""
        dtype = getattr(torch, NAMES[self.kind])
        assert isinstance(dtype, torch.dtype)
        return dtype

    def read(self, rows: slice | None = None) -> torch.Tensor:
        """Return rows of the tensor, from the first to before the last; None: all.

        Raises:
            ValueError: the file is shorter than its header says.
        """
        shape = list(self.shape)
        first = self.first
        if rows is not None:
            row = torch.Size(shape[1:])
            row_bytes = row.numel() * self.dtype.itemsize
            first += rows.start * row_bytes
            shape[0] = rows.stop - rows.start
        tensor = torch.empty(shape, dtype=self.dtype)
        left = _bytes_of(tensor)
        with self.file.open("rb", buffering=0) as stream:
            stream.seek(first)
            while left:
                size = stream.readinto(left)
                if not size:
                    raise ValueError(f"{self.file}: expected {len(left)} bytes more, got its end")
                left = left[size:]
        return tensor


def read_header(file: Path) -> tuple[dict[str, Any], int]:
    """Return the header of a file, and the number of its first byte after it.

    Raises:
        ValueError: it is no safetensors file.
    """
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(LENGTH_BYTES), "little")
        if size > MAX_HEADER_BYTES:
            raise ValueError(f"{file}: no safetensors file: its header has {size} bytes")
        try:
            header: dict[str, Any] = json.loads(stream.read(size))
        except ValueError as error:
            raise ValueError(f"{file}: no safetensors file: {error}") from error
    return header, LENGTH_BYTES + size


def list_tensors(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file by name.

    Raises:
        ValueError: it is no safetensors file, or shorter than it says.
    """
    header, begin = read_header(file)
    size = file.stat().st_size
    tensors = {}
    for name, entry in header.items():
        if name != METADATA:
            start, end = entry["data_offsets"]
            tensor = StoredTensor(
                file,
                kind=entry["dtype"],
                shape=entry["shape"],
                first=begin + start,
                end=begin + end,
            )
            if tensor.end > size:
                raise ValueError(f"{file}: expected {tensor.end} bytes, got {size}")
            tensors[name] = tensor
    return tensors


@runtime_checkable
class StreamedWeights(Protocol):
    """Weights that exist one after another while they are iterated."""

    def infos(self, dtype: torch.dtype | None) -> list[TensorInfo] | None:
        """Return what is going to be iterated; None: all of it exists anyway.

        Args:
            dtype: that floating-point tensors are cast to; None: as they are.
        """


def infos_of(
    weights: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None
) -> list[TensorInfo]:
    """Return name, dtype and shape of tensors, floating-point ones as if they were cast."""
    result: list[TensorInfo] = []
    for name, tensor in weights.items():
        if dtype is not None and tensor.is_floating_point():
            sent = dtype
        else:
            sent = tensor.dtype
        result.append([name, dtype_name(sent), list(tensor.shape)])
    return result


def num_bytes(infos: Iterable[TensorInfo]) -> int:
    return sum(map(_size_of, infos))


def write_tensors(
    file: BinaryIO,
    infos: Sequence[TensorInfo],
    tensors: Iterable[tuple[str, torch.Tensor]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write tensors, in main memory, to a file while they are iterated.

    Args:
        infos: those of all of them.
        metadata: of the file; None: it has none.

    Raises:
        ValueError: a tensor is another one than the infos say.
    """
    header: dict[str, Any] = {}
    if metadata:
        header[METADATA] = dict(metadata)
    left = {}
    end = 0
    # Wide ones first: each begins at a multiple of its width, as torch's views need it.
    for info in sorted(infos, key=_width_of, reverse=True):
        name, dtype, shape = info
        start = end
        end += _size_of(info)
        header[name] = {
            "dtype": DTYPES[dtype],
            "shape": shape,
            "data_offsets": [start, end],
        }
        left[name] = (info, start)
    text = json.dumps(header).encode()
    padding = -len(text) % HEADER_ALIGNMENT
    text += b" " * padding
    file.write(len(text).to_bytes(LENGTH_BYTES, "little"))
    file.write(text)
    first = LENGTH_BYTES + len(text)
    for name, tensor in tensors:
        got = [name, dtype_name(tensor.dtype), list(tensor.shape)]
        if name not in left:
            raise ValueError(f"weights: expected one of {', '.join(left)}, got {got}")
        info, start = left.pop(name)
        if list(info) != got:
            raise ValueError(f"weights: expected {info}, got {got}")
        file.seek(first + start)
        file.write(_bytes_of(tensor.contiguous()))
    if left:
        raise ValueError(f"weights: expected {', '.join(left)}, too, got none of them")


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.view(-1)
    return flat.view(torch.uint8).numpy().data


def _width_of(info: TensorInfo) -> int:
    return dtype_of(info).itemsize


def _size_of(info: TensorInfo) -> int:
    shape = torch.Size(info[2])
    return shape.numel() * _width_of(info)
