"""The compaction example: its environment, its demonstrations, and (slow) that summaries learn."""

import json
import random
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from examples.compaction import make_data
from examples.compaction.ledger import (
    ACKNOWLEDGED,
    ASKS,
    FACTS_PER_TURN,
    LONGEST_PROMPT,
    NAMES,
    TASK,
    Ledger,
    drop_history,
    observation,
    question,
)
from skyrl_fast.config.loading import load_config

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/compaction"
FACTS = [["Ada", "drum"], ["Bela", "lamp"], ["Carl", "book"], ["Dora", "coin"]]


def test_the_environment_shows_all_facts_and_asks_for_one() -> None:
    env = Ledger({"facts": FACTS, "asked": "Carl"})
    shown = [env.step(ACKNOWLEDGED) for _ in range(3)]
    assert [step.observations for step in shown] == [
        "Seen today : Ada drum Bela lamp .",
        "Seen today : Carl book Dora coin .",
        "What has Carl ?",
    ]
    assert not any(step.done for step in shown)
    right = env.step("book")
    assert (right.reward, right.done) == (1.0, True)


@pytest.mark.parametrize("answer", ["drum", "book drum", "", "Carl book"])
def test_another_answer_is_wrong(answer: str) -> None:
    env = Ledger({"facts": FACTS, "asked": "Carl"})
    for _ in range(3):
        env.step(ACKNOWLEDGED)
    wrong = env.step(answer)
    assert (wrong.reward, wrong.done) == (0.0, True)


def test_the_question_is_asked_again_and_not_for_ever() -> None:
    env = Ledger({"facts": FACTS, "asked": "Carl"})
    steps = [env.step(ACKNOWLEDGED) for _ in range(2 + ASKS)]
    assert [step.observations for step in steps[2:]] == ["What has Carl ?"] * ASKS
    assert not steps[-1].done
    assert env.step(ACKNOWLEDGED).done


def test_demonstrations_look_up_what_their_context_has() -> None:
    rng = random.Random(3)
    found = 0
    for _ in range(50):
        chats = make_data.demonstrate(rng)
        for chat in chats[:-1]:
            assert chat[-2]["content"].endswith(make_data.REQUEST)
        last = chats[-1]
        facts: dict[str, str] = {}
        for message, said in pairwise(last):
            words = message["content"].split()
            if message["content"].startswith("What has"):
                found += facts.get(words[2]) == said["content"]
            elif message["role"] == "user":
                facts |= dict(pairwise(words))
    assert found > 50


def test_facts_do_not_fit_and_summaries_of_all_do() -> None:
    config = load_config(EXAMPLE / "config.yaml", [])
    generator = config.generator
    turns = make_data.NUM_FACTS // FACTS_PER_TURN
    shown = observation([("Ada", "drum")] * FACTS_PER_TURN).split()
    tokens_of_turn = len(["<|im_start|>", "user", *shown, "<|im_end|>"])
    tokens_of_turn += len(["<|im_start|>", "assistant", ACKNOWLEDGED, "<|im_end|>"])
    longest = generator.max_input_length + generator.sampling_params.max_generate_length
    first = len(["<|im_start|>", "user", *TASK.split(), "<|im_end|>"])
    assert first + turns * tokens_of_turn > longest
    summary = 2 * make_data.NUM_FACTS + 1
    assert summary <= generator.sampling_params.max_generate_length
    assert generator.compaction.request == make_data.REQUEST
    assert generator.compaction_budget == LONGEST_PROMPT
    assert len(NAMES) >= make_data.NUM_FACTS
    assert question("Ada").split()[2] == "Ada"


def test_the_control_keeps_nothing() -> None:
    messages = [{"role": "user", "content": "task"}, {"role": "assistant", "content": "ok"}]
    assert drop_history(messages, LONGEST_PROMPT) is None
    assert drop_history(messages, LONGEST_PROMPT + 1) == messages[:1]


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(3600)
def test_trained_summaries_raise_the_reward(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE / "run.py"), "--base", str(tmp_path)]
    subprocess.run(command, check=True, cwd=ROOT)
    lines = (tmp_path / "compaction/run/metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line) for line in lines]
    scores = [one["eval/all/avg_score"] for one in metrics if "eval/all/avg_score" in one]
    contexts = [
        one["generate/avg_num_contexts"] for one in metrics if "generate/avg_num_contexts" in one
    ]
    assert min(contexts) > 2
    assert scores[-1] > scores[0] + 0.15
