"""Clients that repeat, disconnect or send nonsense: each is counted, and the run continues."""

import asyncio
import contextlib
import gzip
import json
import resource
import threading
import zlib
from typing import Any

import pytest
from _gateway import MODEL, USER, chat, gateways, played, with_waits
from fake_envs import FakePrompt, says

from skyrl_fast.config import SamplingParams
from skyrl_fast.gateway import connections
from skyrl_fast.gateway.messages import ApiError, Outcome
from skyrl_fast.gateway.prompt_ids import PromptIds
from skyrl_fast.gateway.rewards import Rewards
from skyrl_fast.gateway.server import GatewayLimits
from skyrl_fast.rollout.engine.protocol import EngineDeadError, EngineError
from skyrl_fast.rollout.trajectory import Step

httpx = pytest.importorskip("httpx")
openai = pytest.importorskip("openai")

BODY = json.dumps({"model": MODEL, "messages": [USER]}).encode()


def client_of(task: Any, **options: Any) -> Any:
    headers = {"authorization": f"Bearer {task.api_key}", "content-type": "application/json"}
    return httpx.AsyncClient(base_url=task.base_url, headers=headers, **options)


@pytest.mark.spec("gateway.retries")
def test_a_repeated_request_is_one_call(tiny_tokenizer: Any) -> None:
    async def agent(task: Any) -> float:
        async with client_of(task) as client:
            post = client.post("/chat/completions", content=BODY)
            again = {"x-stainless-retry-count": "1"}
            first, second = await asyncio.gather(
                post, client.post("/chat/completions", content=BODY, headers=again)
            )
            third = await client.post("/chat/completions", content=BODY, headers=again)
            assert first.json() == second.json() == third.json()
            other = await client.post("/chat/completions", content=BODY)  # says that it is new
            assert other.json()["id"] != first.json()["id"]
        return 0.0

    out = played(agent, tiny_tokenizer)
    assert [s.text for s in out.only.steps] == ["a0", "a1"]
    assert out.only.env_metrics["repeated_calls"] == 2
    assert out.engine.calls[0].seed != out.engine.calls[1].seed


@pytest.mark.spec("gateway.retries")
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_returns_gets_the_answer_of_its_first_call(
    stream: bool, tiny_tokenizer: Any
) -> None:

    async def until_it_is_gone() -> None:
        while not gateways[-1].faults["gateway_lost_clients"]:
            await asyncio.sleep(0.01)

    async def agent(task: Any) -> float:
        patience = httpx.Timeout(60, read=0.3)
        client = task.async_openai.with_options(timeout=patience, max_retries=20)
        create = client.chat.completions.create
        if not stream:
            await create(model=MODEL, messages=[USER])  # the client repeats it
            return 0.0
        while True:  # of a stream that has begun, the agent does
            try:
                events = await create(model=MODEL, messages=[USER], stream=True)
                assert [e.choices[0].finish_reason async for e in events][-1] == "stop"
                return 0.0
            except (httpx.ReadTimeout, openai.APITimeoutError):
                pass

    out = played(with_waits(agent, until_it_is_gone), tiny_tokenizer, max_retries=0)
    assert [s.text for s in out.only.steps] == ["a0"]
    assert len(out.engine.calls) == 1
    assert out.only.env_metrics["repeated_calls"] >= 1


@pytest.mark.spec("gateway.lost-clients")
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_no_client_waits_for_is_aborted_and_not_trained(
    stream: bool, tiny_tokenizer: Any
) -> None:
    def answer(call: Any, n: int) -> Any:
        return None if n == 0 else says(tiny_tokenizer, "a")  # the first never ends

    async def agent(task: Any) -> float:
        body = {"model": MODEL, "messages": [USER], "stream": stream}
        async with client_of(task) as client:
            post = asyncio.create_task(client.post("/chat/completions", json=body))
            while box.engine.running == 0:
                await asyncio.sleep(0.01)
            post.cancel()
            while box.engine.running:
                await asyncio.sleep(0.01)
        await chat(task, [{"role": "user", "content": "other"}])
        return 1.0

    async def at_once() -> None:
        """Let the engine answer."""

    box = with_waits(agent, at_once)
    out = played(box, tiny_tokenizer, answer=answer, limits=GatewayLimits(retry=0.05))
    assert [s.text for s in out.only.steps] == ["a"]
    assert out.only.env_metrics["undelivered_calls"] == 1
    assert out.faults["gateway_lost_clients"] == 1


