"""The agent loop: one prompt in, one trajectory out.

One turn: make the prompt, check its length, generate, step the environment, append the end token
where one is due, record the gen-only step.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from skyrl_fast.config import GeneratorConfig
from skyrl_fast.rollout.activity import ACTING, GENERATING, Activity, ActivityBoard
from skyrl_fast.rollout.answer_parser import AnswerParser
from skyrl_fast.rollout.chat_messages import template_kwargs_of
from skyrl_fast.rollout.chat_template import ChatTemplate, Message, message_text
from skyrl_fast.rollout.compaction import Compaction, messages_after
from skyrl_fast.rollout.context import CompactContext, Context, begin_context
from skyrl_fast.rollout.engine.protocol import Generation
from skyrl_fast.rollout.engine.route_record import find_recorded_routes, turn_routes
from skyrl_fast.rollout.env.answers import EnvAnswer
from skyrl_fast.rollout.env.errors import EnvError
from skyrl_fast.rollout.env.factory import EnvFactory, EnvSession
from skyrl_fast.rollout.env.protocol import Action
from skyrl_fast.rollout.loop_settings import RolloutPrompt
from skyrl_fast.rollout.policy_calls import PolicyCalls
from skyrl_fast.rollout.stop_reason import LENGTH, MAX_TURNS
from skyrl_fast.rollout.token_ids import TokenIds, grown_ids
from skyrl_fast.rollout.tool_calls import ParsedAnswer, ToolCallParser
from skyrl_fast.rollout.trajectory import SUMMARISE, Step, Trajectory
from skyrl_fast.rollout.turn import decode_response, end_to_append

T = TypeVar("T")

LONG_TEXT = 5_000  # characters; fewer are tokenised in a millisecond


class AgentLoop:
    """An `Agent` that plays an environment turn by turn."""

    def __init__(
        self,
        calls: PolicyCalls,
        env_factory: EnvFactory,
        config: GeneratorConfig,
        *,
        board: ActivityBoard,
        tool_parser: ToolCallParser | None = None,
    ) -> None:
        self.calls = calls
        self.tokenizer = calls.tokenizer
        self.env_factory = env_factory
        self.config = config
        self.max_input_length = config.max_input_length
        self.board = board
        self.parser = AnswerParser(tool_parser)
        if config.context == "compact":
            self.compaction: Compaction | None = Compaction(config)
        else:
            self.compaction = None
        chosen = config.skip_special_tokens
        if chosen is None:
            self.skip_special_tokens = tool_parser is None
        else:
            self.skip_special_tokens = chosen
        self._template_kwargs: dict[str, Any] = {}
        self._template: ChatTemplate | None = None

    def chat_template(self, prompt: RolloutPrompt) -> ChatTemplate:
        # Consecutive trajectories with equal ones share it, and what it has found out about itself.
        kwargs = {**self.config.chat_template_kwargs, **template_kwargs_of(prompt.env_extras)}
        if self._template is None or kwargs != self._template_kwargs:
            self._template_kwargs = kwargs
            self._template = ChatTemplate(
                self.tokenizer,
                self.config.chat_template,
                kwargs,
                max_length=self.max_input_length,
            )
        return self._template

    def episode(
        self, trajectory: Trajectory, prompt: RolloutPrompt, entry: Activity, *, policy_version: int
    ) -> _EnvEpisode:
        return _EnvEpisode(self, trajectory, prompt, entry, policy_version)


@dataclass(slots=True)
class _EnvEpisode:
    loop: AgentLoop
    trajectory: Trajectory
    prompt: RolloutPrompt
    entry: Activity
    policy_version: int
    env: EnvSession | None = None
    unparsed: int = 0  # answers with a failed call
    reward_parts: Counter[str] = field(default_factory=Counter)  # each summed over the steps
    policy: str | None = None  # policy of the next answer, where policies have names
    first_messages: Sequence[Message] = ()
    begins: int = 0  # number of the step that begins the context

    async def play(self) -> str:
        loop = self.loop
        if loop.calls.policies:
            self.policy = loop.calls.policies[0]  # unless the row names another one
            self._name_policies(self.prompt.env_extras.get("policy"))
        extras = dict(self.prompt.env_extras)
        if loop.config.max_turns is not None:
            # The environment ends the episode at its own max_turns: pass it our limit.
            extras["max_turns"] = loop.config.max_turns
        self.env = await loop.env_factory.make(self.prompt.env_class, extras)
        self.first_messages = await self.env.init(self.prompt.messages)
        characters = _characters(self.first_messages)
        context = await self._begin_context(loop.chat_template(self.prompt), self.first_messages)
        return await self._turns(context, characters, self.first_messages, self.env)

    async def _begin_context(self, template: ChatTemplate, messages: Sequence[Message]) -> Context:
        self.begins = len(self.trajectory.steps)
        make = partial(begin_context, self.loop.config.context, template, messages)
        return await _off_loop(_characters(messages), make)

    async def close(self) -> None:
        _move_last_reward(self.trajectory.steps)
        if self.env is not None:
            if self.trajectory.failure is None:
                found: dict[str, Any] = dict(self.reward_parts)
                if self.loop.parser.tool_parser is not None:
                    found["unparsed_tool_calls"] = float(self.unparsed)
                self.trajectory.env_metrics = {**found, **await self.env.metrics()}
            await self.env.close()

    async def _turns(
        self, context: Context, characters: int, messages: Sequence[Message], env: EnvSession
    ) -> str:
        """Append steps until the trajectory ends; return its stop reason."""
        loop = self.loop
        entry = self.entry
        steps = self.trajectory.steps
        tools = context.template.tools
        renders_all = loop.config.context == "retemplate"  # for each prompt
        shown = _shown_text(messages)  # since the last answer
        before: list[int] = []  # the last prompt
        kept = TokenIds([])  # the same, as its step has it
        for turn in range(loop.config.turn_limit):
            if isinstance(context, CompactContext) and len(steps) > self.begins:
                context = await self._compact(context, kept, turn, shown)
            prompt_token_ids = await _off_loop(
                characters if renders_all else 0, context.prompt_token_ids
            )
            if len(prompt_token_ids) > loop.max_input_length:
                return LENGTH
            loop.board.set_phase(entry, GENERATING, attempt=entry.attempt, turn=turn)
            generation = await self._generate(prompt_token_ids)
            routes = turn_routes(self._own_steps(), prompt_token_ids, generation)
            text = decode_response(
                context.template, generation, skip_special_tokens=loop.skip_special_tokens
            )
            parsed = await loop.parser.parse(text, tools, place=f"turn-{turn}")
            arguments = [call["function"]["arguments"] for call in parsed.tool_calls]
            if not all(isinstance(given, dict) for given in arguments):
                parsed = ParsedAnswer(text, failed=True)  # environments index the arguments
            self.unparsed += parsed.failed
            loop.board.set_phase(entry, ACTING, attempt=entry.attempt, turn=turn)
            answer = await env.step(Action(text, parsed.tool_calls, parsed.failed))
            last = answer.done or turn + 1 == loop.config.turn_limit
            # Prompts share their parts: a copy in each step would be quadratic in the turns.
            before, kept = prompt_token_ids, grown_ids(prompt_token_ids, before, kept)
            step = Step.from_generation(
                kept,
                generation,
                text=text,
                appended_end=self._end_token(context.template, generation, is_last=last),
                reward=answer.reward,
                observation=_shown_text(answer.messages),
                env_seconds=answer.seconds,
                expert_indices=routes,
                policy=self.policy,
                number=len(steps),
                parent=self._parent(),
                state=shown,
            )
            shown = step.observation
            steps.append(step)
            self.reward_parts.update(answer.reward_parts)
            self._name_policies(answer.policy, *answer.policy_rewards)
            self.trajectory.policy_rewards |= answer.policy_rewards
            if last:
                # A truncated response keeps "length": the filter for overlong ones reads it.
                truncated = generation.stop_reason == LENGTH
                if answer.done or truncated:
                    return generation.stop_reason
                return MAX_TURNS
            new = _characters([*answer.messages, answer.postprocessed_action])
            extend = partial(_extend_context, context, step, generation, parsed, answer)
            await _off_loop(characters + new, extend)
            characters += new if renders_all else 0
        raise AssertionError("unreachable: the last turn returns")

    def _parent(self) -> int | None:
        """Return the number of the step that the next call continues, if it continues one."""
        last = len(self.trajectory.steps) - 1
        if last < self.begins:
            return None
        return last

    async def _compact(
        self, context: CompactContext, before: TokenIds, turn: int, shown: str
    ) -> CompactContext:
        """Return the context of the next turn: this one, or one that replaces it.

        Args:
            before: prompt of the last turn.
            shown: what the environment has shown since.
        """
        loop = self.loop
        assert loop.compaction is not None
        steps = self.trajectory.steps
        num_tokens = len(context.prompt_token_ids())
        kinds = [step.kind for step in steps]
        wanted = await loop.compaction.decide(
            context.messages,
            num_tokens,
            num_summaries=kinds.count(SUMMARISE),
        )
        if wanted is None:
            return context
        if isinstance(wanted, str):
            ask = partial(context.request_token_ids, wanted)
            prompt_token_ids = await _off_loop(_characters(context.messages), ask)
            if len(prompt_token_ids) > loop.max_input_length:
                return context
            summary = await self._summarise(context, prompt_token_ids, before, turn, shown)
            plain = context.template.without_control_tokens(summary)
            messages = messages_after(self.first_messages, plain)
        else:
            messages = wanted
        replaced = await self._begin_context(context.template, messages)
        assert isinstance(replaced, CompactContext)
        return replaced

    async def _summarise(
        self,
        context: CompactContext,
        prompt_token_ids: list[int],
        before: TokenIds,
        turn: int,
        shown: str,
    ) -> str:
        """Append the step of a summary; return its text."""
        loop = self.loop
        entry = self.entry
        loop.board.set_phase(entry, GENERATING, attempt=entry.attempt, turn=turn)
        generation = await self._generate(prompt_token_ids, place=f"summary-{turn}")
        text = decode_response(
            context.template, generation, skip_special_tokens=loop.skip_special_tokens
        )
        step = Step.from_generation(
            grown_ids(prompt_token_ids, before[:], before),
            generation,
            text=text,
            appended_end=self._end_token(context.template, generation, is_last=False),
            expert_indices=turn_routes(self._own_steps(), prompt_token_ids, generation),
            policy=self.policy,
            number=len(self.trajectory.steps),
            parent=self._parent(),
            state=shown,
            kind=SUMMARISE,
        )
        self.trajectory.steps.append(step)
        return text

    def _name_policies(self, next_policy: Any, *rewarded: str) -> None:
        """Let a policy give the next answer, if one is named."""
        calls = self.loop.calls
        named: list[tuple[Any, tuple[str, ...]]] = [(next_policy, calls.sampled)]
        for name in rewarded:
            named.append((name, calls.policies))
        for name, known in named:
            if name is not None and name not in known:
                if known:
                    expected = f"one of {', '.join(known)}"
                else:
                    expected = "no name in a run of one"
                raise EnvError(f"policy: expected {expected}, got {name!r:.100}")
        self.policy = next_policy or self.policy

    async def _generate(self, prompt_token_ids: list[int], place: str | None = None) -> Generation:
        known = find_recorded_routes(self._own_steps(), prompt_token_ids)
        if known is None:
            expert_indices_start = 0
        else:
            expert_indices_start = len(known)
        return await self.loop.calls.sample(
            self.trajectory,
            prompt_token_ids,
            self.loop.config.sampling(self.trajectory.phase),
            policy_version=self.policy_version,
            attempt=self.entry.attempt,
            place=self.entry.turn if place is None else place,
            expert_indices_start=expert_indices_start,
            policy=self.policy,
        )

    def _own_steps(self) -> list[Step]:
        """Return the steps of the policy that answers: another one routes the same tokens else."""
        return [step for step in self.trajectory.steps if step.policy == self.policy]

    def _end_token(
        self, template: ChatTemplate, generation: Generation, *, is_last: bool
    ) -> int | None:
        # That is: a stop string ended the response (several turns), or the last response lacks its
        # end token and was not truncated (single conversation). A response of the maximum length
        # has no room for it.
        config = self.loop.config
        if config.context == "single":
            append = is_last and generation.stop_reason != LENGTH
        else:
            append = (
                generation.stop_string is not None
                and config.append_eos_token_after_stop_str_in_multi_turn
            )
        sampling = config.sampling(self.trajectory.phase)
        if append:
            return end_to_append(template, generation, sampling)
        return None


def _move_last_reward(steps: Sequence[Step]) -> None:
    """Give the last turn's reward to a summary after it, which then ends the trajectory."""
    # The outcome of a trajectory is its last step's reward.
    if len(steps) < 2:
        return
    turn = steps[-2]
    last = steps[-1]
    if last.kind == SUMMARISE:
        last.reward = turn.reward
        turn.reward = 0.0


def _shown_text(messages: Sequence[Message]) -> str:
    return "\n".join(message_text(message) for message in messages)


def _characters(messages: Sequence[Message | str | None]) -> int:
    return sum(len(str(message)) for message in messages)


async def _off_loop(characters: int, call: Callable[[], T]) -> T:
    """Return the result of rendering or tokenising; long texts do not stop the event loop."""
    if characters < LONG_TEXT:
        return call()
    return await asyncio.to_thread(call)


def _extend_context(
    context: Context,
    step: Step,
    generation: Generation,
    parsed: ParsedAnswer,
    answer: EnvAnswer,
) -> None:
    action = answer.postprocessed_action
    if action is None and parsed.tool_calls:
        action = {
            "role": "assistant",
            "content": parsed.content,
            "tool_calls": parsed.tool_calls,
        }
    replaced = isinstance(action, str)
    if action is None:
        action = step.text
    if not isinstance(action, dict):
        action = {"role": "assistant", "content": action}
    # A dictionary is the same answer as a message, with its tool calls.
    context.add_response(
        step.response_ids, action, replaced=replaced, stopped=generation.stopped_at_token
    )
    context.add_observation(answer.messages)
