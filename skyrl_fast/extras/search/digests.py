"""SHA-256 digests of saved files, in the format of `sha256sum`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path


def write_digests(listing: Path, files: Sequence[Path]) -> None:
    """Write the digests of files, which are in the same folder as the listing."""
    lines = [f"{_digest(file)}  {file.name}\n" for file in files]
    listing.write_text("".join(lines), encoding="utf-8")


def check_digests(listing: Path) -> None:
    """Raise ValueError for the first file whose content is not what was written.

    The files are read completely: about a second for each gigabyte and a half.
    """
    for line in listing.read_text(encoding="utf-8").splitlines():
        digest, _, name = line.partition("  ")
        if _digest(listing.parent / name) != digest:
            raise ValueError(f"{name}: its content is not what was written (digests differ)")


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
