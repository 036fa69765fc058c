"""A digest of a model folder's weights, by which an adapter knows the base that it was trained on.

It covers the name, dtype and shape of every tensor, and a few bytes of up to 1,024 of them:
training changes nearly all numbers of a model, so the bytes of another base differ, and at most
192 KiB are read besides the headers. It is the same for other files with the same tensors. A hub's
revision would do for models of the hub alone, and copies of a model have the same weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from skyrl_fast.config.model_folder import model_folder

NUM_TENSORS = 1024  # whose bytes are read
SAMPLE_BYTES = 64  # at the start, in the middle and at the end of a tensor
HEADER_BYTES = 8  # that hold the length of a safetensors file's header
METADATA = "__metadata__"
MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit


def base_weights_digest(path: str) -> str:
    """Return the digest of a model's safetensors files, "" if there are none.

    Args:
        path: folder of the model, or its name on the hub, in whose cache it is.

    Raises:
        ValueError: a file is no safetensors file.
    """
    try:
        folder = model_folder(path)
    except ValueError:
        return ""
    tensors: dict[str, tuple[Path, str, int, int]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, kind, start, end in _tensors_of(file):
            tensors[name] = (file, kind, start, end)
    if not tensors:
        return ""
    digest = hashlib.sha256()
    every = -(-len(tensors) // NUM_TENSORS)
    for number, name in enumerate(sorted(tensors)):
        file, kind, start, end = tensors[name]
        digest.update(f"{name} {kind}\n".encode())
        if number % every == 0:
            digest.update(_sample(file, start, end))
    return digest.hexdigest()


def sort_metadata(file: Path) -> None:
    """Sort the metadata of a safetensors file by their keys, in place.

    safetensors writes them in any order: the same tensors would have other bytes each time.
    """
    with file.open("r+b") as stream:
        header, first = _header(stream, file)
        header[METADATA] = dict(sorted(header[METADATA].items()))
        size = first - HEADER_BYTES
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(size)
        assert len(text) == size
        stream.seek(HEADER_BYTES)
        stream.write(text)


def _tensors_of(file: Path) -> Iterator[tuple[str, str, int, int]]:
    """Yield name, dtype with shape, and the place of the bytes of each tensor of a file."""
    with file.open("rb") as stream:
        header, first = _header(stream, file)
    for name, entry in header.items():
        if name != METADATA:
            start, end = entry["data_offsets"]
            yield name, f"{entry['dtype']} {entry['shape']}", first + start, first + end


def _header(stream: BinaryIO, file: Path) -> tuple[dict[str, Any], int]:
    size = int.from_bytes(stream.read(HEADER_BYTES), "little")
    if size > MAX_HEADER_BYTES:
        raise ValueError(f"{file}: no safetensors file: its header has {size} bytes")
    try:
        header: dict[str, Any] = json.loads(stream.read(size))
    except ValueError as error:
        raise ValueError(f"{file}: no safetensors file: {error}") from error
    return header, HEADER_BYTES + size


def _sample(file: Path, start: int, end: int) -> bytes:
    length = min(SAMPLE_BYTES, end - start)
    places = (start, (start + end - length) // 2, end - length)
    with file.open("rb") as stream:
        parts = []
        for place in places:
            stream.seek(place)
            parts.append(stream.read(length))
    return b"".join(parts)
