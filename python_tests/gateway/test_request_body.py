"""Bodies that begin like earlier ones are read as if each were the first."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("pydantic")
pytest.importorskip("msgspec")

from skyrl_fast.gateway.dialects.openai_chat import ChatRequest
from skyrl_fast.gateway.messages import ApiError
from skyrl_fast.gateway.request_body import RequestBodies, check_fields, parse_json

pytestmark = pytest.mark.spec("gateway.requests")

ITEMS = [
    '{"role": "user", "content": "a"}',
    '{"role":"user","content":"é\\u00e9 ]},{\\" "}',
    '{"role": "assistant", "content": null, "extra": [1, {"messages": [{}]}]}',
    '{"role": "nobody", "content": "a"}',  # an error of validation
    "3",
    "[]",
    "",  # so that there are commas without items
]
HEADS = [
    '{"messages": [',
    '{"model": "m", "messages":[',
    '{"tools": [{"messages": []}], "messages": [',
]
TAILS = [
    ', "model": "m"}',
    "}",
    ', "messages": [{"role": "user", "content": "b"}], "model": "m"}',  # the last one counts
    ', "model": "m", "mess\\u0061ges": []}',
    ', "model": "m"} x',
    ', "model": NaN}',
    "",
]
spaces = st.sampled_from(["", " ", "\n\t "])
bodies = st.builds(
    lambda head, items, between, after, tail: f"{head}{(',' + between).join(items)}{after}]{tail}",
    st.sampled_from(HEADS),
    st.lists(st.sampled_from(ITEMS), max_size=4),
    spaces,
    spaces,
    st.sampled_from(TAILS),
)


def outcome(read: Any) -> Any:
    try:
        return read()
    except ApiError as error:
        return (error.status, error.message)


@given(sent=st.lists(bodies, max_size=8))
def test_each_body_has_the_fields_of_its_json(sent: list[str]) -> None:
    reader = RequestBodies()
    for text in sent:
        body = text.encode()
        expected = outcome(lambda body=body: check_fields(ChatRequest, parse_json(body)))
        got = outcome(lambda body=body: reader.fields(body, ChatRequest, "messages"))
        assert got == expected


def test_what_was_read_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The JSON that is parsed is that of the new messages, in a conversation that grows."""
    sizes: list[int] = []
    loads = json.loads

    def counted(body: bytes) -> Any:
        sizes.append(len(body))
        return loads(body)

    monkeypatch.setattr("skyrl_fast.gateway.request_body.json.loads", counted)
    reader, messages = RequestBodies(), []
    for turn in range(20):
        messages.append({"role": "user", "content": f"{turn}" * 100})
        body = json.dumps({"messages": messages, "model": "m", "seed": turn}).encode()
        fields = reader.fields(body, ChatRequest, "messages")
        assert [m.content for m in fields.messages] == [m["content"] for m in messages]
        assert fields.model_extra == {"seed": turn}
    assert max(sizes) < 400


def test_objects_are_counted_before_they_are_read() -> None:
    def read(text: str) -> Any:
        return parse_json(b'{"messages": [' + text.encode() + b"]}")

    part = '{ \n"type": "text"}'
    with pytest.raises(ApiError, match="more than 100,000 objects") as error:
        read(",".join([part] * 100_000))
    assert error.value.status == 413
    assert len(read(",".join([part] * 99_999))["messages"]) == 99_999
    code = json.dumps('{"a": {"b": 1}} ' * 100_000)  # a text
    assert len(read(code)["messages"]) == 1
