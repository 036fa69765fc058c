"""uvicorn in a thread, and raw HTTP requests to it."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

LOOPBACK = "127.0.0.1"


@contextmanager
def serving(app: Any, **options: Any) -> Iterator[int]:
    """Serve the application on a free port of loopback; yield the port."""
    import uvicorn

    listening = socket.create_server((LOOPBACK, 0))
    # log_config=None: its records reach the root logger, where tests look for them.
    settings = {"log_level": "warning", "log_config": None, "lifespan": "off", **options}
    server = uvicorn.Server(uvicorn.Config(app, **settings))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        yield listening.getsockname()[1]
    finally:
        server.should_exit = server.force_exit = True
        thread.join(30)
        listening.close()


def connect(port: int, seconds: float = 20.0) -> socket.socket:
    return socket.create_connection((LOOPBACK, port), timeout=seconds)