async def send_raw(task: Any, text: bytes, *, half: bool = False) -> tuple[Any, Any]:
    """Send the bytes to an agent's gateway; return the connection."""
    url = httpx.URL(task.base_url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(text)
    await writer.drain()
    if half:
        writer.write_eof()
    return reader, writer


@pytest.mark.spec("gateway.lost-clients")
@pytest.mark.parametrize("half", [False, True])
def test_an_answer_that_is_ready_at_once_is_not_trained_if_its_client_has_left(
    half: bool, tiny_tokenizer: Any
) -> None:
    async def agent(task: Any) -> float:
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(BODY)}\r\n"
            f"Authorization: Bearer {task.api_key}\r\n\r\n"
        )
        reader, writer = await send_raw(task, head.encode() + BODY, half=half)
        if half:
            assert await reader.read() == b""
        writer.close()
        async with asyncio.timeout(20):
            while not gateways[-1].faults["gateway_lost_clients"]:
                await asyncio.sleep(0.01)
        await chat(task, [{"role": "user", "content": "other"}])
        return 1.0

    out = played(agent, tiny_tokenizer)
    assert len(out.engine.calls) == 2
    assert [s.text for s in out.only.steps] == ["a1"]
    assert out.only.env_metrics["undelivered_calls"] == 1


SILENT = {
    "nothing": b"",
    "a part of its headers": b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n",
    "a part of its second headers": b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\nGET /v1",
}


@pytest.mark.spec("gateway.connections")
@pytest.mark.parametrize("name", SILENT)
def test_a_connection_without_a_request_is_closed(name: str, tiny_tokenizer: Any) -> None:
    limits = GatewayLimits(request=0.2)

    async def agent(task: Any) -> float:
        reader, writer = await send_raw(task, b"")
        for byte in SILENT[name]:
            writer.write(bytes([byte]))
            await asyncio.sleep(0)
        async with asyncio.timeout(20):
            with contextlib.suppress(ConnectionError):
                await reader.read()
        writer.close()
        await chat(task, [USER])
        return 1.0

    assert [s.text for s in played(agent, tiny_tokenizer, limits=limits).only.steps] == ["a0"]


@pytest.mark.spec("gateway.connections")
def test_connections_beyond_the_limit_are_closed(tiny_tokenizer: Any) -> None:
    limits = GatewayLimits(connections=3)

    async def agent(task: Any) -> float:
        silent = [await send_raw(task, b"") for _ in range(3)]
        reader, writer = await send_raw(task, b"GET /v1/models HTTP/1.1\r\n\r\n")
        async with asyncio.timeout(20):
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        for _, opened in [*silent, (reader, writer)]:
            opened.close()
        await chat(task, [USER])
        return 1.0

    assert [s.text for s in played(agent, tiny_tokenizer, limits=limits).only.steps] == ["a0"]


def test_connections_may_have_half_of_the_descriptors() -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert connections.max_connections() == soft // 2


