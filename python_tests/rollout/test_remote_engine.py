"""Requests to a `vllm serve` endpoint, and handling of its responses."""

import asyncio
import base64
import io
import json
import ssl
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from _weights import ADAPTER, MODULES
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from skyrl_fast import cli
from skyrl_fast.commands import engine as engine_command
from skyrl_fast.config import ConfigError, InferenceEngineConfig, SamplingParams
from skyrl_fast.config.loading import load_config
from skyrl_fast.rollout.engine.completion_answer import read_sampled
from skyrl_fast.rollout.engine.from_settings import make_engines, make_vllm_setup
from skyrl_fast.rollout.engine.protocol import EngineDeadError, EngineError, Generation
from skyrl_fast.rollout.engine.remote import RemoteEngine, ServerLimits
from skyrl_fast.rollout.engine.serve_guard import CLAIM_FIRST, CLAIM_HEADER, TRAINER_HEADER
from skyrl_fast.rollout.engine.serve_vllm import serve_command, serve_environment
from skyrl_fast.rollout.engine.vllm_start import VllmSetup
from skyrl_fast.rollout.engine.weights.receipt import WeightSyncError, tensor_digest
from skyrl_fast.rollout.engine.weights.transports.file import send_by_file
from skyrl_fast.rollout.stop_reason import INTERRUPTED

SAMPLING = SamplingParams(
    max_generate_length=8, temperature=0.5, stop=["</a>"], additional_kwargs={"stop_token_ids": [9]}
)


HANDSHAKE = ("apply_patches", "weights_dtype")


class Server:
    """Answers like vLLM; records its requests."""

    def __init__(self, completion: Callable[[dict[str, Any]], Any] | None = None) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.headers: list[httpx.Headers] = []
        self.well = True
        self.completion = completion or (lambda body: choice([5, 6], [-0.5, -0.25]))
        self.missing: list[str] = []
        self.results: Any = None
        self.trainer: str | None = None

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if not self.well:
            raise httpx.ConnectError("refused")
        path = request.url.path
        if path == "/health":
            return httpx.Response(200)
        trainer = request.headers.get(TRAINER_HEADER)
        if request.headers.get(CLAIM_HEADER) == CLAIM_FIRST:
            self.trainer = trainer
        if trainer not in (None, self.trainer):
            return httpx.Response(409, json={"detail": "another trainer updates this server now"})
        if path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "the-model"}]})
        body = json.loads(request.content) if request.content else dict(request.url.params)
        self.asked.append((path, body))
        self.headers.append(request.headers)
        if path == "/v1/completions":
            answer = self.completion(body)
            if isinstance(answer, httpx.Response):
                return answer
            return httpx.Response(200, json={"choices": [answer]})
        if path == "/collective_rpc":
            return httpx.Response(200, json={"results": self.results or [self.receipt(body)]})
        return httpx.Response(200, json={})

    def receipt(self, call: dict[str, Any]) -> dict[str, Any]:
        """What the worker extension returns."""
        path = Path(call.get("args", ["none"])[0])
        tensors = load_file(path) if path.is_file() else {}
        digests = {name: tensor_digest(tensor) for name, tensor in tensors.items()}
        return {"digests": digests, "unloaded": self.missing, "dtype": "bfloat16"}


def choice(ids: Any, logprobs: Any, **more: Any) -> dict[str, Any]:
    return {
        "token_ids": ids,
        "logprobs": {"token_logprobs": logprobs},
        "finish_reason": "stop",
        "stop_reason": None,
        **more,
    }


def json_of(answer: dict[str, Any]) -> str:
    return json.dumps({"choices": [answer]})


def encoded(header: str, data: bytes = b"\0" * 8, version: bytes = b"\1\0") -> str:
    """Return routes with this header, in base64."""
    text = header.encode() + b"\n"
    size = len(text).to_bytes(2 if version == b"\1\0" else 4, "little")
    return base64.b64encode(b"\x93NUMPY" + version + size + text + data).decode()


def header(shape: str = "(4, 1, 2)", dtype: str = "|u1", order: str = "False") -> str:
    return f"{{'descr': '{dtype}', 'fortran_order': {order}, 'shape': {shape}}}"


