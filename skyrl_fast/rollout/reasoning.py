"""Thoughts in a model's answers, by vLLM's parser of the model's family."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from skyrl_fast.rollout.vllm_parsers import VllmParser, parser_request
from skyrl_fast.system.printable import log_line

log = logging.getLogger(__name__)


class ReasoningParser(VllmParser):
    """Divides answers into thoughts and the rest; see `VllmParser`."""

    setting = "generator.reasoning_parser"
    registry = ("vllm.reasoning", "ReasoningParserManager", "get_reasoning_parser")

    def _extract(self, parser: Any, text: str) -> Any:
        return parser.extract_reasoning(text, parser_request(chat_template_kwargs={}))

    def divide(self, text: str, template_kwargs: Mapping[str, Any]) -> tuple[str, str]:
        try:
            request = parser_request(chat_template_kwargs=dict(template_kwargs))
            parser = self._make(self._tokenizer, chat_template_kwargs=dict(template_kwargs))
            thoughts, rest = parser.extract_reasoning(text, request)
        except Exception as error:  # whatever a model wrote
            log.info(
                "%s: no thoughts: %s", self.setting, log_line(f"{type(error).__name__}: {error}")
            )
            return "", text
        return thoughts or "", rest or ""