@pytest.mark.spec("gateway.streams")
def test_a_stream_shows_signs_of_life_and_ends_with_the_answer_or_an_error(
    tiny_tokenizer: Any,
) -> None:
    limits = GatewayLimits(ping=0.01)
    gate = asyncio.Event()
    lines: list[str] = []

    async def agent(task: Any) -> float:
        body = {"model": MODEL, "messages": [USER], "stream": True}
        async with (
            client_of(task) as client,
            client.stream("POST", "/chat/completions", json=body) as answer,
        ):
            async for line in answer.aiter_lines():
                lines.append(line)
                gate.set()
        with pytest.raises(openai.APIError, match="out of memory"):
            events = await chat(task, [{"role": "user", "content": "x"}], stream=True)
            assert [event async for event in events] == []
        await chat(task, [{"role": "user", "content": "y"}])
        return 1.0

    def answer(call: Any, n: int) -> Any:
        return EngineError("out of memory") if n == 1 else says(tiny_tokenizer, "one two")

    box = with_waits(agent, gate.wait)
    out = played(box, tiny_tokenizer, answer=answer, max_retries=0, limits=limits)
    assert lines[0] == ": waiting"
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    texts = [chunk["choices"][0]["delta"].get("content") for chunk in chunks]
    assert texts == ["", "one two", None]
    assert out.only.failure is None


@pytest.mark.parametrize("comes_back", [False, True])
def test_an_answer_that_is_broken_off_is_trained_only_if_it_is_delivered_after_all(
    comes_back: bool, tiny_tokenizer: Any
) -> None:
    words = 80_000  # with log-probabilities more bytes than sockets hold

    async def agent(task: Any) -> float:
        body = {"model": MODEL, "messages": [USER], "stream": True, "logprobs": True}
        async with (
            client_of(task) as client,
            client.stream("POST", "/chat/completions", json=body) as answer,
        ):
            async for _ in answer.aiter_bytes(100):
                break
        await chat(task, [{"role": "user", "content": "other"}])
        if comes_back:
            async with client_of(task) as client:
                again = await client.post("/chat/completions", json=body)
                assert again.text.endswith("data: [DONE]\n\n")
        return 1.0

    def answer(call: Any, n: int) -> Any:
        return says(tiny_tokenizer, "a " * words if n == 0 else "b")

    sampling = SamplingParams(max_generate_length=3 * words)
    out = played(agent, tiny_tokenizer, answer=answer, sampling_params=sampling)
    assert len(out.engine.calls) == 2
    lengths = [1 + len("b"), *([1 + 2 * words] if comes_back else [])]
    assert [len(s.response_ids) for s in out.only.steps] == lengths
    assert out.only.env_metrics["undelivered_calls"] == (0 if comes_back else 1)
    assert out.faults["gateway_lost_clients"] == 1


@pytest.mark.spec("gateway.keys")
def test_a_key_ends_with_its_trajectory_and_reaches_no_other(tiny_tokenizer: Any) -> None:
    tasks: list[Any] = []

    async def agent(task: Any) -> float:
        await chat(task, [USER])
        tasks.append(task)
        if len(tasks) == 2:  # the first has ended
            await asyncio.sleep(0.05)
            late = openai.AsyncOpenAI(
                base_url=task.base_url, api_key=tasks[0].api_key, max_retries=0
            )
            with pytest.raises(openai.PermissionDeniedError, match="ended"):
                await late.chat.completions.create(model=MODEL, messages=[USER])
            async with httpx.AsyncClient(base_url=task.base_url) as client:
                headers = {"authorization": f"Bearer {task.api_key}", "origin": "http://evil"}
                refused = await client.post("/chat/completions", content=BODY, headers=headers)
                assert refused.status_code == 403
                assert (await client.get("/models")).status_code == 401
                headers = {"x-api-key": task.api_key}
                assert (await client.get("/models", headers=headers)).status_code == 200
        return 1.0

    prompts = [FakePrompt("p"), FakePrompt("q")]
    out = played(agent, tiny_tokenizer, prompts=prompts, max_concurrent_trajectories=1)
    assert [len(t.steps) for t in out.trajectories] == [1, 1]
    assert len({task.api_key for task in tasks}) == 2
    assert (out.faults["gateway_late_calls"], out.faults["gateway_wrong_keys"]) == (1, 1)