def damaged_routes() -> list[Any]:
    good = encoded(header())
    return [
        "AAAA",
        "no base64!",
        good[:-4],
        good[: len(good) // 2 // 4 * 4],
        base64.b64encode(b"\x93NUMPY\1\0").decode(),
        encoded(header("(1000000000000, 48, 8)")),
        encoded(header("(4, 1, 3)")),
        encoded(header("(-4, -1, 2)")),
        encoded(header("(8,)")),
        encoded(header(dtype="|O")),
        encoded(header(dtype="<f8", shape="(1, 1, 1)")),
        encoded(header(order="True")),
        encoded(header(dtype="|i1"), b"\xff" * 8),
        encoded(header("(" * 200 + ")" * 200)),
        encoded(" " * 60_000),
        encoded(header(), version=b"\3\0"),
        encoded("{'descr': [('a', '|O')], 'fortran_order': False, 'shape': (1, 1, 1)}"),
        3,
        ["AAAA"],
        True,
    ]


def with_engine(server: Server, work: Callable[[RemoteEngine], Any], **options: Any) -> Any:
    async def go() -> Any:
        transport = httpx.MockTransport(server)
        engine = RemoteEngine("http://there:1", transport=transport, **options)
        async with engine:
            server.asked.clear()
            server.headers.clear()
            return await work(engine)

    return asyncio.run(go())


async def ask(engine: RemoteEngine, version: int = 3) -> Generation:
    return await engine.generate([1, 2], SAMPLING, session_id="s-1", policy_version=version, seed=5)


@pytest.mark.spec("async.servers")
def test_request_and_response_are_token_ids() -> None:
    server = Server(lambda body: choice([5, 6, 7], [-0.5, -0.25, -1.0], stop_reason="</a>"))
    got = with_engine(server, ask)
    assert got == Generation([5, 6, 7], [-0.5, -0.25, -1.0], "stop", "</a>")
    ((path, body),) = server.asked
    assert path == "/v1/completions"
    assert body == {
        "model": "the-model",
        "prompt": [1, 2],
        "max_tokens": 8,
        "temperature": 0.5,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "stop": ["</a>"],
        "stop_token_ids": [9],
        "include_stop_str_in_output": True,
        "seed": 5,
        "logprobs": 0,
        "return_token_ids": True,
        "cache_salt": "policy-3",
    }
    assert server.headers[0]["x-session-id"] == "s-1"


@pytest.mark.spec("gateway.engines")
def test_any_server_will_do_if_its_weights_are_not_updated() -> None:
    """It has neither this package's worker extension nor vLLM's endpoints for development."""

    class Plain(Server):
        def __call__(self, request: httpx.Request) -> httpx.Response:
            known = ("/health", "/v1/models", "/v1/completions")
            plain = request.url.path in known
            return super().__call__(request) if plain else httpx.Response(404)

    assert with_engine(Plain(), ask, weight_sync=None).token_ids == [5, 6]
    with pytest.raises(EngineError, match="answered 404 to /resume"):
        with_engine(Plain(), ask)


@pytest.mark.spec("kept.read")
def test_kept_tokens_are_read_from_the_returned_logprobs() -> None:
    top = [{"token_id:5": -0.5, "token_id:9": -0.9327521, "token_id:4": -9999.0}, {"token_id:6": 0}]
    logprobs = {"token_logprobs": [-0.5, 0.0], "top_logprobs": top}
    server = Server(lambda body: {**choice([5, 6], []), "logprobs": logprobs})

    async def generate(engine: RemoteEngine) -> Generation:
        sampling = SamplingParams(top_p=0.9)
        return await engine.generate([1], sampling, session_id="s", policy_version=0)

    got = with_engine(server, generate, vocab_size=50)
    assert [one.tolist() for one in got.kept_ids] == [[5, 9], [6]]
    body = server.asked[0][1]
    assert (body["logprobs"], body["top_k"], body["return_tokens_as_token_ids"]) == (50, 256, True)


@pytest.mark.parametrize("other", [50, 2**32 + 9, 10**30, -1])
def test_kept_tokens_outside_the_vocabulary_fail_the_request(other: int) -> None:
    top = [{"token_id:5": -0.6931472, f"token_id:{other}": -0.6931472}]
    logprobs = {"token_logprobs": [-0.6931472], "top_logprobs": top}
    server = Server(lambda body: {**choice([5], []), "logprobs": logprobs})

    async def generate(engine: RemoteEngine) -> Generation:
        sampling = SamplingParams(top_p=0.9)
        return await engine.generate([1], sampling, session_id="s", policy_version=0)

    with pytest.raises(EngineError, match=r"from 0 to|OverflowError"):
        with_engine(server, generate, vocab_size=50)


def test_stop_token_is_not_a_stop_string_and_routes_are_decoded() -> None:
    routes = np.arange(8, dtype=np.uint8).reshape(4, 1, 2)
    buffer = io.BytesIO()
    np.save(buffer, routes)
    text = base64.b64encode(buffer.getvalue()).decode()
    server = Server(lambda body: choice([9], [-1.0], stop_reason=9, routed_experts=text))
    got = with_engine(server, ask, records_routes=True)
    assert got.stop_string is None
    assert np.array_equal(got.expert_indices, routes)
    assert server.asked[0][1]["routed_experts_prompt_start"] == 0


@pytest.mark.spec("async.servers")
def test_probe_logprobs_are_those_of_the_given_tokens() -> None:
    entries = [None, {"2": {"logprob": -0.5}, "8": {"logprob": -9.0}}, {"3": {"logprob": -0.25}}]
    server = Server(lambda body: choice([4], [-1.0], prompt_logprobs=entries))
    assert with_engine(server, lambda e: e.prompt_logprobs([1, 2, 3])) == [-0.5, -0.25]


@pytest.mark.spec("async.in-flight-update")
def test_interrupted_request_returns_its_partial_response() -> None:
    server = Server(lambda body: choice([5], [-0.5], finish_reason="abort"))

    async def work(engine: RemoteEngine) -> Generation:
        with pytest.raises(EngineError, match="session s-1: ended with 'abort'"):
            await ask(engine)
        await engine.interrupt()
        got = await ask(engine)
        await engine.resume()
        await engine.resume()  # once is enough
        return got

    assert with_engine(server, work) == Generation([5], [-0.5], INTERRUPTED)
    assert [call for call in server.asked if call[0] != "/v1/completions"] == [
        ("/pause", {"mode": "abort", "clear_cache": "false"}),
        ("/resume", {}),
    ]


async def load_zeros(engine: RemoteEngine) -> None:
    with send_by_file({"w": torch.zeros(2)}, engine.weights_dtype) as call:
        await engine.load_weights(call)


@pytest.mark.spec("update.node-engines")
def test_a_server_that_sleeps_wakes_up_for_new_weights() -> None:
    async def work(engine: RemoteEngine) -> None:
        await engine.sleep()
        await engine.sleep()  # once is enough
        await load_zeros(engine)
        await load_zeros(engine)

    awake = Server()
    with_engine(awake, work)
    loads = [("load_weights_file", ""), ("reset_prefix_cache", "")]
    assert [describe_call(*call) for call in awake.asked] == [*loads, *loads]
    server = Server()
    with_engine(server, work, sleeps=True)
    assert [describe_call(*call) for call in server.asked] == [
        ("sleep", "level=1 mode=abort"),
        ("wake_up", "tags=weights"),
        *loads,
        ("wake_up", "tags=kv_cache"),
        *loads,
    ]


def describe_call(path: str, body: dict[str, Any]) -> tuple[str, str]:
    if path == "/collective_rpc":
        return body["method"], ""
    return path.removeprefix("/"), " ".join(f"{name}={value}" for name, value in body.items())


@pytest.mark.spec("async.server-weights")
@pytest.mark.parametrize("weight_sync", ["file", "reload"])
def test_weights_are_transferred_through_a_shared_folder(weight_sync: str) -> None:
    server = Server()
    with_engine(server, load_zeros, weight_sync=weight_sync)
    (path, call), (last, _) = server.asked
    assert (path, last) == ("/collective_rpc", "/reset_prefix_cache")
    if weight_sync == "file":
        assert call["method"] == "load_weights_file"
        (file,) = call["args"]
        assert file.endswith(".safetensors")
    else:
        assert call["method"] == "reload_weights"
        file = call["kwargs"]["weights_path"]
    assert not Path(file).exists()  # deleted after loading


def test_parameters_without_new_values_are_an_error() -> None:
    server = Server()
    server.missing = ["lm_head.weight"]
    with pytest.raises(WeightSyncError, match=r"got no new values: lm_head\.weight"):
        with_engine(server, load_zeros)


def test_error_of_a_refused_call_quotes_the_server() -> None:
    server = Server(lambda body: httpx.Response(400, text="max_tokens is too large"))
    with pytest.raises(EngineError, match="answered 400 to /v1/completions: max_tokens is too"):
        with_engine(server, ask)


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        (httpx.Response(200, text="<html>hello</html>"), "without JSON: '<html>hello"),
        (httpx.Response(200, content=b"\xff\xfe{"), "without JSON: "),
        (httpx.Response(200, text='{"choices": [{"token_ids": [5'), "without JSON: "),
        (httpx.Response(200, json=[]), "in another format than vLLM: TypeError"),
        (httpx.Response(200, json={"choices": []}), "in another format than vLLM: IndexError"),
        (
            httpx.Response(200, json={"error": "x"}),
            "in another format than vLLM: KeyError: 'choices'",
        ),
        ({"text": "a", "finish_reason": "stop"}, "than vLLM: KeyError: 'logprobs'"),
        *(
            (choice([5], [value]), "than vLLM: TypeError: expected a number")
            for value in (None, "-0.5", True, [-0.5])
        ),
        *(
            (choice([5, value], [-0.5, -0.5]), "s-1: token 1: expected an id from 0 to 99, got ")
            for value in (-6, 100, 10**30, "56", "a", True, 5.0, 5.7, None, [6])
        ),
        *(
            (
                json_of(choice([5], [7])).replace("7", value),
                "s-1: logprob 0: expected a number from -9000 to 0",
            )
            for value in (
                "NaN",
                "Infinity",
                "-Infinity",
                "3.0",
                "0.5",
                "1e999",
                "1",
                "-9999",
                "-1e30",
            )
        ),
        (choice("5", [-0.5]), "TypeError: expected a list, got str"),
        (choice(None, []), "TypeError: expected a list, got NoneType"),
        (choice([5, 6], [-0.5]), "ended with 'stop', 2 tokens and 1 logprobs"),
        (choice([5] * 9, [-0.5] * 9), "s-1: expected at most 8 tokens, got 9"),
        *(
            (choice([5], [-0.5], finish_reason=value), "s-1: ended with")
            for value in ("tool_calls", ["stop"], {"stop": 1}, "a" * 10**6)
        ),
        *((choice([5], [-0.5], routed_experts=text), "vLLM: ") for text in damaged_routes()),
        *(
            (choice([5], [-0.5], stop_reason=text), "s-1: stop string: expected one of the request")
            for text in ("", "a" * 10**6, "</b>")
        ),
        (choice([], [], finish_reason=INTERRUPTED), "no request of vLLM ends like this"),
        ("[" * 100_000, "without JSON: "),
        ('{"choices": ' + "9" * 5000, "without JSON: "),
        (httpx.Response(307, headers={"location": "/b"}), "answered 307 to /v1/completions"),
        (httpx.Response(404, text="<html>none</html>"), "answered 404 .*<html>none"),
        (httpx.Response(503, text="loading"), "answered 503 to /v1/completions: loading"),
    ],
)
def test_invalid_response_fails_its_request_and_is_quoted(answer: Any, wanted: str) -> None:
    server = Server(
        lambda body: httpx.Response(200, text=answer) if isinstance(answer, str) else answer
    )
    with pytest.raises(EngineError, match=wanted) as caught:
        with_engine(server, ask, records_routes=True, vocab_size=100)
    assert not isinstance(caught.value, EngineDeadError)
    assert len(str(caught.value)) < 1000


