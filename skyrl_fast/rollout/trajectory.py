"""The record of one run of an agent in an environment: a list of steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from skyrl_fast.rollout.engine.protocol import Generation
from skyrl_fast.rollout.stop_reason import STOP
from skyrl_fast.rollout.token_ids import count_shared, ids_array

ACT = "act"  # kinds of calls: the agent acts in its environment
SUMMARISE = "summarise"  # its answer begins the context that replaces this one
OTHER = "other"  # of an agent at the gateway, with nothing in its answers that is used later
KINDS = (ACT, SUMMARISE, OTHER)

PLACEHOLDER_PROMPT = (0,)  # the one attended token of a trajectory without steps


@dataclass(slots=True)
class Step:
    """One call of the language model, gen-only: the response is what was sampled, no observation.

    Args:
        prompt_token_ids: the full context that the model saw; `TokenIds` where steps share parts.
        response_ids: the tokens it sampled (and an end token, where one was appended).
        loss_mask: 1 per sampled token, 0 for an appended end token.
        rollout_logprobs: the sampler's log-probabilities (0.0 for an appended token), or None.
        reward: the environment's answer to this step.
        stop_reason: why the engine stopped; on the last step, what ended the trajectory.
        policy_version: number of weight updates of the policy that sampled; the oldest, if the
            weights were updated during sampling.
        observation: the environment's answer as text; it is part of the next prompt only.
        expert_indices: integers [tokens, layers, experts per token], or None.
        token_versions: the policy version of each response token; None: `policy_version` for all.
        kept_ids: for each response token the ascending ids, int32, of the tokens that it was
            sampled from (`SamplingParams.max_kept_tokens`), empty for an appended token; None: the
            vocabulary.
        num_cached_tokens: leading prompt tokens that were in the engine's prefix cache; None:
            unknown.
        policy: name of the policy that sampled it, or of its role; None: the run has one policy.
        number: name of the step in its trajectory, which it keeps where others are left out; None:
            not recorded, see `recorded_steps`.
        parent: number of the step that its prompt continues; None: of none.
        state: what the environment showed before it: the text of the messages after the last
            answer in its prompt; None: not recorded.
        answers: begin and end of each earlier answer in its prompt, whichever policy gave it;
            None: not determined yet.
        kind: what the call was for, one of `KINDS`.
    """

    prompt_token_ids: Sequence[int]
    response_ids: list[int]
    loss_mask: list[int]
    rollout_logprobs: list[float] | None
    reward: float
    stop_reason: str
    policy_version: int
    text: str
    observation: str
    llm_seconds: float
    env_seconds: float
    expert_indices: np.ndarray | None = None
    token_versions: list[int] | None = None
    kept_ids: list[np.ndarray] | None = None
    num_cached_tokens: int | None = None
    policy: str | None = None
    number: int | None = None
    parent: int | None = None
    state: str | None = None
    answers: tuple[tuple[int, int], ...] | None = None
    kind: str = ACT

    @classmethod
    def from_generation(
        cls,
        prompt_token_ids: Sequence[int],
        generation: Generation,
        *,
        text: str,
        appended_end: int | None = None,
        reward: float = 0.0,
        observation: str = "",
        env_seconds: float = 0.0,
        expert_indices: np.ndarray | None = None,
        policy: str | None = None,
        number: int | None = None,
        parent: int | None = None,
        state: str | None = None,
        kind: str = ACT,
    ) -> Step:
        """Return the step of a call of the policy; other arguments as of `Step`.

        Args:
            appended_end: the end token that is appended to it: mask 0, logprob 0.0, the version of
                the token before it; None: none.

        Example:
            >>> sampled = Generation([5, 6], [-0.1, -0.2], "stop", "</a>", versions=[3, 3])
            >>> step = Step.from_generation([1], sampled, text="hi", appended_end=2)
            >>> step.response_ids, step.loss_mask, step.rollout_logprobs
            ([5, 6, 2], [1, 1, 0], [-0.1, -0.2, 0.0])
        """
        versions = generation.versions
        kept_ids = generation.kept_ids
        assert versions
        if appended_end is None:
            appended = []
        else:
            appended = [appended_end]
        if kept_ids is not None:
            kept_ids = list(kept_ids)
            for _ in appended:
                kept_ids.append(np.zeros(0, np.int32))
        is_one_version = versions[0] == versions[-1]
        if is_one_version:
            token_versions = None
        else:
            token_versions = versions + versions[-1:] * len(appended)
        return cls(
            prompt_token_ids=prompt_token_ids,
            response_ids=generation.token_ids + appended,
            loss_mask=[1] * len(generation.token_ids) + [0] * len(appended),
            rollout_logprobs=generation.logprobs + [0.0] * len(appended),
            reward=reward,
            stop_reason=generation.stop_reason,
            policy_version=versions[0],
            text=text,
            observation=observation,
            llm_seconds=generation.seconds,
            env_seconds=env_seconds,
            expert_indices=expert_indices,
            token_versions=token_versions,
            kept_ids=kept_ids,
            num_cached_tokens=generation.num_cached_tokens,
            policy=policy,
            number=number,
            parent=parent,
            state=state,
            kind=kind,
        )

    @property
    def versions(self) -> list[int]:
        if self.token_versions is None:
            return [self.policy_version] * len(self.response_ids)
        return self.token_versions


@dataclass(frozen=True, slots=True)
class OtherCall:
    """A call of the agent that is not trained: of another model, or under another name.

    Args:
        request, response: what was said, as text, which may be cut.
        before_step: number of steps before it.
    """

    model: str
    request: str
    response: str
    before_step: int
    seconds: float


@dataclass(slots=True)
class Trajectory:
    """All steps of one sample of a prompt, and how it ended.

    Args:
        uid: name of the prompt; trajectories of one prompt form a group.
        repetition_id: which sample of the prompt this is.
        steps: in time order; empty if the first prompt was already too long.
        seconds: wall-clock time from start to end.
        failure: the error that remained after all retries, or None.
        phase: "train" or "eval".
        data_source: name of the data set, or None.
        policy_rewards: outcomes by the policy's name; others have the trajectory's own.
        failure_trace: the calls in the user's code that ended in the failure; "" for none.
    """

    uid: str
    repetition_id: int
    steps: list[Step] = field(default_factory=list)
    stop_reason: str = STOP
    env_class: str = ""
    env_metrics: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    failure: str | None = None
    phase: str = "train"
    data_source: str | None = None
    other_calls: list[OtherCall] = field(default_factory=list)
    policy_rewards: dict[str, float] = field(default_factory=dict)
    failure_trace: str = ""

    def steps_or_placeholder(self) -> list[Step]:
        """Return its steps; one masked placeholder with reward 0 if it failed or has none."""
        if self.steps and self.failure is None:
            return self.steps
        if self.steps:
            first = self.steps[0]
        else:
            first = None
        if first:
            prompt_token_ids = first.prompt_token_ids
        else:
            prompt_token_ids = list(PLACEHOLDER_PROMPT)
        placeholder = Step(
            prompt_token_ids=prompt_token_ids,
            response_ids=[],
            loss_mask=[],
            rollout_logprobs=[],
            reward=0.0,
            stop_reason=self.stop_reason,
            policy_version=first.policy_version if first else 0,
            text="",
            observation="",
            llm_seconds=0.0,
            env_seconds=0.0,
        )
        return [placeholder]

    @property
    def llm_seconds(self) -> float:
        return sum(step.llm_seconds for step in self.steps)

    @property
    def env_seconds(self) -> float:
        return sum(step.env_seconds for step in self.steps)

    @property
    def has_acted(self) -> bool:
        """Whether it is a sample of the policy: it did not fail, and has a step."""
        return bool(self.steps) and self.failure is None

    def outcome(self, *, sums_rewards: bool = False) -> float:
        """Return its reward: the last step's, or the sum of all; 0 if it failed or has no step."""
        if not self.has_acted:
            return 0.0
        if not sums_rewards:
            return float(self.steps[-1].reward)
        return float(sum(step.reward for step in self.steps))


