"""An ASGI application for tests of what stands in front of it."""

from typing import Any


class Recorder:
    """An application that answers 200 and records its requests."""

    def __init__(self) -> None:
        self.passed: list[tuple[str, str, bytes]] = []
        self.headers: list[dict[bytes, bytes]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        assert not message["more_body"]
        self.passed.append((scope["method"], scope["path"], message["body"]))
        self.headers.append(dict(scope["headers"]))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})
