"""Reading of a run's trajectories, also while the run is in progress or after it was killed."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from skyrl_fast.rollout.token_ids import TokenIds, ids_array
from skyrl_fast.trajectory_store.parts import (
    IndexEntry,
    RunPart,
    index_entry,
    parts,
    read_index_file,
    read_lines,
)
from skyrl_fast.trajectory_store.record import FORMAT
from skyrl_fast.trajectory_store.replay import read_kept_ids, read_routes

FOLDER = "trajectories"


@dataclass(frozen=True, slots=True, eq=False)
class StoredStep:
    """One step: prompt, response, and the values it was trained with. A response tokens.

    Args:
        prompt_token_ids: the complete context, whose parts the steps share.
        response_ids: (A,) ints.
        pieces: A strings, the text of each token; joined they are the response.
        loss_mask: (A,) uint8, 1 = trained; in an evaluation 1 = sampled.
        policy_versions: (A,) int64, policy version that sampled the token.
        rollout_logprobs, trainer_logprobs, advantages: (A,) float32, NaN where there is none.
        turn: the turn's other values in the line, such as "observation" and "reward".
        kept_ids: for each response token the ids, int32, that it was sampled from; None: the
            vocabulary, or not stored.
        routes: integers [tokens, layers, experts per token]; None: none, or not stored.
    """

    prompt_token_ids: TokenIds
    response_ids: list[int]
    pieces: list[str]
    loss_mask: np.ndarray
    policy_versions: np.ndarray
    rollout_logprobs: np.ndarray
    trainer_logprobs: np.ndarray
    advantages: np.ndarray
    turn: Mapping[str, Any]
    kept_ids: list[np.ndarray] | None = None
    routes: np.ndarray | None = None


@dataclass(frozen=True, slots=True, eq=False)
class StoredTrajectory:
    """One trajectory: its index entry, its steps, and the environment's metrics.

    `other_calls`: of an agent, which are no steps: each with the values of `OtherCall`.
    `not_stored`: what its steps had, and the store does not: "kept_ids", "routes".
    `policy_rewards`: of policies with an outcome of their own.
    `failure_trace`: the calls in the user's code that ended in the failure; "" for none.
    """

    entry: IndexEntry
    steps: list[StoredStep]
    env_metrics: Mapping[str, Any]
    other_calls: Sequence[Mapping[str, Any]] = ()
    not_stored: Sequence[str] = ()
    policy_rewards: Mapping[str, float] = field(default_factory=dict)
    failure_trace: str = ""


def read_index(run: str | Path) -> list[IndexEntry]:
    """Return the index entry of each trajectory of a run, by step, evaluations after the batch.

    Example:
        >>> failed = [entry for entry in read_index("runs/guess") if entry.failure]
        >>> pandas.DataFrame(map(dataclasses.asdict, read_index("runs/guess")))
    """
    folder = Path(run) / FOLDER
    indexed = read_index_file(folder)
    entries: list[IndexEntry] = []
    for part in parts(folder):
        found = indexed.get(part.path.name)
        if found is None:
            entries += [entry for entry, _ in read_part(part)]
        else:
            entries += found
    return entries


def read_trajectories(
    run: str | Path, *, phase: str | None = None, steps: Container[int] | None = None
) -> Iterator[StoredTrajectory]:
    """Yield the trajectories of a run, in the order of `read_index`.

    Args:
        phase: "train" or "eval"; None: both.
        steps: only trajectories of these steps, for example a `range`; None: all.

    Raises:
        ValueError: unknown phase, or lines of another format.

    Example:
        >>> for trajectory in read_trajectories("runs/guess", phase="train", steps=range(5, 9)):
        ...     print(trajectory.entry.uid, trajectory.steps[-1].advantages.mean())
    """
    if phase not in (None, "train", "eval"):
        raise ValueError(f"read_trajectories: phase: expected 'train' or 'eval', got {phase!r}")
    for part in parts(Path(run) / FOLDER):
        if steps is not None and part.step not in steps:
            continue
        if phase is not None and part.evaluation != (phase == "eval"):
            continue
        for entry, record in read_part(part):
            yield parse_trajectory(entry, record)


def read_part(part: RunPart) -> Iterator[tuple[IndexEntry, dict[str, Any]]]:
    """Yield index entry and record of each complete line of a part.

    Raises:
        ValueError: lines of another format, or lines that are not trajectories.
    """
    for offset, size, record in read_lines(part.path):
        if record.get("format") != FORMAT:
            raise ValueError(
                f"{part.path}: expected trajectories of format {FORMAT}, got "
                f"{record.get('format')!r}: written by another version of this package"
            )
        try:
            entry = index_entry(record, part.path.name, offset, size)
        except (AttributeError, LookupError, TypeError) as error:
            raise invalid_line_error(part, offset, error) from error
        yield entry, record


def invalid_line_error(part: RunPart, offset: int, error: Exception) -> ValueError:
    """Return the error for a line that lacks values of a trajectory or has wrong ones."""
    return ValueError(
        f"{part.path}: the line at byte {offset} is not a trajectory: "
        f"{type(error).__name__}: {error}"
    )


def parse_trajectory(entry: IndexEntry, record: Mapping[str, Any]) -> StoredTrajectory:
    steps: list[StoredStep] = []
    before = TokenIds([])
    routes: np.ndarray | None = None
    for turn, tokens in zip(record["turns"], record["tokens"], strict=True):
        shared = before.prefix(tokens["prompt_shared"])
        prompt = TokenIds([*shared.parts, ids_array(tokens["prompt_token_ids"])])
        count = len(tokens["response_ids"])
        routes = read_routes(tokens, routes)
        steps.append(
            StoredStep(
                prompt_token_ids=prompt,
                response_ids=tokens["response_ids"],
                pieces=pieces_of(turn["response"], tokens["response_ends"]),
                loss_mask=np.array(tokens["loss_mask"], dtype=np.uint8),
                policy_versions=np.array(
                    tokens["policy_versions"] or [turn["policy_version"]] * count, dtype=np.int64
                ),
                rollout_logprobs=_floats(tokens["rollout_logprobs"], count),
                trainer_logprobs=_floats(tokens["trainer_logprobs"], count),
                advantages=_floats(tokens["advantages"], count),
                turn=turn,
                kept_ids=read_kept_ids(tokens),
                routes=routes,
            )
        )
        before = TokenIds([*prompt.parts, ids_array(tokens["response_ids"])])
    return StoredTrajectory(
        entry=entry,
        steps=steps,
        env_metrics=record["env_metrics"],
        other_calls=record.get("other_calls", ()),
        not_stored=record.get("not_stored", ()),
        policy_rewards=record.get("policy_rewards", {}),
        failure_trace=record.get("failure_trace", ""),
    )


def pieces_of(text: str, ends: Sequence[int]) -> list[str]:
    """Return the text of each token.

    Example:
        >>> pieces_of("look at", [4, 7])
        ['look', ' at']
    """
    result: list[str] = []
    for start, end in zip([0, *ends], ends, strict=False):
        result.append(text[start:end])
    return result


def _floats(values: Sequence[float | None], count: int) -> np.ndarray:
    return np.array(values or [np.nan] * count, dtype=np.float32)  # None becomes NaN