def test_integers_and_rounded_logprobs_are_numbers() -> None:
    server = Server(lambda body: choice([5, 0, 99], [-1, 0, 1e-7]))
    got = with_engine(server, ask, vocab_size=100)
    assert got.token_ids == [5, 0, 99]
    assert got.logprobs == [-1.0, 0.0, 1e-7]
    assert all(type(logprob) is float for logprob in got.logprobs)


FINITE = st.floats(allow_nan=False, allow_infinity=False)
NUMBERS = FINITE | st.floats(width=32, allow_nan=False, allow_infinity=False)


@pytest.mark.parametrize("has_msgspec", [True, False])
@given(logprobs=st.lists(NUMBERS), ids=st.lists(st.integers(0, 2**31 - 1)))
def test_tokens_and_logprobs_are_read_to_the_bit(
    has_msgspec: bool, logprobs: list[float], ids: list[int]
) -> None:
    words = ['a"b\\\u00e9'] * len(logprobs)
    others = {"tokens": words, "text_offset": ids, "top_logprobs": [{word: 0.5} for word in words]}
    fields = choice(ids, logprobs, prompt_token_ids=ids, text="a", prompt_logprobs=None)
    fields["logprobs"] |= others
    body = json_of(fields).encode()
    with pytest.MonkeyPatch.context() as patch:
        if not has_msgspec:
            patch.setitem(sys.modules, "msgspec", None)  # cannot be imported
        (read,) = read_sampled(body)["choices"]
    got = read["logprobs"]["token_logprobs"]
    assert list(map(float.hex, got)) == list(map(float.hex, logprobs))
    assert read["token_ids"] == ids and set(map(type, read["token_ids"])) <= {int}
    assert (read["finish_reason"], read["stop_reason"]) == ("stop", None)
    assert ("text" in read) is ("tokens" in read["logprobs"]) is not has_msgspec


