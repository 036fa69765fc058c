"""Rewards of one trajectory's calls: posted, or returned by the agent."""

from __future__ import annotations

import re

from skyrl_fast.gateway.messages import ApiError, Outcome
from skyrl_fast.rollout.env.answers import LARGEST_REWARD
from skyrl_fast.rollout.trajectory import Step


class Rewards:
    """Adds rewards to steps at the trajectory's end: until then a step's answer may be lost."""

    def __init__(self) -> None:
        self._calls: dict[str, Step] = {}  # the first choice's step, by id of the answer
        self._spans: dict[str, list[Step]] = {}  # the steps of each span
        self._given: list[tuple[str | None, str | None, float]] = []  # id, span, reward

    def add_answer(self, answer_id: str, steps: list[Step], span: str | None) -> None:
        self._calls[answer_id] = steps[0]
        if span is not None:
            self._spans.setdefault(span, []).extend(steps)

    def withdraw(self, answer_id: str, steps: list[Step]) -> bool:
        """Forget an answer, if no reward was given to it; return whether it is forgotten."""
        gone = {id(step) for step in steps}
        spans = {
            span: [step for step in of_span if id(step) not in gone]
            for span, of_span in self._spans.items()
        }
        if any(call == answer_id or spans.get(span or "") == [] for call, span, _ in self._given):
            return False
        self._calls.pop(answer_id, None)
        self._spans = {span: of_span for span, of_span in spans.items() if of_span}
        return True

    def add(self, value: float, *, call: str | None = None, span: str | None = None) -> None:
        """Add a reward to a call, to the last step of a span, or to the trajectory.

        Args:
            value: finite in float32, also added to the rewards before it.
            call: id of the answer, with or without the prefix of its dialect.

        Raises:
            ApiError: there is no such call or span, or the value is not finite.
        """
        if not sum((abs(given) for _, _, given in self._given), abs(value)) <= LARGEST_REWARD:
            raise ApiError(400, f"reward: expected a finite float32 number, got {value}")
        if call is None:
            name = None
        else:
            name = re.split("[-_]", call)[-1]
        if name is not None and name not in self._calls:
            raise ApiError(404, "no trained answer of this trajectory has this id")
        if span is not None and span not in self._spans:
            raise ApiError(404, "no trained answer of this trajectory has this span")
        self._given.append((name, span, value))

    def apply(self, outcome: Outcome, last: Step) -> None:
        """Add rewards to their steps, the trajectory's to `last`; ApiError for an invalid one."""
        before = list(self._given)
        posted = any(call is None and span is None for call, span, _ in self._given)
        try:
            for answer, value in outcome.call_rewards.items():
                self.add(value, call=answer)
            if outcome.reward is not None and not (posted and outcome.unless_posted):
                self.add(outcome.reward)
        except ApiError:
            self._given = before  # none of them, where one is wrong
            raise
        for call, span, value in self._given:
            if call:
                step = self._calls[call]
            elif span:
                step = self._spans[span][-1]
            else:
                step = last
            step.reward += value
