"""bench.lora: its runs, the peak memory of a command, and its tables."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench import lora
from bench.generation import refuse_failures
from bench.growth import Sizes, measure, table, trajectories_of
from bench.lora import Measured, Run, memory_table, reward_table, train
from skyrl_fast.rollout.trajectory import Trajectory

ROWS: list[dict[str, Any]] = [
    {"step": 0, lora.EVAL: 0.25},
    *(
        {
            "step": step,
            lora.SAMPLED: step / 10,
            "timing/step": seconds,
            "timing/forward_backward": seconds / 2,
            "sync/update_seconds": seconds / 4,
            "sync/num_bytes": 2.5e6,
        }
        for step, seconds in enumerate((9.0, 1.0, 2.0, 3.0), 1)
    ),
    {"step": 4, lora.EVAL: 0.75},
]


PEAKS = {"trainer": 3 << 29, "engine": 1 << 30, "both": 1 << 31}


def test_a_finished_run_is_read_and_tables_leave_the_first_step_out(tmp_path: Path) -> None:
    commands: list[list[str]] = []
    run = Run("quickstart", lora=True, seed=7, frozen=True)
    folder = tmp_path / "lora" / "quickstart_lora_7_lr_0"

    def measure_run(command: Sequence[str]) -> dict[str, int]:
        commands.append([*command])
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        return PEAKS

    first, second = (train(run, tmp_path, 4, measure=measure_run) for _ in range(2))
    assert first == second == Measured(ROWS, PEAKS)
    (command,) = commands
    assert {"trainer.policy.optimizer_config.lr=0", "trainer.max_training_steps=4"} < {*command}
    assert command[4].endswith("examples/quickstart/lora.yaml")
    row = reward_table({run: first}).splitlines()[-1]
    assert row == "| LoRA, 7, learning rate 0 | 0.25, 0.75 | 1.00 | 0.500 | 2.50 |"
    full = Run("smollm", lora=False, seed=7)
    row = memory_table({full: first}, {full: 9 << 28}).splitlines()[-1]
    sizes = "| smollm: all weights | 1.50 | 1.00 | 2.00 | 2.25 "
    assert row == f"{sizes}| 2.0 | 0.50 | 2.5 | 0.10, 0.40 | 0.25, 0.75 |"
    lora.plot({run: first, full: second}, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


# --- bench.growth --------------------------------------------------------------------------------


def test_sizes() -> None:
    sizes = Sizes(trajectories=6, turns=3, tokens=600, group=2)
    sampled = trajectories_of(sizes)
    assert len(sampled) == 6 and len({t.uid for t in sampled}) == 3
    assert all(len(t.steps) == 3 for t in sampled)
    assert 400 < len(sampled[0].steps[-1].prompt_token_ids) <= 600


def test_every_phase_is_measured() -> None:
    cases = {
        size: measure(
            Sizes(trajectories=size, turns=2, tokens=64, group=2),
            repeats=1,
            collect=lambda: None,  # garbage of all that the tests have imported
        )
        for size in (4, 8)
    }
    lines = table("trajectories", cases).splitlines()
    assert len(lines) == 3 + len(cases[4].seconds) == 10
    assert min(cases[8].seconds.values()) > 0


# --- the bench of generation refuses to measure what failed --------------------------------------


def trajectory(failure: str | None) -> Trajectory:
    return Trajectory("a", 0, [], "stop", "text2sql", {}, 0.0, failure=failure)


def test_a_failed_trajectory_ends_the_bench_with_its_reason() -> None:
    refuse_failures([trajectory(None)])
    with pytest.raises(SystemExit, match=r"1 of 2 trajectories failed: no database"):
        refuse_failures([trajectory(None), trajectory("no database")])
