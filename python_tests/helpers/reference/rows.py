"""Rows of a batch, from the recorded steps of trajectories (sections 1, 10, 20 and 21)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from skyrl_fast.rollout.trajectory import Step, Trajectory

FORK = "fork"
FIRST_PROMPT = ""  # the state of a trajectory's first step


class CannotJoinError(Exception):
    """The steps of a trajectory are not one row, where the settings want one."""


@dataclass(slots=True)
class Sample:
    """A trajectory, and what its record does not say.

    Args:
        is_answer: of each step, for each token of its prompt, whether it is a part of an earlier
            answer, of whichever policy, perhaps in other tokens.
    """

    trajectory: Trajectory
    is_answer: list[list[bool]]


@dataclass(slots=True)
class Turn:
    """A step of one policy, with its reward after the division by policies."""

    step: Step
    is_answer: list[bool]
    state: str
    reward: float
    stop: str
    context: int = 0


@dataclass(slots=True)
class Part:
    """What one policy did in a trajectory."""

    uid: str
    sample: int
    turns: list[Turn]
    stop: str
    has_failed: bool
    first_prompt: list[int]
    reported: dict[str, float] = field(default_factory=dict)  # numbers by name


@dataclass(slots=True)
class Row:
    """A training row.

    Args:
        rewards: of each response token.
        leading: reward that comes before the first response token.
        trailing: reward that comes after the last token: of a row without response tokens.
        kept: for each response token the ids that it was sampled from; empty: the vocabulary.
        is_observed: for each response token, whether the environment wrote it.
        is_summary: for each response token, whether it is one of a summary.
        steps: how many steps were joined.
        reported: numbers of the trajectory by name, which may be parts of its reward.
        context: number of its last step's context in the trajectory.
    """

    uid: str
    sample: int
    prompt: list[int]
    response: list[int]
    mask: list[int]
    sampled: list[float]
    rewards: list[float]
    stop: str
    state: str = FIRST_PROMPT
    leading: float = 0.0
    trailing: float = 0.0
    kept: list[list[int]] = field(default_factory=list)
    is_observed: list[bool] = field(default_factory=list)
    is_summary: list[bool] = field(default_factory=list)
    is_last: bool = False
    is_placeholder: bool = False
    steps: int = 1
    reported: dict[str, float] = field(default_factory=dict)
    context: int = 0

    @property
    def reward(self) -> float:
        return self.leading + sum(self.rewards) + self.trailing

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.response

    @property
    def trajectory(self) -> tuple[str, int]:
        return self.uid, self.sample

    @property
    def is_live(self) -> bool:
        return any(self.mask)


def states_of(trajectory: Trajectory) -> list[str]:
    """Return what the environment showed before each step."""
    states = []
    before: Step | None = None
    for step in trajectory.steps:
        if step.number is not None:
            states.append(step.state or FIRST_PROMPT)
        else:
            states.append(FIRST_PROMPT if before is None else before.observation)
        before = step
    return states


def contexts_of(trajectory: Trajectory) -> list[int]:
    """Return the number of each step's context.

    One begins with a step that continues no other, or whose prompt is shorter than that of the one
    it continues.
    """
    found: list[int] = []
    place_of: dict[int | None, int] = {}
    for place, step in enumerate(trajectory.steps):
        before = place_of.get(step.parent)
        if step.number is None:
            before = place - 1 if place else None
        continues = before is not None
        if continues:
            length = len(trajectory.steps[before].prompt_token_ids)
            continues = len(step.prompt_token_ids) >= length
        found.append(found[before] if continues else max(found, default=-1) + 1)
        place_of[place if step.number is None else step.number] = place
    return found


def complete_parts(samples: Iterable[Sample]) -> list[Part]:
    """Return the parts of a run with one policy: complete trajectories."""
    return [_part(sample, sample.trajectory.steps) for sample in samples]


def parts_of_policy(samples: Sequence[Sample], name: str, *, sums_rewards: bool) -> list[Part]:
    """Return what the policy did; its outcome is that of the trajectory or of the name.

    A prompt in which it did nothing has one part without turns, so that mini-batches have the same
    prompts for all policies. Without any step of the policy there is no part.
    """
    own = {id(sample): _steps_of(sample, name) for sample in samples}
    if not any(own.values()):
        return []
    parts = []
    for _, group in groupby(samples, key=lambda sample: sample.trajectory.uid):
        members = list(group)
        called = [
            sample for sample in members if own[id(sample)] or sample.trajectory.failure is not None
        ]
        for sample in called or members[:1]:
            part = _part(sample, own[id(sample)])
            _set_outcome(part, sample.trajectory, name, sums_rewards=sums_rewards)
            parts.append(part)
    return parts


def _steps_of(sample: Sample, name: str) -> list[Step]:
    return [step for step in sample.trajectory.steps if step.policy == name]


def _set_outcome(part: Part, trajectory: Trajectory, name: str, *, sums_rewards: bool) -> None:
    if not part.turns:
        return
    last = part.turns[-1]
    last.stop = trajectory.stop_reason
    rewards = [step.reward for step in trajectory.steps]
    outcome = sum(rewards) if sums_rewards else rewards[-1]
    outcome = trajectory.policy_rewards.get(name, outcome)
    if sums_rewards:
        last.reward = outcome - sum(turn.reward for turn in part.turns[:-1])
    elif last.step is trajectory.steps[-1]:
        last.reward = outcome
    else:
        last.reward += outcome


def _part(sample: Sample, steps: Sequence[Step]) -> Part:
    trajectory = sample.trajectory
    states = states_of(trajectory)
    contexts = contexts_of(trajectory)
    turns = [
        Turn(step, is_answer, state, step.reward, step.stop_reason, context)
        for step, is_answer, state, context in zip(
            trajectory.steps, sample.is_answer, states, contexts, strict=True
        )
        if any(step is one for one in steps)
    ]
    first = list(steps[0].prompt_token_ids) if steps else [0]
    return Part(
        uid=trajectory.uid,
        sample=trajectory.repetition_id,
        turns=turns,
        stop=trajectory.stop_reason,
        has_failed=trajectory.failure is not None,
        first_prompt=first,
        reported=dict(trajectory.env_metrics),
    )


def merges_steps(config: Any) -> bool:
    return bool(config.trainer.rows != "step")


def build_rows(parts: Iterable[Part], config: Any, *, sums_rewards: bool) -> list[Row]:
    """Return the rows in the form that the settings choose."""
    generator = config.generator
    one_row = config.trainer.rows == "trajectory"
    merges = merges_steps(config)
    rows = []
    for part in parts:
        if part.has_failed or not part.turns:
            rows.append(_placeholder(part))
            continue
        own = [_row_of_turn(part, turn) for turn in part.turns]
        if merges:
            drift = 0 if generator.merge_drift == FORK else generator.merge_max_drift_tokens
            own = _join(own, part.turns, drift, keeps_rewards=sums_rewards)
        if one_row and len(own) > 1:
            raise CannotJoinError(part.uid)
        own[-1].is_last = True
        rows += own
    return rows


def rows_of_turns(parts: Iterable[Part]) -> list[Row]:
    """Return a row per turn, whatever form is trained; one of a trajectory without turns."""
    rows = []
    for part in parts:
        own = [_row_of_turn(part, turn) for turn in part.turns]
        if part.has_failed or not own:
            own = [_placeholder(part)]
        own[-1].is_last = True
        rows += own
    return rows


def _placeholder(part: Part) -> Row:
    row = Row(part.uid, part.sample, part.first_prompt, [], [], [], [], part.stop)
    return replace(row, is_last=True, is_placeholder=True)


def _row_of_turn(part: Part, turn: Turn) -> Row:
    step = turn.step
    length = len(step.response_ids)
    rewards = [0.0] * length
    trailing = 0.0
    if rewards:
        rewards[-1] = turn.reward
    else:
        trailing = turn.reward
    kept = [[]] * length
    if step.kept_ids is not None:
        kept = [[int(token) for token in one] for one in step.kept_ids]
    return Row(
        uid=part.uid,
        sample=part.sample,
        prompt=list(step.prompt_token_ids),
        response=list(step.response_ids),
        mask=list(step.loss_mask),
        sampled=list(step.rollout_logprobs or [0.0] * length),
        rewards=rewards,
        trailing=trailing,
        stop=turn.stop,
        state=turn.state,
        kept=kept,
        is_observed=[False] * length,
        is_summary=[step.kind == "summarise"] * length,
        reported=dict(part.reported),
        context=turn.context,
    )


def _join(
    rows: Sequence[Row], turns: Sequence[Turn], most_dropped: int, *, keeps_rewards: bool
) -> list[Row]:
    """Join each row to the one before it where that is a prefix of its prompt, or drifted."""
    joined: list[Row] = []
    for row, turn in zip(rows, turns, strict=True):
        shared = _shared(joined[-1], row, most_dropped) if joined else None
        if shared is None:
            joined.append(row)
        else:
            _append(joined[-1], row, turn, shared, keeps_rewards=keeps_rewards)
    return joined


def _shared(before: Row, row: Row, most_dropped: int) -> int | None:
    """Return how many tokens of the row so far stay; None: the step begins another row."""
    tokens = before.tokens
    shared = 0
    while shared < min(len(tokens), len(row.prompt)) and tokens[shared] == row.prompt[shared]:
        shared += 1
    if shared == len(tokens):
        return shared
    if len(tokens) - shared > most_dropped or not before.is_live:
        return None
    end = max(index for index, trained in enumerate(before.mask) if trained)
    begin = end
    while begin > 0 and before.mask[begin - 1]:
        begin -= 1
    is_in_last_run = shared - 1 >= len(before.prompt) + begin
    return shared if is_in_last_run else None


def _append(row: Row, other: Row, turn: Turn, shared: int, *, keeps_rewards: bool) -> None:
    stays = shared - len(row.prompt)
    dropped_reward = sum(row.rewards[stays:])
    for values in (
        row.response,
        row.mask,
        row.sampled,
        row.rewards,
        row.kept,
        row.is_observed,
        row.is_summary,
    ):
        del values[stays:]
    if row.rewards:
        row.rewards[-1] += dropped_reward
    row.leading += row.trailing  # of a response without tokens
    row.trailing = 0.0
    delta = other.prompt[shared:]
    row.response += delta
    row.mask += [0] * len(delta)
    row.sampled += [0.0] * len(delta)
    row.rewards += [0.0] * len(delta)
    row.kept += [[]] * len(delta)
    row.is_observed += [not answer for answer in turn.is_answer[shared:]]
    row.is_summary += [False] * len(delta)
    if row.rewards:
        row.rewards[0] += row.leading  # of an empty response with nothing before it
        row.leading = 0.0
    if not other.response and row.rewards:
        row.rewards[-1] += other.trailing
    elif not other.response:
        row.trailing += other.trailing
    row.response += other.response
    row.mask += other.mask
    row.sampled += other.sampled
    row.rewards += other.rewards
    if row.rewards:
        row.rewards[0] += row.leading
        row.leading = 0.0
    row.kept += other.kept
    row.is_observed += other.is_observed
    row.is_summary += other.is_summary
    row.stop = other.stop
    row.state = other.state
    row.context = other.context
    row.steps += 1
    if not keeps_rewards:
        _set_reward(row, turn.reward)


def _set_reward(row: Row, reward: float) -> None:
    row.leading = row.trailing = 0.0
    row.rewards[:] = [0.0] * len(row.rewards)
    if row.rewards:
        row.rewards[-1] = reward
    else:
        row.trailing = reward
