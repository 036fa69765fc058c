"""Calls of other models are forwarded to their servers: shown in the trajectory, not trained."""

import asyncio
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from _gateway import USER, chat, played, skip_without_anthropic
from _http_server import serving
from _stored import WordTokenizer
from fake_envs import says

from skyrl_fast.gateway.messages import Answer, Call
from skyrl_fast.rollout.trajectory import Trajectory

pytest.importorskip("openai")
pytest.importorskip("starlette")

import openai
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from skyrl_fast.config import ConfigError
from skyrl_fast.config.loading import load_config
from skyrl_fast.config.upstream import Upstream
from skyrl_fast.gateway import other_calls
from skyrl_fast.trajectory_store import read_trajectories
from skyrl_fast.trajectory_store.recorded import read_recorded
from skyrl_fast.trajectory_store.writer import TrajectoryWriter
from skyrl_fast.viewer.build import build_view

skip_without_anthropic()


class Judge:
    """A server of another maker: OpenAI's chats and Anthropic's messages."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any], Any]] = []
        self.sent = 0  # events

    async def answer(self, request: Request) -> Response:
        body = await request.json()
        self.asked.append((request.url.path, body, request.headers.get("authorization")))
        text = body["messages"][-1]["content"]
        if text == "refuse":
            error = {"message": "no money", "type": "insufficient_quota", "code": "quota"}
            return JSONResponse({"error": error}, 429, {"retry-after": "0"})
        if text == "wait":
            await asyncio.sleep(600)
        if request.url.path == "/v1/messages":
            return JSONResponse(
                {
                    "id": "msg_1",
                    "type": "message",
                    "role": "assistant",
                    "model": body["model"],
                    "content": [{"type": "text", "text": "fine"}],
                    "stop_reason": "end_turn",
                    "stop_sequence": None,
                    "usage": {"input_tokens": 1, "output_tokens": 1},
                }
            )
        if body.get("stream"):
            return StreamingResponse(self._events(body), media_type="text/event-stream")
        message = {"role": "assistant", "content": "good"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        head = {"id": "x", "object": "chat.completion", "created": 0, "model": body["model"]}
        return JSONResponse({**head, "choices": [choice]})

    async def _events(self, body: dict[str, Any]) -> Any:
        head = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": body["model"]}
        endless = body["messages"][-1]["content"] == "endless"
        texts = itertools.repeat("on ") if endless else ("very ", "good")
        for text in texts:
            if endless:
                await asyncio.sleep(0.01)
            choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
            self.sent += 1
            yield f"data: {json.dumps({**head, 'choices': [choice]})}\n\n"
        yield "data: [DONE]\n\n"

    @property
    def app(self) -> Starlette:
        paths = ("/v1/chat/completions", "/v1/messages")
        return Starlette(routes=[Route(path, self.answer, methods=["POST"]) for path in paths])


async def ask(task: Any, text: str, **options: Any) -> Any:
    return await task.async_openai.with_options(max_retries=0).chat.completions.create(
        model="judge", messages=[USER, {"role": "user", "content": text}], **options
    )


@pytest.mark.spec("gateway.upstreams")
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_texts_of_events_may_have_line_ends_of_unicode(end: str) -> None:
    text = "a\u2028b\u0085c\u2029d\x0be"
    event = {"choices": [{"delta": {"content": text}}]}
    lines = ["event: x", f"data: {json.dumps(event, ensure_ascii=False)}", "", "data: [DONE]", ""]
    assert other_calls.text_of_events(end.join(lines).encode()) == text


@pytest.mark.spec("gateway.upstreams")
def test_calls_by_name_go_on_to_another_server(tiny_tokenizer: Any) -> None:
    judge = Judge()

    async def agent(task: Any) -> float:
        await chat(task, [USER])
        assert (await ask(task, "how?", temperature=0.1)).choices[0].message.content == "good"
        events = [event async for event in await ask(task, "how?", stream=True)]
        assert "".join(e.choices[0].delta.content or "" for e in events) == "very good"
        answer = await task.async_anthropic.messages.create(
            model="judge", max_tokens=5, messages=[{"role": "user", "content": "so?"}]
        )
        assert answer.content[0].text == "fine"
        with pytest.raises(openai.RateLimitError, match="no money"):
            await ask(task, "refuse")
        names = [m.id for m in (await task.async_openai.models.list()).data]
        assert names == ["policy", "judge"]
        await chat(task, [USER])
        return 1.0

    with serving(judge.app) as port:
        server = Upstream(f"http://127.0.0.1:{port}/v1", "big-model", "sk-secret")
        out = played(agent, tiny_tokenizer, upstreams={"judge": server})
    t = out.only
    assert t.failure is None
    assert [step.text for step in t.steps] == ["a0", "a1"]
    assert (t.env_metrics["calls"], t.env_metrics["upstream_calls"]) == (2, 4)
    path, body, key = judge.asked[0]
    assert (path, body["model"], key) == ("/v1/chat/completions", "big-model", "Bearer sk-secret")
    assert body["temperature"] == 0.1  # as the agent asked
    assert judge.asked[2][0] == "/v1/messages"
    assert [(c.model, c.request, c.response, c.before_step) for c in t.other_calls] == [
        ("judge", "user: task\nuser: how?", "good", 1),
        ("judge", "user: task\nuser: how?", "very good", 1),
        ("judge", "user: so?", "fine", 1),
    ]


def test_a_server_that_is_gone_and_a_trajectory_that_ends(tiny_tokenizer: Any) -> None:
    judge = Judge()

    async def agent(task: Any) -> float:
        await chat(task, [USER])
        with pytest.raises(openai.InternalServerError, match="ConnectError") as raised:
            await task.async_openai.with_options(max_retries=0).chat.completions.create(
                model="gone", messages=[USER]
            )
        assert raised.value.status_code == 502
        waiting.append(asyncio.create_task(ask(task, "wait")))
        while not judge.asked and not waiting[0].done():
            await asyncio.sleep(0.01)
        return 1.0

    waiting: list[asyncio.Task[Any]] = []  # its client is closed with the agent
    with serving(judge.app) as port:
        upstreams = {
            "judge": Upstream(f"http://127.0.0.1:{port}/v1", "m"),
            "gone": Upstream("http://127.0.0.1:9/v1", "m"),
        }
        t = played(agent, tiny_tokenizer, upstreams=upstreams).only
    assert (t.failure, t.other_calls) == (None, [])
    with pytest.raises(openai.APIError):
        waiting[0].result()


@pytest.mark.parametrize("leaves", [True, False])
def test_a_stream_ends_with_its_client_or_its_trajectory(leaves: bool, tiny_tokenizer: Any) -> None:
    judge = Judge()

    async def agent(task: Any) -> float:
        await chat(task, [USER])
        stream = await ask(task, "endless", stream=True)
        assert (await anext(stream)).choices[0].delta.content == "on "
        if not leaves:
            return 1.0
        await stream.close()
        before = -1
        while before != judge.sent:  # the server notices that its client has left
            before = judge.sent
            await asyncio.sleep(0.5)
        return 1.0

    with serving(judge.app) as port:
        server = Upstream(f"http://127.0.0.1:{port}/v1", "m")
        t = played(agent, tiny_tokenizer, upstreams={"judge": server}).only
    assert t.failure is None
    if leaves:
        (call,) = t.other_calls
        assert call.response.startswith("on ")


@pytest.mark.spec("gateway.untrained")
def test_untrained_names_of_the_policy_are_shown(tiny_tokenizer: Any) -> None:
    async def agent(task: Any) -> float:
        for text in ("t", "another"):
            await task.async_openai.chat.completions.create(
                model="title", messages=[{"role": "user", "content": text}]
            )
        await chat(task, [USER])
        return 1.0

    t = played(
        agent,
        tiny_tokenizer,
        untrained_models=("title",),
        answer=lambda call, n: says(tiny_tokenizer, f"a{n}"),
    ).only
    assert [step.text for step in t.steps] == ["a2"]
    first, second = t.other_calls
    assert (first.model, first.request, first.response) == ("title", "user: t", "a0")
    assert (second.request, second.response) == ("user: another", "a1")


@pytest.mark.spec("gateway.untrained")
def test_long_texts_are_shortened_and_further_calls_left_out() -> None:
    trajectory = Trajectory("uid", 0)
    others = other_calls.OtherCalls(trajectory, max_text=20, max_kept=2)
    for number, text in enumerate(("t", "user: " + "long " * 10, "third")):
        others.add_sampled(Call("title", prompt=text), Answer(f"{number}", 0, "title", 1, []))
    first, second = trajectory.other_calls
    assert first.request == "t"
    assert second.request == "user: long long long ... (36 more characters)"


@pytest.mark.spec("viewer.other-calls")
def test_other_calls_are_stored_and_shown(tmp_path: Path, tiny_tokenizer: Any) -> None:
    judge = Judge()

    async def agent(task: Any) -> float:
        await chat(task, [USER])
        await ask(task, "</script>how?")
        return 1.0

    with serving(judge.app) as port:
        server = Upstream(f"http://127.0.0.1:{port}/v1", "big-model")
        out = played(agent, tiny_tokenizer, upstreams={"judge": server})
    writer = TrajectoryWriter(tmp_path / "trajectories", WordTokenizer(), last_step=0)
    writer.write(1, "eval", out.trajectories)
    (stored,) = read_trajectories(tmp_path)
    (call,) = stored.other_calls
    assert (call["model"], call["response"], call["before_step"]) == ("judge", "good", 1)
    (trajectory,) = read_recorded(tmp_path, phase="eval")
    assert trajectory.other_calls[0].request == out.only.other_calls[0].request
    build_view(tmp_path)
    data = "".join(p.read_text() for p in sorted((tmp_path / "view" / "data").glob("*.js")))
    assert "other_calls" in data and "judge" in data
    assert "</script>how?" not in data
    assert re.search(r"not trained", (tmp_path / "view" / "trajectory.js").read_text())


def test_settings_of_other_models(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = ["data.train_data=[a.jsonl]", "trainer.policy.model.path=m", "agent.function=a:b"]
    monkeypatch.setenv("JUDGE_KEY", "sk-secret")
    config = load_config(
        None,
        [
            *needed,
            "agent.upstreams.judge={base_url: 'http://a/v1', api_key: '${oc.env:JUDGE_KEY}'}",
        ],
    )
    assert config.agent.upstreams["judge"]["api_key"] == "sk-secret"
    from skyrl_fast.config import to_dict

    assert "sk-secret" not in json.dumps(to_dict(config))
    for setting, wanted in (
        ("judge=http://a", "judge: expected a mapping with base_url, api_key, model"),
        ("judge={url: http://a}", "judge: expected a mapping"),
        ("judge={base_url: a}", "judge.base_url: expected http://host/v1, got 'a'"),
        ("judge={base_url: 'http://a', model: 3}", "judge.model: expected a string"),
        ("policy={base_url: 'http://a'}", "expected other names than agent.model"),
    ):
        with pytest.raises(ConfigError, match=wanted):
            load_config(None, [*needed, f"agent.upstreams.{setting}"])
