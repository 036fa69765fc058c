"""The agent loop: one prompt in, one trajectory out.

One turn: make the prompt, check its length, generate, step the environment, append the end token
where one is due, record the gen-only step.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from skyrl_fast.config import GeneratorConfig
from skyrl_fast.printable import MAX_FAILURE, log_line, shortened
from skyrl_fast.rollout.activity import (
    ACTING,
    CLOSING,
    GENERATING,
    MAKING,
    Activity,
    ActivityBoard,
)
from skyrl_fast.rollout.context import (
    Context,
    ContextError,
    Message,
    make_context,
    message_text,
)
from skyrl_fast.rollout.continued import VersionedGeneration, generate_through_updates
from skyrl_fast.rollout.engine.protocol import EngineDeadError, EngineError, Generation, Sampler
from skyrl_fast.rollout.engine.route_record import recorded_routes, turn_routes
from skyrl_fast.rollout.engine.weights.gate import WeightGate
from skyrl_fast.rollout.env.answers import EnvAnswer
from skyrl_fast.rollout.env.factory import EnvError, EnvFactory, EnvSession
from skyrl_fast.rollout.env.protocol import Action
from skyrl_fast.rollout.loop_settings import RolloutPrompt
from skyrl_fast.rollout.stop_reason import (
    ENGINE_ERROR,
    ENV_ERROR,
    LENGTH,
    MAX_TURNS,
    STOP,
    TIMEOUT,
)
from skyrl_fast.rollout.tool_calls import ParsedAnswer, ToolCallParser
from skyrl_fast.rollout.trajectory import Step, Trajectory
from skyrl_fast.rollout.turn import SampledTokens, decode_response, request_seed, sampled_tokens

log = logging.getLogger(__name__)
T = TypeVar("T")

LONG_TEXT = 5_000  # characters; fewer are tokenised in a millisecond


class AgentLoop:
    """Run one trajectory per call of `run`; calls may overlap."""

    def __init__(
        self,
        engine: Sampler,
        tokenizer: Any,
        env_factory: EnvFactory,
        config: GeneratorConfig,
        *,
        phase: str,
        policy_version: int,
        seed: int,
        gate: WeightGate | None = None,
        board: ActivityBoard | None = None,
        faults: Counter[str] | None = None,
        tool_parser: ToolCallParser | None = None,
    ) -> None:
        """Store what all trajectories share; arguments as for `rollout`.

        Args:
            policy_version: at the start, for the seeds; requests use the gate's version.
            gate: of the engine; None: nothing updates its weights during the rollout.
            board: records the phase of each trajectory.
            faults: counts failed attempts.
            tool_parser: finds tool calls in answers; None: they are only text.
        """
        self._engine = engine
        self._tokenizer = tokenizer
        self._env_factory = env_factory
        self._config = config
        assert config.max_input_length is not None
        self._max_input_length = config.max_input_length
        self._phase = phase
        self._policy_version = policy_version
        self._seed = seed
        self._gate = gate or WeightGate(policy_version)
        self._board = board or ActivityBoard()
        self._faults = Counter() if faults is None else faults
        self._tool_parser = tool_parser
        chosen = config.skip_special_tokens
        self._skip_special_tokens = tool_parser is None if chosen is None else chosen

    async def run(
        self,
        prompt: RolloutPrompt,
        repetition_id: int,
        *,
        entry: Activity | None = None,
        first_attempt: int = 0,
    ) -> Trajectory:
        """Return one trajectory; retry it if its environment or the engine failed.

        The deadline starts here and covers all attempts. A trajectory at its deadline ends with
        the steps it has; it has failed only if it has none.

        Args:
            prompt: the task.
            repetition_id: which sample of the prompt.
            entry: its entry on the board; None: a new one.
            first_attempt: number of the first attempt, for the seeds.

        Raises:
            EngineDeadError: the engine died.
        """
        started = time.perf_counter()
        deadline = asyncio.get_running_loop().time() + self._config.trajectory_timeout_seconds
        entry = entry or self._board.enter(prompt.uid, repetition_id)
        attempt = first_attempt
        while True:
            trajectory = await self._attempt(prompt, repetition_id, attempt, deadline, entry)
            trajectory.seconds = time.perf_counter() - started
            late = asyncio.get_running_loop().time() >= deadline
            last = attempt - first_attempt == self._config.max_retries
            if trajectory.failure is None or last or late:
                self._board.leave(entry)
                return trajectory
            self._faults["retried_trajectories"] += 1
            failure = log_line(trajectory.failure)
            log.info("%s/%d, attempt %d: %s", prompt.uid, repetition_id, attempt, failure)
            attempt += 1

    async def _attempt(
        self,
        prompt: RolloutPrompt,
        repetition_id: int,
        attempt: int,
        deadline: float,
        entry: Activity,
    ) -> Trajectory:
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
        env: EnvSession | None = None
        self._board.set_phase(entry, MAKING, attempt=attempt, turn=0)
        try:
            async with asyncio.timeout_at(deadline) as clock:
                # The environment ends the episode at its own max_turns: pass it our limit.
                extras = {**prompt.env_extras, "max_turns": self._config.max_turns}
                env = await self._env_factory.make(prompt.env_class, extras)
                trajectory.stop_reason = await self._episode(trajectory, prompt, env, entry)
        except EngineDeadError:
            raise
        except (EnvError, ContextError) as error:
            self._faults["environment_errors"] += 1
            _end(trajectory, ENV_ERROR, str(error))
        except EngineError as error:
            self._faults["engine_errors"] += 1
            _end(trajectory, ENGINE_ERROR, str(error))
        except TimeoutError as error:
            if not clock.expired():  # of some connection, not our deadline
                _end(trajectory, ENGINE_ERROR, f"TimeoutError: {error}")
            elif trajectory.steps:
                log.info("at its deadline: %s", entry.describe(self._board.clock()))
                trajectory.stop_reason = TIMEOUT
            else:
                _end(trajectory, TIMEOUT, self._late(entry))
        finally:
            # Also reached when the complete rollout is cancelled.
            self._board.set_phase(entry, CLOSING, attempt=attempt, turn=entry.turn)
            if env is not None:
                if trajectory.failure is None:
                    trajectory.env_metrics = await env.metrics()
                await env.close()
        if trajectory.steps:
            trajectory.steps[-1].stop_reason = trajectory.stop_reason
        return trajectory

    def _late(self, entry: Activity) -> str:
        return (
            f"turn 1 of attempt {entry.attempt + 1} did not finish within "
            f"{self._config.trajectory_timeout_seconds:g} s, the deadline of a trajectory "
            f"({entry.phase} for {self._board.clock() - entry.since:.1f} s)"
        )

    async def _episode(
        self, trajectory: Trajectory, prompt: RolloutPrompt, env: EnvSession, entry: Activity
    ) -> str:
        messages = await env.init([dict(message) for message in prompt.messages])
        make = partial(
            make_context,
            self._config.context,
            self._tokenizer,
            messages,
            chat_template=self._config.chat_template,
            template_kwargs=self._template_kwargs(prompt),
            max_length=self._max_input_length,
        )
        characters = _characters(messages)
        context = await _off_loop(characters, make)
        tools = self._template_kwargs(prompt).get("tools")
        return await self._turns(trajectory, context, characters, env, entry, tools)

    def _template_kwargs(self, prompt: RolloutPrompt) -> dict[str, Any]:
        tools = prompt.env_extras.get("tools")
        shared = self._config.chat_template_kwargs
        return dict(shared) if tools is None else {**shared, "tools": tools}

    async def _turns(
        self,
        trajectory: Trajectory,
        context: Context,
        characters: int,
        env: EnvSession,
        entry: Activity,
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> str:
        """Append steps until the trajectory ends; return its stop reason.

        Args:
            characters: of the environment's messages so far.
            tools: that the prompt offers.
        """
        for turn in range(self._config.max_turns):
            prompt_token_ids = await _off_loop(characters, context.prompt_token_ids)
            if len(prompt_token_ids) > self._max_input_length:
                return LENGTH
            self._board.set_phase(entry, GENERATING, attempt=entry.attempt, turn=turn)
            versioned, llm_seconds = await self._generate(trajectory, prompt_token_ids, entry)
            generation = versioned.generation
            routes = turn_routes(trajectory.steps, prompt_token_ids, generation)
            text = decode_response(
                self._tokenizer, generation, skip_special_tokens=self._skip_special_tokens
            )
            parsed = ParsedAnswer(text)
            if self._tool_parser is not None:
                parsed = self._tool_parser.parsed(text, tools)
            self._board.set_phase(entry, ACTING, attempt=entry.attempt, turn=turn)
            answer = await env.step(Action(text, parsed.tool_calls))
            last = answer.done or turn + 1 == self._config.max_turns
            sampled = self._with_end_token(generation, is_last=last)
            trajectory.steps.append(
                self._step(prompt_token_ids, sampled, versioned, text, answer, llm_seconds)
            )
            trajectory.steps[-1].expert_indices = routes
            if last:
                # A truncated response keeps "length": the filter for overlong ones reads it.
                truncated = generation.stop_reason == LENGTH
                return generation.stop_reason if answer.done or truncated else MAX_TURNS
            characters += _characters([*answer.messages, answer.postprocessed_action])
            extend = partial(_extend_context, context, sampled, text, parsed, answer)
            await _off_loop(characters, extend)
        raise AssertionError("unreachable: the last turn returns")

    async def _generate(
        self, trajectory: Trajectory, prompt_token_ids: list[int], entry: Activity
    ) -> tuple[VersionedGeneration, float]:
        sample = f"{trajectory.uid}-{trajectory.repetition_id}"
        name = f"{self._phase}-{self._policy_version}-{sample}"
        # Evaluations use the same seeds for every version, so that only the policy differs.
        seed_name = f"eval-{sample}" if self._phase == "eval" else name
        known = recorded_routes(trajectory.steps, prompt_token_ids)

        def part_seed(part: int) -> int:
            part_name = seed_name if part == 0 else f"{seed_name}+{part}"
            return request_seed(self._seed, part_name, entry.attempt, entry.turn)

        started = time.perf_counter()
        versioned = await generate_through_updates(
            self._engine,
            self._gate,
            self._tokenizer,
            prompt_token_ids,
            self._config.sampling(self._phase),
            session_id=f"{name}-{entry.attempt}",
            part_seed=part_seed,
            expert_indices_start=0 if known is None else len(known),
        )
        if not versioned.generation.token_ids:
            raise EngineError(f"the engine returned no tokens for session {name}-{entry.attempt}")
        return versioned, time.perf_counter() - started

    def _with_end_token(self, generation: Generation, *, is_last: bool) -> SampledTokens:
        """Append the end token where the specification asks for one.

        That is: a stop string ended the response (several turns), or the last response lacks its
        end token and was not truncated (single conversation). A response of the maximum length has
        no room for it.
        """
        end = self._tokenizer.eos_token_id
        longest = self._config.sampling(self._phase).max_generate_length
        if generation.token_ids[-1] == end or len(generation.token_ids) >= longest:
            append = False
        elif self._config.context == "single":
            append = is_last and generation.stop_reason != LENGTH
        else:
            append = (
                generation.stop_string is not None
                and self._config.append_eos_token_after_stop_str_in_multi_turn
            )
        return sampled_tokens(generation, appended_eos=end if append else None)

    def _step(
        self,
        prompt_token_ids: list[int],
        sampled: SampledTokens,
        versioned: VersionedGeneration,
        text: str,
        answer: EnvAnswer,
        llm_seconds: float,
    ) -> Step:
        versions = versioned.versions
        single_version = versions[0] == versions[-1]
        # An appended end token was not sampled: it takes the version of the token before it.
        appended = len(sampled.response_ids) - len(versions)
        return Step(
            prompt_token_ids=prompt_token_ids,
            response_ids=sampled.response_ids,
            loss_mask=sampled.loss_mask,
            rollout_logprobs=sampled.rollout_logprobs,
            reward=answer.reward,
            stop_reason=versioned.generation.stop_reason,
            policy_version=versions[0],
            text=text,
            observation="\n".join(message_text(message) for message in answer.messages),
            llm_seconds=llm_seconds,
            env_seconds=answer.seconds,
            token_versions=None if single_version else versions + versions[-1:] * appended,
            kept_ids=sampled.kept_ids,
        )


def _characters(messages: Sequence[Message | str | None]) -> int:
    return sum(len(str(message)) for message in messages)


async def _off_loop(characters: int, call: Callable[[], T]) -> T:
    """Return the result of rendering or tokenising; long texts do not stop the event loop."""
    return call() if characters < LONG_TEXT else await asyncio.to_thread(call)


def _end(trajectory: Trajectory, stop_reason: str, failure: str) -> None:
    trajectory.stop_reason, trajectory.failure = stop_reason, shortened(failure, MAX_FAILURE)


def _extend_context(
    context: Context, sampled: SampledTokens, text: str, parsed: ParsedAnswer, answer: EnvAnswer
) -> None:
    """Add the turn's two messages to the context."""
    action = answer.postprocessed_action
    if action is None and parsed.tool_calls:
        action = {
            "role": "assistant",
            "content": parsed.content,
            "tool_calls": parsed.tool_calls,
        }
    if isinstance(action, dict):  # the same answer as a message, with its tool calls
        context.add_response(sampled.response_ids, action, replaced=False)
    else:
        message = {"role": "assistant", "content": text if action is None else action}
        context.add_response(sampled.response_ids, message, replaced=action is not None)
    context.add_observation(answer.messages)
