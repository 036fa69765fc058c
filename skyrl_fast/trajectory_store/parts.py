"""The files of a store: one part per training batch or evaluation, and one index.

    RUN/trajectories/step_000012.jsonl        the batch of step 12, one trajectory per line
    RUN/trajectories/eval_step_000010.jsonl   the evaluation after step 10
    RUN/trajectories/index.jsonl              a short line per trajectory

The parts are authoritative; the index only saves reading them. Where it does not match a part,
after a crash or because files were moved, that part is read instead.

Design: docs/design/015-trajectory-store-and-viewer.md.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

logger = logging.getLogger(__name__)

INDEX = "index.jsonl"
NON_FINITE = "non_finite"  # key in a line of metrics.jsonl: names of the values that are null
_NAME = re.compile(r"(eval_)?step_(\d{6,})\.jsonl")


@dataclass(frozen=True, slots=True, order=True)
class RunPart:
    """One file of a store. Parts sort by step, the evaluation after the batch."""

    step: int
    evaluation: bool
    path: Path


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """The summary of one trajectory, and the position of its line.

    Args:
        offset, bytes: position and size of the line in the part, including the newline.
        turns, tokens, trained_tokens: numbers of steps, response tokens and trained tokens.
        others: as in the line; docs/spec.md, section 14.
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
_TYPES = {  # JSON has no difference between 1 and 1.0
    name: kind | int if kind in (float, float | None) else kind
    for name, kind in get_type_hints(IndexEntry).items()
}
_COPIED = _FIELDS[3:-3]


def part_name(step: int, phase: str) -> str:
    return f"{'eval_' if phase == 'eval' else ''}step_{step:06d}.jsonl"


def parts(folder: Path) -> list[RunPart]:
    """Return the parts in a store's folder, in order; none if the folder does not exist."""
    if not folder.is_dir():
        return []
    matches = ((_NAME.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted(RunPart(int(match[2]), bool(match[1]), path) for match, path in matches if match)


def index_entry(record: Mapping[str, Any], file: str, offset: int, size: int) -> IndexEntry:
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
    return {name: getattr(entry, name) for name in _FIELDS}


def read_lines(path: Path) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield offset, size in bytes and record of each complete line.

    A last line without a newline, left by a crash or still being written, is ignored. Any other
    line that is not a JSON object is skipped with a warning that names it.
    """
    offset = 0
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                try:
                    record = json.loads(line)
                    if not isinstance(record, dict):
                        raise ValueError("not a JSON object")
                except (ValueError, RecursionError) as error:
                    logger.warning("%s: line at byte %d skipped: %s", path, offset, error)
                else:
                    yield offset, len(line), record
            offset += len(line)


def read_index_file(folder: Path) -> dict[str, list[IndexEntry]]:
    """Return the entries of each part whose index lines cover the complete file.

    If a part was written twice, the later lines count: they start again at offset 0.
    """
    by_file: dict[str, list[IndexEntry]] = {}
    path = folder / INDEX
    if path.exists():
        for _, _, record in read_lines(path):
            if not _is_entry(record):
                continue  # damaged or of another version: the part itself is read
            entry = IndexEntry(**record)
            entries = by_file.setdefault(entry.file, [])
            if entry.offset == 0:
                entries.clear()
            entries.append(entry)
    return {
        name: entries for name, entries in by_file.items() if _covers(entries, folder / Path(name))
    }


def _is_entry(record: Mapping[str, Any]) -> bool:
    return record.keys() == _TYPES.keys() and all(
        isinstance(record[name], kind) for name, kind in _TYPES.items()
    )


def _covers(entries: list[IndexEntry], part: Path) -> bool:
    end = 0
    for entry in entries:
        if entry.offset != end:
            return False
        end += entry.bytes
    return part.is_file() and part.stat().st_size == end
