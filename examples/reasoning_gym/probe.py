"""What a model can do at the start: each task of reasoning-gym, at its easiest level.

    python examples/reasoning_gym/probe.py
    python examples/reasoning_gym/probe.py --marks --tasks lcm gcd --questions 16 --samples 8

Samples from SmolLM2-135M-Instruct as an evaluation of a run does, and prints a table: the share of
replies with an answer, the mean score by the task's own checker, the share of right ones, and what
the best constant answer scores. All of a reply is the answer, or with --marks what it has between
`<answer>` and `</answer>`. A task is worth training where some samples are right, few of
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

from examples.reasoning_gym.packages import install, make_importable  # noqa: E402
from examples.smollm.run import prepare as prepare_smollm  # noqa: E402
from examples.tiny_model.recipe import make_once  # noqa: E402
from skyrl_fast.adapters.reasoning_gym_env import ReasoningGymEnv, reasoning_gym_rows  # noqa: E402

SMOLLM = Path("runs/smollm")
PACKAGES = Path("runs/reasoning_gym/packages")
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
    score: float
    right: float
    constant_score: float
    constant: str
    questions_tried: int
    question_tokens: float
    answer_tokens: float


def rows_of(task: str, number: int, *, marks: bool = False) -> list[dict[str, Any]]:
    """Return questions of the task's easiest level, or of its default settings without one."""
    try:
        return reasoning_gym_rows(task, number, level=0, marks=marks)
    except ValueError:  # no curriculum, or one whose first level its own check refuses
        return reasoning_gym_rows(task, number, marks=marks)


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
        step = ReasoningGymEnv(row).step(constant)
        scores.append(step.reward["reward"])  # type: ignore[index]
        if time.monotonic() > 2 * SECONDS_FOR_ANSWERS + deadline:
            break
    return statistics.mean(scores), constant, len(scores)


def sample(rows: list[dict[str, Any]], options: argparse.Namespace) -> Path:
    """Sample the questions; return the folder of the trajectories."""
    from skyrl_fast import evaluate

    out = options.out.absolute()
    sampling = {"max_generate_length": options.longest, "temperature": 1.0}
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


def probed(folder: Path, levels: dict[str, int | None], number: int) -> list[Probed]:
    """Return each task's figures, the most often right first."""
    from skyrl_fast.trajectory_store import read_trajectories

    by_task: dict[str, list[Any]] = {task: [] for task in levels}
    for trajectory in read_trajectories(folder):
        task = trajectory.entry.data_source.partition("_level_")[0]
        by_task[task].append(trajectory)
    found = []
    for task, trajectories in by_task.items():
        steps = [trajectory.steps[0] for trajectory in trajectories]
        constant_score, constant, tried = best_constant(task, number)
        found.append(
            Probed(
                task=task,
                level=levels[task],
                answered=_mean(t.env_metrics.get("answered", 0.0) for t in trajectories),
                score=_mean(t.entry.reward or 0.0 for t in trajectories),
                right=_mean(t.env_metrics.get("solved", 0.0) for t in trajectories),
                constant_score=constant_score,
                constant=constant,
                questions_tried=tried,
                question_tokens=_mean(len(step.prompt_token_ids) for step in steps),
                answer_tokens=_mean(len(step.response_ids) for step in steps),
            )
        )
    return sorted(found, key=lambda one: (-one.right, -one.score, one.task))


def _mean(values: Any) -> float:
    return statistics.mean(map(float, values))


def report(found: Sequence[Probed]) -> None:
    """Print a table."""
    print(
        "| task | level | answered | score | right | best constant answer scores "
        "| tokens of question, answer |\n|---|---|---:|---:|---:|---|---|"
    )
    for one in found:
        level = "default" if one.level is None else str(one.level)
        constant = one.constant.replace("\n", " ").replace("|", "/")[:16]
        print(
            f"| {one.task} | {level} | {one.answered:.2f} | {one.score:.3f} | {one.right:.3f} "
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
    parser.add_argument("--longest", type=int, default=96, help="tokens of an answer")
    parser.add_argument("--dtype", default="bfloat16", help="of the engine")
    parser.add_argument("--constant", type=int, default=200, help="questions for constant answers")
    parser.add_argument("--marks", action="store_true", help="read answers between their marks")
    options = parser.parse_args()
    os.chdir(options.base)
    make_once(PACKAGES, install)
    make_importable(PACKAGES)
    prepare_smollm(SMOLLM)

    from reasoning_gym.factory import DATASETS
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(SMOLLM / "model")
    rows: list[dict[str, Any]] = []
    levels: dict[str, int | None] = {}
    for task in options.tasks or sorted(DATASETS.keys() - MIXED_BY_US):
        started = time.perf_counter()
        asked = rows_of(task, options.questions, marks=options.marks)
        if time.perf_counter() - started > SECONDS_OF_QUESTION * options.questions:
            continue
        texts = [row["prompt"][0]["content"] for row in asked]
        if max(len(tokenizer.encode(text)) for text in texts) > LONGEST_QUESTION - 50:
            continue  # 50: of the chat template
        rows += asked
        levels[task] = asked[0]["reasoning_gym"]["level"]
    started = time.perf_counter()
    folder = sample(rows, options)
    seconds = time.perf_counter() - started
    found = probed(folder, levels, options.constant)
    report(found)
    number = len(rows) * options.samples
    print(f"\n{number} answers to {len(levels)} tasks in {seconds:.0f} s, engine included")
    lines = [json.dumps({name: getattr(one, name) for name in Probed.__slots__}) for one in found]
    (folder / "probe.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
