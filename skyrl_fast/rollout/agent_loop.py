"""The agent loop: prompts in, trajectories out, many at once.

One turn, in this order: make its prompt, check that prompt's length, generate, settle the end
token, step the environment, emit the gen-only step.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from skyrl_fast.rollout.context import CONTEXTS, Context, make_context
from skyrl_fast.rollout.engine import (
    Engine,
    EngineDeadError,
    EngineError,
    Generation,
    SamplingParams,
)
from skyrl_fast.rollout.env import Env, EnvAnswer, EnvError, EnvFactory, EnvTimeoutError
from skyrl_fast.rollout.trajectory import Step, Trajectory
from skyrl_fast.rollout.turn import SampledTokens, decode_response, request_seed, sampled_tokens

log = logging.getLogger(__name__)

PHASES = ("train", "eval")

# What ended a trajectory. "stop": the environment was done after a response that ended by itself.
STOP = "stop"
LENGTH = "length"  # a prompt over max_input_length, or the last response was cut
MAX_TURNS = "max_turns"
ENV_ERROR = "env_error"
ENGINE_ERROR = "engine_error"
TIMEOUT = "timeout"


class RolloutError(RuntimeError):
    """Not one trajectory succeeded: the set-up is wrong, not a flaky environment."""


class RolloutPrompt(Protocol):
    """One task: what a prompt must have to be rolled out."""

    @property
    def uid(self) -> str:
        """Name of its group."""

    @property
    def messages(self) -> Sequence[Mapping[str, Any]]:
        """The first prompt as chat messages."""

    @property
    def env_class(self) -> str:
        """Name of its environment in skyrl_gym."""

    @property
    def env_extras(self) -> Mapping[str, Any]:
        """What the environment's constructor gets as `extras`."""

    @property
    def data_source(self) -> str | None:
        """Name of the data set, or None."""


@dataclass(frozen=True, slots=True)
class RolloutConfig:
    """Settings of the agent loop.

    Args:
        n_samples_per_prompt: trajectories of one group in training.
        eval_n_samples_per_prompt: the same in evaluation.
        max_turns: most steps of one trajectory.
        max_input_length: no step has a longer prompt.
        sampling_params: of training.
        eval_sampling_params: of evaluation; None: as in training.
        context: "append", "retemplate" or "single"; see `make_context`.
        append_eos_after_stop_string: a response that a stop string ended gets an end token, which
            is not trained.
        chat_template: in place of the tokenizer's own.
        chat_template_kwargs: passed to the chat template.
        max_concurrent_trajectories: agent loops at once.
        trajectory_timeout_seconds: deadline of one attempt at one trajectory.
        max_retries: further attempts after an environment or the engine failed.
    """

    n_samples_per_prompt: int = 1
    eval_n_samples_per_prompt: int = 1
    max_turns: int = 1
    max_input_length: int = 512
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    eval_sampling_params: SamplingParams | None = None
    context: str = "append"
    append_eos_after_stop_string: bool = True
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    max_concurrent_trajectories: int = 256
    trajectory_timeout_seconds: float = 300.0
    max_retries: int = 1

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        for name in (
            "n_samples_per_prompt",
            "eval_n_samples_per_prompt",
            "max_turns",
            "max_input_length",
            "max_concurrent_trajectories",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"RolloutConfig: {name}: wanted >= 1, got {getattr(self, name)}")
        if self.context not in CONTEXTS:
            raise ValueError(
                f"RolloutConfig: context: wanted one of {CONTEXTS}, got {self.context!r}"
            )
        if self.trajectory_timeout_seconds <= 0 or self.max_retries < 0:
            raise ValueError(
                "RolloutConfig: wanted trajectory_timeout_seconds > 0 and max_retries >= 0, got "
                f"{self.trajectory_timeout_seconds} and {self.max_retries}"
            )

    def samples(self, phase: str) -> int:
        """Trajectories per prompt in this phase."""
        return self.n_samples_per_prompt if phase == "train" else self.eval_n_samples_per_prompt

    def sampling(self, phase: str) -> SamplingParams:
        """Sampling parameters of this phase."""
        own = self.eval_sampling_params if phase == "eval" else None
        return self.sampling_params if own is None else own


