"""One sampled answer to a call: its step, and what the client gets of it.

Design: docs/design/021-gateway.md.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, product
from typing import Any

from skyrl_fast.config import SamplingParams
from skyrl_fast.gateway.form_limits import FormError
from skyrl_fast.gateway.messages import ApiError, Call, Choice, ToolCall
from skyrl_fast.gateway.policy import ServedPolicy
from skyrl_fast.gateway.prompt_ids import PromptIds, PromptTokens
from skyrl_fast.rollout.chat_template import message_text
from skyrl_fast.rollout.engine.protocol import Generation
from skyrl_fast.rollout.engine.route_record import turn_routes
from skyrl_fast.rollout.stop_reason import LENGTH, STOP
from skyrl_fast.rollout.token_ids import ids_array
from skyrl_fast.rollout.tokenization import decode
from skyrl_fast.rollout.tool_calls import REQUIRED
from skyrl_fast.rollout.trajectory import Step, Trajectory
from skyrl_fast.rollout.turn import decode_response, end_to_append

MAX_WHITE_SPACE = 3  # characters at the end of a text before a tool call that may be the template's
MAX_UNFIT = 3  # answers that no form continues, after which others like them are not tried


@dataclass(frozen=True, slots=True)
class _Parts:
    """An answer, divided; tool calls as in a chat message."""

    thoughts: str
    text: str
    tool_calls: list[dict[str, Any]] = field(default_factory=list)

    def message(self) -> dict[str, Any]:
        return {
            "role": "assistant",
            "content": self.text,
            **({"reasoning_content": self.thoughts} if self.thoughts else {}),
            **({"tool_calls": self.tool_calls} if self.tool_calls else {}),
        }


@dataclass(slots=True)
class Choices:
    """Samples the answers of one session.

    Args:
        known: ids of tool calls, and texts without thoughts.
        forms: of white space in answers: which of them to send.
        unfit: times that none was as sampled.
        numbers: of the steps, in the order in which their answers were complete.
        callers: numbers of the steps with tool calls, by the calls' ids.
        acted: numbers of the steps whose tool calls have had results.
    """

    policy: ServedPolicy
    trajectory: Trajectory
    prompts: PromptIds
    counts: Counter[str]
    policy_version: int
    known: set[str] = field(default_factory=set)
    forms: dict[Any, int] = field(default_factory=dict)
    unfit: Counter[Any] = field(default_factory=Counter)
    numbers: Iterator[int] = field(default_factory=count)
    callers: dict[str, int] = field(default_factory=dict)
    acted: set[int] = field(default_factory=set)

    async def sample(
        self, call: Call, prompt: PromptTokens, place: str, attempt: int
    ) -> tuple[Choice, Step]:
        """Return one answer and its step; its `place` in the trajectory is for the seeds.

        Raises:
            EngineError: the engine failed, or refuses the request.
            ApiError: tools cannot be forced.
        """
        policy = self.policy
        name = policy.find_policy(call.model)
        sampling = await self._sampling(call)
        generation = await policy.calls.sample(
            self.trajectory,
            prompt.token_ids,
            sampling,
            policy_version=self.policy_version,
            attempt=attempt,
            place=place,
            policy=name,
        )
        text = decode_response(policy.template, generation)
        complete = text if generation.stop_string is None else None  # else it may have been cut
        number = next(self.numbers)
        self._note_results(call)
        parent = self._find_parent(prompt)
        self.prompts.add_response(prompt, generation.token_ids, complete, number=number)
        append = (
            generation.stop_string is not None
            and policy.config.append_eos_token_after_stop_str_in_multi_turn
        )
        if append:
            appended_end = end_to_append(policy.template, generation, sampling)
        else:
            appended_end = None
        step = Step.from_generation(
            prompt.kept,
            generation,
            text=text,
            appended_end=appended_end,
            expert_indices=turn_routes([], prompt.token_ids, generation),
            policy=name,
            number=number,
            parent=None if parent is None else parent.number,
            state=self._shown_text(call, prompt, parent),
        )
        parts = await self._parts(call, prompt, generation, step.text, place)
        text = parts.text
        stop_string = generation.stop_string
        if stop_string is not None and call.stop is not None and not call.include_stop:
            text = text.removesuffix(stop_string)
        if generation.stop_reason == LENGTH:
            finish = LENGTH
        else:
            finish = STOP
        tool_calls = list(map(_tool_call, parts.tool_calls))
        self.known.update([text.strip(), *(tool_call.id for tool_call in tool_calls)])
        self.callers.update((tool_call.id, number) for tool_call in tool_calls)
        choice = Choice(
            text=text,
            thoughts=parts.thoughts,
            tool_calls=tool_calls,
            finish="tool_calls" if tool_calls else finish,
            stop_string=stop_string,
            token_ids=generation.token_ids,
            logprobs=generation.logprobs,
        )
        return choice, step

    def _note_results(self, call: Call) -> None:
        """Remember which steps' tool calls have had results, as far as a request has these."""
        for message in call.messages or []:
            caller = self.callers.get(message.get("tool_call_id") or "")
            if caller is not None:
                self.acted.add(caller)

    def _find_parent(self, prompt: PromptTokens) -> Step | None:
        """Return the delivered step whose prompt and response this prompt continues."""
        steps = reversed(self.trajectory.steps)
        if prompt.rendered.parts:
            return next((s for s in steps if s.number == prompt.parent), None)
        # The client gave tokens: no text tells where an answer ends.
        ids = prompt.kept.array()

        def continues(step: Step) -> bool:
            before = ids_array(step.prompt_token_ids)
            response = ids_array(step.response_ids)
            end = len(before) + len(response)
            is_same_prompt = ids[: len(before)].tolist() == before.tolist()
            return is_same_prompt and ids[len(before) : end].tolist() == response.tolist()

        return next((step for step in steps if continues(step)), None)

    def _shown_text(self, call: Call, prompt: PromptTokens, parent: Step | None) -> str:
        """Return what the agent's environment showed since the last answer in the prompt."""
        if call.messages is not None:
            messages = [*call.messages]
            while messages and messages[-1].get("role") == "assistant":
                messages.pop()  # which this answer continues
            roles = [message.get("role") for message in messages]
            answers = []
            for place, role in enumerate(roles):
                if role == "assistant":
                    answers.append(place)
            if answers:
                new = messages[answers[-1] + 1 :]
            else:
                new = messages
            return "\n".join(message_text(message) for message in new)
        if parent is None:
            known = 0
        else:
            known = len(parent.prompt_token_ids) + len(parent.response_ids)
        return decode(self.policy.calls.tokenizer, prompt.kept.array()[known:].tolist())

    async def _sampling(self, call: Call) -> SamplingParams:
        run = self.policy.config.sampling(self.trajectory.phase)
        longest = run.max_generate_length
        structured = call.structured
        if call.forced_tool is not None:
            structured = self._forcing(call, call.forced_tool)
        elif structured is not None and call.tools and call.parse_tools:
            structured = self._form_or_calls(call, structured)
        try:
            if structured is not None:
                await self.policy.forms.check(structured)
        except FormError as error:
            raise ApiError(400, f"the form of an answer: {error}", code="unsupported") from error
        is_trained = self.trajectory.phase == "train"
        if structured is not None and is_trained and run.max_kept_tokens is None:
            name = "generator.sampling_params.max_kept_tokens"
            raise ApiError(400, f"the form of an answer can be set only with {name}, got null")
        more: dict[str, Any] = {} if structured is None else {"structured_outputs": structured}
        if call.stop_token_ids is not None:
            more["stop_token_ids"] = call.stop_token_ids
        if call.stop is None:
            stop = run.stop
        else:
            stop = call.stop
        return replace(
            run,
            max_generate_length=min(call.max_tokens or longest, longest),
            stop=stop,
            additional_kwargs={**run.additional_kwargs, **more},
        )

    def _forcing(self, call: Call, forced: str) -> dict[str, Any]:
        parser = self.policy.tool_parser
        if parser is None:
            raise ApiError(400, "tool_choice: tools are forced only with generator.tool_parser")
        if not call.tools:
            raise ApiError(400, "tool_choice: expected tools to choose from, got none")
        try:
            return parser.forcing(call.tools, forced)
        except ValueError as error:
            raise ApiError(400, f"tool_choice: {error}") from error

    def _form_or_calls(self, call: Call, form: dict[str, Any]) -> dict[str, Any]:
        """Return the form of an answer that has the wanted form, or calls tools."""
        if self.policy.tool_parser is None:  # none can be called
            return form
        tag = self._forcing(call, REQUIRED).get("structural_tag")
        if tag is None or form.keys() != {"json"}:
            raise ApiError(
                400,
                "the form of an answer, with tools: expected a JSON schema and a "
                "generator.tool_parser whose calls vLLM can describe; leave out one of the two",
                code="unsupported",
            )
        schema = {"type": "json_schema", "json_schema": form["json"]}
        either = {"type": "or", "elements": [schema, json.loads(tag)["format"]]}
        return {"structural_tag": json.dumps({"type": "structural_tag", "format": either})}

    # --- what the client gets

    async def _parts(
        self, call: Call, prompt: PromptTokens, generation: Generation, text: str, place: str
    ) -> _Parts:
        """Return the answer's parts, as the template has to get them back."""
        # Parsers and templates disagree about the white space between them.
        policy = self.policy
        reasons = policy.reasoning_parser is not None and call.messages is not None
        calls = policy.tool_parser is not None and call.parse_tools and bool(call.tools)
        if not reasons and not calls:
            return _Parts("", text)
        answer = await policy.answer_parser.parse(
            decode_response(policy.template, generation, skip_special_tokens=False),
            call.tools,
            place=place,
            forced=call.forced_tool,
            template_kwargs={**policy.config.chat_template_kwargs, **call.template_kwargs},
            with_thoughts=reasons,
            with_calls=calls,
        )
        if answer.thoughts:
            text = policy.template.control_tokens.sub("", answer.rest)
        parts = _Parts(answer.thoughts, text)
        tool_calls = answer.tool_calls
        if tool_calls:
            # As vLLM's server does; the step has all that was sampled.
            allowed = None if call.parallel_tool_calls else 1
            parts = _Parts(answer.thoughts, answer.content, tool_calls[:allowed])
            self.counts["left_out_tool_calls"] += len(tool_calls[allowed or len(tool_calls) :])
        self.counts["answers_with_thoughts"] += bool(answer.thoughts)
        self.counts["answers_with_tool_calls"] += bool(answer.tool_calls)
        self.counts["unparsed_tool_calls"] += answer.failed
        return await self._returnable(call, prompt, generation.token_ids, parts)

    async def _returnable(
        self, call: Call, prompt: PromptTokens, token_ids: list[int], parts: _Parts
    ) -> _Parts:
        if parts.tool_calls or parts.thoughts:
            texts = _trim(parts.text)
        else:
            texts = [parts.text]
        thoughts = list(dict.fromkeys([parts.thoughts, parts.thoughts.strip()]))
        forms = []
        for t, x in product(thoughts, texts):
            forms.append(replace(parts, thoughts=t, text=x))
        if len(forms) == 1:
            return parts
        spaces = (*map(_spaces, (parts.thoughts, parts.text)), bool(parts.tool_calls))
        if spaces not in self.forms:
            if self.unfit[spaces] >= MAX_UNFIT:
                return parts
            choose = partial(
                self.prompts.continuing,
                prompt,
                token_ids,
                call.messages or [],
                [form.message() for form in forms],
                tools=call.tools,
                template_kwargs=call.template_kwargs,
            )
            index = await asyncio.to_thread(choose)
            if index is None:
                self.unfit[spaces] += 1
                return parts
            self.forms[spaces] = index
        return forms[self.forms[spaces]]


def _trim(text: str) -> list[str]:
    ends = range(len(text), max(len(text.rstrip()), len(text) - MAX_WHITE_SPACE) - 1, -1)
    texts = [*(text[:end] for end in ends), text.rstrip(), text.lstrip(), text.strip()]
    return list(dict.fromkeys(texts))


def _spaces(text: str) -> tuple[str, ...]:
    """Return the white space at both ends of a text; all of it, where it is nothing else."""
    rest = text.strip()
    if not rest:
        return (text,)
    before, _, after = text.partition(rest)
    return before, after


def _tool_call(call: Mapping[str, Any]) -> ToolCall:
    function = call["function"]
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return ToolCall(call["id"], function["name"], arguments)
