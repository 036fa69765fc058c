"""Random requests to each HTTP surface: an answer below 500 or none, no traceback, no hang."""

import json
import logging
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")

from _asgi import Recorder
from _http_fuzz import RequestFuzz, Template, statuses
from _http_server import serving
from _thorough import THOROUGH

from skyrl_fast.rollout.engine.serve_guard import PAUSE_QUERY, engine_routes
from skyrl_fast.system.http_guard import HttpGuard

FEW, MANY = 400, 100_000 if THOROUGH else 20_000
KEY = "k" * 32
number_of_requests = pytest.mark.parametrize(
    "number", [FEW, pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)


def checked(caplog: pytest.LogCaptureFixture, counts: Counter[str], number: int) -> None:
    assert counts.total() == number
    assert not [status for status in counts if status.startswith("5")], counts
    assert counts["200"] > number // 20  # not only refusals
    errors = [r for r in caplog.records if r.levelno >= logging.ERROR or r.exc_info]
    assert errors == []
    assert "Traceback" not in caplog.text


@pytest.mark.spec("http.guard")
@number_of_requests
def test_engine_guard(number: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "skyrl_fast-weights-1"
    folder.mkdir()
    weights = folder / "weights.safetensors"
    weights.write_text("")
    load = {"method": "load_weights_file", "args": [str(weights)]}
    reload = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
    pause = f"/pause?{PAUSE_QUERY.decode()}"
    templates = [
        Template("GET", "/health"),
        Template("GET", "/v1/models"),
        Template("POST", pause),
        Template("POST", "/resume"),
        Template("POST", "/reset_prefix_cache"),
        Template("POST", "/v1/completions", {"prompt": [1, 2], "max_tokens": 4}),
        *[Template("POST", "/collective_rpc", call) for call in (load, reload)] * 4,
    ]
    app = Recorder()
    guard = HttpGuard(app, engine_routes([tmp_path]), key=KEY, max_body_bytes=1 << 20)
    headers = [b"authorization: Bearer " + KEY.encode()]
    with serving(guard) as port:
        counts = statuses(port, RequestFuzz(templates, headers, random.Random(2)), number)
    print(counts)
    checked(caplog, counts, number)
    calls: list[Any] = [json.loads(body) for _, path, body in app.passed if "rpc" in path]
    assert calls
    assert all(call in (load, reload) for call in calls)