MALFORMED = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'"text"',
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"model": "policy"}',
    b'{"model": "policy", "messages": "hi"}',
    b'{"model": "policy", "messages": [{"role": "king", "content": "a"}]}',
    b'{"model": "policy", "messages": [{"role": "user", "content": 7}]}',
    b'{"model": "policy", "messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"model": "policy", "messages": [{"role": "user", "content": "a"}], "n": 0}',
    b'{"model": "policy", "messages": [{"role": "user", "content": "a"}], "n": 1e99}',
    b'{"model": "policy", "messages": [{"role": "user", "content": "a"}], "max_tokens": -1}',
    b'{"model": "policy", "messages": [{"role": "user", "content": "a"}], "tools": [7]}',
    b'{"model": ["policy"], "messages": [{"role": "user", "content": "a"}]}',
]


@pytest.mark.spec("gateway.errors")
def test_malformed_bodies_are_refused_in_the_dialects_form(tiny_tokenizer: Any) -> None:
    async def agent(task: Any) -> float:
        async with client_of(task) as client:
            for body in MALFORMED:
                answer = await client.post("/chat/completions", content=body)
                assert answer.status_code == 400, (body[:80], answer.text)
                assert answer.json()["error"]["message"], body[:80]
            assert (await client.get("/chat/completions")).status_code == 405
            assert (await client.post("/other", content=b"{}")).status_code == 404
        await chat(task, [USER])
        return 1.0

    out = played(agent, tiny_tokenizer)
    assert len(out.only.steps) == len(out.engine.calls) == 1
    assert out.faults["gateway_refused_calls"] == len(MALFORMED) + 1  # the unknown path


@pytest.mark.spec("gateway.agent-failures")
def test_failures_of_agent_and_engine_are_told_apart_and_retried(tiny_tokenizer: Any) -> None:
    async def raises(task: Any) -> float:
        await chat(task, [USER])
        raise LookupError("no such door")

    out = played(raises, tiny_tokenizer, max_retries=1)
    assert out.only.stop_reason == "env_error"
    assert "LookupError: no such door" in str(out.only.failure)
    assert out.runner.faults == {"environment_errors": 2, "retried_trajectories": 1}

    async def calls(task: Any) -> float:
        task.async_openai.max_retries = 0
        await chat(task, [USER])
        return 1.0

    def broken(call: Any, n: int) -> Any:
        return EngineError("out of memory") if n == 0 else says(tiny_tokenizer, "a")

    out = played(calls, tiny_tokenizer, answer=broken, max_retries=1)
    assert (out.only.stop_reason, out.only.failure) == ("stop", None)
    assert out.runner.faults == {"engine_errors": 1, "retried_trajectories": 1}

    async def none(task: Any) -> float:
        return 1.0

    out = played(none, tiny_tokenizer, max_retries=0)
    assert "without an answer" in str(out.only.failure)

    async def odd(task: Any) -> str:
        await chat(task, [USER])
        return "good"

    out = played(odd, tiny_tokenizer, max_retries=0)
    assert "expected a finite float32 number, got 'good'" in str(out.only.failure)


def test_the_other_choices_of_a_failed_call_are_aborted(tiny_tokenizer: Any) -> None:
    engines: list[Any] = []

    class Asks(with_waits):
        def patch(self, engine: Any) -> None:
            engines.append(engine)

    async def agent(task: Any) -> float:
        task.async_openai.max_retries = 0
        with pytest.raises(openai.InternalServerError, match="out of memory"):
            await chat(task, [USER], n=3)
        while engines[0].running:
            await asyncio.sleep(0.01)
        with pytest.raises(openai.BadRequestError, match="max_turns"):
            await chat(task, [USER], n=2)
        await chat(task, [USER])
        return 1.0

    def answer(call: Any, n: int) -> Any:
        if len(engines[0].calls) == 4:
            return says(tiny_tokenizer, "a")
        return EngineError("out of memory") if not failed.append(n) and len(failed) == 1 else None

    failed: list[int] = []
    out = played(Asks(agent, None), tiny_tokenizer, answer=answer, max_turns=4, max_retries=0)
    assert (out.only.failure, [s.text for s in out.only.steps]) == (None, ["a"])


