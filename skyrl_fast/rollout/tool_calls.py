"""Tool calls in a model's answers, by vLLM's parser of the model's family."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from skyrl_fast.printable import log_line

log = logging.getLogger(__name__)

SETTING = "generator.tool_parser"


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """An answer, divided.

    Args:
        content: its text without calls.
        tool_calls: as in a chat message, `{"type": "function", "function": {"name": ...,
            "arguments": {...}}}`; arguments that are no JSON object stay text.
    """

    content: str
    tool_calls: list[dict[str, Any]] = field(default_factory=list)


class ToolCallParser:
    """Finds tool calls in answers.

    Args:
        name: of a parser of vLLM, as in `vllm serve --tool-call-parser`, such as "hermes".
        tokenizer: of the model.

    Raises:
        ValueError: vLLM is missing or has no parser of this name.
    """

    def __init__(self, name: str, tokenizer: Any) -> None:
        self._make = _parser_class(name)
        # A traceback for each call that a model writes wrongly.
        logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)
        self._tokenizer = _WithVocabulary(tokenizer)

    def parsed(self, text: str, tools: Sequence[Mapping[str, Any]] | None) -> ParsedAnswer:
        """Return the answer's content and calls; without calls where they cannot be parsed.

        Args:
            text: of the answer, with special tokens.
            tools: that the model was offered, for the types of arguments.
        """
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        try:
            request = ChatCompletionRequest(
                model="",
                messages=[{"role": "user", "content": ""}],
                tools=[dict(tool) for tool in tools] if tools else None,
            )
            found = self._make(self._tokenizer, request.tools).extract_tool_calls(text, request)
        except Exception as error:  # whatever a model wrote
            log.info("%s: no calls: %s", SETTING, log_line(f"{type(error).__name__}: {error}"))
            return ParsedAnswer(text)
        if not found.tools_called:
            return ParsedAnswer(text)
        return ParsedAnswer(
            found.content or "",
            [_call(call.function.name, call.function.arguments) for call in found.tool_calls],
        )


class _WithVocabulary:
    """A tokenizer that builds its vocabulary, a large dict, once and not for each answer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    @cached_property
    def _vocabulary(self) -> dict[str, int]:
        vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        return vocabulary

    def get_vocab(self) -> dict[str, int]:
        return self._vocabulary


def check_tool_parser(name: str) -> None:
    """Raise ValueError if vLLM is missing or has no parser of this name."""
    _parser_class(name)


def _parser_class(name: str) -> Any:
    try:
        from vllm.tool_parsers import ToolParserManager
    except ImportError as error:
        raise ValueError(f"{SETTING}: wanted null without vLLM ({error}), got {name!r}") from error
    try:
        return ToolParserManager.get_tool_parser(name)
    except KeyError:
        known = ", ".join(ToolParserManager.list_registered())
        raise ValueError(f"{SETTING}: wanted null or one of {known}, got {name!r}") from None


def _call(name: str, arguments: str) -> dict[str, Any]:
    try:
        values = json.loads(arguments)
    except ValueError:
        values = arguments
    given = values if isinstance(values, dict) else arguments
    return {"type": "function", "function": {"name": name, "arguments": given}}
