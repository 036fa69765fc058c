"""A process that answers as `vllm serve`: `python _small_server.py HOST PORT [BEHAVIOUR]`.

It answers its process id as the one token, and exits with its parent. BEHAVIOUR:
"exits": it ends at once, with two lines of log; "silent": it listens and is never healthy.
"""

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from skyrl_fast.system.parent_watch import exit_with_parent

KEY = "SKYRL_FAST_ENGINE_KEY"


class JsonHandler(BaseHTTPRequestHandler):
    def answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: Any) -> None:
        """Write nothing."""


class Handler(JsonHandler):
    behaviour = ""

    def do_GET(self) -> None:
        if self.headers["authorization"] != f"Bearer {os.environ[KEY]}":
            self.answer(401, {})
        elif self.path == "/health":
            self.answer(503 if self.behaviour == "silent" else 200, {})
        else:
            self.answer(200, {"data": [{"id": "m"}]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        choice = {
            "token_ids": [os.getpid()],
            "logprobs": {"token_logprobs": [-0.5]},
            "finish_reason": "stop",
        }
        self.answer(200, {"choices": [choice]})


def main() -> None:
    host, port, behaviour = sys.argv[1:4]
    exit_with_parent(int(os.environ["SKYRL_FAST_PARENT"]))
    if behaviour == "exits":
        print("loading\nno memory", flush=True)
        sys.exit(3)
    Handler.behaviour = behaviour
    ThreadingHTTPServer((host, int(port)), Handler).serve_forever()


if __name__ == "__main__":
    main()
