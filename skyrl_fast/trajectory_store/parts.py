"""The files of a store: one part per training batch or evaluation, and an index of all.

    RUN/trajectories/step_000012.jsonl        the batch that made step 12, a trajectory per line
    RUN/trajectories/eval_step_000010.jsonl   the evaluation after step 10
    RUN/trajectories/index.jsonl              a short line for each of their lines

The parts say what is true. The index only saves reading them: where it does not fit a part, after a
crash or because somebody moved files, that part is read instead.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

INDEX = "index.jsonl"
_NAME = re.compile(r"(eval_)?step_(\d{6,})\.jsonl")


@dataclass(frozen=True, slots=True, order=True)
class Part:
    """One file of a store; parts sort by step, the evaluation after the batch."""

    step: int
    evaluation: bool
    path: Path


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """One trajectory in short, and where its line lies.

    Args:
        file: name of the part.
        offset, bytes: of the line in the part, newline included.
        turns, tokens, trained_tokens: steps, their response tokens, those of them trained.
        others: as in the line itself; docs/spec.md, section 14.
    """

    file: str
    offset: int
    bytes: int
    phase: str
    step: int
    uid: str
    repetition_id: int
    env_class: str
    data_source: str
    reward: float | None
    advantage: float | None
    stop_reason: str
    failure: str
    filtered: bool
    policy_version: int | None
    staleness: int | None
    seconds: float
    turns: int
    tokens: int
    trained_tokens: int


_FIELDS = [f.name for f in fields(IndexEntry)]
_COPIED = _FIELDS[3:-3]


def part_name(step: int, phase: str) -> str:
    """Return the file name of a batch's or an evaluation's part."""
    return f"{'eval_' if phase == 'eval' else ''}step_{step:06d}.jsonl"


def parts(folder: Path) -> list[Part]:
    """Return the parts in a store's folder, in order; none where it is not there."""
    if not folder.is_dir():
        return []
    found = ((_NAME.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted(Part(int(match[2]), bool(match[1]), path) for match, path in found if match)


def entry_of(record: Mapping[str, Any], file: str, offset: int, size: int) -> IndexEntry:
    """Return the index entry of a line."""
    turns = record["turns"]
    return IndexEntry(
        file=file,
        offset=offset,
        bytes=size,
        **{name: record[name] for name in _COPIED},
        turns=len(turns),
        tokens=sum(turn["response_tokens"] for turn in turns),
        trained_tokens=sum(turn["trained_tokens"] for turn in turns),
    )


def entry_fields(entry: IndexEntry) -> dict[str, Any]:
    """Return the entry as plain values, in order."""
    return {name: getattr(entry, name) for name in _FIELDS}


def read_lines(path: Path) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield offset, bytes and record of each whole line.

    A last line without its end, left by a crash or still being written, is no line. Another line
    that is no JSON object is skipped with a warning that names it.
    """
    offset = 0
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                try:
                    record = json.loads(line)
                    if not isinstance(record, dict):
                        raise ValueError("no object")
                except ValueError as error:
                    logger.warning("%s: line at byte %d skipped: %s", path, offset, error)
                else:
                    yield offset, len(line), record
            offset += len(line)


def read_index_file(folder: Path) -> dict[str, list[IndexEntry]]:
    """Return the entries of each part whose index lines cover the whole file; of no other part.

    Where a part was written twice the later lines count: they begin again at offset 0.
    """
    found: dict[str, list[IndexEntry]] = {}
    path = folder / INDEX
    if path.exists():
        for _, _, record in read_lines(path):
            try:
                entry = IndexEntry(**record)
            except TypeError:
                continue  # of another version: the part itself is read
            own = found.setdefault(entry.file, [])
            if entry.offset == 0:
                own.clear()
            own.append(entry)
    return {
        name: entries for name, entries in found.items() if _covers(entries, folder / Path(name))
    }


def _covers(entries: list[IndexEntry], part: Path) -> bool:
    end = 0
    for entry in entries:
        if entry.offset != end:
            return False
        end += entry.bytes
    return part.is_file() and part.stat().st_size == end