async def test_certificates_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read = ssl.SSLContext.load_verify_locations
    calls = []

    def count(*arguments: Any, **options: Any) -> None:
        calls.append(arguments)
        read(*arguments, **options)

    monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", count)
    engine = RemoteEngine("http://127.0.0.1:9", start_timeout_seconds=0)
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="did not answer within 0 s"):
            await engine.start()
    await engine.close()
    assert len(calls) <= 1  # none if an earlier test has read them


def test_limit_of_tokens_is_that_of_the_request() -> None:
    server = Server(lambda body: choice([5] * 9, [-0.5] * 9))
    longer = SamplingParams(max_generate_length=8, additional_kwargs={"max_tokens": 9})

    async def work(engine: RemoteEngine) -> Generation:
        return await engine.generate([1], longer, session_id="s", policy_version=0)

    assert len(with_engine(server, work).token_ids) == 9


@pytest.mark.parametrize("value", ["-0.5", True, None, [1]])
def test_probe_logprobs_are_numbers(value: Any) -> None:
    entries = [None, {"2": {"logprob": value}}]
    server = Server(lambda body: choice([4], [-1.0], prompt_logprobs=entries))
    with pytest.raises(EngineError, match="than vLLM: TypeError: expected a number"):
        with_engine(server, lambda e: e.prompt_logprobs([1, 2]))


