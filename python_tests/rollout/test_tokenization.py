"""Encoding, decoding and rendering next to what transformers does."""

from typing import Any

import pytest

from bench._tokenizer import byte_level_tokenizer
from skyrl_fast.rollout.chat_template import ChatTemplate, ContextError
from skyrl_fast.rollout.tokenization import decode, encode

TEXTS = ["", "a", "words and  spaces\n", "ä😀\u0301", "<|im_start|>user\nhi<|im_end|>", "x" * 300]
# Like those of models with tools and thoughts, and with transformers' own functions.
FULL_TEMPLATE = (
    "{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}{{ bos_token or '' }}{{ style }}"
    "{% for m in messages %}{% if m.role == 'none' %}{{ raise_exception('a role') }}{% endif %}"
    "{% if m.reasoning_content is defined %}<t>{{ m.reasoning_content }}</t>{% endif %}"
    "{% if m.thinking is defined %}[{{ m.thinking }}]{% endif %}"
    "<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}"
    "{% elif m.content is defined %}{{ m.content | tojson }}{% endif %}"
    "{% if m.tool_calls is defined %}{{ m.tool_calls | tojson }}{% endif %}"
    "{{ m.get('name', '-') }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"x": [1, None]}}}
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": "s"}, {"role": "user", "content": "a & b < c"}],
    [{"role": "assistant", "content": None, "tool_calls": [CALL], "name": None}],
    [{"role": "assistant", "content": "x", "reasoning": "because"}],
    [{"role": "assistant", "content": "x", "thinking": "so", "reasoning_content": "why"}],
    [{"role": "tool", "content": [{"type": "text", "text": "ü"}], "tool_call_id": "c"}],
    [{"role": "user", "content": "\ud800"}],
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_and_texts_are_those_of_transformers(tiny_tokenizer: Any, text: str) -> None:
    ids = encode(tiny_tokenizer, text)
    assert ids == tiny_tokenizer.encode(text, add_special_tokens=False)
    for skip in (False, True):
        wanted = tiny_tokenizer.decode(ids, skip_special_tokens=skip)
        assert decode(tiny_tokenizer, ids, skip_special_tokens=skip) == wanted


def test_settings_of_the_tokenizer_that_change_tokens_are_respected() -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer("a long text", truncation=True, max_length=3)  # remembered by the backend
    assert tokenizer.backend_tokenizer.truncation is not None
    assert decode(tokenizer, encode(tokenizer, "a long text")) == "a long text"
    tokenizer.backend_tokenizer.enable_padding(length=50)
    assert decode(tokenizer, encode(tokenizer, "a long text")) == "a long text"
    special = encode(tokenizer, "<|im_end|>")
    tokenizer.split_special_tokens = True
    wanted = tokenizer.encode("<|im_end|>", add_special_tokens=False)
    assert encode(tokenizer, "<|im_end|>") == wanted != special


def test_a_class_with_code_of_its_own_is_asked() -> None:
    tokenizer = byte_level_tokenizer()

    class Shouting(type(tokenizer)):  # type: ignore[misc]
        def encode(self, text: str, **kwargs: Any) -> list[int]:
            return super().encode(text.upper(), **kwargs)

        def decode(self, token_ids: Any, **kwargs: Any) -> str:
            return super().decode(token_ids, **kwargs).upper()

        def apply_chat_template(self, conversation: Any, **kwargs: Any) -> str:
            return "own"

    tokenizer.__class__ = Shouting
    assert encode(tokenizer, "ab") == byte_level_tokenizer().encode("AB")
    assert decode(tokenizer, encode(tokenizer, "c")) == "C"
    assert ChatTemplate(tokenizer).render_parts(CHATS[0]) == ["own"]


@pytest.mark.parametrize("chat", CHATS, ids=range(len(CHATS)))
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_rendered_without_copies_is_the_same(tiny_tokenizer: Any, chat: Any, tools: Any) -> None:
    template = ChatTemplate(tiny_tokenizer, FULL_TEMPLATE, {"style": "<plain>"})
    chats = [CHATS[0], chat, [*CHATS[0], *chat], [*chat, *CHATS[1]]]
    for messages in chats:  # the first is rendered in both ways
        for options in ({}, {"answer_next": False}, {"style": "other"}):
            wanted = template.text(messages, tools=tools, **options)
            seen = [template.prepare_message(message) for message in messages]
            parts = template.render_parts(seen, tools=tools, **options)
            assert "".join(parts) == wanted
    assert template.renders_directly


def test_arguments_of_transformers_are_no_variables(tiny_tokenizer: Any) -> None:
    template = ChatTemplate(tiny_tokenizer, FULL_TEMPLATE)
    assert "".join(template.render_parts(CHATS[0])) == template.text(CHATS[0])
    chat = [*CHATS[0], {"role": "assistant", "content": "and"}]
    options = {"answer_next": False, "continue_final_message": True}
    assert template.render_parts(chat, **options) == [template.text(chat, **options)]
    assert template.text(chat, **options).endswith("and")


def test_transformers_renders_if_its_first_prompt_is_another(tiny_tokenizer: Any) -> None:
    class Other:
        def generate(self, _: Any) -> list[str]:
            return ["other"]

    template = ChatTemplate(tiny_tokenizer, compile_template=lambda template: Other())
    for chat in CHATS[:2]:
        assert template.render_parts(chat) == [template.text(chat)] != ["other"]


def test_refusals_name_the_roles(tiny_tokenizer: Any) -> None:
    template = ChatTemplate(tiny_tokenizer, FULL_TEMPLATE)
    template.render_parts(CHATS[0])
    with pytest.raises(ContextError, match="messages of the roles none: TemplateError: a role"):
        template.render_parts([template.prepare_message({"role": "none", "content": ""})])


def test_transformers_renders_what_only_it_can_prepare(tiny_tokenizer: Any) -> None:
    """A function among the tools of the run becomes a schema."""

    def look(place: str) -> str:
        """Look at a place.

        Args:
            place: a name.
        """
        return place

    template = ChatTemplate(tiny_tokenizer, FULL_TEMPLATE, {"tools": [look]})
    for chat in CHATS[:2]:
        assert "Look at a place" in "".join(template.render_parts(chat))
