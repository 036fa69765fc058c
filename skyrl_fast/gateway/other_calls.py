"""A session's calls that are not trained: shown with the trajectory, some answered elsewhere."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any

from starlette.responses import Response, StreamingResponse

from skyrl_fast.config.upstream import Upstream
from skyrl_fast.gateway.messages import Answer, ApiError, Call
from skyrl_fast.rollout.trajectory import OtherCall, Trajectory
from skyrl_fast.system.printable import log_line, shorten

if TYPE_CHECKING:
    import httpx

MAX_TEXT = 20_000
MAX_KEPT = 1_000
MAX_ANSWER_BYTES = 64 << 20
BAD_GATEWAY = 502


class OtherCalls:
    """Forward calls to other models; the trajectory gets them in the order of their answers.

    Args:
        trajectory: gets the calls.
        max_text: characters of a request, and of an answer, that are kept.
        max_kept: calls of a trajectory that are kept.
    """

    def __init__(
        self, trajectory: Trajectory, *, max_text: int = MAX_TEXT, max_kept: int = MAX_KEPT
    ) -> None:
        self._max_text = max_text
        self._max_kept = max_kept
        self._trajectory = trajectory
        self._sending: set[asyncio.Task[httpx.Response]] = set()
        self._streaming: set[httpx.Response] = set()
        self._ids: set[str] = set()

    def add_sampled(self, call: Call, answer: Answer) -> None:
        """Keep a call that the policy answered under a name that is not trained."""
        if answer.id not in self._ids:
            self._ids.add(answer.id)
            asked = call.prompt if call.messages is None else call.messages
            said = "\n".join(choice.text for choice in answer.choices)
            self._keep(call.model, asked, said, 0.0)

    async def forward(
        self, client: httpx.AsyncClient, upstream: Upstream, path: str, body: Mapping[str, Any]
    ) -> Response:
        """Return another server's answer; ApiError if unreachable or the trajectory has ended."""
        started = time.perf_counter()
        streams = body.get("stream") is True
        sending = asyncio.create_task(_send(client, upstream, path, body, streams=streams))
        self._sending.add(sending)
        sending.add_done_callback(self._sending.discard)
        await asyncio.wait([sending])
        if sending.cancelled():
            raise ApiError(500, "the call was aborted: its trajectory has ended")
        if (error := sending.exception()) is not None:
            text = f"{upstream.base_url}: {type(error).__name__}: {log_line(error)}"
            raise ApiError(BAD_GATEWAY, text)
        answer = sending.result()
        media_type = answer.headers.get("content-type", "application/json")
        if streams and answer.is_success:
            events = self._events(answer, body, started)
            return StreamingResponse(events, answer.status_code, media_type=media_type)
        if answer.is_success:
            self._record_answer(body, _text_of(answer.content), started)
        return Response(answer.content, answer.status_code, media_type=media_type)

    async def close(self) -> None:
        for task in list(self._sending):
            task.cancel()
        for answer in list(self._streaming):
            await answer.aclose()

    async def _events(
        self, answer: httpx.Response, body: Mapping[str, Any], started: float
    ) -> AsyncIterator[bytes]:
        import httpx

        kept = bytearray()
        self._streaming.add(answer)
        try:
            async for part in answer.aiter_bytes():
                if len(kept) < MAX_ANSWER_BYTES:
                    kept += part
                yield part
        except (httpx.HTTPError, httpx.StreamError):
            return  # it broke, or the trajectory has ended: the client sees a cut stream
        finally:
            self._streaming.discard(answer)
            self._record_answer(body, text_of_events(bytes(kept)), started)
            await asyncio.shield(answer.aclose())  # also where the client has left

    def _record_answer(self, body: Mapping[str, Any], said: str, started: float) -> None:
        asked = next((body[n] for n in ("messages", "input", "prompt") if n in body), "")
        self._keep(str(body["model"]), asked, said, time.perf_counter() - started)

    def _keep(self, model: str, asked: Any, said: str, seconds: float) -> None:
        calls = self._trajectory.other_calls
        if len(calls) < self._max_kept:
            calls.append(
                OtherCall(
                    model,
                    shorten(_text_of_prompt(asked), self._max_text),
                    shorten(said, self._max_text),
                    len(self._trajectory.steps),
                    seconds,
                )
            )


async def _send(
    client: httpx.AsyncClient,
    upstream: Upstream,
    path: str,
    body: Mapping[str, Any],
    *,
    streams: bool,
) -> httpx.Response:
    request = client.build_request("POST", **upstream.request(path, body))
    answer = await client.send(request, stream=True)
    if not (streams and answer.is_success):
        try:
            await answer.aread()
        finally:
            await answer.aclose()
    return answer


def _text_of_prompt(asked: Any) -> str:
    if isinstance(asked, str):
        return asked
    if isinstance(asked, list) and all(isinstance(m, Mapping) and "role" in m for m in asked):
        return "\n".join(f"{m['role']}: {_plain(m.get('content'))}" for m in asked)
    return _plain(asked)


def _plain(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


def _text_of(content: bytes) -> str:
    """Return the text of an answer in any dialect, or the answer itself."""
    try:
        values = json.loads(content)
    except (ValueError, RecursionError):
        return content[:MAX_TEXT].decode("utf-8", "replace")
    return _said(values) or _plain(values)


def text_of_events(content: bytes) -> str:
    parts = []
    # JSON may contain U+2028 and others at which str.splitlines divides, too.
    for line in re.split("\r\n|\r|\n", content.decode("utf-8", "replace")):
        if line.startswith("data:"):
            try:
                parts.append(_said(json.loads(line[len("data:") :])))
            except (ValueError, RecursionError):
                continue  # [DONE]
    return "".join(parts)


def _said(values: Any) -> str:
    """Return the texts and tool calls of an answer or of an event."""
    if isinstance(values, str):
        return values
    if isinstance(values, list):
        return "".join(map(_said, values))
    if not isinstance(values, Mapping):
        return ""
    if values.get("type") in ("response.completed", "response.output_text.done"):
        return ""  # repeats what its events have said
    names = ("choices", "message", "delta", "output", "content", "text")
    said = "".join(_said(values[name]) for name in names if name in values)
    calls = values.get("tool_calls")
    return said + (_plain(calls) if calls else "")
