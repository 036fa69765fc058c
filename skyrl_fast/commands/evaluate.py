"""The command `skyrl-fast evaluate CONFIG [TARGET ...]`."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from skyrl_fast.commands.command import (
    as_override,
    count,
    load_settings,
    log_to_stderr,
    needs_extra,
    say,
)

if TYPE_CHECKING:
    from skyrl_fast.train.evaluation import Evaluation
    from skyrl_fast.train.flow.rollouts import MakeRollouts
    from skyrl_fast.train.metrics.evaluation import Estimate

HELP = "evaluate models, checkpoints, adapters or servers"
DESCRIPTION = (
    "Sample the evaluation prompts of a run's settings from each target, and print what it scored: "
    "the folder of a run (its newest checkpoint), a checkpoint, a PEFT adapter or a model, a model "
    "on the hub, or the URL of a server. Without a target: the model of the settings. Several "
    "targets are compared prompt by prompt with the first."
)
YAML = (".yaml", ".yml")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="YAML file of a run: sections data, trainer, generator, ...")
    parser.add_argument(
        "targets",
        nargs="*",
        metavar="TARGET",
        help="what to evaluate; section.key=value is an override of the settings here, too",
    )
    parser.set_defaults(overrides=[])
    parser.add_argument(
        "--data", nargs="+", metavar="DATA", help="files or data sets on the hub, for data.val_data"
    )
    parser.add_argument("--samples", type=count, help="trajectories of each prompt, for pass@k")
    parser.add_argument(
        "--out", type=Path, help="new folder; default: RUN_PATH/evaluations/1, 2, ..."
    )


def run(options: argparse.Namespace, *, make_rollouts: MakeRollouts | None = None) -> int:
    """Evaluate the targets and print their table.

    Args:
        options: parsed arguments.
        make_rollouts: as of `evaluate`.
    """
    from skyrl_fast.config.files import check_data_files

    log_to_stderr()
    overrides, targets = _divide([*options.targets, *options.overrides])
    if options.data is not None:
        overrides.append(as_override("data.val_data", options.data))
    if options.samples is not None:
        overrides.append(f"generator.eval_n_samples_per_prompt={options.samples}")
    config = load_settings(options.config, overrides, has_prompts=True)
    check_data_files("data.val_data", config.data.val_data)
    with needs_extra("train"):
        from skyrl_fast.train.evaluation import evaluate
    out = options.out or _next_folder(Path(config.trainer.run_path) / "evaluations")
    results = evaluate(config, targets, out=out, make_rollouts=make_rollouts, say=say)
    sys.stdout.write(_table(results))
    sys.stdout.write(f"\n{'results:':10}{out}\n")
    for result in results:
        folder = quote(str(result.folder))
        sys.stdout.write(f"{'view it:':10}skyrl-fast view {folder}\n")
    return 0


def _divide(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the overrides (section.key=value and YAML files), and the targets."""
    from skyrl_fast.config import Config

    sections = "|".join(item.name for item in fields(Config))
    is_override = re.compile(rf"({sections})(\.[\w.-]+)?=").match
    overrides = []
    targets = []
    for word in words:
        is_file = word.endswith(YAML)
        if is_file or is_override(word):
            overrides.append(word)
        else:
            targets.append(word)
    return overrides, targets


def _next_folder(parent: Path) -> Path:
    """Return the first of parent/1, parent/2, ... that does not exist."""
    number = 1
    while (parent / str(number)).exists():
        number += 1
    return parent / str(number)


def _table(results: Sequence[Evaluation]) -> str:
    """Return a row for each target: scores of all and of each source, and differences."""
    from skyrl_fast.train.metrics.rewards import PASS_THRESHOLD

    first = results[0]
    shown = _shown_metrics(first)
    header = ["model", "score", "error", *shown.values()]
    note = f"{len(first.scores)} prompts; errors are standard errors over prompts"
    is_compared = len(results) > 1
    if is_compared:
        header += ["difference", "error"]
        note += f", differences are to {first.name}, prompt by prompt"
    rows = [header]
    for result in results:
        row = [result.name, *_estimate(result.score, "")]
        row += [_number(result.metrics[f"eval/{name}"]) for name in shown]
        if is_compared and result is not first:
            row += _estimate(result.difference(first), "+")
        rows.append(row + [""] * (len(header) - len(row)))
    lines = _aligned(rows)
    pass_note = (
        f"pass@k: one of k samples has a reward above {PASS_THRESHOLD:g}, "
        "also one below that of a right answer"
    )
    return "\n".join([*lines, note, pass_note]) + "\n"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line for each row: the first cell to the left, the others to the right."""
    columns = zip(*rows, strict=True)
    widths = [max(map(len, column)) for column in columns]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        for cell, width in zip(row[1:], widths[1:], strict=True):
            cells.append(cell.rjust(width))
        line = "  ".join(cells)
        lines.append(line.rstrip())
    return lines


def _shown_metrics(result: Evaluation) -> dict[str, str]:
    """Return the metrics beside the score, each with its header."""
    names = [name.removeprefix("eval/") for name in result.metrics]
    shown = {}
    for name in names:
        found = re.fullmatch(r"all/pass_at_(\d+)", name)
        if found is not None:
            shown[name] = f"pass@{found[1]}"
    shown |= {"all/failed_share": "failed", "all/avg_num_turns": "turns"}
    sources = {}
    for name in names:
        source, _, metric = name.partition("/")
        if metric == "avg_score" and source != "all":
            sources[name] = source
    if len(sources) > 1:
        shown |= sources
    return shown


def _estimate(value: Estimate, sign: str) -> list[str]:
    return [f"{value.mean:{sign}.4f}", _number(value.error)]


def _number(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:.4f}"
