"""The offline run of each recipe by its command, on real vLLM: the reward rises."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("skyrl_gym")
pytest.importorskip("bm25s")
pytest.importorskip("fastapi")

ROOT = Path(__file__).parents[2]
DEADLINE_SECONDS = 3600

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(DEADLINE_SECONDS)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs/; SKYRL_FAST_RECIPES can name one with existing data and models."""
    given = os.environ.get("SKYRL_FAST_RECIPES")
    return Path(given) if given else tmp_path_factory.mktemp("recipes")


def run(base: Path, run_path: Path, recipe: str, *arguments: str) -> list[dict[str, Any]]:
    command = [sys.executable, str(ROOT / f"examples/{recipe}/run.py"), "--base", str(base)]
    result = subprocess.run(
        [*command, *arguments, f"trainer.run_path={run_path}"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    lines = (run_path / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    ("recipe", "variant"),
    [
        ("gsm8k", "single_turn"),
        ("gsm8k", "multi_turn"),
        ("text2sql", "append"),
        ("text2sql", "thinking"),
        ("search_r1", "short"),
        ("gateway", "policies"),
    ],
)
def test_reward_rises(base: Path, tmp_path: Path, recipe: str, variant: str) -> None:
    rows = run(base, tmp_path / "run", recipe, "--variant", variant)
    rewards = [row["eval/all/avg_score"] for row in rows if "eval/all/avg_score" in row]
    assert rewards[0] <= 0.5
    assert rewards[-1] >= rewards[0] + 0.3
    if variant == "thinking":
        last = rows[-1]
        assert last["generate/avg_num_turns"] > 1.5
        # Only a turn without thoughts to strip can be merged with the next.
        assert last["generate/num_seq_after_merge"] > 0.9 * last["generate/num_seq_before_merge"]


def test_a_student_learns_from_a_teacher_without_a_reward(base: Path, tmp_path: Path) -> None:
    rows = run(base, tmp_path / "run", "distillation")
    kls = [row["distillation/kl"] for row in rows if "distillation/kl" in row]
    assert sum(kls[-5:]) < 0.5 * sum(kls[:5])
    rewards = [row["eval/all/avg_score"] for row in rows if "eval/all/avg_score" in row]
    assert rewards[-1] >= rewards[0] + 0.2


def test_rows_with_long_passages_stay_within_the_limit(base: Path, tmp_path: Path) -> None:
    rows = run(base, tmp_path / "run", "search_r1", "--variant", "long")
    lengths = [
        row["generate/batch_padded_seq_len"]
        for row in rows
        if "generate/batch_padded_seq_len" in row
    ]
    assert lengths
    assert max(lengths) > 2000  # the passages are long
    assert max(lengths) <= 4096 + 32
