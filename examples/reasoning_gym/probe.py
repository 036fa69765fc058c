"""What a model can do at the start: each task of reasoning-gym, at its easiest level.

    python examples/reasoning_gym/probe.py --out DIR
    python examples/reasoning_gym/probe.py --tasks lcm gcd --questions 16 --samples 8 --out DIR

Samples from SmolLM2-135M-Instruct as an evaluation of a run does, and prints a table: the share of
replies with an answer between its marks, and the mean score by the task's own checker where the
answer is what stands there, the last number of the reply, or all of it; and what the best constant
answer scores. A task is worth training where some samples are right, few of
the questions have the same answer, and questions and answers are short. One engine samples all
tasks; those with questions of more than 400 tokens, or that take a second to make, are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # this file may be started from anywhere

from examples.reasoning_gym.last_number import LastNumber  # noqa: E402
from examples.reasoning_gym.packages import PACKAGES, make_importable  # noqa: E402
from examples.smollm.run import prepare as prepare_smollm  # noqa: E402
from examples.tiny_model.recipe import install, make_once  # noqa: E402
from skyrl_fast.adapters.reasoning_gym_env import (  # noqa: E402
    COLUMN,
    ReasoningGymEnv,
    reasoning_gym_rows,
)

SMOLLM = Path("runs/smollm")
FOLDER = Path("runs/reasoning_gym/packages")
MIXED_BY_US = {"composite"}
LONGEST_QUESTION = 400  # tokens
SECONDS_OF_QUESTION = 1.0  # to make: each trajectory makes its question again
SECONDS_FOR_ANSWERS = 10.0  # of a task: some take seconds to make a question


@dataclass(frozen=True, slots=True)
class Probed:
    """One task: shares from 0 to 1, and mean numbers of tokens."""

    task: str
    level: int | None
    answered: float
    marks: float
    last_number: float
    all_text: float
    constant_score: float
    constant: str
    questions_tried: int
    question_tokens: float
    answer_tokens: float


def rows_of(task: str, number: int) -> list[dict[str, Any]]:
    """Return questions of the task's easiest level, or of its default settings without one."""
    try:
        return reasoning_gym_rows(task, number, level=0)
    except ValueError:  # no curriculum, or one whose first level its own check refuses
        return reasoning_gym_rows(task, number)


def best_constant(task: str, number: int) -> tuple[float, str, int]:
    """Return the mean score of the most frequent right answer, the answer, and of how many."""
    rows = rows_of(task, number)
    deadline = time.monotonic() + SECONDS_FOR_ANSWERS
    answers = []
    for row in rows:
        answers.append(ReasoningGymEnv(row)._entry["answer"])
        if time.monotonic() > deadline:
            break
    ((constant, _),) = Counter(map(str, answers)).most_common(1)
    scores = []
    for row in rows[: len(answers)]:
        scores.append(ReasoningGymEnv(row)._score(constant))
        if time.monotonic() > 2 * SECONDS_FOR_ANSWERS + deadline:
            break
    return statistics.mean(scores), constant, len(scores)


def sample(rows: list[dict[str, Any]], options: argparse.Namespace) -> Path:
    """Sample the questions; return the folder of the trajectories."""
    from skyrl_fast import evaluate

    out = options.out.absolute()
    sampling = {"max_generate_length": options.longest, "temperature": options.temperature}
    settings = {
        "trainer": {"policy": {"model": {"path": str(SMOLLM / "model")}}, "seed": 42},
        "generator": {
            "eval_n_samples_per_prompt": options.samples,
            "max_turns": 1,
            "max_input_length": LONGEST_QUESTION,
            "eval_sampling_params": sampling,
            "inference_engine": {"max_num_seqs": 128, "model_dtype": options.dtype},
        },
    }
    results = evaluate(settings, out=out, env=ReasoningGymEnv, eval_prompts=rows, say=print)
    return results[0].folder