def step_numbers(steps: Sequence[Step]) -> list[int]:
    """Return the steps' numbers; the place in the sequence of a step that has none."""
    result: list[int] = []
    for index, step in enumerate(steps):
        result.append(index if step.number is None else step.number)
    return result


def recorded_steps(trajectory: Trajectory) -> list[Step]:
    """Return the steps of a complete trajectory with number, parent, state and answers.

    What was not recorded is that of one conversation in time order: each step continues the one
    before it, whose observation is its state.
    """
    steps: dict[int, Step] = {}
    before: Step | None = None
    for index, step in enumerate(trajectory.steps):
        if step.number is None:
            if before is None:
                number = None
            else:
                number = before.number
            if before is None:
                state = None
            else:
                state = before.observation
            step = replace(step, number=index, parent=number, state=state)
        if step.answers is None:
            if step.parent is None:
                parent = None
            else:
                parent = steps.get(step.parent)
            step = replace(step, answers=_find_answers(step.prompt_token_ids, parent))
        assert step.number is not None
        steps[step.number] = before = step
    return list(steps.values())


def _find_answers(
    prompt_token_ids: Sequence[int], parent: Step | None
) -> tuple[tuple[int, int], ...]:
    if parent is None or parent.answers is None:
        return ()
    prompt = ids_array(prompt_token_ids)
    before = ids_array(parent.prompt_token_ids)
    context = np.concatenate([before, ids_array(parent.response_ids)])
    shared = count_shared(prompt, context)
    # An answer that comes back in other tokens still has its place: it is no observation.
    places = (*parent.answers, (len(before), len(context)))
    found = []
    for begin, end in places:
        if begin < shared:
            found.append((begin, min(end, len(prompt))))
    return tuple(found)
