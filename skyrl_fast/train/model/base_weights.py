"""A digest of a model folder's weights, by which an adapter knows the base that it was trained on.

It covers the name, dtype and shape of every tensor, and a few bytes of up to 1,024 of them:
training changes nearly all numbers of a model, so the bytes of another base differ, and at most
192 KiB are read besides the headers. It is the same for other files with the same tensors. A hub's
revision would do for models of the hub alone, and copies of a model have the same weights.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from skyrl_fast.config.model_folder import model_folder
from skyrl_fast.rollout.engine.weights.tensor_file import (
    LENGTH_BYTES,
    METADATA,
    StoredTensor,
    list_tensors,
    read_header,
)

NUM_TENSORS = 1024  # whose bytes are read
SAMPLE_BYTES = 64  # at the start, in the middle and at the end of a tensor


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
    tensors: dict[str, StoredTensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= list_tensors(file)
    if not tensors:
        return ""
    digest = hashlib.sha256()
    every = -(-len(tensors) // NUM_TENSORS)
    for number, name in enumerate(sorted(tensors)):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.kind} {tensor.shape}\n".encode())
        if number % every == 0:
            digest.update(_sample(tensor.file, tensor.first, tensor.end))
    return digest.hexdigest()


def sort_metadata(file: Path) -> None:
    """Sort the metadata of a safetensors file by their keys, in place.

    safetensors writes them in any order: the same tensors would have other bytes each time.
    """
    header, first = read_header(file)
    header[METADATA] = dict(sorted(header[METADATA].items()))
    size = first - LENGTH_BYTES
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(size)
    assert len(text) == size
    with file.open("r+b") as stream:
        stream.seek(LENGTH_BYTES)
        stream.write(text)


def _sample(file: Path, start: int, end: int) -> bytes:
    length = min(SAMPLE_BYTES, end - start)
    places = (start, (start + end - length) // 2, end - length)
    with file.open("rb") as stream:
        parts = []
        for place in places:
            stream.seek(place)
            parts.append(stream.read(length))
    return b"".join(parts)
