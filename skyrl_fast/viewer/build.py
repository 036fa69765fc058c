"""Writes the page, its data in chunks, and the run's metrics into one folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from skyrl_fast.trajectory_store.parts import IndexEntry, parts, read_lines
from skyrl_fast.trajectory_store.reader import (
    FOLDER,
    StoredStep,
    no_trajectory,
    read_part,
    stored_trajectory,
)
from skyrl_fast.viewer.columns import Columns, Spread, short
from skyrl_fast.viewer.script import script

PAGE = (
    "index.html",
    "style.css",
    *("text.js", "data.js", "list.js", "tokens.js", "trajectory.js", "chart.js", "charts.js"),
    "app.js",
)
MARK = "skyrl_fast_view.json"  # a folder with it was written by this module
CHUNK_CHARACTERS = 1 << 19  # about; a group is never split
SCALE_PERCENT = 99.0  # of the run's tokens have colours inside the scale
SMALLEST_SCALE = 1e-3  # differences below are rounding
_CALL = "skyrlFastView.receive"


class ViewError(ValueError):
    """No page can be made; the message says what to do."""


@dataclass(frozen=True, slots=True)
class View:
    """What was written.

    Args:
        page: the file to open.
        trajectories, chunks: how many.
        bytes: of all files.
    """

    page: Path
    trajectories: int
    chunks: int
    bytes: int


def build_view(run: Path, out: Path | None = None) -> View:
    """Write the page of a run; an earlier one in its place is replaced when this one is whole.

    Args:
        run: the run's folder; it may still be running.
        out: folder of the page; None: `view` in the run's folder.

    Raises:
        ViewError: no trajectories, or `out` holds something else.
        ValueError: trajectories of another format.
    """
    out = (run / "view" if out is None else out).resolve()  # what a link names is replaced
    if not run.is_dir():
        raise ViewError(f"{run}: no such folder")
    if not parts(run / FOLDER):
        raise ViewError(
            f"{run}: no trajectories in {run / FOLDER}; training writes them there unless "
            "trainer.dump_trajectories=false"
        )
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / MARK).exists())):
        raise ViewError(f"{out}: not empty and no page of this command; choose another --out")
    if out == Path.cwd():
        raise ViewError(
            f"{out}: the folder that you are in cannot be replaced; choose another --out"
        )
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        view = _write(run, partial, out)
        if out.exists():
            shutil.rmtree(out)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return view


def _write(run: Path, folder: Path, out: Path) -> View:
    data = folder / "data"
    data.mkdir(parents=True)
    columns = Columns()
    spreads = {"advantage": Spread(), "mismatch": Spread()}
    chunks = 0
    for chunks, group in enumerate(_chunks(run, spreads), start=1):
        for entry, _ in group:
            columns.add(entry, chunks - 1)
        texts = [shown for _, shown in group]
        content = script(_CALL, f"chunk{chunks - 1}", texts)
        (data / f"chunk{chunks - 1}.js").write_text(content, encoding="ascii")
    scales = {name: spread.percentile(SCALE_PERCENT) for name, spread in spreads.items()}
    summary = {
        "path": str(run),
        "name": _run_name(run) or run.resolve().name,
        "scales": {n: None if s is None else max(s, SMALLEST_SCALE) for n, s in scales.items()},
        **columns.as_dict(),
    }
    (data / "summary.js").write_text(script(_CALL, "summary", summary), encoding="ascii")
    (data / "metrics.js").write_text(script(_CALL, "metrics", _metrics(run)), encoding="ascii")
    page = files("skyrl_fast.viewer") / "page"
    for name in PAGE:
        (folder / name).write_bytes((page / name).read_bytes())
    (folder / MARK).write_text(json.dumps({"trajectories": len(columns)}) + "\n", encoding="ascii")
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return View(out / "index.html", len(columns), chunks, size)


def _chunks(
    run: Path, spreads: Mapping[str, Spread]
) -> Iterator[list[tuple[IndexEntry, dict[str, Any]]]]:
    """Whole groups, together about CHUNK_CHARACTERS long."""
    chunk: list[tuple[IndexEntry, dict[str, Any]]] = []
    size, group = 0, None
    for part in parts(run / FOLDER):
        for entry, record in read_part(part):
            if size > CHUNK_CHARACTERS and group != (part, entry.uid):
                yield chunk
                chunk, size = [], 0
            group = (part, entry.uid)
            try:
                shown = _shown(entry, record, spreads)
            except (AttributeError, LookupError, TypeError, ValueError) as error:
                raise no_trajectory(part, entry.offset, error) from error
            chunk.append((entry, shown))
            size += entry.bytes
    if chunk:
        yield chunk


def _shown(
    entry: IndexEntry, record: Mapping[str, Any], spreads: Mapping[str, Spread]
) -> dict[str, Any]:
    """What the page shows of a trajectory when it is opened."""
    trajectory = stored_trajectory(entry, record)
    for step in trajectory.steps:
        trained = step.loss_mask != 0
        spreads["advantage"].add(step.advantages[trained])
        spreads["mismatch"].add((step.trainer_logprobs - step.rollout_logprobs)[trained])
    return {
        "failure": entry.failure,
        "env_metrics": trajectory.env_metrics,
        "turns": [
            {
                **{name: value for name, value in step.turn.items() if name != "response"},
                "prompt_shared": tokens["prompt_shared"],
                "pieces": step.pieces,
                "ids": step.response_ids,
                "mask": step.loss_mask.tolist(),
                **_numbers(step),
                "versions": tokens["policy_versions"],
            }
            for step, tokens in zip(trajectory.steps, record["tokens"], strict=True)
        ],
    }


def _numbers(step: StoredStep) -> dict[str, list[float | None]]:
    return {
        "engine": _short_list(step.rollout_logprobs),
        "trainer": _short_list(step.trainer_logprobs),
        "advantages": _short_list(step.advantages),
    }


def _short_list(values: np.ndarray) -> list[float | None]:
    if np.isnan(values).all():
        return []
    return [None if np.isnan(value) else short(float(value)) for value in values]


def _metrics(run: Path) -> dict[str, Any]:
    """The numbers of metrics.jsonl by name, None where a step has none."""
    path = run / "metrics.jsonl"
    rows = [row for _, _, row in read_lines(path)] if path.exists() else []
    names = sorted({name for row in rows for name in row} - {"step"})
    series = {name: [_number(row.get(name)) for row in rows] for name in names}
    return {"steps": [_number(row.get("step")) for row in rows], "series": series}


def _number(value: Any) -> float | None:
    if isinstance(value, int):
        return value
    if not isinstance(value, float) or not np.isfinite(value):
        return None
    return float(f"{value:.6g}")


def _run_name(run: Path) -> str:
    try:
        config = json.loads((run / "config.json").read_text(encoding="utf-8"))
        return str(config["trainer"]["run_name"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
