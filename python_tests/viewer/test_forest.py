"""The forest of a trajectory's calls, found from their tokens."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _stored import WordTokenizer, make_step, make_trajectory
from hypothesis import given
from hypothesis import strategies as st

from skyrl_fast.rollout.token_ids import count_shared
from skyrl_fast.trajectory_store import read_trajectories
from skyrl_fast.trajectory_store.forest import Place, forest
from skyrl_fast.trajectory_store.writer import TrajectoryWriter

# Prompt and answer of each call, and its place.
CALLS: list[tuple[list[int], list[int], tuple[str, int | None]]] = [
    ([1, 2], [10, 11], ("starts", None)),
    ([1, 2, 10, 11, 3], [12, 13], ("continues", 0)),
    ([1, 7], [20], ("starts", None)),  # a sub-agent with the same first token
    ([1, 2, 10, 11, 3, 12, 13, 4], [14], ("continues", 1)),
    ([1, 7, 20, 8], [21], ("continues", 2)),
    ([1, 2, 10, 11, 5], [15], ("continues", 0)),  # another observation: a branch
    ([1, 2, 10, 11, 3, 12, 6], [16], ("forks", 1)),  # a part of an answer
    ([1, 2, 9], [17, 22, 23], ("rewrites", 0)),
    ([1, 2, 9, 17, 8], [24], ("rewrites", 7)),  # too little of the answer
    ([1, 2, 10, 11, 3], [18], ("repeats", 1)),
    ([1, 2], [10, 11], ("repeats", 0)),
    ([1, 2, 10, 11], [19], ("continues", 10)),  # of two calls with the same tokens the later one
]


def stored(calls: list[Any], folder: Path) -> Any:
    steps = [make_step(prompt, response) for prompt, response, *_ in calls]
    writer = TrajectoryWriter(folder / "trajectories", WordTokenizer(), last_step=0)
    writer.write(1, "eval", [make_trajectory("a", 0, steps)])
    (found,) = read_trajectories(folder)
    return found


@pytest.mark.spec("viewer.forest")
def test_places_of_calls(tmp_path: Path) -> None:
    found = forest(stored(CALLS, tmp_path).steps)
    assert found == [Place(*place) for *_, place in CALLS]


def expected(steps: list[Any], number: int) -> Place:
    """Return the place by comparing the prompt with every earlier call."""
    prompt = list(steps[number].prompt_token_ids)
    best: tuple[tuple[int, int, int], Place] = ((-1, -1, -1), Place("starts", None))
    for other, step in enumerate(steps[:number]):
        asked = list(step.prompt_token_ids)
        both = asked + list(step.response_ids)
        shared = count_shared(np.array(prompt), np.array(both))
        if shared == len(both):
            best = max(best, ((shared, 2, other), Place("continues", other)), key=lambda b: b[0])
        elif shared > len(asked):  # of equal answers, the first one sampled these tokens
            half = 2 * (shared - len(asked)) >= len(step.response_ids)
            kind = "forks" if half else "rewrites"
            best = max(best, ((shared, 1, -other), Place(kind, other)), key=lambda b: b[0])
        elif shared == len(asked):
            best = max(best, ((shared, 0, -other), Place("rewrites", other)), key=lambda b: b[0])
    same = [n for n in range(number) if list(steps[n].prompt_token_ids) == prompt]
    return Place("repeats", same[0]) if same else best[1]


TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=4)


@given(st.lists(st.tuples(TOKENS, TOKENS, st.integers(0, 9)), min_size=1, max_size=8))
def test_places_are_those_of_a_comparison_with_every_call(drawn: list[Any]) -> None:
    calls: list[tuple[list[int], list[int]]] = []
    for prompt, response, of in drawn:
        if of < len(calls):  # a conversation that grows
            prompt = [*calls[of][0], *calls[of][1], *prompt]
        calls.append((prompt, response))
    steps = [make_step(prompt, response) for prompt, response in calls]
    assert forest(steps) == [expected(steps, n) for n in range(len(steps))]  # type: ignore[arg-type]


def test_a_long_line_is_found_in_linear_memory() -> None:
    steps, prompt = [], [1]
    for n in range(200):
        response = np.arange(50) + n
        steps.append(make_step(prompt, response.tolist()))
        prompt = [*prompt, *response.tolist(), 5]
    places = forest(steps)  # type: ignore[arg-type]
    assert [place.parent for place in places] == [None, *range(199)]
