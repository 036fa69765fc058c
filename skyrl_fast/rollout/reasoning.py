"""Thoughts in a model's answers, by vLLM's parser of the model's family."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from skyrl_fast.rollout.vllm_parsers import WithVocabulary, check_reads_text, parser_class
from skyrl_fast.system.printable import log_line

log = logging.getLogger(__name__)

SETTING = "generator.reasoning_parser"


class ReasoningParser:
    """Divides answers into thoughts and the rest.

    Args:
        name: name of a parser of vLLM, as in `vllm serve --reasoning-parser`, such as "qwen3".

    Raises:
        ValueError: vLLM is missing or has no parser of this name, the tokenizer is not of its
            model family, or it reads no text.
    """

    def __init__(self, name: str, tokenizer: Any) -> None:
        self._make = _parser_class(name)
        self._arguments = (name, tokenizer)
        self._tokenizer = WithVocabulary(tokenizer)
        try:
            parser = self._make(self._tokenizer)
        except Exception as error:  # of any parser
            raise ValueError(f"{SETTING}: {name} refuses the tokenizer: {error}") from error
        check_reads_text(SETTING, name, lambda: parser.extract_reasoning("x", _request({})))

    def __reduce__(self) -> tuple[Any, ...]:
        return ReasoningParser, self._arguments

    def divide(self, text: str, template_kwargs: Mapping[str, Any]) -> tuple[str, str]:
        """Return the thoughts of an answer, and the text after them.

        Args:
            text: text of the answer, with special tokens.
            template_kwargs: arguments of the chat template, such as `enable_thinking`.
        """
        try:
            request = _request(template_kwargs)
            parser = self._make(self._tokenizer, chat_template_kwargs=dict(template_kwargs))
            thoughts, rest = parser.extract_reasoning(text, request)
        except Exception as error:  # whatever a model wrote
            log.info("%s: no thoughts: %s", SETTING, log_line(f"{type(error).__name__}: {error}"))
            return "", text
        return thoughts or "", rest or ""


def _request(template_kwargs: Mapping[str, Any]) -> Any:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    return ChatCompletionRequest(
        model="",
        messages=[{"role": "user", "content": ""}],
        chat_template_kwargs=dict(template_kwargs),
    )


def check_reasoning_parser(name: str) -> None:
    """Raise ValueError if vLLM is missing or has no parser of this name."""
    _parser_class(name)


def _parser_class(name: str) -> Any:
    return parser_class(
        SETTING,
        name,
        module="vllm.reasoning",
        manager="ReasoningParserManager",
        get="get_reasoning_parser",
    )
