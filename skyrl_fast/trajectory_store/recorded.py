"""Stored trajectories as training data: `Trajectory` objects, and chats for fine-tuning."""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from skyrl_fast.rollout.trajectory import ACT, OtherCall, Step, Trajectory
from skyrl_fast.system.digests import chain_digest
from skyrl_fast.trajectory_store.parts import read_lines
from skyrl_fast.trajectory_store.reader import StoredStep, StoredTrajectory, read_trajectories

MESSAGES = "messages.jsonl"  # in the folder of a recording
TEMPLATE_KEYS = ("tools", "chat_template_kwargs")  # keys of a call there


def read_recorded(
    run: str | Path,
    *,
    phase: str | None = None,
    steps: Container[int] | None = None,
    min_reward: float | None = None,
) -> list[Trajectory]:
    """Return the stored trajectories, groups adjacent, for `batch_from_trajectories`.

    Log-probabilities have the store's 6 decimals. Of a training run, a prompt has a group in each
    step that trains it; that of a later one has its step in the uid.

    Args:
        phase: as for `read_trajectories`; None: of a recording all, of a training run "train".
        steps: only trajectories of these steps; None: all.
        min_reward: leave out trajectories with less.

    Raises:
        ValueError: unknown phase, lines of another format, or trajectories with kept ids or routes
            of experts, which the store of a training run does not have: they would be trained under
            another distribution than the one that sampled them.
    """
    is_run = not (Path(run) / MESSAGES).is_file()
    if phase is None and is_run:
        phase = "train"
    groups: dict[str, list[Trajectory]] = {}
    first_steps: dict[str, int] = {}
    for stored in read_trajectories(run, phase=phase, steps=steps):
        reward = stored.entry.reward
        if min_reward is None or (reward is not None and reward >= min_reward):
            _check_complete(run, stored)
            uid = stored.entry.uid
            step = stored.entry.step
            if is_run and first_steps.setdefault(uid, step) != step:
                uid = f"{uid}~{step}"
            groups.setdefault(uid, []).append(_trajectory(stored, uid))
    return [trajectory for group in groups.values() for trajectory in group]


def _check_complete(run: str | Path, stored: StoredTrajectory) -> None:
    if stored.not_stored:
        entry = stored.entry
        raise ValueError(
            f"{run}: trajectory {entry.uid!r} #{entry.repetition_id} was sampled with "
            f"{' and '.join(stored.not_stored)}, without which it cannot be trained; the store of "
            "a training run does not have them, a recording of skyrl-fast gateway has"
        )


def _trajectory(stored: StoredTrajectory, uid: str) -> Trajectory:
    entry = stored.entry
    return Trajectory(
        uid=uid,
        repetition_id=entry.repetition_id,
        steps=list(map(_step, stored.steps)),
        stop_reason=entry.stop_reason,
        env_class=entry.env_class,
        env_metrics=dict(stored.env_metrics),
        policy_rewards=dict(stored.policy_rewards),
        seconds=entry.seconds,
        failure=entry.failure or None,
        failure_trace=stored.failure_trace,
        phase=entry.phase,
        data_source=entry.data_source or None,
        other_calls=[OtherCall(**call) for call in stored.other_calls],
    )


def _step(stored: StoredStep) -> Step:
    turn = stored.turn
    versions = stored.policy_versions.tolist()
    known = not np.isnan(stored.rollout_logprobs).any()
    if known:
        rollout_logprobs = stored.rollout_logprobs.tolist()
    else:
        rollout_logprobs = None
    if len(set(versions)) > 1:
        token_versions = versions
    else:
        token_versions = None
    return Step(
        prompt_token_ids=stored.prompt_token_ids,
        response_ids=stored.response_ids,
        loss_mask=stored.loss_mask.tolist(),
        rollout_logprobs=rollout_logprobs,
        reward=float(turn["reward"] or 0.0),
        stop_reason=turn["stop_reason"],
        policy_version=turn["policy_version"],
        text=turn["response"],
        observation=turn["observation"],
        llm_seconds=turn["llm_seconds"],
        env_seconds=turn["env_seconds"],
        expert_indices=stored.routes,
        token_versions=token_versions,
        kept_ids=stored.kept_ids,
        policy=turn.get("policy"),
        number=turn.get("number"),
        parent=turn.get("parent"),
        state=turn.get("state"),
        kind=turn.get("kind", ACT),
    )


def sft_rows(run: str | Path, *, min_reward: float | None = None) -> Iterator[dict[str, Any]]:
    """Yield the conversations of a recording as rows of `skyrl-fast sft`.

    A row has `messages`, with the `tools` and `chat_template_kwargs` of its requests. Each answer
    of the policy is trained in one row: a conversation that only grew is one row, a fork is
    another, in which answers that an earlier row trains, and those of other models, have `weight`
    0.

    Args:
        min_reward: leave out sessions with less.

    Raises:
        ValueError: the folder has no messages.
    """
    path = Path(run) / MESSAGES
    if not path.is_file():
        raise ValueError(
            f"{path}: no such file: expected a recording, as `skyrl-fast gateway --record` writes "
            "it; a run has no messages"
        )
    for _, _, session in read_lines(path):
        if min_reward is None or (session["reward"] or 0.0) >= min_reward:
            yield from rows_of_calls(session["calls"])


def rows_of_calls(calls: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    chats: list[list[dict[str, Any]]] = []
    last: list[dict[str, Any]] = []
    for call in calls:
        last = [*last[: call["shared"]], *call["messages"], call["answer"]]
        chats.append(last)
    templates = [{name: call[name] for name in TEMPLATE_KEYS if name in call} for call in calls]
    chains = [_chain(chat, template) for chat, template in zip(chats, templates, strict=True)]
    untrained = {chain[-1] for chain in chains}  # answers that no row has yet
    continued = {digest for chain in chains for digest in chain[:-1]}
    for template, chat, chain in zip(templates, chats, chains, strict=True):
        if chain[-1] in continued or chain[-1] not in untrained:
            continue
        messages = []
        for message, digest in zip(chat, chain, strict=True):
            trained = digest in untrained
            untrained.discard(digest)
            skipped = message["role"] == "assistant" and not trained
            messages.append({**message, "weight": 0} if skipped else message)
        yield {"messages": messages, **template}


def _chain(chat: Sequence[Mapping[str, Any]], template: Mapping[str, Any]) -> list[bytes]:
    """Return a digest of the conversation up to each message; with other tools it is another."""

    def link(before: bytes, message: Any) -> bytes:
        return chain_digest(before, json.dumps(message, sort_keys=True, default=str))

    if template:
        first = link(b"", template)
    else:
        first = b""
    return list(accumulate(chat, link, initial=first))[1:]
