"""One trajectory's calls: each is sampled once, delivered, and recorded as a step."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import re
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from skyrl_fast.config import GeneratorConfig, SamplingParams
from skyrl_fast.config.upstream import Upstream
from skyrl_fast.gateway.messages import Answer, ApiError, Call, Choice, Outcome, ToolCall
from skyrl_fast.gateway.other_calls import OtherCalls
from skyrl_fast.gateway.prompt_ids import FORKED, RESTARTED, PromptIds, PromptTokens
from skyrl_fast.rollout.activity import ACTING, GENERATING, Activity, ActivityBoard
from skyrl_fast.rollout.chat_template import ChatTemplate, ContextError
from skyrl_fast.rollout.engine.protocol import EngineDeadError, EngineError
from skyrl_fast.rollout.engine.route_record import turn_routes
from skyrl_fast.rollout.policy_calls import PolicyCalls, recorded_step
from skyrl_fast.rollout.stop_reason import LENGTH, MAX_TURNS, STOP
from skyrl_fast.rollout.tool_calls import ParsedAnswer, ToolCallParser
from skyrl_fast.rollout.trajectory import Step, Trajectory
from skyrl_fast.rollout.turn import decode_response, sampled_tokens

log = logging.getLogger(__name__)

# How long an answer waits for a client that has disconnected: SDKs call again after up to 8 s.
RETRY_SECONDS = 10.0
MAX_WHITE_SPACE = 3  # characters at the end of a text before a tool call that may be the template's
LONG_TEXT = 5_000  # characters; fewer are rendered and tokenised in a millisecond
# Metrics of a trajectory that are there even if their count is 0.
COUNTS = (
    "calls",
    "first_prompts",
    "continued_prompts",
    "restarted_prompts",
    "forked_prompts",
    "repeated_calls",
    "untrained_calls",
    "upstream_calls",
    "too_long_prompts",
    "undelivered_calls",
    "answers_with_tool_calls",
)


@dataclass(frozen=True, slots=True)
class Policy:
    """What all sessions of a run share.

    Args:
        calls: of the engine.
        config: the generator's settings; see `loop_settings`.
        template: of the model, whose prompts have at most `max_input_length` tokens.
        board: records what each trajectory does.
        model: name under which the policy is called.
        untrained_models: names whose calls are sampled from the policy, but not trained.
        upstreams: by name, models whose calls are forwarded to another server.
        tool_parser: finds tool calls in answers; None: they are only text.
        one_line: whether a trajectory's calls must follow each other, for estimators per turn.
        takes_rewards: whether rewards may be posted. Code that a model writes can have the key.
        said: what the log has said once.
    """

    calls: PolicyCalls
    config: GeneratorConfig
    template: ChatTemplate
    board: ActivityBoard
    model: str
    untrained_models: tuple[str, ...] = ()
    upstreams: Mapping[str, Upstream] = field(default_factory=dict)
    tool_parser: ToolCallParser | None = None
    one_line: bool = False
    takes_rewards: bool = True
    said: set[str] = field(default_factory=set)

    def check_model(self, name: str) -> None:
        """Raise ApiError for an unknown name."""
        if name != self.model and name not in self.untrained_models:
            known = ", ".join([self.model, *self.untrained_models, *self.upstreams])
            raise ApiError(
                404,
                f"The model `{name}` does not exist here; known: {known}",
                code="model_not_found",
            )


@dataclass(eq=False, slots=True)
class RunningCall:
    """A call that is sampled, or was.

    Args:
        task: returns the answer, and the steps of its choices.
        span: name of the part of the agent that called.
        trained: whether its steps are the trajectory's.
        waiting: number of clients that wait for its answer.
        delivered: whether the answer was sent.
    """

    task: asyncio.Task[tuple[Answer, list[Step]]]
    span: str | None
    trained: bool
    waiting: int = 0
    delivered: bool = False


class Session:
    """The calls of one attempt at a trajectory.

    Args:
        policy: answers them.
        trajectory: gets the steps of each answer that is delivered, in this order.
        entry: of the trajectory on the board.
        policy_version: at the start, for the seeds.
    """

    def __init__(
        self, policy: Policy, trajectory: Trajectory, entry: Activity, *, policy_version: int
    ) -> None:
        self.policy = policy
        self.counts: Counter[str] = Counter()
        self.memory: dict[str, Any] = {}  # of the dialects, for requests that refer to earlier ones
        self.refused: str | None = None  # the stop reason of the last call, if it was refused
        self.engine_failure: EngineError | None = None  # of the last call, if it failed
        self.engine_died = asyncio.Event()
        self.others = OtherCalls(trajectory)
        self._trajectory = trajectory
        self._entry = entry
        self._policy_version = policy_version
        self._prompts = PromptIds(policy.template)
        self._calls: list[RunningCall] = []
        self._by_body: dict[bytes, RunningCall] = {}
        self._called: set[str] = set()  # ids of tool calls
        self._places: Counter[bytes] = Counter()  # prompts, for the seeds
        self._rewarded: dict[str, Step] = {}  # the first choice's step, by id of the answer
        self._spans: dict[str, Step] = {}  # the last step of each span
        self._rewards: list[tuple[str | None, str | None, float]] = []  # id, span, reward
        self._num_choices = 0  # of all calls
        self._num_running = 0
        self._idle_since = time.perf_counter()
        self._idle_seconds = 0.0

    async def prompt(self, call: Call) -> PromptTokens:
        """Return the tokens of a call's prompt.

        Raises:
            ApiError: unknown model, a prompt that the chat template refuses or that is too long.
        """
        prompt = await self._tokenized(call)
        limit = self.policy.config.max_input_length
        assert limit is not None
        if len(prompt.token_ids) > limit:
            self.refused = LENGTH
            self.counts["too_long_prompts"] += 1
            raise ApiError(
                400,
                f"prompt is too long: {len(prompt.token_ids)} tokens > {limit} maximum. This "
                f"model's maximum context length is {limit} tokens (generator.max_input_length).",
                code="context_length_exceeded",
            )
        return prompt

    async def count_tokens(self, call: Call) -> int:
        """Return the length of a call's prompt; of one that is too long, a length that is, too.

        Raises:
            ApiError: unknown model, or a prompt that the chat template refuses.
        """
        return len((await self._tokenized(call)).token_ids)

    async def _tokenized(self, call: Call) -> PromptTokens:
        self.policy.check_model(call.model)
        try:
            if call.num_characters < LONG_TEXT:
                return self._rendered(call)
            return await asyncio.to_thread(self._rendered, call)
        except ContextError as error:
            raise ApiError(400, str(error)) from error

    def _rendered(self, call: Call) -> PromptTokens:
        if call.messages is not None:
            return self._prompts.chat(call.messages, call.tools, call.template_kwargs)
        if isinstance(call.prompt, str):
            return self._prompts.text(call.prompt)
        return self._prompts.given(call.prompt or [])

    def start(
        self, call: Call, prompt: PromptTokens, body: bytes, *, is_retry: bool, span: str | None
    ) -> RunningCall:
        """Return the running call of a request: a new one, or the one that it repeats.

        A request repeats another if its client says so, or if the other's client disconnected
        before the answer.

        Args:
            call: the request.
            prompt: its tokens.
            body: its path and bytes; a repetition has the same.
            is_retry: what the client says.
            span: name of the part of the agent that calls.

        Raises:
            ApiError: the trajectory has had all its calls, or they must not overlap.
        """
        key = hashlib.blake2b(body, digest_size=16).digest()
        known = self._by_body.get(key)
        abandoned = known is not None and known.waiting == 0 and not known.delivered
        if known is not None and (is_retry or abandoned) and not _failed(known.task):
            self.counts["repeated_calls"] += 1
            return known
        limit = self.policy.config.max_turns
        if self._num_choices + call.num_choices > limit:
            self.refused = MAX_TURNS
            text = f"the trajectory has had its {limit} calls (generator.max_turns)"
            raise ApiError(400, text, code="max_turns")
        trained = call.model == self.policy.model
        if self.policy.one_line and trained and self._overlaps(call):
            raise ApiError(
                400,
                "calls of one trajectory must follow each other: the run's advantage estimator is "
                "per turn or token (trainer.algorithm.advantage_estimator)",
            )
        self._say_not_honoured(call)
        self.refused = None
        self._num_choices += call.num_choices
        self.counts["calls"] += 1
        self.counts[f"{self._kind(call, prompt)}_prompts"] += 1
        self.counts["untrained_calls"] += not trained
        running = RunningCall(asyncio.create_task(self._sampled(call, prompt)), span, trained)
        running.task.add_done_callback(_retrieve)
        self._by_body[key] = running
        self._calls.append(running)
        return running

    def _overlaps(self, call: Call) -> bool:
        running = any(other.trained and not other.task.done() for other in self._calls)
        return running or call.num_choices > 1

    def _kind(self, call: Call, prompt: PromptTokens) -> str:
        """Return how a prompt relates to the earlier calls, also by the ids of tool calls."""
        calls = [c for m in call.messages or [] for c in m.get("tool_calls") or []]
        ours = any(called.get("id") in self._called for called in calls)
        return FORKED if prompt.kind == RESTARTED and ours else prompt.kind

    def _say_not_honoured(self, call: Call) -> None:
        for name in call.not_honoured:
            if name not in self.policy.said:
                self.policy.said.add(name)
                log.warning(
                    "an agent sets %s: the run's sampling parameters are used, so that the "
                    "trainer can compute log-probabilities; said once",
                    name,
                )

    # --- sampling

    async def _sampled(self, call: Call, prompt: PromptTokens) -> tuple[Answer, list[Step]]:
        number = self._places[prompt.digest]  # of calls with this prompt: not of their arrival
        self._places[prompt.digest] += call.num_choices
        self._began()
        choices = [
            asyncio.create_task(self._choice(call, prompt, f"{prompt.digest.hex()}-{number + n}"))
            for n in range(call.num_choices)
        ]
        try:
            sampled = await asyncio.gather(*choices)
        except EngineError as error:
            self.engine_failure = error
            if isinstance(error, EngineDeadError):
                self.engine_died.set()
            raise
        finally:
            for choice in choices:  # the others, if one failed
                choice.cancel()
            self._ended()
        self.engine_failure = None
        answer = Answer(
            id=uuid.uuid4().hex,
            created=int(time.time()),
            model=call.model,
            num_prompt_tokens=len(prompt.token_ids),
            choices=[answered for answered, _ in sampled],
        )
        return answer, [step for _, step in sampled]

    async def _choice(self, call: Call, prompt: PromptTokens, place: str) -> tuple[Choice, Step]:
        policy = self.policy
        sampling = self._sampling(call)
        versioned, seconds = await policy.calls.sample(
            self._trajectory,
            prompt.token_ids,
            sampling,
            policy_version=self._policy_version,
            attempt=self._entry.attempt,
            place=place,
        )
        generation = versioned.generation
        tokenizer = policy.calls.tokenizer
        end = tokenizer.eos_token_id
        appended = (
            generation.stop_string is not None
            and policy.config.append_eos_token_after_stop_str_in_multi_turn
            and generation.token_ids[-1] != end
            and len(generation.token_ids) < sampling.max_generate_length
        )
        self._prompts.add_response(prompt, generation.token_ids)
        complete = decode_response(tokenizer, generation)
        step = recorded_step(
            prompt.token_ids,
            sampled_tokens(generation, appended_eos=end if appended else None),
            versioned,
            text=complete,
            llm_seconds=seconds,
        )
        step.expert_indices = turn_routes([], prompt.token_ids, generation)
        text, tool_calls = complete, []
        if policy.tool_parser is not None and call.parse_tools and call.tools:
            marked = decode_response(tokenizer, generation, skip_special_tokens=False)
            parsed = policy.tool_parser.parsed(marked, call.tools)
            if parsed.tool_calls:
                tool_calls = list(map(_tool_call, parsed.tool_calls))
                text = await self._content(call, prompt, generation.token_ids, parsed)
                self._called.update(tool_call.id for tool_call in tool_calls)
            self.counts["answers_with_tool_calls"] += bool(tool_calls)
        stop_string = generation.stop_string
        if stop_string is not None and call.stop is not None and not call.include_stop:
            text = text.removesuffix(stop_string)
        finish = LENGTH if generation.stop_reason == LENGTH else STOP
        return (
            Choice(
                text=text,
                tool_calls=tool_calls,
                finish="tool_calls" if tool_calls else finish,
                stop_string=stop_string,
                token_ids=generation.token_ids,
                logprobs=generation.logprobs,
            ),
            step,
        )

    async def _content(
        self, call: Call, prompt: PromptTokens, token_ids: list[int], parsed: ParsedAnswer
    ) -> str:
        """Return the text next to tool calls, as the template has to get it back.

        Parsers and templates disagree about the white space between text and calls.
        """
        text = parsed.content
        ends = range(len(text), max(len(text.rstrip()), len(text) - MAX_WHITE_SPACE) - 1, -1)
        texts = list(dict.fromkeys([*(text[:end] for end in ends), text.rstrip(), text.strip()]))
        answer = {"role": "assistant", "tool_calls": parsed.tool_calls}
        choose = partial(
            self._prompts.continuing,
            prompt,
            token_ids,
            call.messages or [],
            [{**answer, "content": text} for text in texts],
            tools=call.tools,
            template_kwargs=call.template_kwargs,
        )
        if len(texts) == 1:
            return texts[0]
        is_long = call.num_characters >= LONG_TEXT
        return texts[await asyncio.to_thread(choose) if is_long else choose()]

    def _sampling(self, call: Call) -> SamplingParams:
        run = self.policy.config.sampling(self._trajectory.phase)
        longest = run.max_generate_length
        return replace(
            run,
            max_generate_length=longest
            if call.max_tokens is None
            else min(call.max_tokens, longest),
            stop=run.stop if call.stop is None else call.stop,
        )

    def _began(self) -> None:
        self._num_running += 1
        if self._num_running == 1:
            self._idle_seconds += time.perf_counter() - self._idle_since
        entry, board = self._entry, self.policy.board
        board.set_phase(entry, GENERATING, attempt=entry.attempt, turn=len(self._calls) - 1)

    def _ended(self) -> None:
        self._num_running -= 1
        if self._num_running == 0:
            self._idle_since = time.perf_counter()
            entry, board = self._entry, self.policy.board
            board.set_phase(entry, ACTING, attempt=entry.attempt, turn=entry.turn)

    # --- delivery

    @contextmanager
    def waiting(self, running: RunningCall) -> Iterator[None]:
        """Count a client that waits; if the last one leaves without an answer, it may come back."""
        running.waiting += 1
        try:
            yield
        finally:
            running.waiting -= 1
            if running.waiting == 0 and not running.delivered and not _failed(running.task):
                later = asyncio.get_running_loop().call_later
                later(RETRY_SECONDS, self._give_up, running)

    def _give_up(self, running: RunningCall) -> None:
        if running.waiting == 0 and not running.delivered:
            running.task.cancel()

    def deliver(self, running: RunningCall) -> Answer:
        """Return the answer of a call whose task is done, and record its steps."""
        answer, steps = running.task.result()
        if not running.delivered:
            running.delivered = True
            if running.trained:
                self._trajectory.steps += steps
                self._rewarded[answer.id] = steps[0]
                if running.span is not None:
                    self._spans[running.span] = steps[-1]
        return answer

    def not_delivered(self, running: RunningCall) -> None:
        """Take the steps of a call back: its client was gone before it had the answer."""
        if running.delivered and running.waiting <= 1:  # this client
            running.delivered = False
            _, steps = running.task.result()
            kept = [step for step in self._trajectory.steps if all(step is not s for s in steps)]
            self._trajectory.steps[:] = kept

    # --- rewards and end

    def reward(self, value: float, *, call: str | None = None, span: str | None = None) -> None:
        """Add a reward to a call, to the last step of a span, or to the trajectory.

        Args:
            value: finite.
            call: id of the answer, with or without the prefix of its dialect.
            span: name of the part of the agent.

        Raises:
            ApiError: there is no such call or span, or the value is not finite.
        """
        if not math.isfinite(value):
            raise ApiError(400, f"reward: wanted a finite number, got {value}")
        name = None if call is None else re.split("[-_]", call)[-1]
        if name is not None and name not in self._rewarded:
            raise ApiError(404, "no trained answer of this trajectory has this id")
        if span is not None and span not in self._spans:
            raise ApiError(404, "no trained answer of this trajectory has this span")
        self._rewards.append((name, span, value))

    def finish(self, outcome: Outcome) -> str:
        """Set rewards and metrics of the trajectory; return its stop reason.

        Raises:
            ApiError: a reward for a call that does not exist.
        """
        posted_before = list(self._rewards)
        try:
            for answer, value in outcome.call_rewards.items():
                self.reward(value, call=answer)
        except ApiError:
            self._rewards = posted_before  # none of them, where one is wrong
            raise
        steps = self._trajectory.steps
        posted = any(call is None and span is None for call, span, _ in self._rewards)
        if outcome.reward is not None and not (posted and outcome.unless_posted):
            self._rewards.append((None, None, outcome.reward))
        for call, span, value in self._rewards:
            step = self._rewarded[call] if call else self._spans[span] if span else steps[-1]
            step.reward += value
        if self._num_running == 0:
            self._idle_seconds += time.perf_counter() - self._idle_since
        steps[-1].env_seconds = self._idle_seconds
        self._trajectory.env_metrics = {**self.metrics(), **outcome.metrics}
        if self.refused is not None:
            return self.refused
        return LENGTH if steps[-1].stop_reason == LENGTH else STOP

    def metrics(self) -> dict[str, float]:
        """Return the counts of the calls."""
        counts = {**dict.fromkeys(COUNTS, 0), **self.counts}
        counts["undelivered_calls"] = sum(not call.delivered for call in self._calls)
        return {name: float(number) for name, number in counts.items()}

    async def close(self) -> None:
        """Abort all calls."""
        await self.others.close()
        running = [call.task for call in self._calls if not call.task.done()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _failed(task: asyncio.Task[Any]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Retrieve the exception of a call without clients, so that asyncio does not report it."""
    if not task.cancelled():
        task.exception()


def _tool_call(call: Mapping[str, Any]) -> ToolCall:
    function = call["function"]
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return ToolCall(f"call_{uuid.uuid4().hex[:24]}", function["name"], arguments)
