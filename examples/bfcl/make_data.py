"""The leaderboard's questions in three parts by a hash of the function's name."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from examples.bfcl.checker import HERE, Checker
from examples.tiny_model.jsonl import write_jsonl
from examples.tiny_model.recipe import environment_with

CATEGORY = "simple_python"
PARTS = {"eval": 0.25, "demonstrations": 0.375, "train": 1.0}  # upper bounds of the hash


def make_data(folder: Path, packages: Path, category: str = CATEGORY) -> None:
    """Write `train.jsonl`, `demonstrations.jsonl` and `eval.jsonl`.

    No function is called in two of them.

    Args:
        folder: to create.
        packages: folder of the package bfcl-eval.
        category: of the leaderboard, with functions in Python and one call as the answer.
    """
    parts: dict[str, list[dict[str, Any]]] = {name: [] for name in PARTS}
    checker = Checker(packages)
    for row in _questions(packages, category):
        part = part_of(called(row))
        if part == "demonstrations":
            demonstration = demonstrated(row, checker)
            if demonstration is None:
                continue
            row = demonstration
        parts[part].append(row)
    checker.close()
    folder.mkdir(parents=True)
    for name, rows in parts.items():
        write_jsonl(folder / f"{name}.jsonl", rows)


def _questions(packages: Path, category: str) -> Iterator[dict[str, Any]]:
    command = [sys.executable, str(HERE / "package.py"), "rows", category]
    printed = subprocess.run(
        command, env=environment_with(packages), check=True, stdout=subprocess.PIPE, text=True
    )
    for line in printed.stdout.splitlines():
        row = json.loads(line)
        yield {**row, "data_source": row["category"]}


def part_of(function: str) -> str:
    """Return the part that a function belongs to.

    Example:
        >>> part_of("calculate_triangle_area") in PARTS
        True
    """
    share = int(hashlib.sha256(function.encode()).hexdigest()[:8], 16) / 16**8
    return next(part for part, bound in PARTS.items() if share < bound)


def called(row: Mapping[str, Any]) -> str:
    """Return the name, as the tools have it, of the function that a right answer calls."""
    (name,) = row["answers"][0]
    return name.replace(".", "_")


def demonstrated(row: Mapping[str, Any], checker: Checker) -> dict[str, Any] | None:
    """Return a chat with the right call as its answer; None: the checker refuses what is listed.

    Args:
        row: a question.
        checker: of the leaderboard.
    """
    ((name, values),) = row["answers"][0].items()
    (function,) = [one for one in row["functions"] if one["name"] == name]
    name = called(row)
    arguments = _first(values, function["parameters"]["required"])
    if not checker.check(row, [{name: arguments}])["valid"]:
        return None
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    return {"messages": [*row["prompt"], answer], "tools": row["tools"], "id": row["id"]}


def _first(values: Mapping[str, Any], required: Sequence[str] = ()) -> dict[str, Any]:
    """Return the first possible value of each argument that must be given.

    Args:
        values: the possible ones by name; an empty text among them says that none is right, too.
        required: names that must be given all the same.
    """
    chosen = {}
    for name, possible in values.items():
        if not isinstance(possible, list):  # one, within a mapping
            chosen[name] = possible
            continue
        given = [value for value in possible if value != ""]
        if given and (name in required or given == possible):
            chosen[name] = _plain(given[0])
    return chosen


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return _first(value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value
