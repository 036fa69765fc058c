"""The reasoning-gym recipe: its rows, how it reads answers, its controls, and what is measured."""

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from _stored import WordTokenizer, two_turns

pytest.importorskip("reasoning_gym.factory")

from examples.reasoning_gym.last_number import LastNumber
from examples.reasoning_gym.make_data import NUM_EVAL, make_data, text_of
from examples.reasoning_gym.packages import PACKAGES
from examples.tiny_model import measure
from examples.tiny_model.jsonl import read_jsonl
from skyrl_fast.adapters.reasoning_gym_env import COLUMN
from skyrl_fast.trajectory_store.writer import TrajectoryWriter

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("reasoning_gym") / "data"
    make_data(found)
    return found


def reward(row: dict[str, Any], text: str) -> float:
    step = LastNumber(row).step(text)
    assert isinstance(step.reward, dict)
    return float(step.reward["reward"])


def test_no_question_is_asked_twice(folder: Path) -> None:
    train = read_jsonl(folder / "train.jsonl")
    held_out = read_jsonl(folder / "eval.jsonl")
    texts = [text_of(row) for row in train + held_out]
    assert len(set(texts)) == len(texts)
    assert len(held_out) == NUM_EVAL
    for name, rows in (("train", train), ("eval", held_out)):
        again = read_jsonl(folder / f"{name}_tries.jsonl")
        assert [text_of(row) for row in again] == [text_of(row) for row in rows]
        assert {row[COLUMN]["tries"] for row in again} == {2}


def test_the_answer_is_the_last_number(folder: Path) -> None:
    row = read_jsonl(folder / "eval.jsonl")[0]
    env = LastNumber(row)
    answer = env._entry["answer"]
    assert reward(row, f"3 + 4 is no {answer}0, it is {answer}.") == 1.0
    assert reward(row, f"{answer} and not 1000") == 0.0
    assert reward(row, "none") == 0.0
    assert env.read_answer("3 - 12 = -9") == "-9"
    assert env.read_answer("12 - 9") == "9"


def test_rewards_of_others_are_those_of_the_next_question(folder: Path) -> None:
    rows = read_jsonl(folder / "train.jsonl")
    others = read_jsonl(folder / "train_others.jsonl")
    assert [text_of(row) for row in others] == [text_of(row) for row in rows]
    for other, following in zip(others, [*rows[1:], rows[0]], strict=True):
        assert reward(other, LastNumber(following)._entry["answer"]) == 1.0


def test_packages_are_those_of_the_tests_environment() -> None:
    locked = (ROOT / "requirements.lock").read_text()
    for package in PACKAGES:
        assert f"\n{package} --hash" in locked


def test_the_rise_has_the_error_over_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    def run(*scores: float) -> list[dict[str, Any]]:
        evaluations = [{"step": 10 * i, measure.EVAL: value} for i, value in enumerate(scores)]
        step = {"step": 1, measure.SAMPLED: 0.25, "policy/policy_entropy": 1.0, "timing/step": 3.0}
        return [*evaluations, step]

    kind = measure.Kind("trained", "LoRA", (1, 2))
    found = measure.summarize(kind, [run(0.1, 0.5), run(0.2, 0.8)])
    assert found["rise"] == pytest.approx(0.5)
    assert found["error_of_rise"] == pytest.approx(0.1)  # 0.4 and 0.6
    measure.report([found])
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "| LoRA | 1 | 0.100 | 0.500 | 0.25, 0.25 | 3 |"
    assert lines[-1] == "LoRA: rise 0.500 +- 0.100 over 2 seeds"


def test_the_rise_has_an_error_over_the_questions_that_all_runs_have(tmp_path: Path) -> None:
    # The first and the last evaluation of two runs: two answers to each of three questions.
    rewards = {
        "trained_1": {0: [(0, 0), (1, 0), (0, 0)], 10: [(1, 1), (1, 1), (0, 0)]},
        "trained_2": {0: [(0, 0), (0, 0), (0, 0)], 10: [(1, 0), (1, 1), (0, 0)]},
    }
    for name, of_steps in rewards.items():
        writer = TrajectoryWriter(tmp_path / name / "trajectories", WordTokenizer(), last_step=0)
        for step, of_questions in {**of_steps, 5: [(1, 1)] * 3}.items():
            answers = []
            for question, (first, second) in enumerate(of_questions):
                answers.append(two_turns(f"eval-{question}", 0, first))
                answers.append(two_turns(f"eval-{question}", 1, second))
            writer.write(step, "eval", answers)
    found = measure.rise_over_questions([tmp_path / name for name in rewards])
    assert found is not None
    rises = [3 / 4, 3 / 4, 0]
    assert found.mean == pytest.approx(statistics.mean(rises))
    assert found.error == pytest.approx(statistics.stdev(rises) / 3**0.5)
    assert measure.rise_over_questions([tmp_path / "none"]) is None


def test_finished_runs_of_other_kinds_are_read_and_not_made(tmp_path: Path) -> None:
    def finish(name: str, *scores: float) -> None:
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        step = {"step": 1, measure.SAMPLED: 0.25, "policy/policy_entropy": 1.0, "timing/step": 3.0}
        rows = [{"step": 10 * i, measure.EVAL: value} for i, value in enumerate(scores)]
        lines = [json.dumps(row) for row in (*rows, step)]
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        (folder / "learning_curve.png").touch()

    finish("trained_1", 0.1, 0.5)
    finish("trained_2", 0.2, 0.8)
    finish("frozen_1", 0.1, 0.1)
    finish("half_1", 0.1, 0.1)  # and the other seed is missing
    kinds = (
        measure.Kind("trained", "LoRA", (1, 2)),
        measure.Kind("frozen", "learning rate 0", (1,)),
        measure.Kind("half", "half", (1, 2)),
    )
    measured = measure.Measured(tmp_path / "no_script.py", Path("runs"), kinds)
    measure.main(measured, "", ["--base", str(tmp_path), "--only", "frozen"])
    scores = json.loads((tmp_path / "runs/scores.json").read_text())
    assert [run["label"] for run in scores["runs"]] == ["LoRA", "learning rate 0"]
    assert (tmp_path / "runs/scores.png").exists()


def test_a_kind_with_a_script_of_its_own_samples_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "supervised.py"
    script.write_text(
        "import json, sys\n"
        "from pathlib import Path\n"
        "settings = dict(word.split('=') for word in sys.argv[1:] if '=' in word)\n"
        "folder = Path(settings['trainer.run_path'])\n"
        "folder.mkdir(parents=True)\n"
        f"rows = [{{'step': 0, '{measure.EVAL}': 0.25}}]\n"
        f"rows += [{{'step': 1, '{measure.EVAL}': 0.5, 'timing/step': 3.0}}]\n"
        "lines = [json.dumps(row) for row in rows]\n"
        "(folder / 'metrics.jsonl').write_text(chr(10).join(lines) + chr(10))\n"
        "(folder / 'learning_curve.png').touch()\n"
    )
    kind = measure.Kind("supervised", "demonstrations", (7,), script=script)
    measured = measure.Measured(tmp_path / "no_script.py", Path("runs"), [kind])
    measure.main(measured, "", ["--base", str(tmp_path)])
    assert "| demonstrations | 7 | 0.250 | 0.500 | -, - | 3 |" in capsys.readouterr().out