def test_a_dead_engine_ends_the_rollout(tiny_tokenizer: Any) -> None:
    async def agent(task: Any) -> float:
        while True:  # catches everything
            try:
                await chat(task, [USER])
            except openai.APIError:
                await asyncio.sleep(0.01)

    with pytest.raises(EngineDeadError, match="gone"):
        played(agent, tiny_tokenizer, answer=lambda call, n: EngineDeadError("gone"))


def test_a_dead_engine_is_named_where_another_call_ends_with_it(tiny_tokenizer: Any) -> None:
    both = asyncio.Event()

    async def agent(task: Any) -> float:
        prompts = [[USER], [{"role": "user", "content": "other"}]]
        calls = (task.async_openai.with_options(max_retries=0).chat.completions.create(
            model=MODEL, messages=messages
        ) for messages in prompts)  # fmt: skip
        await asyncio.gather(*calls, return_exceptions=True)
        await asyncio.sleep(600)
        return 1.0

    async def wait() -> None:
        waiting.append(1)
        if len(waiting) == 2:
            both.set()
        await both.wait()

    waiting: list[int] = []
    answers = [EngineDeadError("gone"), says(tiny_tokenizer, "a")]

    def answer(call: Any, n: int) -> Any:
        return answers.pop(0)

    with pytest.raises(EngineDeadError, match="gone"):
        played(with_waits(agent, wait), tiny_tokenizer, answer=answer)


@pytest.mark.parametrize("blocking", [False, True])
def test_an_agent_at_its_deadline_keeps_its_steps(blocking: bool, tiny_tokenizer: Any) -> None:
    loops: list[Any] = []
    ended = threading.Event()

    def answer(call: Any, n: int) -> Any:
        loops.append(asyncio.get_running_loop())
        return says(tiny_tokenizer, "a")

    def pass_the_deadline() -> None:
        (loop,) = loops
        clock = loop.time
        loop.time = lambda: clock() + 1000
        loop.call_soon_threadsafe(lambda: None)

    async def waits(task: Any) -> float:
        answer = await chat(task, [USER])
        async with client_of(task) as client:
            await client.post("/rewards", json={"reward": 0.75, "id": answer.id})
        pass_the_deadline()
        await asyncio.sleep(600)
        return 1.0

    def blocks(task: Any) -> float:
        task.openai.chat.completions.create(model=MODEL, messages=[USER])
        pass_the_deadline()
        ended.wait(600)
        return 1.0

    agent = blocks if blocking else waits
    out = played(agent, tiny_tokenizer, answer=answer, trajectory_timeout_seconds=500.0)
    ended.set()
    t = out.only
    assert (t.stop_reason, t.failure, len(t.steps)) == ("timeout", None, 1)
    posted = 0.0 if blocking else 0.75
    assert (t.steps[0].stop_reason, t.steps[0].reward) == ("timeout", posted)
    assert t.env_metrics["calls"] == 1


@pytest.mark.parametrize(
    ("other", "calls"), [('{"b": "2", "a": "1"}', 1), ('{"b": "3", "a": "1"}', 2)]
)
def test_a_retry_with_its_keys_in_another_order_is_the_same_call(
    other: str, calls: int, tiny_tokenizer: Any
) -> None:
    async def agent(task: Any) -> float:
        async with client_of(task) as client:
            for metadata, timeout in (('{"a": "1", "b": "2"}', 0.3), (other, 5.0)):
                body = (
                    f'{{"model": "{task.model}", "metadata": {metadata}, '
                    '"messages": [{"role": "user", "content": "hi"}]}'
                )
                with contextlib.suppress(httpx.ReadTimeout):
                    await client.post("/chat/completions", content=body, timeout=timeout)
        return 1.0

    async def wait() -> None:
        await asyncio.sleep(0.8)

    out = played(with_waits(agent, wait), tiny_tokenizer)
    assert len(out.engine.calls) == calls
    assert out.only.env_metrics["repeated_calls"] == 2 - calls


