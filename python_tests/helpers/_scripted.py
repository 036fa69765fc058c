"""Random trajectories of a scripted world, and what their records do not say.

Contexts grow, fork, drift or end early; answers may be empty or end in an appended token;
trajectories may fail or have no step.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from _fakes import FIRST_WORD, OBSERVATION, VOCABULARY
from reference.rows import Sample

from skyrl_fast.rollout.trajectory import SUMMARISE, Step, Trajectory

START = 1
END = 2
WORDS = range(FIRST_WORD, VOCABULARY)
SIGHTS = ("left", "right")
REWARDS = (0.0, 0.0, 1.0, 1.0, 0.5, -0.25)
PARTS = ("correct", "short")  # of rewards, by name
UNREPORTED = 0.2  # share of parts that a trajectory does not report
ENDS = ("stop", "stop", "stop", "length", "max_turns", "timeout")
LONGEST_ANSWER = 4
DRIFT = 2  # most tokens that come back as others
NOISE = 0.3  # standard deviation of trainer minus sampler, in nats
LARGEST_LOGPROB = -1e-3
# Shares of what may happen to a trajectory, and to a context.
WITHOUT_STEPS = 0.06
FAILED = 0.06
UNIFORM_GROUPS = 0.2
APPENDED_END = 0.3
GROWS = 0.6
BEGINS_AGAIN = 0.15
ENDS_EARLY = 0.1
ENDS_SUMMARISED = 0.1

# Log-probabilities of the response of (prompt, response, kept ids of its tokens).
Scores = Callable[[Sequence[tuple[list[int], list[int], list[list[int]]]]], list[list[float]]]


@dataclass(frozen=True, slots=True)
class World:
    """What may happen in trajectories.

    Args:
        policies: names; empty: one policy.
        only_grows: each prompt begins with the context before it.
        is_recorded: steps have number, parent and state, as an agent's calls have.
        num_kept: ids that a token is sampled from; 0: the vocabulary.
        may_fail: whether trajectories fail, or have no step.
        summarises: steps after which a context begins again may be summaries.
    """

    policies: tuple[str, ...] = ()
    only_grows: bool = False
    is_recorded: bool = False
    num_kept: int = 0
    may_fail: bool = True
    summarises: bool = False


@dataclass(slots=True)
class Context:
    """Tokens, and whether each is a part of an answer."""

    tokens: list[int]
    is_answer: list[bool]

    def extended(self, tokens: Sequence[int], *, is_answer: bool) -> "Context":
        marks = [is_answer] * len(tokens)
        return Context([*self.tokens, *tokens], [*self.is_answer, *marks])


def report_parts(rng: random.Random, samples: Sequence[Sample]) -> None:
    """Let the trajectories report named parts of their rewards."""
    for sample in samples:
        for name in PARTS:
            if rng.random() >= UNREPORTED:
                sample.trajectory.env_metrics[name] = rng.choice(REWARDS)


def random_samples(
    rng: random.Random, world: World, uids: Sequence[str], samples_per_prompt: int
) -> list[Sample]:
    """Return the samples of all prompts, without log-probabilities; see `fill_logprobs`."""
    samples = []
    for index, uid in enumerate(uids):
        word = rng.choice(WORDS)
        # One at least in each run: rules for rows without an advantage depend on it.
        is_uniform = index == 1 or rng.random() < UNIFORM_GROUPS
        for number in range(samples_per_prompt):
            sample = _sample(rng, world, uid, number, word)
            if is_uniform:
                for step in sample.trajectory.steps:
                    step.reward = 0.5
                sample.trajectory.policy_rewards = {}
            samples.append(sample)
    return samples


def fill_logprobs(rng: random.Random, samples: Sequence[Sample], scores: Scores) -> None:
    """Give each sampled token a log-probability near that of the scores."""
    steps = [step for sample in samples for step in sample.trajectory.steps]
    of_steps = [
        (
            list(step.prompt_token_ids),
            step.response_ids,
            [list(map(int, kept)) for kept in step.kept_ids or [()] * len(step.response_ids)],
        )
        for step in steps
    ]
    for step, values in zip(steps, scores(of_steps), strict=True):
        step.rollout_logprobs = [
            min(value + rng.gauss(0, NOISE), LARGEST_LOGPROB) if is_sampled else 0.0
            for value, is_sampled in zip(values, step.loss_mask, strict=True)
        ]


def _sample(rng: random.Random, world: World, uid: str, number: int, word: int) -> Sample:
    trajectory = Trajectory(uid, number, env_class="fake", seconds=rng.random())
    fate = rng.random()
    if world.may_fail and fate < WITHOUT_STEPS:
        trajectory.stop_reason = "length"
        return Sample(trajectory, [])
    trajectory.stop_reason = rng.choice(ENDS)
    context = Context([START, word], [False, False])
    contexts: list[Context] = []
    for turn in range(rng.choice((1, 2, 2, 3, 4))):
        if turn:
            before = trajectory.steps[-1]
            context = _next_context(rng, world, contexts[-1], before)
            begins_again = len(context.tokens) < len(contexts[-1].tokens)
            if world.summarises and begins_again and before.response_ids:
                before.kind = SUMMARISE
        step = _step(rng, world, context)
        if world.is_recorded:
            _record(rng, step, turn)
        contexts.append(context)
        trajectory.steps.append(step)
    if world.summarises and trajectory.steps[-1].response_ids and rng.random() < ENDS_SUMMARISED:
        trajectory.steps[-1].kind = SUMMARISE
    trajectory.steps[-1].stop_reason = trajectory.stop_reason
    if world.may_fail and WITHOUT_STEPS <= fate < WITHOUT_STEPS + FAILED:
        trajectory.failure = "broken"
        trajectory.stop_reason = "env_error"
    for name in world.policies:
        if rng.random() < 0.25:
            trajectory.policy_rewards[name] = rng.choice(REWARDS)
    return Sample(trajectory, [context.is_answer for context in contexts])


def _next_context(rng: random.Random, world: World, before: Context, step: Step) -> Context:
    """Return the prompt after a step."""
    context = before.extended(step.response_ids, is_answer=True)
    # The first token is never an answer's: what was said and what was seen can be told apart.
    words = [rng.choice(WORDS) for _ in range(rng.randint(0, 2))]
    observation = rng.choice(([], [OBSERVATION, *words]))
    way = rng.random()
    length = len(step.response_ids)
    if world.only_grows or way < GROWS or length <= DRIFT:
        return context.extended(observation, is_answer=False)
    if way < GROWS + BEGINS_AGAIN:  # begins again
        start = Context(before.tokens[:2], before.is_answer[:2])
        again = start.extended([OBSERVATION, *words], is_answer=False)
        # Where the answer was, its tokens would be taken for it.
        if again.tokens[: len(before.tokens)] == before.tokens:
            again = start.extended([OBSERVATION], is_answer=False)
        return again
    kept = len(context.tokens) - rng.randint(1, DRIFT)
    shorter = Context(context.tokens[:kept], context.is_answer[:kept])
    if way < GROWS + BEGINS_AGAIN + ENDS_EARLY:  # ends early
        return shorter
    others = [FIRST_WORD + (token - FIRST_WORD + 1) % len(WORDS) for token in context.tokens[kept:]]
    return shorter.extended(others, is_answer=True).extended(observation, is_answer=False)


def _step(rng: random.Random, world: World, context: Context) -> Step:
    length = rng.choice((0, 1, 2, 3, 3, LONGEST_ANSWER))
    sampled = [rng.choice(WORDS) for _ in range(length)]
    kept: list[Any] | None = None
    if world.num_kept:
        kept = [_kept_ids(rng, token, world.num_kept) for token in sampled]
    may_append = 0 < length < LONGEST_ANSWER
    appended = [END] if may_append and rng.random() < APPENDED_END else []
    if kept is not None:
        kept += [np.zeros(0, np.int32) for _ in appended]
    policy = None
    if world.policies:
        policy = rng.choice((*world.policies, *world.policies, "reference"))
    return Step(
        prompt_token_ids=list(context.tokens),
        response_ids=sampled + appended,
        loss_mask=[1] * length + [0] * len(appended),
        rollout_logprobs=None,
        reward=rng.choice(REWARDS),
        stop_reason=rng.choice(("stop", "stop", "length")),
        policy_version=0,
        text="",
        observation=rng.choice(SIGHTS),
        llm_seconds=rng.random(),
        env_seconds=rng.random(),
        kept_ids=kept,
        policy=policy,
    )


def _record(rng: random.Random, step: Step, turn: int) -> None:
    """Fill in what a gateway records; it sees no environment's answer."""
    step.number = turn
    step.parent = turn - 1 if turn else None
    step.state = rng.choice(SIGHTS)
    step.observation = ""


def _kept_ids(rng: random.Random, token: int, number: int) -> np.ndarray:
    others = rng.sample([other for other in range(VOCABULARY) if other != token], number - 1)
    return np.array(sorted([token, *others]), dtype=np.int32)