def probed(folder: Path, rows: list[dict[str, Any]], number: int, tokenizer: Any) -> list[Probed]:
    """Return each task's figures, the best first.

    Args:
        folder: of the trajectories.
        rows: the questions, in the order of the trajectories' numbers.
        number: of questions for constant answers.
        tokenizer: of the model.
    """
    from skyrl_fast.trajectory_store import read_trajectories

    by_task: dict[str, list[Any]] = {row[COLUMN]["task"]: [] for row in rows}
    for trajectory in read_trajectories(folder):
        row = rows[int(trajectory.entry.uid.removeprefix("eval-"))]
        (step,) = trajectory.steps
        text = tokenizer.decode(step.response_ids, skip_special_tokens=True)
        between_marks, last_number = ReasoningGymEnv(row), LastNumber(row)
        by_task[row[COLUMN]["task"]].append(
            {
                "level": row[COLUMN]["level"],
                "answered": between_marks.read_answer(text) is not None,
                "marks": between_marks._score(between_marks.read_answer(text)),
                "last_number": last_number._score(last_number.read_answer(text)),
                "all_text": between_marks._score(text.strip()),
                "question_tokens": len(step.prompt_token_ids),
                "answer_tokens": len(step.response_ids),
            }
        )
    found = []
    for task, replies in by_task.items():
        constant_score, constant, tried = best_constant(task, number)
        level = replies[0].pop("level")
        means = {name: _mean(reply[name] for reply in replies) for name in replies[0]}
        found.append(
            Probed(
                task=task,
                level=level,
                constant_score=constant_score,
                constant=constant,
                questions_tried=tried,
                **means,
            )
        )
    return sorted(found, key=lambda one: (-max(one.marks, one.last_number, one.all_text), one.task))


def _mean(values: Any) -> float:
    return statistics.mean(map(float, values))


def report(found: Sequence[Probed]) -> None:
    """Print a table."""
    print(
        "| task | level | with marks | score: between marks | last number | all of the reply "
        "| best constant answer scores | tokens of question, reply |\n"
        "|---|---|---:|---:|---:|---:|---|---|"
    )
    for one in found:
        level = "default" if one.level is None else str(one.level)
        constant = one.constant.replace("\n", " ").replace("|", "/")[:16]
        print(
            f"| {one.task} | {level} | {one.answered:.2f} | {one.marks:.3f} "
            f"| {one.last_number:.3f} | {one.all_text:.3f} "
            f"| {one.constant_score:.3f} (`{constant}`, {one.questions_tried} questions) "
            f"| {one.question_tokens:.0f}, {one.answer_tokens:.0f} |"
        )


def main() -> None:
    """Sample and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", type=Path, default=Path("."), help="parent of the runs' folder")
    parser.add_argument("--out", type=Path, required=True, help="new folder of the trajectories")
    parser.add_argument("--tasks", nargs="+", help="default: all")
    parser.add_argument("--questions", type=int, default=4, help="of each task")
    parser.add_argument("--samples", type=int, default=4, help="of each question")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--longest", type=int, default=96, help="tokens of an answer")
    parser.add_argument("--dtype", default="bfloat16", help="of the engine")
    parser.add_argument("--constant", type=int, default=200, help="questions for constant answers")
    options = parser.parse_args()
    os.chdir(options.base)
    make_once(FOLDER, lambda path: install(path, PACKAGES))
    make_importable(FOLDER)
    prepare_smollm(SMOLLM)

    from reasoning_gym.factory import DATASETS
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(SMOLLM / "model")
    rows: list[dict[str, Any]] = []
    for task in options.tasks or sorted(DATASETS.keys() - MIXED_BY_US):
        started = time.perf_counter()
        asked = rows_of(task, options.questions)
        if time.perf_counter() - started > SECONDS_OF_QUESTION * options.questions:
            continue
        texts = [row["prompt"][0]["content"] for row in asked]
        if max(len(tokenizer.encode(text)) for text in texts) > LONGEST_QUESTION - 50:
            continue  # 50: of the chat template
        rows += asked
    started = time.perf_counter()
    folder = sample(rows, options)
    seconds = time.perf_counter() - started
    found = probed(folder, rows, options.constant, tokenizer)
    report(found)
    number = len(rows) * options.samples
    print(f"\n{number} answers to {len(found)} tasks in {seconds:.0f} s, engine included")
    lines = [json.dumps({name: getattr(one, name) for name in Probed.__slots__}) for one in found]
    (folder / "probe.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