def waits_of(seconds: list[float]) -> Any:
    """Return a wait before each answer of an engine, the last one before all later ones."""
    left = [*seconds]

    async def wait() -> None:
        await asyncio.sleep(left.pop(0) if len(left) > 1 else left[0])

    return wait


@pytest.mark.spec("gateway.retries")
def test_equal_requests_at_once_are_two_calls_also_where_one_is_tried_again(
    tiny_tokenizer: Any,
) -> None:
    async def agent(task: Any) -> float:
        async def ask(timeout: float) -> str:
            client = task.async_openai.with_options(timeout=timeout, max_retries=3)
            return (await client.chat.completions.create(model=MODEL, messages=[USER])).id

        impatient = asyncio.create_task(ask(0.5))
        await asyncio.sleep(0.1)
        assert await ask(20.0) != await impatient
        return 1.0

    out = played(with_waits(agent, waits_of([1.0, 2.0])), tiny_tokenizer)
    assert [s.text for s in out.only.steps] == ["a0", "a1"]
    assert out.only.env_metrics["undelivered_calls"] == 0


@pytest.mark.spec("gateway.lost-clients")
def test_a_client_that_comes_back_is_waited_for_anew(tiny_tokenizer: Any) -> None:
    limits = GatewayLimits(retry=1.5)

    async def agent(task: Any) -> float:
        async with client_of(task) as client:
            for timeout in (0.3, 1.5, 20.0):  # the second one ends after the first one's limit
                with contextlib.suppress(httpx.ReadTimeout):
                    await client.post("/chat/completions", content=BODY, timeout=timeout)
        return 1.0

    out = played(with_waits(agent, waits_of([3.0])), tiny_tokenizer, limits=limits)
    assert (len(out.engine.calls), out.only.env_metrics["repeated_calls"]) == (1, 2)


def test_a_call_that_was_given_up_does_not_overlap_the_next_one(tiny_tokenizer: Any) -> None:
    async def agent(task: Any) -> float:
        async with client_of(task) as client:
            with contextlib.suppress(httpx.ReadTimeout):
                await client.post("/chat/completions", content=BODY, timeout=0.3)
        await chat(task, [{"role": "user", "content": "other"}])
        return 1.0

    out = played(
        with_waits(agent, waits_of([600.0, 0.0])), tiny_tokenizer, one_line=True, max_retries=0
    )
    assert (out.only.failure, len(out.only.steps)) == (None, 1)


@pytest.mark.parametrize(("model", "reason"), [("titles", "stop"), (MODEL, "length")])
def test_the_refused_call_of_another_model_is_not_the_trajectorys_end(
    model: str, reason: str, tiny_tokenizer: Any
) -> None:
    async def agent(task: Any) -> float:
        await chat(task, [USER])
        long = [{"role": "user", "content": "x" * 5_000}]
        with pytest.raises(openai.BadRequestError, match="prompt is too long"):
            await task.async_openai.chat.completions.create(model=model, messages=long)
        return 1.0

    out = played(agent, tiny_tokenizer, untrained_models=("titles",))
    assert [(s.stop_reason, s.reward) for s in out.only.steps] == [(reason, 1.0)]


WITHOUT_TOOLS = (
    "{% for m in messages if m.role != 'tool' %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT_OR_CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content %}{{ m.content }}{% else %}"
    "{{ m.tool_calls | tojson }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "texts", "refused"),
    [(WITHOUT_TOOLS, ["x", "x"], [True, True]), (TEXT_OR_CALLS, ["", "x"], [False, True])],
)
def test_a_prompt_that_lacks_a_message_is_refused_after_others_too(
    template: str, texts: list[str], refused: list[bool], tiny_tokenizer: Any
) -> None:
    called = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "c", "content": "a door"}
    seen: list[bool] = []

    async def agent(task: Any) -> float:
        for text in texts:
            answer = {"role": "assistant", "content": text, "tool_calls": [called]}
            try:
                await chat(task, [USER, answer, result])
                seen.append(False)
            except openai.BadRequestError as error:
                assert "the chat template leaves out" in str(error)
                seen.append(True)
        await chat(task, [USER])
        return 1.0

    played(agent, tiny_tokenizer, chat_template=template)
    assert seen == refused


