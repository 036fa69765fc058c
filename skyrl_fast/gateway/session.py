"""One trajectory's calls: each is sampled once, delivered, and recorded as a step.

Design: docs/design/021-gateway.md.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import xxhash

from skyrl_fast.gateway.choices import Choices
from skyrl_fast.gateway.messages import Answer, ApiError, Call, Outcome
from skyrl_fast.gateway.other_calls import OtherCalls
from skyrl_fast.gateway.policy import ServedPolicy
from skyrl_fast.gateway.prompt_ids import FORKED, RESTARTED, PromptIds, PromptTokens
from skyrl_fast.gateway.request_body import RequestBodies, parse_json
from skyrl_fast.gateway.rewards import Rewards
from skyrl_fast.rollout.activity import ACTING, GENERATING, Activity
from skyrl_fast.rollout.chat_template import CHARACTERS_PER_TOKEN, ContextError, message_text
from skyrl_fast.rollout.contexts import name_calls
from skyrl_fast.rollout.engine.protocol import EngineDeadError, EngineError, RefusedRequestError
from skyrl_fast.rollout.stop_reason import LENGTH, MAX_TURNS, STOP
from skyrl_fast.rollout.tokenization import decode
from skyrl_fast.rollout.trajectory import Step, Trajectory
from skyrl_fast.system.printable import log_line
from skyrl_fast.system.tasks import gather_or_cancel, ignore_result

log = logging.getLogger(__name__)
T = TypeVar("T")

MAX_BODIES = 8  # bodies of the last calls, kept until they are delivered
LONG_BODY = 1 << 20  # bytes; fewer are parsed in some milliseconds, others in a thread
LONG_TEXT = 5_000  # characters; fewer are tokenised in two milliseconds, others in a thread
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
    "unparsed_tool_calls",
    "left_out_tool_calls",
    "answers_with_thoughts",
)


@dataclass(eq=False, slots=True)
class RunningCall:
    """A call that is sampled, or was.

    Args:
        task: returns the answer, and the steps of its choices.
        span: name of the part of the agent that called.
        trained: whether its steps are the trajectory's.
        waiting: number of clients that wait for its answer.
        left: ends it some time after its last client has disconnected; None: none has.
    """

    task: asyncio.Task[tuple[Answer, list[Step]]]
    path: str
    body: bytes
    span: str | None
    trained: bool
    waiting: int = 0
    delivered: bool = False
    left: asyncio.TimerHandle | None = None

    def meet_client(self) -> None:
        """Keep it for a client that waits for it, or comes back."""
        if self.left is not None:
            self.left.cancel()
            self.left = None


class Session:
    """The calls of one attempt at a trajectory, which gets the steps in order of delivery."""

    def __init__(
        self, policy: ServedPolicy, trajectory: Trajectory, entry: Activity, *, policy_version: int
    ) -> None:
        self.policy = policy
        self.counts: Counter[str] = Counter()
        self.bodies = RequestBodies()
        self.rewards = Rewards()
        self.memory: dict[str, Any] = {}  # of the dialects, for requests that refer to earlier ones
        # The stop reason of the policy's last call, if it was refused.
        self.refused: str | None = None
        self.engine_failure: EngineError | None = None  # why the last call failed, if it did
        self.engine_died = asyncio.Event()
        self.others = OtherCalls(trajectory)
        self.trajectory = trajectory
        self._entry = entry
        self._prompts = PromptIds(policy.template)
        self._choices = Choices(policy, trajectory, self._prompts, self.counts, policy_version)
        self._reading = asyncio.Lock()
        self._calls: list[RunningCall] = []
        self._by_body: dict[tuple[str, bytes], list[RunningCall]] = {}
        self._places: Counter[bytes] = Counter()  # prompts, for the seeds
        self._num_choices = 0  # choices of all calls
        self._finished = False
        self._num_running = 0
        self._idle_since = time.perf_counter()
        self._idle_seconds = 0.0

    async def read(self, body: bytes, parse: Callable[[], T]) -> T:
        """Return a request; a long one is parsed in a thread, after those before it."""
        async with self._reading:
            if len(body) < LONG_BODY:
                return parse()
            return await asyncio.to_thread(parse)

    async def prompt(self, call: Call) -> PromptTokens:
        """Return a call's prompt; ApiError for an unknown model, a refused or too long prompt."""
        self._check_length(call, self._least_tokens(call))
        prompt = await self._tokenize(call)
        self._check_length(call, len(prompt.token_ids))
        return prompt

    def _least_tokens(self, call: Call) -> int:
        """Return how many tokens a call's new messages and tools have at least."""
        # What is too long is refused before it is rendered: regular expressions hold Python's lock
        # for seconds where a text has megabytes.
        number = max(len(call.messages or ()), len(call.tools or ()))
        if number > self.policy.config.max_input_length:
            return number
        return max(number, self._prompts.num_new_characters(call) // CHARACTERS_PER_TOKEN)

    def _check_length(self, call: Call, number: int) -> None:
        limit = self.policy.config.max_input_length
        assert limit is not None
        if number <= limit:
            return
        self._refuse(call, LENGTH)
        self.counts["too_long_prompts"] += 1
        self._warn_once(
            f"an agent's prompt of {number:,} tokens is longer than "
            f"generator.max_input_length={limit}: such calls are refused, and are not trained"
        )
        raise ApiError(
            400,
            f"prompt is too long: {number} tokens > {limit} maximum. This "
            f"model's maximum context length is {limit} tokens (generator.max_input_length).",
            code="context_length_exceeded",
        )

    def _refuse(self, call: Call, reason: str) -> None:
        if call.model in self.policy.trained:
            self.refused = reason

    async def count_tokens(self, call: Call) -> int:
        """Return the length of a call's prompt; of one that is too long, a length that is, too.

        Raises:
            ApiError: unknown model, or a prompt that the chat template refuses.
        """
        limit = self.policy.config.max_input_length
        least = self._least_tokens(call)
        if limit is not None and least > limit:
            return least
        prompt = await self._tokenize(call)
        number = len(prompt.token_ids)
        self._prompts.release(prompt)
        return number

    async def _tokenize(self, call: Call) -> PromptTokens:
        self.policy.check_model(call.model)
        try:
            if self._prompts.num_new_characters(call) < LONG_TEXT:
                return self._render(call)
            return await asyncio.to_thread(self._render, call)
        except ContextError as error:
            raise ApiError(400, str(error)) from error

    def _render(self, call: Call) -> PromptTokens:
        if call.messages is not None:
            if call.tools and not self.policy.template.shows_tools():
                self._warn_once(
                    "an agent gives tools, which the chat template leaves out, so that the model "
                    "does not see them: set generator.chat_template to one that writes tools"
                )
            return self._prompts.chat(call.messages, call.tools, call.template_kwargs)
        if isinstance(call.prompt, str):
            return self._prompts.text(call.prompt)
        return self._prompts.from_ids(call.prompt or [])

    def start(
        self,
        call: Call,
        prompt: PromptTokens,
        path: str,
        body: bytes,
        *,
        is_retry: bool,
        span: str | None,
    ) -> RunningCall:
        """Return the running call of a request: a new one, or the one that it repeats.

        A request repeats another if its client says so, or if the other's client disconnected
        before the answer.

        Args:
            path, body: path and body of the request; a repetition has the same, or the same JSON.

        Raises:
            ApiError: the trajectory has had all its calls, or they must not overlap.
        """
        key = (path, xxhash.xxh3_128_digest(body))
        same = self._by_body.setdefault(key, [])
        known = _find_repeated(same, is_retry) or self._same_json(path, body, is_retry)
        if known is not None:
            self.counts["repeated_calls"] += 1
            known.meet_client()
            return known
        limit = self.policy.config.turn_limit
        if self._num_choices + call.num_choices > limit:
            self._refuse(call, MAX_TURNS)
            text = f"the trajectory has had its {limit} calls (generator.max_turns)"
            raise ApiError(400, text, code="max_turns")
        trained = call.model in self.policy.trained
        if self.policy.one_line and trained:
            if self._overlaps(call):
                raise ApiError(
                    400,
                    "calls of one trajectory must follow each other: the run's advantage estimator "
                    "is per turn, context or token (trainer.algorithm.advantage_estimator)",
                )
            self._end_left_calls()  # the agent has given them up, and makes another one
        self._warn_of_ignored(call)
        if trained:
            self.refused = None
        self._num_choices += call.num_choices
        self.counts["calls"] += 1
        self.counts[f"{self._kind(call, prompt)}_prompts"] += 1
        self.counts["untrained_calls"] += not trained
        for earlier in self._calls[-MAX_BODIES:]:
            if earlier.delivered:
                earlier.body = b""
        task = asyncio.create_task(self._sample(call, prompt))
        running = RunningCall(task, path, body, span, trained)
        running.task.add_done_callback(ignore_result)
        same.append(running)
        self._calls.append(running)
        return running

    def _same_json(self, path: str, body: bytes, is_retry: bool) -> RunningCall | None:
        """Return an undelivered call whose body has the same JSON, in whatever order of keys."""
        # Some clients write their metadata in another order when they try again.
        for running in reversed(self._calls):
            if running.delivered or running.path != path or _has_failed(running.task):
                continue
            if not is_retry and running.left is None:
                continue
            if len(running.body) == len(body) and parse_json(running.body) == parse_json(body):
                return running
        return None

    def _overlaps(self, call: Call) -> bool:
        running = [other for other in self._calls if other.trained and not other.task.done()]
        return call.num_choices > 1 or any(other.left is None for other in running)

    def _end_left_calls(self) -> None:
        for other in self._calls:
            if other.trained and other.left is not None:
                other.task.cancel()

    def _kind(self, call: Call, prompt: PromptTokens) -> str:
        # An answer without its thoughts, or with its calls in another form, is known by its text or
        # by the calls' ids.
        if prompt.kind != RESTARTED:
            return prompt.kind
        answers = [m for m in call.messages or [] if m.get("role") == "assistant"]
        names = {message_text(m).strip() for m in answers}
        names |= {c.get("id") for m in answers for c in m.get("tool_calls") or []}
        if self._choices.known.isdisjoint(names - {""}):
            return RESTARTED
        return FORKED

    def _warn_of_ignored(self, call: Call) -> None:
        for name, reason in call.ignored.items():
            self._warn_once(f"an agent sets {name}: {reason}")

    def _warn_once(self, text: str) -> None:
        if text not in self.policy.warned:
            self.policy.warned.add(text)
            log.warning("%s; said once", text)

    # --- sampling

    async def _sample(self, call: Call, prompt: PromptTokens) -> tuple[Answer, list[Step]]:
        # Counts calls with this prompt, so that seeds do not depend on arrival order.
        number = self._places[prompt.digest]
        self._places[prompt.digest] += call.num_choices
        self._mark_running()
        choices = []
        for n in range(call.num_choices):
            choices.append(
                self._choices.sample(
                    call, prompt, f"{prompt.digest.hex()}-{number + n}", self._entry.attempt
                )
            )
        try:
            if len(choices) == 1:  # the usual call, which needs no task of its own
                sampled = [await choices[0]]
            else:
                sampled = await gather_or_cancel(choices)
        except EngineError as error:
            if isinstance(error, RefusedRequestError):  # not a failure: it would come again
                raise ApiError(
                    400, f"the engine refuses the request: {log_line(error)}", code="invalid_value"
                ) from error
            self.engine_failure = error
            if isinstance(error, EngineDeadError):
                self.engine_died.set()
            raise
        finally:
            self._mark_idle()
        if not self.engine_died.is_set():
            self.engine_failure = None
        answer = Answer(
            id=uuid.uuid4().hex,
            created=int(time.time()),
            model=call.model,
            num_prompt_tokens=len(prompt.token_ids),
            choices=[answered for answered, _ in sampled],
        )
        self._prompts.release(prompt)
        return answer, [step for _, step in sampled]

    def _mark_running(self) -> None:
        self._num_running += 1
        if self._num_running == 1:
            self._idle_seconds += time.perf_counter() - self._idle_since
        entry = self._entry
        board = self.policy.board
        board.set_phase(entry, GENERATING, attempt=entry.attempt, turn=len(self._calls) - 1)

    def _mark_idle(self) -> None:
        self._num_running -= 1
        if self._num_running == 0:
            self._idle_since = time.perf_counter()
            entry = self._entry
            board = self.policy.board
            board.set_phase(entry, ACTING, attempt=entry.attempt, turn=entry.turn)

    # --- delivery

    @contextmanager
    def waiting(self, running: RunningCall, retry_seconds: float) -> Iterator[None]:
        """Count a client that waits.

        If the last one leaves without an answer, it may come back within these seconds.
        """
        running.waiting += 1
        running.meet_client()
        try:
            yield
        finally:
            running.waiting -= 1
            if running.waiting == 0 and not running.delivered and not _has_failed(running.task):
                later = asyncio.get_running_loop().call_later
                running.left = later(retry_seconds, running.task.cancel)

    def deliver(self, running: RunningCall) -> Answer:
        """Return the answer of a call whose task is done, and record its steps."""
        answer, steps = running.task.result()
        if not running.delivered:
            running.delivered = True
            if running.trained:
                self.trajectory.steps += steps
                self.rewards.add_answer(answer.id, steps, running.span)
        return answer

    def withdraw(self, running: RunningCall) -> None:
        """Take the steps of a call back: its client was gone before it had the answer.

        Not where the trajectory has ended, or a reward was given to the answer.
        """
        if running.delivered and running.waiting <= 1 and not self._finished:  # this client
            answer, steps = running.task.result()
            if self.rewards.withdraw(answer.id, steps):
                running.delivered = False
                kept = []
                for s in self.trajectory.steps:
                    if all(s is not step for step in steps):
                        kept.append(s)
                self.trajectory.steps[:] = kept

    # --- end

    def finish(self, outcome: Outcome) -> str:
        """Set rewards and metrics; return the stop reason. ApiError: unknown call or policy."""
        steps = self.trajectory.steps
        names = self.policy.calls.policies
        for name in outcome.policy_rewards:
            if name not in names:
                text = f"policy_rewards: expected names of {', '.join(names) or 'no policy'}"
                raise ApiError(400, f"{text}, got {name}")
        self.trajectory.policy_rewards = dict(outcome.policy_rewards)
        as_text = partial(decode, self.policy.calls.tokenizer)
        name_calls(self.trajectory, as_text, acted=self._choices.acted)
        self.rewards.apply(outcome, steps[-1])
        self._finished = True
        if self._num_running == 0:
            self._idle_seconds += time.perf_counter() - self._idle_since
        steps[-1].env_seconds = self._idle_seconds
        self.trajectory.env_metrics = {**self.metrics(), **outcome.metrics}
        if self.refused is not None:
            return self.refused
        if steps[-1].stop_reason == LENGTH:
            return LENGTH
        return STOP

    def metrics(self) -> dict[str, float]:
        counts = {**dict.fromkeys(COUNTS, 0), **self.counts}
        counts["undelivered_calls"] = sum(not call.delivered for call in self._calls)
        return {name: float(number) for name, number in counts.items()}

    async def close(self) -> None:
        await self.others.close()
        running = []
        for call in self._calls:
            if not call.task.done():
                running.append(call.task)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _find_repeated(same: Sequence[RunningCall], is_retry: bool) -> RunningCall | None:
    """Return which of the calls with a request's body it repeats.

    The first one without its client; of a client that says that it tries again, else the last.
    """
    usable = [running for running in same if not _has_failed(running.task)]
    left = [running for running in usable if running.left is not None]
    return next(iter(left or (usable[-1:] if is_retry else [])), None)


def _has_failed(task: asyncio.Task[Any]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)
