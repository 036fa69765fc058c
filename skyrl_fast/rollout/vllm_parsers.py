"""vLLM's parsers of answers, by name: of tool calls and of thoughts."""

from __future__ import annotations

import importlib
import logging
from functools import cached_property
from typing import Any, ClassVar

from skyrl_fast.setting import did_you_mean

_TRITON_CHECK = "vllm.triton_utils.importing"


def _matters(record: logging.LogRecord) -> bool:
    """Return whether a message on Triton is of use: parsers need none, and engines on a GPU do."""
    import torch

    return record.levelno >= logging.ERROR or torch.cuda.is_available()


class VllmParser:
    """A parser of vLLM, by its name in `vllm serve`, such as "hermes"; picklable.

    Raises:
        ValueError: vLLM is missing or has no parser of this name, the tokenizer is not of its
            model family, or it reads no text.
    """

    setting: ClassVar[str]
    registry: ClassVar[tuple[str, str, str]]  # module, its manager, the manager's method

    def __init__(self, name: str, tokenizer: Any) -> None:
        self._make = self.find_class(name)
        self._arguments = (name, tokenizer)
        self._tokenizer = WithVocabulary(tokenizer)
        try:
            parser = self._make(self._tokenizer)
        except Exception as error:  # raised by any parser
            raise ValueError(f"{self.setting}: {name} refuses the tokenizer: {error}") from error
        # vLLM registers stubs for families that it parses by their tokens, such as gpt-oss.
        try:
            if self._extract(parser, "x") is None:
                failure = "it returns nothing"
            else:
                failure = ""
        except Exception as error:  # raised by any parser
            failure = f"{type(error).__name__}: {error}"
        if failure:
            raise ValueError(
                f"{self.setting}: expected a parser of text, got {name!r}, which vLLM uses only "
                f"next to a parser of tokens ({failure}); set it to null, and read the calls and "
                "thoughts in the environment or agent: generator.skip_special_tokens=false keeps "
                "their marks"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._arguments

    def _extract(self, parser: Any, text: str) -> Any:
        """Return what vLLM's parser finds in a text of a conversation without tools."""
        raise NotImplementedError

    @classmethod
    def find_class(cls, name: str) -> Any:
        """Return vLLM's class; ValueError if vLLM is missing or has no parser of this name."""
        module, manager, get = cls.registry
        logging.getLogger(_TRITON_CHECK).addFilter(_matters)
        try:
            registered = getattr(importlib.import_module(module), manager)
        except ImportError as error:
            raise ValueError(
                f"{cls.setting}: expected null without vLLM ({error}), got {name!r}"
            ) from error
        try:
            return getattr(registered, get)(name)
        except KeyError:
            known = registered.list_registered()
            raise ValueError(
                f"{cls.setting}: expected null or one of {', '.join(known)}, got {name!r}"
                f"{did_you_mean(name, known)}"
            ) from None


def parser_request(**fields: Any) -> Any:
    """Return the request of a chat as vLLM's parsers get it."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    return ChatCompletionRequest(model="", messages=[{"role": "user", "content": ""}], **fields)


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
        return self._vocabulary
