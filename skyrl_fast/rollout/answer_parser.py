"""A model's answers divided into thoughts, text and tool calls; long ones in a process.

vLLM's parsers are Python. On some texts that a model may write, their time grows with the square
of the length or faster, and a regular expression holds the interpreter's lock all the while: a
thread would stop the event loop as well, and could not be ended.
"""

from __future__ import annotations

import logging
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from skyrl_fast.rollout.reasoning import ReasoningParser
from skyrl_fast.rollout.tool_calls import ParsedAnswer, ToolCallParser
from skyrl_fast.rollout.workers.calls import ProcessCalls
from skyrl_fast.rollout.workers.protocol import CallResult, HandlerSettings
from skyrl_fast.system.digests import digest_number

log = logging.getLogger(__name__)

# Characters of an answer that is parsed at once. The slowest of vLLM's parsers on the worst of 200
# hostile texts takes 9, 42 and 304 ms for 500, 1,000 and 2,000 characters.
MAX_INLINE = 800
PARSE_SECONDS = 10.0  # for a long answer; the same parsers read usual ones in milliseconds
MAX_PROCESSES = 4
PARSE = "parse"  # the only call of a handler
MAX_ANSWER_BYTES = 64 << 20
# Mistral's chat templates take no other ids than nine of these; all others take any.
ID_CHARACTERS = string.digits + string.ascii_letters
ID_LENGTH = 9


class AnswerParser:
    """Divides answers, with the parsers of the model's family.

    Args:
        parse_seconds: for a long answer.
    """

    def __init__(
        self,
        tool_parser: ToolCallParser | None = None,
        reasoning_parser: ReasoningParser | None = None,
        *,
        parse_seconds: float = PARSE_SECONDS,
    ) -> None:
        self._parse_seconds = parse_seconds
        self.tool_parser = tool_parser
        self.reasoning_parser = reasoning_parser
        self._settings = _Parsers(tool_parser, reasoning_parser)
        self._calls = ProcessCalls(self._settings, MAX_PROCESSES)

    async def parse(
        self,
        text: str,
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        place: str,
        forced: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        with_thoughts: bool = True,
        with_calls: bool = True,
    ) -> ParsedAnswer:
        """Return the parts of an answer, text alone where it cannot be parsed in time.

        Ids of calls without one follow from its `place` in the trajectory.
        """
        thoughts = with_thoughts and self.reasoning_parser is not None
        calls = with_calls and self.tool_parser is not None
        if not thoughts and not calls:
            return ParsedAnswer(text, rest=text)
        if tools is None:
            offered = None
        else:
            offered = [dict(tool) for tool in tools]
        kwargs = dict(template_kwargs or {})
        arguments = (text, offered, forced, kwargs, thoughts, calls)
        if len(text) <= MAX_INLINE:
            parsed = self._settings.parse(*arguments)
        else:
            parsed = await self._parse_in_process(text, arguments)
        failed = parsed.failed or any(_is_odd(call, tools) for call in parsed.tool_calls)
        # A model's own id stays; the others must be those of every run, as they are in prompts.
        named = [
            {"id": _call_id(f"{place}-{number}"), **call}
            for number, call in enumerate(parsed.tool_calls)
        ]
        return replace(parsed, tool_calls=named, failed=failed)

    async def _parse_in_process(self, text: str, arguments: tuple[Any, ...]) -> ParsedAnswer:
        outcome = await self._calls.call(PARSE, arguments, self._parse_seconds)
        if outcome.failure is None:
            parsed: ParsedAnswer = outcome.value
            return parsed
        log.warning("an answer of %d characters stays text: %s", len(text), outcome.failure)
        return ParsedAnswer(text, failed=True, rest=text)


@dataclass(frozen=True, slots=True)
class _Parsers(HandlerSettings):
    """What a process needs, and its own handler; to unpickle the parsers imports vLLM."""

    tool_parser: ToolCallParser | None
    reasoning_parser: ReasoningParser | None

    max_bytes: ClassVar[int] = MAX_ANSWER_BYTES

    def parse(
        self,
        text: str,
        tools: list[dict[str, Any]] | None,
        forced: str | None,
        template_kwargs: dict[str, Any],
        with_thoughts: bool,
        with_calls: bool,
    ) -> ParsedAnswer:
        thoughts = ""
        rest = text
        if self.reasoning_parser is not None and with_thoughts:
            thoughts, rest = self.reasoning_parser.divide(rest, template_kwargs)
        parsed = ParsedAnswer(rest)
        if self.tool_parser is not None and with_calls:
            parsed = self.tool_parser.parse(rest, tools, forced=forced)
        return replace(parsed, thoughts=thoughts, rest=rest)

    def handler(self) -> _Parsers:
        return self

    def call(self, what: str, argument: tuple[Any, ...]) -> CallResult:
        try:
            return CallResult(self.parse(*argument))
        except Exception as error:  # the parsers catch what a text may cause
            return CallResult(failure=f"{what}: {type(error).__name__}: {error}")

    def check_value(self, what: str, value: Any) -> ParsedAnswer:
        return ParsedAnswer(**value)


def _is_odd(call: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] | None) -> bool:
    """Return whether a call is not of an offered function, or its arguments are no JSON object."""
    function = call["function"]
    offered = []
    for tool in tools or []:
        offered.append(tool.get("function", tool).get("name"))
    is_unknown = bool(offered) and function["name"] not in offered
    return is_unknown or not isinstance(function["arguments"], dict)


def _call_id(place: str) -> str:
    """Return the id of a call without one: the same in every run."""
    number = digest_number(place)
    digits = (number // len(ID_CHARACTERS) ** n for n in range(ID_LENGTH))
    return "".join(ID_CHARACTERS[digit % len(ID_CHARACTERS)] for digit in digits)
