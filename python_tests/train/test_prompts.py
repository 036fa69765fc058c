"""The order of prompts over epochs, and prompt files."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skyrl_fast.train.data.prompts import (
    Prompt,
    PromptSampler,
    digest_of,
    load_prompts,
    prompts_from,
)


def test_sampler_epochs_are_permutations_and_resume() -> None:
    sampler = PromptSampler(10, batch_size=4, seed=3)
    batches = [sampler.next_batch() for _ in range(6)]
    for epoch in range(3):
        seen = batches[2 * epoch] + batches[2 * epoch + 1]
        assert len(set(seen)) == 8
    assert batches[:2] != batches[2:4]
    for position in range(6):
        one = PromptSampler(10, batch_size=4, seed=3)
        for _ in range(position):
            one.next_batch()
        two = PromptSampler(10, batch_size=4, seed=3)
        two.restore(json.loads(json.dumps(one.state())))
        assert [two.next_batch() for _ in range(6 - position)] == batches[position:]


def test_prompt_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    rows = [
        {"prompt": "hello", "data_source": "s", "answer": 3},
        {"prompt": [{"role": "user", "content": "x"}], "env_class": "own"},
    ]
    path.write_text(json.dumps(rows))
    first, second = load_prompts([str(path)], default_env_class="d", prefix="eval-")
    assert first == Prompt(
        "eval-0",
        [{"role": "user", "content": "hello"}],
        "d",
        {"data_source": "s", "answer": 3},
        "s",
        is_text=True,
    )
    assert (second.uid, second.env_class) == ("eval-1", "own")


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("a.jsonl", '{"prompt": 3}\n', "row 0: prompt: expected a list of messages"),
        ("a.jsonl", "[1]\n", "row 0: expected a mapping"),
        ("a.jsonl", '{"prompt": "x"}\n{', "line 2: invalid JSON"),
        (
            "a.jsonl",
            b'{"prompt": "x"}\n{"prompt": "\xe9"}',
            r"a\.jsonl, line 2: invalid JSON: 'utf-8' codec",
        ),
        ("a.json", b'[{"prompt": "\xe9"}]', r"a\.json: invalid JSON: 'utf-8' codec"),
        ("a.json", "{}", "expected a list of rows"),
        ("a.csv", "x", "expected .jsonl, .json or .parquet"),
    ],
)
def test_invalid_prompt_files_error_names_the_place(
    tmp_path: Path, name: str, text: str | bytes, wanted: str
) -> None:
    (tmp_path / name).write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ValueError, match=wanted):
        load_prompts([str(tmp_path / name)], default_env_class="d")


ROWS = [{"prompt": "a", "answer": "1"}, {"prompt": [{"role": "user", "content": "b"}], "n": 2}]


class OfPolars:
    """A table of polars, as far as it is used."""

    columns = ("prompt", "answer")

    def to_dicts(self) -> list[dict[str, Any]]:
        return ROWS[:1] * 2


@pytest.mark.spec("rollout.tables")
def test_tables_give_their_rows() -> None:
    pandas, pyarrow = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
    datasets = pytest.importorskip("datasets")
    texts = {"prompt": ["a", "a"], "answer": ["1", "1"]}
    data = datasets.Dataset.from_dict(texts)
    for source in (
        pandas.DataFrame(texts),
        pyarrow.table(texts),
        pyarrow.table(texts).to_batches()[0],
        OfPolars(),
        data,
        data.to_iterable_dataset(),
    ):
        prompts = prompts_from(source, default_env_class="e")
        assert [(p.messages[0]["content"], p.env_extras) for p in prompts] == [
            ("a", {"answer": "1"})
        ] * 2, type(source)
    for column in (data["prompt"], pandas.Series(["a", "a"]), pyarrow.array(["a", "a"])):
        assert [p.messages[0]["content"] for p in prompts_from(column, default_env_class="e")] == [
            *"aa"
        ]
    # A missing value is null, not NaN; lists that pandas has read are arrays.
    frame = pandas.DataFrame([*ROWS, {"prompt": np.array([{"role": "user", "content": "c"}])}])
    first, second, third = prompts_from(frame, default_env_class="e")
    assert (first.env_extras, second.env_extras) == (
        {"answer": "1", "n": None},
        {"answer": None, "n": 2},
    )
    assert third.messages == [{"role": "user", "content": "c"}] and third.env_class == "e"


@pytest.mark.spec("rollout.tables")
def test_other_tables_and_mappings_are_refused() -> None:
    class Frame:
        def __init__(self, attribute: str) -> None:
            setattr(self, attribute, ["prompt", "answer"])

        def __iter__(self) -> Any:
            return iter(["prompt", "answer"])

    for source, error in [
        (Frame("columns"), "prompts: expected rows, got a Frame"),
        (Frame("column_names"), "prompts: expected rows, got a Frame"),
        ({"train": ROWS}, "prompts: expected rows, got a mapping with train"),
    ]:
        with pytest.raises(ValueError, match=error):
            prompts_from(source, default_env_class="e")


@pytest.mark.spec("rollout.message-forms")
@pytest.mark.parametrize(
    ("row", "error"),
    [
        (
            {"prompt": [{"role": "user", "content": [{"type": "image"}]}]},
            "prompt: message 0: content",
        ),
        ({"prompt": "a", "tools": "{"}, "tools: expected a list of mappings"),
        ({"prompt": "a", "tools": float("nan")}, "tools: expected a list of mappings"),
        ({"prompt": "a", "chat_template_kwargs": 3}, "chat_template_kwargs: expected a mapping"),
    ],
)
def test_rows_that_no_template_takes_are_named(row: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=f"^prompts, row 1: {error}"):
        prompts_from(["a", row], default_env_class="e")


def test_environments_get_the_messages_of_the_row_and_tools_as_a_list() -> None:
    messages = [{"role": "developer", "content": [{"type": "text", "text": "a"}]}]
    row = {"prompt": messages, "tools": '[{"type": "function"}]'}
    (prompt,) = prompts_from([row], default_env_class="e")
    assert prompt.messages == messages
    assert prompt.env_extras == {"tools": [{"type": "function"}]}


@pytest.mark.spec("run.same-prompts")
def test_digest_depends_on_rows_and_order_only() -> None:
    def digest(*rows: dict[str, Any]) -> str:
        return digest_of(prompts_from(list(rows), default_env_class="e"))

    one, two = {"prompt": "a", "sum": 3}, {"prompt": "b", "sum": 4}
    assert digest(one, two) == digest(dict(one), dict(two))
    others = [(two, one), (one,), (one, {**two, "sum": 5}), (one, {**two, "prompt": "c"})]
    assert len({digest(one, two), *(digest(*rows) for rows in others)}) == 5
    # Objects, whose text may hold an address, and values that JSON cannot represent.
    cyclic: list[Any] = []
    cyclic.append(cyclic)
    for value in (object, set, lambda: cyclic, lambda: np.arange(3), lambda: float("nan")):
        assert digest({**one, "x": value()}) == digest({**one, "x": value()})