def test_answer_that_is_no_receipt_is_an_error() -> None:
    receipt = {"digests": {}, "unloaded": [], "dtype": "bfloat16"}
    for results, wanted in (
        ("a", "expected a list"),
        ([[["x"], 3]], "another format"),
        ([3], "another format"),
        ([{**receipt, "digests": ["w"]}], "another format"),
        ([receipt], r"did not receive: w"),
        (
            [{**receipt, "digests": {"w": "float32[2]:01"}}],
            r"loaded other values.*w \(expected float32",
        ),
        ([{"digests": {}, "unloaded": []}], "KeyError: 'dtype'"),
    ):
        server = Server()
        server.results = results
        with pytest.raises((EngineError, WeightSyncError), match=wanted):
            with_engine(server, load_zeros)


@pytest.mark.parametrize("status", [200, 400, 500])
def test_answer_without_end_fails_its_request(status: int) -> None:
    limits = ServerLimits(answer_bytes=1_000_000)
    sent = 0

    async def parts() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(1_000):
            sent += 1
            yield b" " * 65_536

    server = Server(lambda body: httpx.Response(status, content=parts()))
    with pytest.raises(EngineError, match="answered /v1/completions with more than 1,000,000 byt"):
        with_engine(server, ask, limits=limits)
    assert sent == 16


