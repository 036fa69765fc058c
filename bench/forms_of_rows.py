"""Tokens and time of one training step, and sampled tokens that are trained, of a stored run.

A training run, or a recording (`--model` is needed then).

    python -m bench.forms_of_rows RUN [--step 5] [--model FOLDER]

Six ways to train on calls that form a forest: every call as a row; rows joined where the context
only grew; of each such chain only its last call (a leaf); of each trajectory only the longest
chain, or the last one; and prefix trees. Each is computed in the layouts that can hold it
(`bench._tree_steps`), and shown in the fastest one. The time is the CPU time, in one thread, of
forward and backward passes through the run's first model: other programs on the machine do not
change it much.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench._tree_steps import step as training_step
from skyrl_fast.batch import StepBatch, batch_from_trajectories
from skyrl_fast.rollout.trajectory import Step, Trajectory
from skyrl_fast.train.model.loading import hide_progress_bars, load_model
from skyrl_fast.train.model.policy import Policy
from skyrl_fast.trajectory_store import read_index
from skyrl_fast.trajectory_store.recorded import read_recorded

RECORDING_BUDGET = 8_192  # tokens of a pass
ROWS = ("padded", "packed", "sequences")
CHAINS = ("merged", "sequences")

Chain = list[int]  # numbers of a trajectory's steps


@dataclass(frozen=True, slots=True)
class Form:
    """One way to train: its rows, and how they are computed."""

    name: str
    batch: StepBatch
    layouts: tuple[str, ...]  # of bench._tree_steps; the fastest one counts


def chains_of(steps: Sequence[Step]) -> list[Chain]:
    """Return the calls in chains: each begins with the tokens of the one before it."""
    chains: list[Chain] = []
    for number, step in enumerate(steps):
        prompt = list(step.prompt_token_ids)
        for chain in chains:
            before = steps[chain[-1]].prompt_token_ids + steps[chain[-1]].response_ids
            if prompt[: len(before)] == before:
                chain.append(number)
                break
        else:
            chains.append([number])
    return chains


def forms_of(trajectories: Sequence[Trajectory]) -> list[Form]:
    """Return the forms of a step's rows, with advantages 1 and -1."""
    rows = batch_from_trajectories(trajectories)
    signs = torch.where(rows.trajectory_ids % 2 == 0, 1.0, -1.0)
    rows = rows.with_(advantages=torch.repeat_interleave(signs, rows.response_lengths.long()))
    chains = [chains_of(t.steps_or_placeholder()) for t in trajectories]
    starts = torch.tensor([0, *(sum(map(len, c)) for c in chains)]).cumsum(0).tolist()

    def part(chosen: Sequence[Sequence[int]]) -> StepBatch:
        numbers = [start + n for start, of in zip(starts, chosen, strict=False) for n in sorted(of)]
        return rows.rows(numbers)

    longest = [
        max(c, key=lambda chain, start=start: int(rows.lengths[start + chain[-1]]))
        for c, start in zip(chains, starts, strict=False)
    ]
    final = [max(c, key=lambda chain: chain[-1]) for c in chains]
    leaves = [[chain[-1] for chain in c] for c in chains]
    return [
        Form("all calls as rows", rows, ROWS),
        Form("all calls, joined where the context only grew", rows, CHAINS),
        Form("last call of each chain", part(leaves), ROWS),
        Form("longest chain of a trajectory", part(longest), CHAINS),
        Form("last chain of a trajectory", part(final), CHAINS),
        Form("all calls, prefix trees (`trainer.row_layout=tree`)", rows, ("tree",)),
    ]


def measured(
    layout: str, batch: StepBatch, policy: Policy, repetitions: int
) -> tuple[float, int, str]:
    """Return the median seconds of a step, the tokens that the model processes, and the layout."""
    tokens, seconds = 0, []
    for _ in range(repetitions):
        started = time.process_time()
        _, tokens = training_step(layout, policy, batch)
        seconds.append(time.process_time() - started)
    return statistics.median(seconds), tokens, layout


def trainer_settings(run: Path) -> dict[str, Any]:
    """Return those of a training run; none for a recording."""
    path = run / "config.json"
    return dict(json.loads(path.read_text())["trainer"]) if path.exists() else {}


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--step", type=int, help="of a training run; default: the last one")
    parser.add_argument("--model", type=Path, help="default: that of the run's settings")
    parser.add_argument("--trajectories", type=int, help="only the first ones")
    parser.add_argument("--repetitions", type=int, default=5, help="of which the median is shown")
    options = parser.parse_args()
    entries = read_index(options.run)
    phase = "train" if any(entry.phase == "train" for entry in entries) else "eval"
    last = max(entry.step for entry in entries if entry.phase == phase)
    step = last if options.step is None else options.step
    hide_progress_bars()
    torch.set_num_threads(1)
    settings = trainer_settings(options.run)
    if options.model is None and not settings:
        parser.error(f"{options.run} is a recording, which does not name its model: give --model")
    policy = Policy(
        load_model(
            str(options.model or settings["policy"]["model"]["path"]), device=torch.device("cpu")
        ),
        tree=None,
        max_tokens_per_microbatch=settings.get("max_tokens_per_microbatch", RECORDING_BUDGET),
    )
    found = read_recorded(options.run, phase=phase, steps=[step])[: options.trajectories]
    forms = forms_of(found)
    rows, _, leaves = (form.batch for form in forms[:3])
    every = int(rows.loss_mask.sum())
    print(
        f"step {step}: {rows.num_trajectories} trajectories, {rows.num_rows} calls,"
        f" {leaves.num_rows} chains\n"
    )
    print("| form | fastest as | tokens processed | sampled tokens trained | CPU ms |")
    print("|---|---|---|---|---|")
    for form in forms:
        seconds, tokens, layout = min(
            measured(layout, form.batch, policy, options.repetitions) for layout in form.layouts
        )
        trained = int(form.batch.loss_mask.sum())
        share = f"{trained:,} ({trained / every:.0%})"
        print(f"| {form.name} | {layout} | {tokens:,} | {share} | {1000 * seconds:.0f} |")


if __name__ == "__main__":
    main()
