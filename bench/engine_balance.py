"""How evenly several engines are used under long-tailed answers: simulated, on a clock of its own.

    python -m bench.engine_balance [--engines 1 2 4 8 16] [--trajectories 32] [--out FILE]

The pool is the package's; engines are stand-ins that batch continuously. An iteration of an engine
takes `FIXED` seconds, `EACH` more for every sequence in it, and `PREFILL` more for every token of a
prompt that the engine has not seen: assumptions, of which the results depend on the ratio. Lengths
of answers are lognormal (sigma 1.2: one in a hundred has nine times the mean), turns geometric. "by
trajectory" and "by request" assign at random, in place of the pool: the first keeps a trajectory's
engine, the second does not.

"over the bound" divides the seconds until the last answer by those that no assignment can beat: all
work divided by the engines, or the longest trajectory alone. "idle" is the share of the engines'
time without a request until then.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import selectors
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skyrl_fast.config import SamplingParams
from skyrl_fast.rollout.engine.pool import EnginePool
from skyrl_fast.rollout.engine.protocol import Generation

FIXED = 0.02  # seconds of an iteration: weights are read once for all sequences
EACH = 0.0001  # for each sequence in it
PREFILL = 0.00005  # for each token of a prompt that is not in the cache
ITERATIONS = 16  # that are simulated as one
MEAN_ANSWER = 400  # tokens
SIGMA = 1.2
MEAN_TURNS = 4
OBSERVATION = 200  # tokens
TOOL = 1.0  # mean seconds
MAX_ANSWER = 16_384
SAMPLING = SamplingParams()


class _NoWait(selectors.SelectSelector):
    """Moves the clock in place of waiting."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        self.now += timeout or 0.0
        return super().select(0)


class _SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop whose seconds pass at once."""

    def __init__(self) -> None:
        self._clock = _NoWait()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


@dataclass
class _Running:
    left: int
    unseen: int  # tokens of its prompt that are not in the cache
    done: asyncio.Future[None]


@dataclass
class StandIn:
    """An engine that batches continuously; `busy` counts the seconds with a request."""

    name: str
    busy: float = 0.0
    prefilled: int = 0
    running: list[_Running] = field(default_factory=list)
    seen: dict[str, int] = field(default_factory=dict)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    def check_running(self) -> None:
        """Never ends."""

    async def generate(self, context: Sequence[int], _: Any, *, session_id: str) -> Generation:
        """Answer with as many tokens as `context` says: its length, and that of the answer."""
        length, answer = context
        unseen = length - self.seen.get(session_id, 0)
        self.seen[session_id] = length + answer
        self.prefilled += unseen
        request = _Running(answer, unseen, asyncio.get_running_loop().create_future())
        self.running.append(request)
        self.arrived.set()
        await request.done
        return Generation([], [], "stop")

    async def run(self) -> None:
        """Iterate while there are requests."""
        while True:
            await self.arrived.wait()
            self.arrived.clear()
            while self.running:
                count = min(ITERATIONS, min(one.left for one in self.running))
                unseen = sum(one.unseen for one in self.running)
                seconds = count * (FIXED + EACH * len(self.running)) + PREFILL * unseen
                batch = [*self.running]
                for one in batch:
                    one.unseen = 0
                await asyncio.sleep(seconds)
                self.busy += seconds
                for one in batch:
                    one.left -= count
                    if one.left <= 0:
                        self.running.remove(one)
                        one.done.set_result(None)


@dataclass(frozen=True)
class Turn:
    """An answer's tokens, and the seconds of the tool after it."""

    tokens: int
    tool: float


def trajectories(count: int, rng: random.Random) -> list[list[Turn]]:
    """Return turns with long-tailed answers."""
    mu = math.log(MEAN_ANSWER) - SIGMA**2 / 2
    result = []
    for _ in range(count):
        number = 1
        while rng.random() > 1 / MEAN_TURNS:
            number += 1
        turns = []
        for _ in range(number):
            tokens = min(MAX_ANSWER, max(1, round(rng.lognormvariate(mu, SIGMA))))
            turns.append(Turn(tokens, rng.expovariate(1 / TOOL)))
        result.append(turns)
    return result


