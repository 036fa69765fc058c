"""The leaderboard example: its data, its checker (slow: with the package), and its control."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.bfcl import run
from examples.bfcl.bfcl_env import Bfcl
from examples.bfcl.checker import Checker
from examples.bfcl.make_data import PARTS, called, demonstrated, make_data, part_of
from examples.shuffled_rewards import shuffled
from examples.tiny_model.jsonl import read_jsonl
from examples.tiny_model.recipe import install
from skyrl_fast import Action, EstimatorInputs

EXAMPLE = Path(run.HERE)
TOOL = {
    "type": "function",
    "function": {
        "name": "area",
        "description": "Area of a square.",
        "parameters": {"type": "object", "properties": {"side": {"type": "integer"}}},
    },
}
# Questions that list no values, or not that a value is optional: the checker accepts no answer.
WITHOUT_RIGHT_ANSWER = {
    "live_simple_106-63-0",
    "live_simple_112-68-0",
    "live_multiple_507-149-4",
    "live_multiple_862-181-3",
    "live_multiple_964-207-0",
}
CALL = {"type": "function", "function": {"name": "area", "arguments": {"side": 3}}}


# --- data --------------------------------------------------------------------------------------


def test_a_function_belongs_to_one_part_and_parts_have_their_shares() -> None:
    parts = [part_of(f"function_{number}") for number in range(4000)]
    assert parts == [part_of(f"function_{number}") for number in range(4000)]
    lower = 0.0
    for part, upper in PARTS.items():
        assert parts.count(part) / 4000 == pytest.approx(upper - lower, abs=0.03)
        lower = upper


def test_the_template_shows_tools_and_an_answer_continues_its_prompt(tiny_tokenizer: Any) -> None:
    template = (EXAMPLE / "chat_template.jinja").read_text()
    question = [{"role": "user", "content": "A square of side 3?"}]
    answer = {"role": "assistant", "content": "", "tool_calls": [CALL]}

    def text(messages: list[dict[str, Any]], **settings: Any) -> str:
        return tiny_tokenizer.apply_chat_template(
            messages, tools=[TOOL], chat_template=template, tokenize=False, **settings
        )

    prompt = text(question, add_generation_prompt=True)
    assert json.dumps(TOOL["function"]) in prompt
    chat = text([*question, answer])
    assert chat.startswith(prompt)
    said = chat.removeprefix(prompt)
    (call,) = re.findall(r"<tool_call>\n(.*)\n</tool_call>", said)  # as vLLM's parser hermes does
    assert json.loads(call) == CALL["function"]
    plain = tiny_tokenizer.apply_chat_template(question, chat_template=template, tokenize=False)
    assert "Call one function" not in plain


# --- checker -----------------------------------------------------------------------------------


def test_an_answer_without_a_call_scores_0_and_asks_no_checker() -> None:
    step = Bfcl({"category": "simple_python"}).step(Action("9"))
    assert (step.reward, step.done) == ({"reward": 0.0, "called": 0.0}, True)


def test_missing_packages_and_a_dead_checker_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nothing: no packages"):
        Checker(tmp_path / "nothing")
    checker = Checker(tmp_path)  # in which there is no bfcl_eval
    row = {"category": "simple_python", "functions": [], "answers": []}
    with pytest.raises(RuntimeError, match="has ended with status 1"):
        checker.check(row, [])


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bfcl") / "packages"
    install(folder, run.PACKAGES)
    return folder


@pytest.fixture
def checker(packages: Path) -> Iterator[Checker]:
    asked = Checker(packages)
    yield asked
    asked.close()


@pytest.mark.slow
@pytest.mark.parametrize("category", ["simple_python", "multiple", "live_simple", "live_multiple"])
def test_all_questions_are_in_one_part_and_the_listed_answers_are_right(
    category: str, packages: Path, checker: Checker, tmp_path: Path
) -> None:
    make_data(tmp_path / "data", packages, category)
    rows = {part: read_jsonl(tmp_path / "data" / f"{part}.jsonl") for part in PARTS}
    chats = [row["messages"][-1]["tool_calls"][0]["function"] for row in rows["demonstrations"]]
    shown = {call["name"] for call in chats}
    trained = {called(row) for row in rows["train"]}
    held_out = {called(row) for row in rows["eval"]}
    assert not trained & held_out
    assert not shown & (trained | held_out)
    questions = [*rows["train"], *rows["eval"]]
    refused = [row["id"] for row in questions if demonstrated(row, checker) is None]
    assert set(refused) <= WITHOUT_RIGHT_ANSWER
    for row in questions:
        name = called(row)
        for wrong in ([], [{name: {}}], [{"no_function": {"x": 1}}], [{name: {"x": 1}}] * 2):
            is_right = wrong == [{name: {}}] and needs_no_argument(row)
            assert checker.check(row, wrong)["valid"] == is_right, row["id"]


def needs_no_argument(row: dict[str, Any]) -> bool:
    """Return whether a listed answer is right without arguments, too: "" stands for none."""
    (answer,) = row["answers"]
    (arguments,) = answer.values()
    return all("" in values for values in arguments.values())


@pytest.mark.slow
def test_hostile_arguments_are_wrong_and_the_checker_goes_on(
    packages: Path, checker: Checker, tmp_path: Path
) -> None:
    make_data(tmp_path / "data", packages)
    rows = read_jsonl(tmp_path / "data" / "train.jsonl")
    hostile: list[Any] = [None, [], {}, [None], {"": None}, "", "\u2028\n", 1e308, -1, [[[]]], True]
    for row in rows[:40]:
        (values,) = row["answers"][0].values()
        name = called(row)
        for value in hostile:
            said = checker.check(row, [{name: dict.fromkeys(values, value)}])
            assert said["valid"] in (True, False)
    chat = demonstrated(rows[0], checker)
    assert chat is not None
    call = chat["messages"][-1]["tool_calls"][0]["function"]
    assert checker.check(rows[0], [{call["name"]: call["arguments"]}])["valid"] is True


# --- control -----------------------------------------------------------------------------------


def test_shuffled_rewards_are_the_same_rewards_in_another_order() -> None:
    rewards = torch.arange(32, dtype=torch.float32)
    rows = torch.arange(32)
    inputs = EstimatorInputs(
        rewards=rewards,
        token_rewards=rewards,
        group_ids=torch.zeros(32, dtype=torch.int64),
        trajectory_ids=rows,
        is_last_step=torch.ones(32, dtype=torch.bool),
        loss_mask=torch.ones(32),
        cu_seqlens=torch.arange(33, dtype=torch.int32),
    )
    found = shuffled(inputs)
    right = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    torch.testing.assert_close(found.sort().values, right)
    assert torch.equal(found, shuffled(inputs))
    moved = found.argsort() != rows
    assert moved.float().mean() > 0.8