def test_undecodable_body_is_requested_again() -> None:
    answers = [
        httpx.Response(
            200, headers={"content-encoding": "gzip"}, stream=httpx.ByteStream(b"no gzip")
        ),
        choice([5], [-0.5]),
    ]
    server = Server(lambda body: answers.pop(0))
    assert with_engine(server, ask).token_ids == [5]


def test_missing_endpoints_of_another_server_are_named() -> None:
    server = Server(lambda body: choice([4], [-1.0], prompt_logprobs=[None, {}]))
    with pytest.raises(EngineError, match="in another format than vLLM: KeyError: '2'"):
        with_engine(server, lambda e: e.prompt_logprobs([1, 2]))
    server.missing = 3  # type: ignore[assignment]
    with pytest.raises(EngineError, match="/collective_rpc in another format than vLLM"):
        with_engine(server, load_zeros)


@pytest.mark.parametrize(
    ("path", "answer", "wanted"),
    [
        ("/v1/models", httpx.Response(200, text="<html>"), "/v1/models without JSON: '<html>'"),
        ("/v1/models", httpx.Response(200, json={}), "KeyError: 'data'"),
        ("/health", httpx.Response(404), "within 0 s: it answered 404 to /health"),
        ("/resume", None, "is healthy but did not answer within 0.05 s"),
    ],
)
def test_server_that_is_not_vllm_is_named(
    path: str, answer: httpx.Response | None, wanted: str
) -> None:
    options = {"start_timeout_seconds": 0.0, "limits": ServerLimits(handshake=0.05)}
    server = Server()

    async def reply(request: httpx.Request) -> httpx.Response:
        if request.url.path != path:
            return server(request)
        if answer is None:
            await asyncio.Event().wait()  # forever
        return answer

    with pytest.raises(EngineError, match=wanted):
        with_engine(reply, ask, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("weight_sync", ["file", "reload", "gloo"])
def test_a_lost_answer_is_asked_for_again_only_where_that_is_harmless(
    weight_sync: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Loses(Server):
        def __call__(self, request: httpx.Request) -> httpx.Response:
            answer = super().__call__(request)
            if "load_weights" in request.content.decode() or "lora" in request.url.path:
                lost.append(request.url.path)
                if len(lost) == 1:
                    raise httpx.ReadError("reset")
            return answer

    lost: list[str] = []
    monkeypatch.setattr(RemoteEngine, "_join_workers", lambda *_: asyncio.sleep(0))
    adapter = ADAPTER if weight_sync == "reload" else None

    async def work(engine: RemoteEngine) -> None:
        with send_by_file({"base_model.model.a.lora_A.weight": torch.zeros(2, 2)}, None) as call:
            await engine.load_weights(call)

    if weight_sync == "file":
        with_engine(Loses(), work)
        assert lost == ["/collective_rpc"] * 2
        return
    with pytest.raises(EngineDeadError, match=r"the answer to /\S+ was lost: ReadError: reset"):
        with_engine(Loses(), work, weight_sync=weight_sync, adapter=adapter)
    assert len(lost) == 1


@pytest.mark.spec("async.server-return")
def test_unreachable_server_is_dead_and_healthy_server_is_retried() -> None:
    server = Server()
    breaks = 1

    def once_broken(body: dict[str, Any]) -> Any:
        nonlocal breaks
        breaks -= 1
        if breaks >= 0:
            raise httpx.ReadError("reset")
        return choice([5], [-0.5])

    server.completion = once_broken

    async def work(engine: RemoteEngine) -> None:
        assert (await ask(engine)).token_ids == [5]
        server.well = False
        assert not await engine.comes_back()
        with pytest.raises(EngineDeadError, match="the server http://there:1 is gone: Connect"):
            await ask(engine)
        server.well = True
        assert await engine.comes_back()

    with_engine(server, work)


@pytest.mark.spec("async.engine-command")
def test_serve_command(tmp_path: Path) -> None:
    config = VllmSetup(
        "model", InferenceEngineConfig(max_num_batched_tokens=50, num_threads=1), max_model_len=100
    )
    command = serve_command(config, host="127.0.0.1", port=8001)
    assert command[3:9] == ["serve", "model", "--host", "127.0.0.1", "--port", "8001"]
    text = " ".join(command)
    for wanted in (
        "--logprobs-mode processed_logprobs",
        "--worker-extension-cls skyrl_fast.rollout.engine.weights.worker.WeightUpdateExtension",
        "--enable-prefix-caching",
        "--enforce-eager",
        "--max-model-len 100",
    ):
        assert wanted in text
    adapted = serve_command(replace(config, adapter=ADAPTER), host="127.0.0.1", port=8001)
    assert f"--max-lora-rank 8 --lora-target-modules {' '.join(MODULES)} --max-loras 1" in " ".join(
        adapted
    )
    environment = serve_environment(config, {"OMP_NUM_THREADS": "2"}, key="k" * 16)
    assert environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert environment["OMP_NUM_THREADS"] == "2"  # the user's value is kept


@pytest.mark.spec("async.engine-command")
def test_engine_command_serves_the_policy_model_on_loopback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_text("")
    served: list[list[str]] = []

    class Served(Exception):  # noqa: N818
        pass

    def execute(program: str, command: list[str], variables: Any) -> None:
        served.append(command)
        raise Served

    yaml = tmp_path / "c.yaml"
    yaml.write_text(f"data: {{train_data: [a]}}\ntrainer: {{policy: {{model: {{path: {model}}}}}}}")
    words = [
        "engine",
        str(yaml),
        "generator.max_input_length=76",
        f"trainer.run_path={tmp_path}/run",
    ]
    options = cli.command_parser().parse_args([*words, "--port", "8003"])
    with pytest.raises(Served):
        engine_command.run(options, execute=execute)
    (command,) = served
    assert command[3:9] == ["serve", str(model), "--host", "127.0.0.1", "--port", "8003"]
    assert command[command.index("--max-model-len") + 1] == "1100"


@pytest.mark.parametrize(
    ("model", "refused"),
    [
        ({"max_position_embeddings": 40}, True),
        ({"max_position_embeddings": 48}, False),
        ({"max_position_embeddings": 40, "rope_scaling": {"rope_type": "yarn"}}, False),
        ({"max_position_embeddings": 40, "rope_parameters": {"rope_type": "default"}}, True),
        ({}, False),
    ],
)
def test_rows_beyond_max_position_embeddings_are_refused_before_the_engine_starts(
    model: dict[str, Any], refused: bool, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(model))
    overrides = [
        "generator.max_input_length=32",
        "generator.sampling_params.max_generate_length=16",
        f"trainer.policy.model.path={tmp_path}",
        f"trainer.run_path={tmp_path}/run",
    ]
    config = load_config(None, ["data.train_data=[x.jsonl]", *overrides])
    if refused:
        setting = r"generator\.{}\.max_generate_length"
        wanted = r"max_input_length \(32\) and {} \({}\): .* 40 positions .* {}$"
        of_training = wanted.format(setting.format("sampling_params"), 16, 48)
        with pytest.raises(ValueError, match=of_training):
            make_vllm_setup(config, str(tmp_path))
        config.generator.eval_sampling_params = SamplingParams()  # with the default length
        of_evaluation = wanted.format(setting.format("eval_sampling_params"), 1024, 1056)
        with pytest.raises(ValueError, match=of_evaluation):
            make_vllm_setup(config, str(tmp_path))
    else:
        assert make_vllm_setup(config, str(tmp_path)).max_model_len == 48


async def test_server_that_a_killed_trainer_has_paused_is_resumed() -> None:
    server = Server()

    async with RemoteEngine("http://there:1", transport=httpx.MockTransport(server)):
        pass
    calls = [("/collective_rpc", {"method": name}) for name in HANDSHAKE]
    assert server.asked == [("/resume", {}), *calls]


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        (
            ["run_engines_locally=false"],
            "expected at least one address with .*run_engines_locally=f",
        ),
        (
            ["run_engines_locally=true", "external_server_urls=['http://a:1']"],
            "external_server_urls: expected none with .*run_engines_locally=true",
        ),
        (["run_engines_locally=false", "external_server_urls=[a:1]"], "expected http://host:port"),
        (
            ["run_engines_locally=false", "external_server_urls=['http://a:1','http://a:1']"],
            "got one twice",
        ),
        (
            ["run_engines_locally=false", "external_server_urls=['http://a:b']"],
            "expected http://host:",
        ),
        (
            ["run_engines_locally=false", "external_server_urls=['http://']"],
            "expected http://host:",
        ),
        *(
            (["run_engines_locally=false", f"external_server_urls=['{url}']"], "without /v1 or a q")
            for url in ("http://a:1/v1", "http://a:1/proxy/v1/", "http://a:1?x=1", "http://a:1#x")
        ),
        (
            ["run_engines_locally=false", "external_server_urls=['http://a:1','http://a:1/']"],
            "got one twice",
        ),
        (["external_proxy_url=x"], "requests are sent directly to"),
        (
            ["run_engines_locally=false", "external_server_urls=['http://a:1']", "num_engines=2"],
            "num_engines: expected null or 1 with .*, as the servers are those of .*, got 2",
        ),
    ],
)
def test_server_settings_are_validated(overrides: list[str], wanted: str) -> None:
    key = "generator.inference_engine."
    base = ["data.train_data=[a.jsonl]", "trainer.policy.model.path=m"]
    with pytest.raises(ConfigError, match=wanted):
        load_config(None, [*base, *(key + text for text in overrides)])