async def rollout(
    prompts: Sequence[RolloutPrompt],
    engine: Engine,
    tokenizer: Any,
    env_factory: EnvFactory,
    config: RolloutConfig,
    *,
    phase: str,
    policy_version: int,
    seed: int,
    on_trajectory: Callable[[Trajectory], None] | None = None,
) -> list[Trajectory]:
    """Every prompt's group of trajectories, ordered by prompt, then repetition.

    A trajectory whose environment or engine failed is tried again `max_retries` times; then it
    stays with its `failure` named and without trainable rows, and the others go on.

    Args:
        prompts: one per group; uids differ.
        engine: started.
        tokenizer: of transformers, with a chat template and an end-of-sequence token.
        env_factory: makes the environments.
        config: of the loop.
        phase: "train" or "eval".
        policy_version: number of weight updates behind the engine's weights.
        seed: of the run; every request's own seed follows from it and from its place in the run.
        on_trajectory: called with each trajectory as it ends, in order of completion.

    Raises:
        ValueError: an unknown phase, two prompts of one uid, a tokenizer without end token.
        EngineDeadError: the engine is gone.
        RolloutError: every trajectory failed.
    """
    if phase not in PHASES:
        raise ValueError(f"rollout: phase: wanted one of {PHASES}, got {phase!r}")
    if len({prompt.uid for prompt in prompts}) != len(prompts):
        raise ValueError("rollout: prompts: two prompts have the same uid")
    if tokenizer.eos_token_id is None:
        raise ValueError("rollout: tokenizer: it has no end-of-sequence token (eos_token)")
    loop = AgentLoop(
        engine,
        tokenizer,
        env_factory,
        config,
        phase=phase,
        policy_version=policy_version,
        seed=seed,
    )
    slots = asyncio.Semaphore(config.max_concurrent_trajectories)

    async def one(prompt: RolloutPrompt, repetition_id: int) -> Trajectory:
        async with slots:
            trajectory = await loop.run(prompt, repetition_id)
        if on_trajectory is not None:
            on_trajectory(trajectory)
        return trajectory

    async with _first_error() as tasks:
        running = [
            tasks.create_task(one(prompt, repetition_id))
            for prompt in prompts
            for repetition_id in range(config.samples(phase))
        ]
    trajectories = [task.result() for task in running]
    _refuse_total_failure(trajectories)
    return trajectories


class _first_error:  # noqa: N801 - used like a function
    """A task group that raises the first error itself instead of a group of errors."""

    def __init__(self) -> None:
        self._tasks = asyncio.TaskGroup()

    async def __aenter__(self) -> asyncio.TaskGroup:
        return await self._tasks.__aenter__()

    async def __aexit__(self, *error: Any) -> None:
        try:
            await self._tasks.__aexit__(*error)
        except* Exception as group:
            first: BaseException = group
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            failure = first
        else:
            return
        raise failure


def _refuse_total_failure(trajectories: Sequence[Trajectory]) -> None:
    failed = [t for t in trajectories if t.failure is not None]
    for trajectory in failed:
        log.warning(
            "trajectory %s/%d failed for good: %s",
            trajectory.uid,
            trajectory.repetition_id,
            trajectory.failure,
        )
    if trajectories and len(failed) == len(trajectories):
        raise RolloutError(
            f"all {len(failed)} trajectories failed; the first one ({failed[0].uid}): "
            f"{failed[0].failure}"
        )


