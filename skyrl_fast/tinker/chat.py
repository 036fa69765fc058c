"""OpenAI's and Anthropic's APIs of what the server holds: the base model, and saved adapters.

`model` is a name of the base model or a `tinker://` path. Requests are parsed, and answers written,
by the gateway's dialects; but the sampling parameters are each request's own, and nothing is
recorded. Log-probabilities are the model's own, as those of `sample`.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from functools import cached_property
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from skyrl_fast.gateway.dialects.anthropic_messages import AnthropicMessages
from skyrl_fast.gateway.dialects.dialect import Dialect, ParsedCall, event
from skyrl_fast.gateway.dialects.openai_chat import OpenAIChat
from skyrl_fast.gateway.dialects.openai_completions import OpenAICompletions
from skyrl_fast.gateway.dialects.openai_responses import OpenAIResponses
from skyrl_fast.gateway.dialects.parameters import SAMPLING
from skyrl_fast.gateway.messages import Answer, ApiError, Call, Choice
from skyrl_fast.gateway.prompt_ids import PromptIds
from skyrl_fast.gateway.request_body import RequestBodies
from skyrl_fast.gateway.server import (
    PING_SECONDS,
    SERVER_ERROR,
    JsonAnswer,
    model_entry,
    read_body,
    wait_for_disconnect,
)
from skyrl_fast.rollout.chat_template import ChatTemplate, ContextError
from skyrl_fast.rollout.engine.protocol import EngineError, Generation, RefusedRequestError
from skyrl_fast.rollout.stop_reason import LENGTH, STOP
from skyrl_fast.rollout.turn import decode_response
from skyrl_fast.tinker.sampling import MAX_SEED, SampleCall
from skyrl_fast.tinker.service import TinkerService
from skyrl_fast.tinker.values import number, whole_number
from skyrl_fast.tinker.wire import RefusedCallError, SampledTokens
from skyrl_fast.train.model.loading import load_tokenizer

# Tinker's own address of the API, and that of all others.
PREFIXES = ("/v1", "/oai/api/v1")
HONOURED = ("temperature", "top_p", "top_k", "seed")

Check = Callable[[Request], None]


class ChatDoor:
    """The routes of the APIs.

    Args:
        check_key: raises ApiError for a request without the server's key.
    """

    def __init__(self, service: TinkerService, check_key: Check) -> None:
        self._service = service
        self._check_key = check_key

    def routes(self) -> list[Route]:
        chat = OpenAIChat()
        messages = AnthropicMessages()
        posts: list[tuple[str, Dialect, Any]] = [
            ("/chat/completions", chat, self._call),
            ("/completions", OpenAICompletions(), self._call),
            ("/responses", OpenAIResponses(), self._call),
            ("/messages", messages, self._call),
            ("/messages/count_tokens", messages, self._count),
        ]
        routes = []
        for prefix in PREFIXES:
            for path, dialect, handle in posts:
                routes.append(self._route(prefix + path, dialect, handle, "POST"))
            routes.append(self._route(f"{prefix}/models", chat, self._models, "GET"))
        return routes

    def _route(self, path: str, dialect: Dialect, handle: Any, method: str) -> Route:
        async def endpoint(request: Request) -> Response:
            try:
                self._check_key(request)
                response: Response = await handle(request, dialect)
                return response
            except ApiError as error:
                failure = error
            except ClientDisconnect:
                return Response(status_code=499)
            return JsonAnswer(dialect.error(failure), failure.status)

        return Route(path, endpoint, methods=[method])

    @cached_property
    def _template(self) -> ChatTemplate:
        base = self._service.base
        return ChatTemplate(load_tokenizer(base.tokenizer), max_length=base.max_length)

    async def _call(self, request: Request, dialect: Dialect) -> Response:
        body = await read_body(request)
        # Requests that refer to earlier ones find none: nothing is recorded.
        parsed = await asyncio.to_thread(dialect.parse, body, RequestBodies(), {})
        task = asyncio.create_task(self._answer(parsed))
        if parsed.call.stream:
            # What is refused is refused before the stream begins.
            await asyncio.wait([task], timeout=PING_SECONDS)
            if task.done():
                _result(task)
            return StreamingResponse(
                self._events(task, parsed, dialect),
                media_type="text/event-stream",
                headers={"cache-control": "no-cache"},
            )
        gone = asyncio.ensure_future(wait_for_disconnect(request))
        try:
            await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientDisconnect
        finally:
            gone.cancel()
            task.cancel()
        return JsonAnswer(dialect.response(_result(task), parsed, self._template.tokenizer))

    async def _events(
        self, task: asyncio.Task[Answer], parsed: ParsedCall, dialect: Dialect
    ) -> AsyncIterator[str]:
        """Yield the events of an answer; comments while it is sampled."""
        try:
            while not task.done():
                await asyncio.wait([task], timeout=PING_SECONDS)
                if not task.done():
                    yield ": waiting\n\n"
            try:
                answer = _result(task)
            except ApiError as error:
                yield event(dialect.error(error), "error")
                return
            for text in dialect.events(answer, parsed, self._template.tokenizer):
                yield text
        finally:
            task.cancel()

    async def _answer(self, parsed: ParsedCall) -> Answer:
        call = parsed.call
        snapshot = self._service.sampling.find_snapshot(call.model)
        _check_served(call)
        prompt = await asyncio.to_thread(self._prompt, call)
        wanted = _sample_call(call, _parameters(parsed), prompt, self._service)
        samples = await self._service.sampling.sample_from(wanted, snapshot)
        return Answer(
            id=uuid.uuid4().hex,
            created=int(time.time()),
            model=call.model,
            num_prompt_tokens=len(prompt),
            choices=[self._choice(call, one) for one in samples.sequences],
        )

    def _prompt(self, call: Call) -> list[int]:
        prompts = PromptIds(self._template)
        try:
            if call.messages is not None:
                rendered = prompts.chat(call.messages, call.tools, call.template_kwargs)
            elif isinstance(call.prompt, str):
                rendered = prompts.text(call.prompt)
            else:
                rendered = prompts.from_ids(call.prompt or [])
        except ContextError as error:
            raise ApiError(400, str(error)) from error
        return [*rendered.token_ids]

    def _choice(self, call: Call, sampled: SampledTokens) -> Choice:
        generation = Generation(
            sampled.tokens, sampled.logprobs, STOP if sampled.stopped else LENGTH
        )
        text = decode_response(self._template, generation)
        stops = call.stop or []
        stop = next((one for one in stops if sampled.stopped and one in text), None)
        if stop is not None:
            text = text[: text.index(stop) + len(stop) * call.include_stop]
        return Choice(
            text=text,
            thoughts="",
            tool_calls=[],
            finish=generation.stop_reason,
            stop_string=stop,
            token_ids=sampled.tokens,
            logprobs=sampled.logprobs,
        )

    async def _count(self, request: Request, dialect: AnthropicMessages) -> Response:
        call = dialect.count_call(await read_body(request), RequestBodies())
        self._service.sampling.find_snapshot(call.model)
        prompt = await asyncio.to_thread(self._prompt, call)
        return JsonAnswer({"input_tokens": len(prompt)})

    async def _models(self, request: Request, dialect: Dialect) -> Response:
        names = self._service.sampling.model_names()
        return JsonAnswer({"object": "list", "data": [model_entry(name) for name in names]})


def _result(task: asyncio.Task[Answer]) -> Answer:
    """Return the answer of a task that has ended; ApiError if it failed."""
    try:
        return task.result()
    except (RefusedCallError, RefusedRequestError) as error:
        raise ApiError(400, str(error), code="invalid_value") from error
    except EngineError as error:
        raise ApiError(SERVER_ERROR, f"the engine failed: {error}") from error


def _check_served(call: Call) -> None:
    if call.structured is not None:
        raise ApiError(400, "the form of an answer: it is not served here", code="unsupported")
    if call.forced_tool is not None:
        raise ApiError(400, "tool_choice: tools cannot be forced here", code="unsupported")
    for name in call.ignored:
        if name in SAMPLING and name not in HONOURED:
            raise ApiError(400, f"{name}: it is not served here", code="unsupported")


def _parameters(parsed: ParsedCall) -> Mapping[str, Any]:
    """Return the sampling parameters that a request sets."""
    fields = getattr(parsed.fields, "fields", parsed.fields)  # of a response they are inside
    given: Mapping[str, Any] = fields.model_extra or {}
    return {name: given[name] for name in HONOURED if given.get(name) is not None}


def _sample_call(
    call: Call, parameters: Mapping[str, Any], prompt: list[int], service: TinkerService
) -> SampleCall:
    limit = service.base.max_length - 1
    if not prompt:
        raise ApiError(400, "prompt: expected at least one token, got none", code="invalid_value")
    if len(prompt) > limit:
        raise ApiError(
            400,
            f"prompt is too long: {len(prompt)} tokens > {limit} maximum",
            code="context_length_exceeded",
        )
    room = service.base.max_length - len(prompt)
    seed = parameters.get("seed")
    return SampleCall(
        prompt=prompt,
        num_samples=call.num_choices,
        max_tokens=min(call.max_tokens or room, room),
        temperature=number("temperature", parameters.get("temperature", 1.0), 0.0),
        top_k=whole_number("top_k", parameters.get("top_k", -1), -1, None),
        top_p=number("top_p", parameters.get("top_p", 1.0), 0.0, 1.0),
        seed=None if seed is None else whole_number("seed", seed, 0, MAX_SEED),
        stop_strings=tuple(call.stop or ()),
        stop_ids=tuple(call.stop_token_ids or ()),
    )
