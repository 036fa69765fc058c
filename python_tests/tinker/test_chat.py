"""OpenAI's and Anthropic's APIs of saved samplers."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from _tinker import KEY, RunningServer, new_model, running_server, train

from skyrl_fast.rollout.chat_template import ChatTemplate

tinker = pytest.importorskip("tinker", reason="the Tinker SDK is not installed")

QUESTION = [{"role": "user", "content": "Which?"}]
REPLY = "This one."


@pytest.fixture(scope="module")
def server(
    tiny_model_folder: Path, tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("tinker")
    end = tiny_tokenizer.eos_token_id
    with running_server(tiny_model_folder, folder, end, names=("tiny/model",)) as running:
        yield running


@pytest.fixture(scope="module")
def snapshot(server: RunningServer, tiny_tokenizer: Any) -> str:
    """The path of a sampler that gives one reply."""
    client = tinker.ServiceClient(base_url=server.url, api_key=KEY)
    model = new_model(client, "tiny/model")
    template = ChatTemplate(tiny_tokenizer)
    prompt = template.token_ids(template.text(QUESTION))
    reply = [*tiny_tokenizer.encode(REPLY, add_special_tokens=False), tiny_tokenizer.eos_token_id]
    train(model, 30, *prompt, *reply)
    path = str(model.save_weights_for_sampler("learnt").result().path)
    client.close("success").result(60)
    return path


@pytest.fixture
def http(server: RunningServer) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=60) as client:
        yield client


def chat(model: str, **options: Any) -> dict[str, Any]:
    return {"model": model, "messages": QUESTION, "temperature": 0, "max_tokens": 20, **options}


@pytest.mark.spec("tinker.chat")
def test_a_snapshot_answers_chats(http: httpx.Client, snapshot: str) -> None:
    for prefix in ("/v1", "/oai/api/v1"):
        answer = http.post(f"{prefix}/chat/completions", json=chat(snapshot)).json()
        assert answer["choices"][0]["message"]["content"] == REPLY
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["model"] == snapshot
    base = http.post("/v1/chat/completions", json=chat("tiny/model")).json()
    assert base["choices"][0]["message"]["content"] != REPLY
    message = http.post("/v1/messages", json=chat(snapshot)).json()
    assert message["content"] == [{"type": "text", "text": REPLY}]
    asked = {"model": snapshot, "input": QUESTION, "temperature": 0, "max_output_tokens": 20}
    answered = http.post("/v1/responses", json=asked).json()
    assert answered["output"][0]["content"][0]["text"] == REPLY
    counted = http.post(
        "/v1/messages/count_tokens", json={"model": snapshot, "messages": QUESTION}
    ).json()
    assert counted["input_tokens"] == answer["usage"]["prompt_tokens"]


def test_sampling_parameters_are_those_of_the_request(http: httpx.Client, snapshot: str) -> None:
    def texts(**options: Any) -> list[str]:
        answer = http.post("/v1/chat/completions", json=chat(snapshot, **options)).json()
        return [choice["message"]["content"] for choice in answer["choices"]]

    several = texts(temperature=50.0, seed=1, n=3, max_tokens=6)
    assert len(set(several)) == 3
    assert texts(temperature=50.0, seed=1, n=3, max_tokens=6) == several
    assert texts(temperature=50.0, seed=2, n=3, max_tokens=6) != several
    assert texts(max_tokens=3) == [REPLY[:3]]  # the tokens are bytes


def test_an_answer_is_streamed(http: httpx.Client, snapshot: str) -> None:
    answer = http.post("/v1/chat/completions", json=chat(snapshot, stream=True))
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert events.pop() == "[DONE]"
    deltas = [json.loads(one)["choices"][0]["delta"].get("content") for one in events]
    assert "".join(filter(None, deltas)) == REPLY
    wrong = http.post("/v1/chat/completions", json=chat("other", stream=True))
    assert wrong.status_code == 404


@pytest.mark.spec("tinker.chat")
@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("other/model", "known: tiny/model"),
        ("tinker://nobody:train:0/sampler_weights/x", "there is no tinker://nobody"),
        ("tinker://../../etc", "path: expected tinker://RUN/"),
    ],
)
def test_an_unknown_model_is_not_found(http: httpx.Client, model: str, words: str) -> None:
    for path in ("chat/completions", "messages"):
        answer = http.post(f"/v1/{path}", json=chat(model))
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (404, "not_found_error")
        assert f"`{model}` does not exist here" in error["message"] and words in error["message"]


def test_what_is_saved_is_listed(http: httpx.Client, snapshot: str) -> None:
    listed = [one["id"] for one in http.get("/v1/models").json()["data"]]
    assert listed == ["tiny/model", snapshot]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"response_format": {"type": "json_object"}}, "form of an answer"),
        ({"frequency_penalty": 0.5}, "frequency_penalty: it is not served"),
        ({"temperature": -1}, "temperature: expected a number of at least 0, got -1"),
        ({"messages": [{"role": "user", "content": "x" * 2000}]}, "prompt is too long"),
        (
            {"tools": [{"function": {"name": "f"}}], "tool_choice": "required"},
            "tool_choice: tools cannot be forced",
        ),
    ],
)
def test_what_is_not_served_is_refused(
    http: httpx.Client, snapshot: str, options: dict[str, Any], words: str
) -> None:
    answer = http.post("/v1/chat/completions", json=chat(snapshot, **options))
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_another_key_is_refused(server: RunningServer, snapshot: str) -> None:
    url = f"{server.url}/v1/chat/completions"
    for headers in ({}, {"Authorization": "Bearer tml-wrong"}):
        answer = httpx.post(url, json=chat(snapshot), headers=headers)
        assert answer.status_code == 401
        assert "wrong API key" in answer.json()["error"]["message"]
