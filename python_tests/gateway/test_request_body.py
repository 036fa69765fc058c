"""Bodies that begin like earlier ones are read as if each were the first."""

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("pydantic")
pytest.importorskip("msgspec")

from skyrl_fast.gateway.dialects.openai_chat import ChatRequest
from skyrl_fast.gateway.messages import ApiError
from skyrl_fast.gateway.request_body import (
    RequestBodies,
    check_fields,
    parse_json,
    without_texts,
)

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


def test_what_was_read_is_not_read_again() -> None:
    """The JSON that is parsed is that of the new messages, in a conversation that grows."""
    sizes: list[int] = []

    def counted(body: bytes) -> Any:
        sizes.append(len(body))
        return parse_json(body)

    reader, messages = RequestBodies(counted), []
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
    with pytest.raises(ApiError, match="more than 100,000 objects"):
        read(",".join(["{}"] * 100_001))
    code = json.dumps('{"a": {"b": 1}} ' * 100_000)  # a text
    assert len(read(code)["messages"]) == 1


LONG_LISTS = {
    "keys": ("300,000 keys", "{" + ",".join(f'"k{i}":1' for i in range(300_001)) + "}"),
    "numbers": ("2,000,000 values", "[" + "1," * 2_000_000 + "1]"),
    "lists": ("2,000,000 values", "[" + ",".join(["[" * 500 + "]" * 500] * 4_001) + "]"),
    "texts": ("2,000,000 values", "[" + '"\\\\",' * 2_000_000 + '"\\""]'),
}


@pytest.mark.parametrize("name", LONG_LISTS)
def test_what_would_take_seconds_is_refused_before_it_is_parsed(name: str) -> None:
    limit, value = LONG_LISTS[name]
    with pytest.raises(ApiError, match=f"^the body has more than {limit}$") as error:
        parse_json(b'{"x": ' + value.encode() + b" no end")  # which only a parser would notice
    assert error.value.status == 413


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_other_encodings_do_not_hide_what_a_body_has(encoding: str) -> None:
    small = {"a": ['"', {"b": 1}]}
    assert parse_json(json.dumps(small).encode(encoding)) == small
    body = json.dumps(['"', [1] * 2_000_000]).encode(encoding)  # the quote is escaped
    with pytest.raises(ApiError, match="2,000,000 values"):
        parse_json(body)


def test_long_prompts_of_ids_and_texts_of_code_are_parsed() -> None:
    ids = list(range(1_900_000))
    assert parse_json(json.dumps({"prompt": ids}).encode()) == {"prompt": ids}
    code = {"content": 'f({"a": [1, 2]}, "\\")\n' * 800_000}
    assert parse_json(json.dumps(code).encode()) == code


json_values = st.recursive(
    st.none() | st.integers() | st.text('a,:[{"\\]}'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text('k,:[{"\\'), inner),
)


def numbers_of(value: Any) -> Counter[str]:
    """Return the keys, objects, lists and commas of a JSON value."""
    if not isinstance(value, list | dict):
        return Counter()
    is_object = isinstance(value, dict)
    found = Counter({"{" if is_object else "[": 1, ",": max(len(value) - 1, 0)})
    found[":"] += len(value) * is_object
    for item in value.values() if is_object else value:
        found += numbers_of(item)
    return found


@given(value=json_values)
def test_characters_outside_texts_are_those_of_the_structure(value: Any) -> None:
    outside = bytes(without_texts(json.dumps(value, ensure_ascii=False).encode())).decode()
    numbers = Counter(character for character in outside if character in ",:[{")
    assert numbers == +numbers_of(value)