class AgentLoop:
    """Runs one trajectory at a time per call; calls may overlap."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        env_factory: EnvFactory,
        config: RolloutConfig,
        *,
        phase: str,
        policy_version: int,
        seed: int,
    ) -> None:
        """Keep what all trajectories share; arguments as for `rollout`."""
        self._engine = engine
        self._tokenizer = tokenizer
        self._env_factory = env_factory
        self._config = config
        self._phase = phase
        self._policy_version = policy_version
        self._seed = seed

    async def run(self, prompt: RolloutPrompt, repetition_id: int) -> Trajectory:
        """One trajectory, tried again where an environment or the engine failed."""
        attempt = 0
        while True:
            trajectory = await self._attempt(prompt, repetition_id, attempt)
            if trajectory.failure is None or attempt == self._config.max_retries:
                return trajectory
            log.info(
                "%s/%d, attempt %d: %s", prompt.uid, repetition_id, attempt, trajectory.failure
            )
            attempt += 1

    async def _attempt(self, prompt: RolloutPrompt, repetition_id: int, attempt: int) -> Trajectory:
        started = time.perf_counter()
        trajectory = Trajectory(
            uid=prompt.uid,
            repetition_id=repetition_id,
            steps=[],
            stop_reason=STOP,
            env_class=prompt.env_class,
            env_metrics={},
            seconds=0.0,
            phase=self._phase,
            data_source=prompt.data_source,
        )
        try:
            async with asyncio.timeout(self._config.trajectory_timeout_seconds):
                await self._fill(trajectory, prompt, attempt)
        except EngineDeadError:
            raise
        except EnvTimeoutError as error:
            trajectory.stop_reason, trajectory.failure = TIMEOUT, str(error)
        except EnvError as error:
            trajectory.stop_reason, trajectory.failure = ENV_ERROR, str(error)
        except EngineError as error:
            trajectory.stop_reason, trajectory.failure = ENGINE_ERROR, str(error)
        except TimeoutError:
            trajectory.stop_reason = TIMEOUT
            trajectory.failure = (
                f"turn {len(trajectory.steps) + 1} was not over after "
                f"{self._config.trajectory_timeout_seconds:g} s, the deadline of a trajectory"
            )
        if trajectory.steps:
            trajectory.steps[-1].stop_reason = trajectory.stop_reason
        trajectory.seconds = time.perf_counter() - started
        return trajectory

    async def _fill(self, trajectory: Trajectory, prompt: RolloutPrompt, attempt: int) -> None:
        # The environment ends the episode at its own max_turns; tell it ours.
        extras = {**prompt.env_extras, "max_turns": self._config.max_turns}
        env = await self._env_factory.make(prompt.env_class, extras)
        try:
            messages = await env.init([dict(message) for message in prompt.messages])
            context = self._context(messages, prompt)
            trajectory.stop_reason = await self._turns(trajectory, context, env, attempt)
            trajectory.env_metrics = await env.metrics()
        finally:
            await env.close()

    def _context(self, messages: Sequence[dict[str, Any]], prompt: RolloutPrompt) -> Context:
        try:
            return make_context(
                self._config.context,
                self._tokenizer,
                messages,
                chat_template=self._config.chat_template,
                template_kwargs=self._config.chat_template_kwargs,
            )
        except Exception as error:
            raise ValueError(
                f"prompt {prompt.uid}: the chat template refuses its messages: {error}"
            ) from error

    async def _turns(self, trajectory: Trajectory, context: Context, env: Env, attempt: int) -> str:
        """Appends steps until something ends the trajectory; returns what."""
        for turn in range(self._config.max_turns):
            prompt_token_ids = context.prompt_token_ids()
            if len(prompt_token_ids) > self._config.max_input_length:
                return LENGTH
            generation, llm_seconds = await self._generate(
                trajectory, prompt_token_ids, turn, attempt
            )
            text = decode_response(self._tokenizer, generation)
            answer = await env.step(text)
            sampled = self._with_end_token(generation, is_last=answer.done)
            trajectory.steps.append(
                self._step(prompt_token_ids, sampled, generation, text, answer, llm_seconds)
            )
            if answer.done:
                return generation.stop_reason
            replaced = answer.postprocessed_action is not None
            context.add_response(
                sampled.response_ids, answer.postprocessed_action or text, replaced=replaced
            )
            context.add_observation(answer.messages)
        return MAX_TURNS

    async def _generate(
        self, trajectory: Trajectory, prompt_token_ids: list[int], turn: int, attempt: int
    ) -> tuple[Generation, float]:
        place = f"{trajectory.uid}-{trajectory.repetition_id}"
        name = f"{self._phase}-{self._policy_version}-{place}"
        # Evaluations draw the same numbers whatever the version: what differs is the policy's.
        seeded = f"eval-{place}" if self._phase == "eval" else name
        sampling = replace(
            self._config.sampling(self._phase),
            seed=request_seed(self._seed, seeded, attempt, turn),
        )
        started = time.perf_counter()
        generation = await self._engine.generate(
            prompt_token_ids,
            sampling,
            session_id=f"{name}-{attempt}",
            policy_version=self._policy_version,
        )
        return generation, time.perf_counter() - started

    def _with_end_token(self, generation: Generation, *, is_last: bool) -> SampledTokens:
        """Appends the end token where the rules say so.

        A stop string ended the response (several turns), or the last response lacks its end
        (single conversation).
        """
        end = self._tokenizer.eos_token_id
        ended = generation.token_ids[-1:] == [end]
        if self._config.context == "single":
            append = is_last and not ended
        else:
            append = (
                generation.stop_string is not None
                and self._config.append_eos_after_stop_string
                and not ended
            )
        return sampled_tokens(generation, appended_eos=end if append else None)

    def _step(
        self,
        prompt_token_ids: list[int],
        sampled: SampledTokens,
        generation: Generation,
        text: str,
        answer: EnvAnswer,
        llm_seconds: float,
    ) -> Step:
        return Step(
            prompt_token_ids=prompt_token_ids,
            response_ids=sampled.response_ids,
            loss_mask=sampled.loss_mask,
            rollout_logprobs=sampled.rollout_logprobs,
            reward=answer.reward,
            stop_reason=generation.stop_reason,
            policy_version=self._policy_version,
            text=text,
            observation="\n".join(str(message["content"]) for message in answer.messages),
            llm_seconds=llm_seconds,
            env_seconds=answer.seconds,
        )
