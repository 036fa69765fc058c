"""Shared code of the examples: templates, rows of the warm start, files created once."""

from pathlib import Path

import pytest

pytest.importorskip("transformers")

from examples.tiny_model.model import THINKING_CHAT_TEMPLATE, make_tokenizer
from examples.tiny_model.recipe import make_once
from examples.tiny_model.warm_start import IGNORED, encode_turns

CHAT = [
    {"role": "user", "content": "question"},
    {"role": "assistant", "content": "<think> first </think> <sql> look </sql>"},
    {"role": "user", "content": "answer </think> here"},
    {"role": "assistant", "content": "<think> second </think> #### 7"},
]


def test_thinking_template_strips_only_earlier_thoughts() -> None:
    tokenizer = make_tokenizer([], chat_template=THINKING_CHAT_TEMPLATE)
    text = tokenizer.apply_chat_template(CHAT[:3], add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|im_start|>user\nquestion<|im_end|>\n"
        "<|im_start|>assistant\n <sql> look </sql><|im_end|>\n"
        "<|im_start|>user\nanswer </think> here<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_each_turn_is_a_row_with_the_answer_as_labels() -> None:
    texts = [message["content"] for message in CHAT]
    tokenizer = make_tokenizer(texts, chat_template=THINKING_CHAT_TEMPLATE)
    rows = encode_turns(tokenizer, [CHAT])
    assert [tokenizer.decode(ids) for ids, _ in rows] == [
        "<|im_start|> user question <|im_end|> <|im_start|> assistant "
        "<think> first </think> <sql> look </sql> <|im_end|>",
        "<|im_start|> user question <|im_end|> <|im_start|> assistant <sql> look </sql> <|im_end|> "
        "<|im_start|> user answer </think> here <|im_end|> <|im_start|> assistant "
        "<think> second </think> #### 7 <|im_end|>",
    ]
    for (ids, labels), turn in zip(rows, (CHAT[1], CHAT[3]), strict=True):
        trained = [label for label in labels if label != IGNORED]
        assert tokenizer.decode(trained) == turn["content"] + " <|im_end|>"
        assert labels[-len(trained) :] == ids[-len(trained) :] == trained


def test_answer_marker_is_one_token_kept_by_decoding() -> None:
    tokenizer = make_tokenizer(["#### 7"])
    assert len(tokenizer.encode("#### 7")) == 2
    assert tokenizer.decode(tokenizer.encode("#### 7")) == "#### 7"


def test_interrupted_build_leaves_no_files(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        folder.mkdir()
        raise KeyboardInterrupt

    def work(folder: Path) -> None:
        folder.mkdir()
        (folder / "file").write_text("x")

    target = tmp_path / "below" / "data"
    with pytest.raises(KeyboardInterrupt):
        make_once(target, fail)
    assert not target.exists()
    make_once(target, work)
    make_once(target, fail)
    assert (target / "file").read_text() == "x"
