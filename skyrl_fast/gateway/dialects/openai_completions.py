"""OpenAI's text completions: `POST /v1/completions`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import Field

from skyrl_fast.gateway.dialects.dialect import Forms, ParsedCall, event, one_form
from skyrl_fast.gateway.dialects.openai_chat import (
    MAX_CHOICES,
    OpenAIErrors,
    StreamOptions,
    head,
    stop_strings,
    usage,
)
from skyrl_fast.gateway.dialects.parameters import COMPLETIONS, check_parameters
from skyrl_fast.gateway.messages import Answer, ApiError, Call, Choice
from skyrl_fast.gateway.request_body import RequestBodies, check_fields, parse_json

DEFAULT_TOKENS = 16  # tokens of an answer, as in OpenAI's API


class CompletionRequest(Forms):
    """A request."""

    model: str
    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int | None = Field(DEFAULT_TOKENS, ge=1)
    stop: str | list[str] | None = None
    n: int | None = Field(1, ge=1, le=MAX_CHOICES)
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    logprobs: int | None = None
    stop_token_ids: list[int] | None = None  # vLLM's, as the next one
    include_stop_str_in_output: bool = False


class OpenAICompletions(OpenAIErrors):
    """The dialect; see `Dialect`."""

    def parse(self, body: bytes, bodies: RequestBodies, memory: dict[str, Any]) -> ParsedCall:
        fields = check_fields(CompletionRequest, parse_json(body))
        ignored = check_parameters(fields, COMPLETIONS)
        if (fields.logprobs or 0) > 1:
            raise ApiError(
                400,
                f"logprobs: expected 0 or 1, got {fields.logprobs}: only the sampled tokens' are "
                "recorded",
                code="unsupported",
            )
        call = Call(
            model=fields.model,
            prompt=_prompt(fields.prompt),
            max_tokens=fields.max_tokens,
            stop=stop_strings(fields.stop),
            include_stop=fields.include_stop_str_in_output,
            num_choices=fields.n or 1,
            stream=bool(fields.stream),
            structured=one_form(fields),
            stop_token_ids=fields.stop_token_ids,
            ignored=ignored,
        )
        return ParsedCall(call, fields)

    def response(self, answer: Answer, request: ParsedCall, tokens: Any) -> dict[str, Any]:
        choices = []
        for index, choice in enumerate(answer.choices):
            choices.append(_choice(index, choice.text, choice, request, tokens))
        return {**_head(answer), "choices": choices, "usage": usage(answer)}

    def events(self, answer: Answer, request: ParsedCall, tokens: Any) -> Iterator[str]:
        for index, choice in enumerate(answer.choices):
            entry = _choice(index, choice.text, choice, request, tokens)
            yield event({**_head(answer), "choices": [entry]})
        options = request.fields.stream_options
        if options is not None and options.include_usage:
            yield event({**_head(answer), "choices": [], "usage": usage(answer)})
        yield "data: [DONE]\n\n"


def _prompt(prompt: Any) -> str | list[int]:
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise ApiError(400, f"prompt: expected one prompt, got {len(prompt)}")
        prompt = prompt[0]
    if not prompt:
        raise ApiError(400, "prompt: expected text or tokens, got nothing")
    return prompt


def _head(answer: Answer) -> dict[str, Any]:
    return head(answer, "cmpl", "text_completion")


def _choice(
    index: int, text: str, choice: Choice, request: ParsedCall, tokens: Any
) -> dict[str, Any]:
    logprobs = None
    if request.fields.logprobs is not None:
        texts = [tokens.decode([token]) for token in choice.token_ids]
        logprobs = {"tokens": texts, "token_logprobs": choice.logprobs, "top_logprobs": None}
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": choice.finish}