@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        ({"vocab_size": 260}, 260),
        ({"text_config": {"vocab_size": 260}}, 260),
        ({"text_config": None}, None),
        ({}, None),
    ],
)
def test_vocabulary_of_a_server_is_that_of_the_policy(
    model: dict[str, Any], wanted: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYRL_FAST_ENGINE_KEY", "k" * 16)
    (tmp_path / "config.json").write_text(json.dumps(model))
    overrides = [
        "data.train_data=[x.jsonl]",
        f"trainer.policy.model.path={tmp_path}",
        "generator.inference_engine.run_engines_locally=false",
        "generator.inference_engine.external_server_urls=['http://127.0.0.1:1']",
    ]
    (engine,) = make_engines(load_config(None, overrides), str(tmp_path))
    assert isinstance(engine, RemoteEngine)
    assert engine.vocab_size == wanted


@pytest.mark.spec("engine.claim")
async def test_two_trainers_do_not_share_a_server() -> None:
    server = Server()

    transport = httpx.MockTransport(server)
    first, second = (RemoteEngine("http://there:1", transport=transport) for _ in range(2))
    async with first, second:
        assert (await ask(second)).token_ids == [5, 6]
        for work in (ask(first), first.interrupt(), first.restart()):
            with pytest.raises(EngineDeadError, match="another trainer updates this server"):
                await work
        assert (await ask(second)).token_ids == [5, 6]


@pytest.mark.spec("async.failed-update")
def test_a_busy_server_is_asked_again_and_a_paused_one_resumes_at_the_end() -> None:
    limits = ServerLimits(resend=0.0)
    statuses = [503, 502]
    server = Server(
        lambda body: httpx.Response(statuses.pop()) if statuses else choice([5], [-0.5])
    )

    async def work(engine: RemoteEngine) -> list[int]:
        got = await ask(engine)
        await engine.interrupt()
        return got.token_ids

    assert with_engine(server, work, limits=limits) == [5]
    assert [path for path, _ in server.asked][-2:] == ["/pause", "/resume"]
    statuses += [503] * 3
    with pytest.raises(EngineError, match="answered 503 to /v1/completions"):
        with_engine(server, ask, limits=limits)
