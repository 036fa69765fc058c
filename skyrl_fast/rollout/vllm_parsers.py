"""vLLM's parsers of answers, by name: of tool calls and of thoughts."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cached_property
from typing import Any


def parser_class(setting: str, name: str, *, module: str, manager: str, get: str) -> Any:
    """Return a parser's class.

    Args:
        module, manager, get: where vLLM registers it: `module.manager.get(name)`.
    """
    try:
        registered = getattr(importlib.import_module(module), manager)
    except ImportError as error:
        raise ValueError(
            f"{setting}: expected null without vLLM ({error}), got {name!r}"
        ) from error
    try:
        return getattr(registered, get)(name)
    except KeyError:
        known = ", ".join(registered.list_registered())
        raise ValueError(f"{setting}: expected null or one of {known}, got {name!r}") from None


def check_reads_text(setting: str, name: str, trial: Callable[[], Any]) -> None:
    """Raise ValueError if a parser raises, or returns nothing, for any text.

    vLLM registers such stubs for families that it parses by their tokens, such as gpt-oss.
    """
    try:
        failure = "it returns nothing" if trial() is None else ""
    except Exception as error:  # of any parser
        failure = f"{type(error).__name__}: {error}"
    if failure:
        raise ValueError(
            f"{setting}: expected a parser of text, got {name!r}, which vLLM uses only next to a "
            f"parser of tokens ({failure}); set it to null, and read the calls and thoughts in the "
            "environment or agent: generator.skip_special_tokens=false keeps their marks"
        )


class WithVocabulary:
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
        """Return the id of each token."""
        return self._vocabulary
