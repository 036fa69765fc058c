"""Writing of a run's page: the static files, the trajectories in scripts, and the metrics.

Design: docs/design/015-trajectory-store-and-viewer.md.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from skyrl_fast.trajectory_store.parts import NON_FINITE, parts, read_lines
from skyrl_fast.trajectory_store.reader import (
    FOLDER,
    StoredTrajectory,
    invalid_line_error,
    parse_trajectory,
    read_part,
)
from skyrl_fast.viewer.columns import Columns, MagnitudeSample
from skyrl_fast.viewer.details import preview, write_details
from skyrl_fast.viewer.script import CALLBACK, ListScripts, literal, script

PAGE = (
    "index.html",
    "style.css",
    "text.js",
    "data.js",
    "list.js",
    "tokens.js",
    "forest.js",
    "trajectory.js",
    "chart.js",
    "charts.js",
    "app.js",
)
MARKER = "skyrl_fast_view.json"  # marks a folder written by this module, and lists its files
SCRIPT_BYTES = 1 << 18  # size of a data file; one with a single item may exceed it
PREVIEWS_PER_SCRIPT = 512
SCALE_PERCENT = 99.0  # percentage of the run's tokens within the colour scale
SMALLEST_SCALE = 1e-3  # smaller differences are rounding


@dataclass(frozen=True, slots=True)
class View:
    """The written page."""

    page: Path
    trajectories: int
    files: int
    bytes: int


def build_view(run: Path, out: Path | None = None) -> View:
    """Write the page of a run; an earlier one there is replaced when this one is complete.

    Args:
        run: the run's folder; it may still be running.
        out: folder of the page; None: `view` in the run's folder.

    Raises:
        ValueError: no trajectories, or of another format; or `out` contains anything that this
            command did not write.
    """
    out = (run / "view" if out is None else out).resolve()  # a link stays, its target is replaced
    if not run.is_dir():
        raise ValueError(f"{run}: no such folder")
    if not parts(run / FOLDER):
        raise ValueError(
            f"{run}: no trajectories in {run / FOLDER}; training writes them there unless "
            "trainer.dump_trajectories=false"
        )
    if run.resolve().is_relative_to(out):
        raise ValueError(f"{out}: contains the run {run}; choose another --out")
    if Path.cwd().is_relative_to(out):
        raise ValueError(
            f"{out}: the current folder or one above it cannot be replaced; choose another --out"
        )
    _earlier_files(out)  # refuse it before the work
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.{secrets.token_hex(4)}.partial")
    partial.mkdir()
    try:
        view = _write(run, partial, out)
        _remove_earlier(out)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # created above
    return view


def _earlier_files(out: Path) -> list[Path]:
    if not out.exists():
        return []
    if not out.is_dir():
        raise ValueError(f"{out}: expected a folder, got a file; choose another --out")
    found = _entries(out)
    if found and not (out / MARKER).is_file():
        raise ValueError(f"{out}: not empty, and not written by this command; choose another --out")
    listed = _list_written(out / MARKER)
    other = sorted(str(path.relative_to(out)) for path in found if path not in listed)
    if other:
        if len(other) > 1:
            more = f" (and {len(other) - 1} more)"
        else:
            more = ""
        raise ValueError(
            f"{out}: holds {other[0]!r}, which this command did not write{more}; move it, or "
            "choose another --out"
        )
    return found


def _entries(folder: Path) -> list[Path]:
    """Return all files, links and empty folders below the folder; links are not followed."""
    found: list[Path] = []
    for path in folder.iterdir():
        below = []
        if path.is_dir() and not path.is_symlink():
            below = _entries(path)
        found += below or [path]
    return found


def _list_written(marker: Path) -> set[Path]:
    """Return the files that a page's mark file lists, and the mark file; none if it is damaged."""
    try:
        names = json.loads(marker.read_text(encoding="ascii"))["files"]
        return {marker, *(marker.parent / name for name in names)}
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return set()


