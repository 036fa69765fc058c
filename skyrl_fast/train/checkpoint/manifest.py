"""The manifest of a checkpoint: size and XXH3 digest of each of its files.

`manifest.json` has the files by relative path, and a digest of that table. A file's digest is that
of its pieces' digests, which are computed in parallel.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

MANIFEST = "manifest.json"
_ALGORITHM = "xxh3_128"  # detects damage, not forgery: whoever can do that can write a manifest

_MAX_THREADS = 8  # together as fast as a disk


@dataclass(frozen=True, slots=True)
class PieceSizes:
    """Bytes of a file that are read at once.

    Args:
        piece: one digest's; a part of the format.
        buffer: one read's, which fits in a core's cache.
    """

    piece: int = 2**24
    buffer: int = 2**20


SIZES = PieceSizes()
Entries = dict[str, dict[str, Any]]  # entries of the manifest, by path relative to its folder
# Of the pieces of files of a folder, given with their bytes; in place of one why it cannot be read.
ReadDigests = Callable[[Path, Mapping[str, int]], Iterable[bytes | str]]


def make_manifest(folder: Path, known: Entries | None = None) -> dict[str, Any]:
    """Return the manifest of all files below the folder; `known` entries are not computed again."""
    known = known or {}
    paths = []
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            paths.append(path)
    # Ranks have sent the entries of the files that they wrote.
    files = entries(folder, [p for p in paths if p.relative_to(folder).as_posix() not in known])
    files = dict(sorted((files | known).items()))
    return {"algorithm": _ALGORITHM, "files": files, "digest": _digest_of_table(files)}


def entries(folder: Path, paths: Sequence[Path]) -> Entries:
    """Return size and digest of files below the folder, by relative path."""
    with _threads() as pool:
        return {
            path.relative_to(folder).as_posix(): {
                "bytes": path.stat().st_size,
                "digest": digest_file(path, pool),
            }
            for path in paths
        }


def list_files(manifest: bytes) -> list[str]:
    """Return the files that a manifest lists; none if `find_damage` will not accept it."""
    try:
        names = []
        for name in json.loads(manifest)["files"]:
            names.append(str(name))
    except (ValueError, LookupError, TypeError, RecursionError):
        return []
    if any(map(_is_outside, names)):
        return []
    return names


def _is_outside(name: str) -> bool:
    # Names of a downloaded manifest decide where files are written.
    path = PurePosixPath(name)
    return path.is_absolute() or ".." in path.parts


def digest_pieces(
    folder: Path, sizes: Mapping[str, int], *, rank: int = 0, size: int = 1
) -> Iterator[bytes | str]:
    """Yield the digest of each piece of some files in their order, or why it cannot be read.

    Args:
        folder: of the files.
        sizes: bytes of the files by relative path.
        rank, size: of processes that share the work, this one's number, and their number. Each
            has pieces that follow one another, with about as many bytes; a piece is of one alone.
    """
    pieces = []
    total = sum(sizes.values())
    before = 0
    for name, num_bytes in sizes.items():
        for start in range(0, num_bytes, SIZES.piece):
            if before * size // total == rank:
                pieces.append((folder / name, start))
            before += min(SIZES.piece, num_bytes - start)
    with _threads() as pool:
        yield from pool.map(_digest_or_reason, pieces)


def _digest_or_reason(piece: tuple[Path, int]) -> bytes | str:
    path, start = piece
    try:
        return _digest_of_piece(path, SIZES, start)
    except OSError as error:
        return _unreadable(error)


def find_damage(folder: Path, read_digests: ReadDigests = digest_pieces) -> tuple[str, str] | None:
    """Compare the files with `manifest.json`; files that it does not list are ignored.

    Args:
        folder: that of the manifest.
        read_digests: reads the files.

    Returns:
        The first file that is damaged, relative to the folder, and what is wrong with it; None if
        all files are those that were written.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files = manifest["files"]
        wanted = {name: (file["bytes"], file["digest"]) for name, file in files.items()}
        algorithm = manifest["algorithm"]
        intact = manifest["digest"] == _digest_of_table(files)
    except OSError as error:
        return MANIFEST, _unreadable(error)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        return MANIFEST, f"not a manifest: {type(error).__name__}: {error}"
    if any(map(_is_outside, wanted)):
        return MANIFEST, "lists files outside its folder"
    if algorithm != _ALGORITHM:
        return MANIFEST, f"expected {_ALGORITHM} digests, got {algorithm!r:.50}"
    if not intact:
        return MANIFEST, "its content is not what was written"
    for name, (size, _) in wanted.items():
        try:
            found = (folder / name).stat().st_size
        except OSError as error:
            return name, _unreadable(error)
        # First all sizes, which cost nothing: a cut file is found before gigabytes are read.
        if found != size:
            return name, f"expected {size} bytes, got {found}"

    sizes = {}
    for name, (size, _) in wanted.items():
        sizes[name] = size
    found = iter(read_digests(folder, sizes))
    for name, (size, digest) in wanted.items():
        digests = []
        num_pieces = math.ceil(size / SIZES.piece)
        for one in islice(found, num_pieces):
            if isinstance(one, str):
                return name, one
            digests.append(one)
        joined = _xxh3(b"".join(digests))
        if joined.hexdigest() != digest:
            return name, "its content is not what was written (digests differ)"
    return None


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1))


def _xxh3(content: bytes = b"") -> Any:
    """Return XXH3's running digest, of the content so far."""
    # Benchmarks and updates without checkpoints run where it is not installed.
    import xxhash

    return xxhash.xxh3_128(content)


def digest_file(path: Path, pool: ThreadPoolExecutor, sizes: PieceSizes = SIZES) -> str:
    """Return the digest of a file, whose pieces are read in the threads."""
    starts = range(0, path.stat().st_size, sizes.piece)
    pieces = pool.map(partial(_digest_of_piece, path, sizes), starts)
    return _xxh3(b"".join(pieces)).hexdigest()


def _digest_of_piece(path: Path, sizes: PieceSizes, start: int) -> bytes:
    digest = _xxh3()
    left = sizes.piece
    buffer = memoryview(bytearray(sizes.buffer))
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while left and (size := file.readinto(buffer[: min(sizes.buffer, left)])):
            digest.update(buffer[:size])
            left -= size
    return digest.digest()


def _digest_of_table(files: dict[str, Any]) -> str:
    return _xxh3(json.dumps(files, sort_keys=True).encode()).hexdigest()


def _unreadable(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "missing"
    return f"cannot be read: {error}"