Assign = Callable[[int, int], int | None]  # trajectory and turn -> engine; None: the pool's choice


async def _play(work: Sequence[Sequence[Turn]], count: int, assign: Assign) -> dict[str, float]:
    """Return the seconds until the last answer, and what the engines did."""
    engines = [StandIn(f"engine {number}") for number in range(count)]
    pool = EnginePool(engines)  # type: ignore[arg-type]
    loops = [asyncio.create_task(engine.run()) for engine in engines]

    async def one(number: int, turns: Sequence[Turn]) -> None:
        length = OBSERVATION
        for place, turn in enumerate(turns):
            chosen = assign(number, place)
            target: Any = pool if chosen is None else engines[chosen]
            await target.generate((length, turn.tokens), SAMPLING, session_id=str(number))
            length += turn.tokens + OBSERVATION
            if place + 1 < len(turns):
                await asyncio.sleep(turn.tool)

    await asyncio.gather(*(one(number, turns) for number, turns in enumerate(work)))
    for task in loops:
        task.cancel()
    seconds = asyncio.get_running_loop().time()
    return {
        "seconds": seconds,
        "idle": 1 - sum(engine.busy for engine in engines) / (count * seconds),
        "prefilled": float(sum(engine.prefilled for engine in engines)),
    }


def bound(work: Sequence[Sequence[Turn]], count: int) -> float:
    """Return the seconds that no assignment can beat.

    An engine with all sequences of the batch in an iteration is the fastest per token.
    """
    tokens = sum(turn.tokens for turns in work for turn in turns)
    fastest = FIXED / math.ceil(len(work) / count) + EACH
    longest = 0.0
    for turns in work:
        alone = sum(turn.tokens for turn in turns) * (FIXED + EACH)
        longest = max(longest, alone + sum(turn.tool for turn in turns[:-1]))
    return max(tokens * fastest / count, longest)


def assignments(count: int, rng: random.Random) -> dict[str, Assign]:
    """Return the ways to choose an engine, by name."""
    of_trajectory: dict[int, int] = {}

    def by_trajectory(number: int, _: int) -> int:
        return of_trajectory.setdefault(number, rng.randrange(count))

    return {
        "the pool": lambda *_: None,
        "by trajectory": by_trajectory,
        "by request": lambda *_: rng.randrange(count),
    }


def simulate(count: int, per_engine: int, seed: int) -> dict[str, dict[str, float]]:
    """Return the results of one batch by way of assignment."""
    work = trajectories(per_engine * count, random.Random(seed))
    found = {}
    for name, assign in assignments(count, random.Random(seed)).items():
        with asyncio.Runner(loop_factory=_SimulatedLoop) as runner:
            result = runner.run(_play(work, count, assign))
        found[name] = result | {"over": result["seconds"] / bound(work, count)}
    return found


def main() -> None:
    """Print a table of means over seeds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", nargs="+", type=int, default=[1, 2, 4, 8, 16])
    parser.add_argument("--trajectories", type=int, default=32, help="per engine")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="file of the table")
    options = parser.parse_args()
    lines = [
        "| engines | assignment | over the bound | idle | tokens prefilled / least |",
        "|---:|---|---:|---:|---:|",
    ]
    for count in options.engines:
        runs = [simulate(count, options.trajectories, seed) for seed in range(options.seeds)]
        for name in runs[0]:
            over = statistics.mean(run[name]["over"] for run in runs)
            idle = statistics.mean(run[name]["idle"] for run in runs)
            again = []
            for run in runs:
                least = min(result["prefilled"] for result in run.values())
                again.append(run[name]["prefilled"] / least)
            row = f"{over:.2f} | {idle:.0%} | {statistics.mean(again):.2f}"
            lines.append(f"| {count} | {name} | {row} |")
    print("\n".join(lines))
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