def _remove_earlier(out: Path) -> None:
    found = _earlier_files(out)
    for path in found:
        path.unlink()
    folders = {parent for path in found for parent in path.parents if parent.is_relative_to(out)}
    if out.exists():
        folders.add(out)
    for folder in sorted(folders, reverse=True):
        folder.rmdir()


def _write(run: Path, folder: Path, out: Path) -> View:
    data = folder / "data"
    data.mkdir()
    columns, samples = _write_trajectories(run, data)
    scales = {name: sample.percentile(SCALE_PERCENT) for name, sample in samples.items()}
    summary = {
        "path": str(run),
        "name": _setting(run, "trainer", "run_name") or run.resolve().name,
        "longest_response": _setting(run, "generator", "sampling_params", "max_generate_length"),
        "scales": {n: None if s is None else max(s, SMALLEST_SCALE) for n, s in scales.items()},
        "previews_per_script": PREVIEWS_PER_SCRIPT,
        **columns.as_dict(),
    }
    (data / "summary.js").write_text(script(CALLBACK, "summary", summary), encoding="ascii")
    (data / "metrics.js").write_text(script(CALLBACK, "metrics", _metrics(run)), encoding="ascii")
    page = files("skyrl_fast.viewer") / "page"
    for name in PAGE:
        (folder / name).write_bytes((page / name).read_bytes())
    written = _entries(folder)
    names = sorted(path.relative_to(folder).as_posix() for path in written)
    content = json.dumps({"trajectories": len(columns), "files": names}, indent=1)
    (folder / MARKER).write_text(content + "\n", encoding="ascii")
    size = sum(path.stat().st_size for path in (*written, folder / MARKER))
    return View(out / "index.html", len(columns), len(written) + 1, size)


def _write_trajectories(run: Path, data: Path) -> tuple[Columns, dict[str, MagnitudeSample]]:
    """Write heads, items and previews of all trajectories; return columns and token values."""
    columns = Columns()
    samples = {"advantage": MagnitudeSample(), "mismatch": MagnitudeSample()}
    heads = ListScripts(data, "heads", SCRIPT_BYTES)
    items = ListScripts(data, "items", SCRIPT_BYTES)
    previews: list[str] = []
    for part in parts(run / FOLDER):
        for entry, record in read_part(part):
            try:
                trajectory = parse_trajectory(entry, record)
                head = literal(write_details(trajectory, record, items))
                previews.append(preview(trajectory))
            except (AttributeError, LookupError, TypeError, ValueError) as error:
                raise invalid_line_error(part, entry.offset, error) from error
            columns.add(entry, *heads.add(head))
            _add_samples(trajectory, samples)
    heads.close()
    items.close()
    for number, start in enumerate(range(0, len(previews), PREVIEWS_PER_SCRIPT)):
        name = f"previews{number}"
        texts = previews[start : start + PREVIEWS_PER_SCRIPT]
        (data / f"{name}.js").write_text(script(CALLBACK, name, texts), encoding="ascii")
    return columns, samples


def _add_samples(trajectory: StoredTrajectory, samples: Mapping[str, MagnitudeSample]) -> None:
    for step in trajectory.steps:
        trained = step.loss_mask != 0
        samples["advantage"].add(step.advantages[trained])
        samples["mismatch"].add((step.trainer_logprobs - step.rollout_logprobs)[trained])


def _metrics(run: Path) -> dict[str, Any]:
    path = run / "metrics.jsonl"
    if path.exists():
        rows = [row for _, _, row in read_lines(path)]
    else:
        rows = []
    names = sorted({name for row in rows for name in row} - {"step", NON_FINITE})
    series = {name: [_number(row.get(name)) for row in rows] for name in names}
    return {"steps": [_number(row.get("step")) for row in rows], "series": series}


def _number(value: Any) -> float | None:
    if isinstance(value, int):
        return value
    if not isinstance(value, float) or not np.isfinite(value):
        return None
    return float(f"{value:.6g}")


def _setting(run: Path, *names: str) -> Any:
    """Return a setting of the run; None where its settings cannot be read."""
    try:
        value = json.loads((run / "config.json").read_text(encoding="utf-8"))
        for name in names:
            value = value[name]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    if isinstance(value, str | int):
        return value
    return None
