"""The HTTP server: routes, keys, errors, and clients that disconnect.

It runs in the rollouts' event loop, on loopback unless told otherwise. A key belongs to one attempt
at one trajectory; it is all that a client needs to know, and all that it can reach.

Design: docs/design/021-gateway.md.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import zlib
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route, Router

from skyrl_fast.config.upstream import Upstream
from skyrl_fast.gateway.connections import REQUEST_SECONDS, Connection
from skyrl_fast.gateway.dialects.anthropic_messages import AnthropicMessages
from skyrl_fast.gateway.dialects.dialect import Dialect, ParsedCall, event, json_text
from skyrl_fast.gateway.dialects.openai_chat import OpenAIChat
from skyrl_fast.gateway.dialects.openai_completions import OpenAICompletions
from skyrl_fast.gateway.dialects.openai_responses import OpenAIResponses
from skyrl_fast.gateway.messages import Answer, ApiError, Call
from skyrl_fast.gateway.request_body import Fields, check_fields, parse_json
from skyrl_fast.gateway.session import RunningCall, Session
from skyrl_fast.rollout.engine.protocol import EngineError
from skyrl_fast.system.network_interface import LOOPBACK, http_url, listen_at
from skyrl_fast.system.printable import log_line

if TYPE_CHECKING:
    import httpx

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 << 20
BODY_SECONDS = 30.0  # for a request's body to arrive
CONNECT_SECONDS = 10.0  # to a server of another model
PING_SECONDS = 5.0  # between signs of life in a stream that waits for its answer
# Longer than clients keep idle connections: one that the server closes while a client begins to use
# it is an error of the client.
KEEP_ALIVE_SECONDS = 300
# That are reported even while their count is 0.
FAULTS = tuple(
    f"gateway_{name}" for name in ("refused_calls", "wrong_keys", "late_calls", "lost_clients")
)
BACKLOG = 1024  # connections that wait to be accepted
ENDED_KEYS = 10_000  # that are remembered, to tell a late call from a wrong key
SPAN_HEADER = "x-span"
RETRY_HEADER = "x-stainless-retry-count"  # header of the official OpenAI and Anthropic clients
SERVER_ERROR = 500
ENDS = (
    "/chat/completions",
    "/completions",
    "/responses",
    "/messages",
    "/messages/count_tokens",
    "/models",
)


@dataclass(frozen=True, slots=True)
class GatewayLimits:
    """How long the gateway waits for clients, and how many it serves.

    Args:
        retry: seconds for which an answer waits for a client that has disconnected: SDKs call again
            after up to 8 s.
        ping: seconds between signs of life in a stream that waits for its answer.
        request: seconds for a request's headers to arrive.
        connections: at once; None: half of the descriptors that the process may open.
    """

    retry: float = 10.0
    ping: float = PING_SECONDS
    request: float = REQUEST_SECONDS
    connections: int | None = None


LIMITS = GatewayLimits()


class RewardRequest(Fields):
    """A posted reward."""

    reward: float
    id: str | None = None
    span: str | None = None


class JsonAnswer(JSONResponse):
    """An answer in JSON that repeats any text of its request."""

    def render(self, content: Any) -> bytes:
        return json_text(content).encode()


class Gateway:
    """Sessions by their keys, and the server that answers their calls.

    Args:
        host: address to listen at; None: that of `start`.
        limits: of clients and connections.

    `routes`, more of them, and `on_answer`, called with each answer that was delivered, may be set
    before the start.

    Example:
        gateway = Gateway()
        await gateway.start()
        key = gateway.open(session)
        ...  # OpenAI(base_url=gateway.url + "/v1", api_key=key)
        await gateway.end(key)
        await gateway.close()
    """

    def __init__(
        self, *, host: str | None = None, port: int = 0, limits: GatewayLimits = LIMITS
    ) -> None:
        self.faults: Counter[str] = Counter(dict.fromkeys(FAULTS, 0))
        self.routes: list[Route] = []
        self.on_answer: Callable[[Session, Call, Answer], None] = lambda session, call, answer: None
        self._limits = limits
        self._host = host or LOOPBACK
        self._port = port
        self._sessions: dict[bytes, Session] = {}  # by digest of the key
        self._ended: OrderedDict[bytes, None] = OrderedDict()
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._client: httpx.AsyncClient | None = None  # for other models

    @property
    def url(self) -> str:
        """Base URL, without `/v1`."""
        return http_url(self._host, self._port)

    async def start(self) -> None:
        """Begin to listen; ValueError if the address is not available."""
        try:
            listening = listen_at(self._host, self._port, backlog=BACKLOG)
        except (OSError, OverflowError) as error:
            place = f"{self._host}:{self._port}"
            raise ValueError(
                f"agent.host, agent.port: cannot listen at {place}: {error}"
            ) from error
        self._port = listening.getsockname()[1]
        connection: Any = partial(
            Connection,
            request_seconds=self._limits.request,
            most=self._limits.connections,
        )
        config = uvicorn.Config(
            self.app(),
            http=connection,
            log_config=None,
            log_level="warning",
            lifespan="off",
            access_log=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
        )
        self._server = QuietServer(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listening]))

    async def close(self) -> None:
        for key in list(self._sessions):
            await self._sessions.pop(key).close()
        if self._server is not None and self._serving is not None:
            self._server.should_exit = self._server.force_exit = True
            await self._serving
        self._server = self._serving = None
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    def open(self, session: Session) -> str:
        """Return a new key, whose calls belong to the session."""
        key = f"sk-{secrets.token_urlsafe(32)}"
        self._sessions[_digest(key)] = session
        return key

    async def end(self, key: str) -> None:
        """Abort the calls of a key's session; later ones are refused."""
        digest = _digest(key)
        session = self._sessions.pop(digest, None)
        self._ended[digest] = None
        if len(self._ended) > ENDED_KEYS:
            self._ended.popitem(last=False)
        if session is not None:
            await session.close()

    def app(self) -> Router:
        chat = OpenAIChat()
        messages = AnthropicMessages()

        def route(
            path: str, dialect: Dialect, handle: Any = self._call, method: str = "POST"
        ) -> Route:
            async def endpoint(request: Request) -> Response:
                return await self._answer_session(request, dialect, handle)

            return Route(path, endpoint, methods=[method])

        return Router(  # without middleware
            routes=[
                route("/v1/chat/completions", chat),
                route("/v1/completions", OpenAICompletions()),
                route("/v1/responses", OpenAIResponses()),
                route("/v1/messages", messages),
                route("/v1/messages/count_tokens", messages, self._count),
                route("/v1/models", chat, self._models, "GET"),
                route("/v1/models/{name:path}", chat, self._model, "GET"),
                route("/v1/rewards", chat, self._reward),
                *self.routes,
            ],
            default=self._refuse_path,
        )

    async def _refuse_path(self, scope: Any, receive: Any, send: Any) -> None:
        """Say how a base URL differs from that of a dialect: an ASGI application."""
        self.faults["gateway_refused_calls"] += 1
        path = scope["path"]
        known = next((end for end in ENDS if path.endswith(end)), None)
        if known is None:
            hint = ""
        else:
            hint = f"; expected {self.url}/v1{known}: check the base URL"
        log.warning("a client asks for %s%s", log_line(path), log_line(hint))
        error = ApiError(404, f"unknown path {path}{hint}", code="not_found")
        await JSONResponse(OpenAIChat().error(error), error.status)(scope, receive, send)

    # --- requests

    async def _answer_session(self, request: Request, dialect: Dialect, handle: Any) -> Response:
        async def handle_session() -> Response:
            return await handle(request, self.session_of(request), dialect)

        return await self.answer(request, handle_session, dialect)

    async def answer(
        self,
        request: Request,
        handle: Callable[[], Awaitable[Response]],
        dialect: Dialect | None = None,
    ) -> Response:
        """Return a handler's answer, or its ApiError in the form of the dialect; None: OpenAI's."""
        try:
            return await handle()
        except ApiError as error:
            failure = error
        except RecursionError:
            failure = ApiError(400, "the body is nested too deeply", code="invalid_value")
        except ClientDisconnect:
            self.faults["gateway_lost_clients"] += 1
            return Response(status_code=499)
        if failure.status < SERVER_ERROR:
            self.faults["gateway_refused_calls"] += 1
            log.info("%s: %d: %s", request.url.path, failure.status, log_line(failure.message))
        return JsonAnswer((dialect or OpenAIChat()).error(failure), failure.status)

    def session_of(self, request: Request) -> Session:
        """Return the session of a request's key; ApiError if it has none, or is from a web page."""
        digest = _digest(key_of(request))
        if digest in self._ended:
            self.faults["gateway_late_calls"] += 1
            raise ApiError(403, "the trajectory of this key has ended")
        session = self._sessions.get(digest)
        if session is None:
            self.faults["gateway_wrong_keys"] += 1
            raise ApiError(401, "Incorrect API key provided", code="invalid_api_key")
        return session

    async def _call(self, request: Request, session: Session, dialect: Dialect) -> Response:
        body = await read_body(request)
        if (upstream := _upstream(session, body)) is not None:
            session.counts["upstream_calls"] += 1
            value = await session.read(body, partial(parse_json, body))
            return await session.others.forward(
                self._upstream_client(), upstream, request.url.path, value
            )
        parse = partial(dialect.parse, body, session.bodies, session.memory)
        parsed = await session.read(body, parse)
        prompt = await session.prompt(parsed.call)
        running = session.start(
            parsed.call,
            prompt,
            request.url.path,
            body,
            is_retry=request.headers.get(RETRY_HEADER, "0") not in ("", "0"),
            span=request.headers.get(SPAN_HEADER),
        )
        tokens = session.policy.calls.tokenizer
        if parsed.call.stream:
            return StreamingResponse(
                self._events(request, session, running, parsed, dialect, tokens),
                media_type="text/event-stream",
                headers={"cache-control": "no-cache"},
            )
        with session.waiting(running, self._limits.retry):
            await self._until_done(running, request)
            if await request.is_disconnected():  # before its answer, however fast that was
                raise ClientDisconnect
            answer = session.deliver(running)
        self._deliver(session, parsed.call, answer)
        return JsonAnswer(dialect.response(answer, parsed, tokens))

    async def _until_done(self, running: RunningCall, request: Request) -> None:
        gone = asyncio.ensure_future(wait_for_disconnect(request))
        try:
            await asyncio.wait([running.task, gone], return_when=asyncio.FIRST_COMPLETED)
            if not running.task.done():
                raise ClientDisconnect
            if (failure := _failure(running.task)) is not None:
                raise failure
        finally:
            gone.cancel()

    async def _events(
        self,
        request: Request,
        session: Session,
        running: RunningCall,
        parsed: ParsedCall,
        dialect: Dialect,
        tokens: Any,
    ) -> AsyncIterator[str]:
        """Yield the events of an answer; comments while it is sampled."""
        complete = False
        with session.waiting(running, self._limits.retry):
            try:
                while not running.task.done():
                    await asyncio.wait([running.task], timeout=self._limits.ping)
                    if not running.task.done():
                        yield ": waiting\n\n"
                failure = _failure(running.task)
                if failure is None:
                    for text in dialect.events(session.deliver(running), parsed, tokens):
                        yield text
                else:
                    yield event(dialect.error(failure), "error")
                # Sending to a client that is gone raises nothing.
                complete = not await request.is_disconnected()
                if complete and failure is None:
                    self._deliver(session, parsed.call, session.deliver(running))
            finally:
                if not complete:
                    self.faults["gateway_lost_clients"] += 1
                    session.withdraw(running)

    def _deliver(self, session: Session, call: Call, answer: Answer) -> None:
        if call.model not in session.policy.trained:
            session.others.add_sampled(call, answer)
        self.on_answer(session, call, answer)

    def _upstream_client(self) -> httpx.AsyncClient:
        if self._client is None:
            import httpx

            # A call may take as long as its trajectory's deadline, which aborts it.
            timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
            limits = httpx.Limits(max_connections=None)
            self._client = httpx.AsyncClient(timeout=timeout, limits=limits)
        return self._client

    async def _count(
        self, request: Request, session: Session, dialect: AnthropicMessages
    ) -> Response:
        body = await read_body(request)
        call = await session.read(body, partial(dialect.count_call, body, session.bodies))
        return JsonAnswer({"input_tokens": await session.count_tokens(call)})

    async def _models(self, request: Request, session: Session, dialect: Dialect) -> Response:
        policy = session.policy
        names = [*policy.sampled, *policy.upstreams]
        return JsonAnswer({"object": "list", "data": [model_entry(name) for name in names]})

    async def _model(self, request: Request, session: Session, dialect: Dialect) -> Response:
        name = request.path_params["name"]
        if name not in session.policy.upstreams:
            session.policy.check_model(name)
        return JsonAnswer(model_entry(name))

    async def _reward(self, request: Request, session: Session, dialect: Dialect) -> Response:
        if not session.policy.takes_rewards:
            raise ApiError(403, "rewards are those of agent.verifier")
        body = await read_body(request)
        value = await session.read(body, partial(parse_json, body))
        fields = check_fields(RewardRequest, value)
        session.rewards.add(fields.reward, call=fields.id, span=fields.span)
        return JsonAnswer({"object": "reward", "reward": fields.reward})