def test_rewards_of_answers_that_are_withdrawn() -> None:
    rewards, (first, second) = (
        Rewards(),
        [Step([1], [2], [1], [-1.0], 0.0, "stop", 0, "", "", 0.0, 0.0) for _ in range(2)],
    )
    rewards.add_answer("a", [first], "plan")
    rewards.add_answer("b", [second], "plan")
    assert rewards.withdraw("b", [second])
    with pytest.raises(ApiError, match="no trained answer of this trajectory has this id"):
        rewards.add(1.0, call="b")
    rewards.add(0.5, span="plan")
    assert not rewards.withdraw("a", [first])  # its reward would be lost
    rewards.apply(Outcome(), first)
    assert (first.reward, second.reward) == (0.5, 0.0)


ENCODINGS = [
    ("gzip", gzip.compress, 200),
    ("deflate", zlib.compress, 200),
    ("identity", bytes, 200),
    ("gzip", bytes, 400),
    ("gzip", lambda body: gzip.compress(body)[:-9], 400),
    ("gzip", lambda body: gzip.compress(b" " * (65 << 20)), 413),
    ("br", bytes, 415),
]


def test_compressed_bodies_and_wrong_base_urls(
    tiny_tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def agent(task: Any) -> float:
        body = json.dumps({"model": task.model, "messages": [USER]}).encode()
        async with client_of(task) as client:
            for encoding, compress, status in ENCODINGS:
                headers = {"content-encoding": encoding}
                answer = await client.post(
                    "/chat/completions", content=compress(body), headers=headers
                )
                assert answer.status_code == status, answer.text
            root = task.base_url.removesuffix("/v1")
            for before, path in (("", "/chat/completions"), ("/v1/v1", "/messages")):
                answer = await client.post(root + before + path, content=body)
                assert answer.status_code == 404
                assert f"expected {root}/v1{path}: check the base URL" in answer.text
        return 1.0

    out = played(agent, tiny_tokenizer)
    assert len(out.only.steps) == 3
    assert "/v1/v1/messages" in caplog.text


@pytest.mark.spec("gateway.long-requests")
@pytest.mark.parametrize("place", ["message", "system", "tools", "kwargs", "messages"])
def test_texts_that_no_prompt_can_hold_are_refused_before_they_are_rendered(
    place: str, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "<|im_start|>" * 200_000
    tool = {"type": "function", "function": {"name": "a", "description": text, "parameters": {}}}
    body: dict[str, Any] = {
        "message": {"messages": [{"role": "user", "content": text}]},
        "system": {"messages": [{"role": "system", "content": text}, USER]},
        "tools": {"messages": [USER], "tools": [tool]},
        "kwargs": {"messages": [USER], "chat_template_kwargs": {"a": [text]}},
        "messages": {"messages": [USER] * 2_000},
    }[place]
    rendered: list[int] = []
    chat_ids = PromptIds.chat

    def counted(self: Any, messages: Any, *arguments: Any) -> Any:
        rendered.append(len(messages))
        return chat_ids(self, messages, *arguments)

    monkeypatch.setattr(PromptIds, "chat", counted)

    async def agent(task: Any) -> float:
        async with client_of(task) as client:
            answer = await client.post("/chat/completions", json={"model": MODEL, **body})
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["code"] == "context_length_exceeded"
            least = 2_000 if place == "messages" else len(text) // 512
            assert f"prompt is too long: {least} tokens > 512 maximum" in answer.text
        await chat(task, [USER])
        return 1.0

    out = played(agent, tiny_tokenizer, max_retries=0)
    assert (out.only.failure, rendered) == (None, [1])
