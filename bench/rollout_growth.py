"""Processor time of a rollout's turn against trajectories and turns, with the fitted exponents.

    python -m bench.rollout_growth [--trajectories 64 256 1024 4096] [--turns 1 4 16 64 128]

The engine answers at once and the environment does nothing, so that what is measured is the
package's: contexts, tokens, tasks, threads, records. A turn is an answer of 150 tokens and an
observation of 300. CPU milliseconds of the process, all threads, for each turn: with 4 turns
against trajectories, then with 64 trajectories against turns; of each the best of `--rounds`
rollouts. An exponent of 0 is a time that does not grow.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from bench._tokenizer import byte_level_tokenizer
from skyrl_fast.config import EnvironmentConfig, GeneratorConfig, SamplingParams
from skyrl_fast.rollout.engine.protocol import Generation
from skyrl_fast.rollout.env.factory import EnvFactory
from skyrl_fast.rollout.env.protocol import Action, Env, EnvStep
from skyrl_fast.rollout.groups import rollout
from skyrl_fast.train.data.prompts import Prompt
from skyrl_fast.train.flow.frozen_heap import freeze_heap

GROUP = 8  # trajectories of a prompt
USUAL_TURNS, USUAL_TRAJECTORIES = 4, 64
ANSWER_TOKENS, OBSERVATION_TOKENS = 150, 300
CHARACTERS = 4  # of a token
WORDS = np.array(["alpha", "beta", "gamma", "delta", "over", "under", "left", "right", "x1", "y2"])


def main() -> None:
    """Print a Markdown table and an exponent for each direction."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trajectories", nargs="*", type=int, default=[64, 256, 1024, 4096])
    parser.add_argument("--turns", nargs="*", type=int, default=[1, 4, 16, 64, 128])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    milliseconds_of_turn(GROUP, USUAL_TURNS, 1)  # imports, caches
    print(
        "| trajectories | turns | tokens of the last prompt | CPU ms of a turn |\n"
        + "|---:" * 4
        + "|"
    )
    cases = {
        "trajectories": [(number, USUAL_TURNS) for number in options.trajectories],
        "turns": [(USUAL_TRAJECTORIES, number) for number in options.turns],
    }
    exponents = {}
    for name, sizes in cases.items():
        times = []
        for trajectories, turns in sizes:
            milliseconds, tokens = milliseconds_of_turn(trajectories, turns, options.rounds)
            times.append(milliseconds)
            print(f"| {trajectories:,} | {turns} | {tokens:,} | {milliseconds:.2f} |", flush=True)
        index = list(cases).index(name)
        exponents[name] = exponent([size[index] for size in sizes], times)
    for name, value in exponents.items():
        print(f"exponent in {name}: {value:.2f}")


def exponent(sizes: Sequence[int], times: Sequence[float]) -> float:
    """Return the slope of the line through the logarithms.

    Example:
        >>> round(exponent([1, 10, 100], [3.0, 30.0, 300.0]), 2)
        1.0
    """
    return float(np.polyfit(np.log(sizes), np.log(times), 1)[0])


def milliseconds_of_turn(trajectories: int, turns: int, rounds: int) -> tuple[float, int]:
    """Return the CPU milliseconds of a turn, and the tokens of the last turn's prompt."""
    best, tokens = float("inf"), 0
    for _ in range(rounds):
        with freeze_heap():  # as in a run
            before = time.process_time()
            found = asyncio.run(run(trajectories, turns))
            best = min(best, time.process_time() - before)
        assert [len(one.steps) for one in found] == [turns] * trajectories
        tokens = len(found[0].steps[-1].prompt_token_ids)
    return 1e3 * best / (trajectories * turns), tokens


async def run(trajectories: int, turns: int) -> list[Any]:
    """Return the trajectories of a rollout."""
    config = GeneratorConfig(
        context="append",
        max_turns=turns,
        max_input_length=1 << 20,
        n_samples_per_prompt=GROUP,
        sampling_params=SamplingParams(max_generate_length=1 << 10),
    )
    rows = [
        Prompt(f"p{number}", [{"role": "user", "content": text(number)}], "", {})
        for number in range(trajectories // GROUP)
    ]
    factory = EnvFactory(EnvironmentConfig(), make_env=Observing)
    try:
        options = {"phase": "train", "policy_version": 0, "seed": 0}
        return await rollout(rows, Instant(), tokenizer(), factory, config, **options)
    finally:
        await factory.close()


class Instant:
    """An engine that answers at once."""

    async def generate(self, prompt_token_ids: Sequence[int], *_: Any, **__: Any) -> Generation:
        """Return one of the answers, chosen by the length of the prompt."""
        await asyncio.sleep(0)  # so that all trajectories wait at the same time, as for an engine
        ids = answers()[len(prompt_token_ids) % len(answers())]
        # New objects, as an engine returns them.
        return Generation(list(ids), [-0.01 * n for n in range(len(ids))], "stop")


class Observing(Env):
    """An environment that answers each turn with a text, until the last one."""

    def __init__(self, row: dict[str, Any]) -> None:
        self._turns = row["max_turns"]
        self._turn = 0

    def step(self, action: Action) -> EnvStep:
        """Return the next text."""
        self._turn += 1
        return EnvStep(1.0, done=self._turn == self._turns, observations=text(self._turn))


@cache
def tokenizer() -> Any:
    """Return a tokenizer that has learned the words."""
    return byte_level_tokenizer(texts=[text(0)], vocab_size=300)


@cache
def text(number: int) -> str:
    """Return words of as many tokens as an observation has."""
    words = np.random.default_rng(number).choice(WORDS, OBSERVATION_TOKENS)
    return " ".join(words)


@cache
def answers() -> list[list[int]]:
    """Return answers with their end token."""
    made = tokenizer()
    encoded = [made.encode(text(-number - 1 + 100)) for number in range(10)]
    return [[*ids[: ANSWER_TOKENS - 1], made.eos_token_id] for ids in encoded]


if __name__ == "__main__":
    main()
