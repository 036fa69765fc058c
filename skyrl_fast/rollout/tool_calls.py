"""Tool calls in a model's answers, by vLLM's parser of the model's family."""

from __future__ import annotations

import copy
import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from skyrl_fast.rollout.vllm_parsers import VllmParser, parser_request
from skyrl_fast.system.printable import log_line

log = logging.getLogger(__name__)

REQUIRED = "required"  # any function must be called
_MARKER = re.compile(r"(tool|function|bot)_?.*(start_token|bot_token|bot_string)|^bot_")


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """An answer, divided.

    Args:
        content: its text without calls.
        tool_calls: as in a chat message, `{"type": "function", "function": {"name": ...,
            "arguments": {...}}}`; arguments that are no JSON object stay text. A call has an `id`
            if the model wrote one, as Kimi K2 does.
        failed: whether it has a call that cannot be parsed, or is not of an offered function.
        thoughts: before it; "" for none.
        rest: text after the thoughts, with its calls and special tokens.
    """

    content: str
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    failed: bool = False
    thoughts: str = ""
    rest: str = ""


class ToolCallParser(VllmParser):
    """Finds tool calls in answers; see `VllmParser`."""

    setting = "generator.tool_parser"
    registry = ("vllm.tool_parsers", "ToolParserManager", "get_tool_parser")

    def __init__(self, name: str, tokenizer: Any) -> None:
        super().__init__(name, tokenizer)
        self._errors = _error_log()  # after vLLM's import, which sets up its loggers

    def _extract(self, parser: Any, text: str) -> Any:
        return parser.extract_tool_calls(text, _request(None))

    def parse(
        self,
        text: str,
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        forced: str | None = None,
    ) -> ParsedAnswer:
        """Return content and calls, none where they cannot be parsed; `forced` as of `forcing`."""
        self._errors.attach()
        logged = self._errors.number  # parsers log what they cannot parse, and return it as text
        try:
            request = _request(tools)
            parser = self._make(self._tokenizer, request.tools)
            if forced is not None and parser.structural_tag_model is None:
                return ParsedAnswer("", _calls_of_json(text, forced))
            found = parser.extract_tool_calls(text, request)
        except Exception as error:  # whatever a model wrote
            log.info("%s: no calls: %s", self.setting, log_line(f"{type(error).__name__}: {error}"))
            return ParsedAnswer(text, failed=True)
        if not found.tools_called or not found.tool_calls:
            begins = any(marker in text for marker in _markers(parser))
            return ParsedAnswer(text, failed=begins or self._errors.number > logged)
        return ParsedAnswer(
            found.content or "",
            [
                # Parsers invent a random id where the model wrote none.
                _call(
                    call.function.name,
                    call.function.arguments,
                    call.id if call.id in text else None,
                )
                for call in found.tool_calls
            ],
        )

    def forcing(self, tools: Sequence[Mapping[str, Any]], forced: str) -> dict[str, Any]:
        """Return vLLM's structured outputs under which an answer is a call.

        In the format of the model's family where vLLM knows it, else as JSON.

        Args:
            forced: "required" or a function's name.

        Raises:
            ValueError: no such function, or schemas that cannot be joined.
        """
        try:
            request = _request(tools, forced)
            parser = self._make(self._tokenizer, request.tools)
            tag = parser.get_structural_tag(request)
            if tag is not None:
                return {"structural_tag": json.dumps(tag.model_dump())}
            wanted = parser.adjust_request(request).structured_outputs
        except Exception as error:  # raised by any parser, also for the request's schemas
            raise ValueError(f"{type(error).__name__}: {error}") from error
        if wanted is None or wanted.json is None:
            raise ValueError(f"vLLM's parser does not force calls ({self.setting})")
        return {"json": wanted.json}


class _LoggedErrors(logging.Handler):
    """Counts the errors that vLLM's parsers log, a traceback each, and drops them."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.number = 0

    def attach(self) -> None:
        """Receive them, also after vLLM's start, whose configuration removes this handler."""
        logger = logging.getLogger("vllm.tool_parsers")
        logger.addHandler(self)  # once is enough
        logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        self.number += 1


@cache
def _error_log() -> _LoggedErrors:
    return _LoggedErrors()


def _call(name: str, arguments: str, sampled_id: str | None = None) -> dict[str, Any]:
    try:
        values = json.loads(arguments)
    except ValueError:
        values = arguments
    given = values if isinstance(values, dict) else arguments
    call = {"type": "function", "function": {"name": name, "arguments": given}}
    return {"id": sampled_id, **call} if sampled_id else call


def _request(tools: Sequence[Mapping[str, Any]] | None, forced: str | None = None) -> Any:
    choice: Any = forced
    if forced is not None and forced != REQUIRED:
        choice = {"type": "function", "function": {"name": forced}}
    return parser_request(
        tools=[copy.deepcopy(dict(tool)) for tool in tools] if tools else None,
        **({} if choice is None else {"tool_choice": choice}),
    )


def _markers(parser: Any) -> list[str]:
    """Return the texts with which calls begin, where the parser has attributes for them."""
    result: list[str] = []
    for name, value in vars(parser).items():
        if isinstance(value, str) and value and _MARKER.search(name):
            result.append(value)
    return result


def _calls_of_json(text: str, forced: str) -> list[dict[str, Any]]:
    if forced != REQUIRED:
        return [_call(forced, json.dumps(json.loads(text)))]
    result: list[dict[str, Any]] = []
    for call in json.loads(text):
        result.append(_call(call["name"], json.dumps(call["parameters"])))
    return result