def key_of(request: Request) -> str:
    """Return a request's key, "" if it has none; ApiError if it comes from a web page.

    Relays may add another bearer to a client's `x-api-key`.
    """
    if "origin" in request.headers:
        raise ApiError(403, "requests of web pages are refused")
    key = request.headers.get("x-api-key")
    if key is None:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            return ""
    return key.strip()


async def json_body(request: Request) -> Any:
    """Return the JSON of a body, None if it is empty; ApiError if it is none, too long, or late."""
    body = await read_body(request)
    if body:
        return await asyncio.to_thread(parse_json, body)
    return None


async def read_body(request: Request) -> bytes:
    """Return the body of a request, decompressed; ApiError if it is too long, or late."""
    parts = []
    size = 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                parts.append(part)
                size += len(part)
                if size > MAX_BODY_BYTES:
                    raise ApiError(413, f"the body is longer than {MAX_BODY_BYTES} bytes")
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_SECONDS:g} s") from None
    return _decompress(b"".join(parts), request.headers.get("content-encoding", "identity"))


def _decompress(body: bytes, encoding: str) -> bytes:
    kind = encoding.strip().lower()
    if kind in ("", "identity"):
        return body
    if kind not in ("gzip", "deflate"):
        raise ApiError(415, f"content-encoding: expected gzip, deflate or identity, got {encoding}")
    decompressor = zlib.decompressobj(zlib.MAX_WBITS | 32)  # detects gzip's or zlib's header
    try:
        text = decompressor.decompress(body, MAX_BODY_BYTES + 1)
    except zlib.error as error:
        raise ApiError(400, f"content-encoding: {encoding}: {error}") from None
    if len(text) > MAX_BODY_BYTES:
        raise ApiError(413, f"the body is longer than {MAX_BODY_BYTES} bytes")
    if not decompressor.eof:
        raise ApiError(400, f"content-encoding: {encoding}: the body is cut")
    return text


class QuietServer(uvicorn.Server):
    """A server that leaves signals to the trainer."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Model(msgspec.Struct):
    model: str


def _upstream(session: Session, body: bytes) -> Upstream | None:
    if not session.policy.upstreams:
        return None
    try:
        name = msgspec.json.decode(body, type=_Model).model
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None  # an invalid request
    return session.policy.upstreams.get(name)


def _failure(task: asyncio.Task[Any]) -> ApiError | None:
    if task.cancelled():
        return ApiError(SERVER_ERROR, "the call was aborted: its trajectory has ended")
    error = task.exception()
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineError):
        return ApiError(SERVER_ERROR, f"the engine failed: {log_line(error)}")
    if error is not None:
        raise error
    return None


async def wait_for_disconnect(request: Request) -> None:
    """Return when a client, whose body was read, has disconnected."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def model_entry(name: str) -> dict[str, Any]:
    """Return what OpenAI's list of models has of one."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "skyrl_fast"}
