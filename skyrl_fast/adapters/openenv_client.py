"""A session of an OpenEnv server, by its WebSocket protocol.

The package openenv is not needed: it requires mcp 1, vLLM requires mcp 2.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from skyrl_fast.rollout.workers.plain import plain_repr

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

MAX_MESSAGE_BYTES = 100 << 20  # as OpenEnv's own client
CLOSE_SECONDS = 5.0  # for the server to end a session
THIS_MACHINE = ("localhost", "127.0.0.1", "::1")
SCHEMES = {"http": "ws", "https": "wss"}
INVALID_ACTION = "VALIDATION_ERROR"


class ServerError(RuntimeError):
    """A server's answer is an error.

    Args:
        code: the protocol's name of it.
        problems: of an invalid action: pydantic's errors, each with type, loc and msg.
    """

    def __init__(self, code: str, message: str, problems: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.problems = problems


@dataclass(frozen=True, slots=True)
class Observed:
    """The answer to a reset or step.

    Args:
        observation: fields of the environment's observation.
        reward: as the server sent it; None: there is none.
        done: whether the episode is over.
    """

    observation: Mapping[str, Any]
    reward: Any
    done: bool


class OpenEnvClient:
    """A session of a server: its own environment, until the connection is closed.

    Args:
        base_url: URL of the server, http(s) or ws(s).
        headers: further HTTP headers, such as `Authorization`.

    Example:
        client = OpenEnvClient("http://127.0.0.1:8000")
        await client.connect()
        print((await client.reset(seed=3)).observation)
        print((await client.step({"message": "hello"})).reward)
        await client.close()
    """

    def __init__(self, base_url: str, *, headers: Mapping[str, str] | None = None) -> None:
        self.base_url = base_url.rstrip("/")
        self._headers = dict(headers or {})
        self._connection: ClientConnection | None = None

    async def connect(self) -> None:
        """Open the connection.

        Raises:
            OSError, websockets.exceptions.WebSocketException: no server answers there.
        """
        from websockets.asyncio.client import connect

        url = urlsplit(self.base_url)
        scheme = SCHEMES.get(url.scheme, url.scheme)
        address = url._replace(scheme=scheme, path=f"{url.path}/ws")
        options: dict[str, Any] = {}
        if url.hostname in THIS_MACHINE:
            options["proxy"] = None
        self._connection = await connect(
            address.geturl(),
            additional_headers=self._headers,
            max_size=MAX_MESSAGE_BYTES,
            **options,
        )

    async def reset(self, **arguments: Any) -> Observed:
        """Begin an episode; errors as of `step`."""
        return await self._ask("reset", arguments)

    async def step(self, action: Mapping[str, Any]) -> Observed:
        """Return the answer to an action.

        Raises:
            ServerError: the server's answer is an error.
            ValueError: its answer is malformed.
            websockets.exceptions.ConnectionClosed: it closed the connection.
        """
        return await self._ask("step", dict(action))

    async def close(self) -> None:
        """End the session; return when the server has freed it."""
        from websockets.exceptions import ConnectionClosed

        connection = self._connection
        self._connection = None
        if connection is None:
            return
        try:
            with contextlib.suppress(ConnectionClosed, TimeoutError):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await connection.send(json.dumps({"type": "close"}))
                    await connection.wait_closed()
        finally:
            connection.transport.abort()  # also if it does not answer

    async def _ask(self, what: str, data: dict[str, Any]) -> Observed:
        from websockets.exceptions import ConnectionClosed

        if self._connection is None:
            raise RuntimeError(f"{what}: expected a connection, call connect first")
        # A server that refuses a session sends an error and closes: the error can still be read.
        with contextlib.suppress(ConnectionClosed):
            await self._connection.send(json.dumps({"type": what, "data": data}))
        return _read_answer(await self._connection.recv())


def _read_answer(text: str | bytes) -> Observed:
    """Return what a message of the server says; ServerError or ValueError, see `step`."""
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected JSON, got {plain_repr(text, 100)}: {error}") from None
    data = None
    if isinstance(message, dict):
        data = message.get("data")
    if not isinstance(data, dict):
        raise ValueError(f"expected a message with type and data, got {plain_repr(message, 100)}")
    if message.get("type") == "error":
        problems = data.get("errors")
        if not isinstance(problems, list):
            problems = []
        known = [problem for problem in problems if isinstance(problem, dict)]
        raise ServerError(str(data.get("code")), str(data.get("message")), known)
    observation = data.get("observation")
    if not isinstance(observation, dict):
        raise ValueError(f"expected an observation, got {plain_repr(message, 100)}")
    done = data.get("done", False)
    if not isinstance(done, bool):
        raise ValueError(f"done: expected true or false, got {plain_repr(done, 100)}")
    return Observed(observation, data.get("reward"), done)
