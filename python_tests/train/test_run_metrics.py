"""Metrics of a step that depend on the form of the run, and the columns of its display."""

import io
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from _training import folder, settings, train
from rich.console import Console

from skyrl_fast.batch import batch_from_trajectories
from skyrl_fast.rollout.activity import ACTING, GENERATING, ActivityBoard
from skyrl_fast.rollout.trajectory import Step, Trajectory
from skyrl_fast.train.memory.peak import PeakMemory
from skyrl_fast.train.metrics.rewards import reward_spread
from skyrl_fast.train.metrics.rollouts import prefix_cache_metrics, truncation_metrics
from skyrl_fast.train.output.loggers import read_metrics
from skyrl_fast.train.output.plot import stack_times
from skyrl_fast.train.output.progress import ProgressDisplay
from skyrl_fast.train.output.time_shares import time_shares
from skyrl_fast.train.output.timeline import ROLLOUTS, TRAINER, Timeline

__all__ = ["folder"]  # a fixture


def last_row(folder: Path, name: str, *overrides: str) -> dict[str, Any]:
    config = settings(folder, name, "trainer.epochs=1", "data.val_data=[]", *overrides)
    return read_metrics(train(config).metrics)[-1]


def trajectory(
    uid: str, reward: float, *, turns: list[tuple[int, str]] | None = None
) -> Trajectory:
    """Return a trajectory; `turns` has the response length and stop reason of each turn."""
    turns = turns or [(1, "stop")]
    steps = [
        Step([1], [5] * length, [1] * length, [0.0] * length, 0.0, stop, 0, "", "", 0.0, 0.0)
        for length, stop in turns
    ]
    steps[-1].reward = reward
    return Trajectory(uid, 0, steps, turns[-1][1], "fake", {}, 0.0)


@pytest.mark.spec("metrics.absent")
def test_kl_is_absent_without_a_kl_loss(folder: Path) -> None:
    names = {"policy/kl", "policy/kl_loss"}
    assert not last_row(folder, "without").keys() & names
    row = last_row(folder, "with", "trainer.algorithm.use_kl_loss=true")
    assert names <= row.keys()
    assert row["policy/kl"] > 0
    assert not [name for name in row if name.startswith("memory/")]


@pytest.mark.spec("metrics.absent")
def test_peak_memory_is_that_since_the_last_call() -> None:
    class Counters:
        """As torch.cuda's: of a GPU with 1 GiB in use after a peak of 3."""

        peak = 3 << 30

        def max_memory_allocated(self, device: torch.device) -> int:
            return self.peak

        def max_memory_reserved(self, device: torch.device) -> int:
            return 2 * self.peak

        def reset_peak_memory_stats(self, device: torch.device) -> None:
            self.peak = 1 << 30

    memory = PeakMemory(torch.device("cuda"), counters=Counters())
    assert memory.metrics() == {"memory/peak_allocated_gib": 3.0, "memory/peak_reserved_gib": 6.0}
    assert memory.metrics()["memory/peak_allocated_gib"] == 1.0
    assert PeakMemory(torch.device("cpu")).metrics() == {}


@pytest.mark.spec("metrics.throughput")
def test_throughput_does_not_depend_on_the_form_of_rows(folder: Path) -> None:
    for setting in ("rows=step", "rows=merged", "row_layout=tree"):
        row = last_row(folder, setting.partition("=")[2], f"trainer.{setting}")
        tokens = 4 * 4 * 2 * 2  # prompts, samples, turns, tokens
        for name in ("tokens_per_second", "trained_tokens_per_second"):
            assert row[f"timing/{name}"] * row["timing/step"] == pytest.approx(tokens)


@pytest.mark.spec("metrics.waiting")
def test_asynchronous_training_waits(folder: Path) -> None:
    times = {"timing/generate", "timing/environment"}
    synchronous = last_row(folder, "sync")
    assert times <= synchronous.keys()
    assert "timing/wait" not in synchronous
    asynchronous = last_row(folder, "async", "trainer.fully_async.enabled=true")
    assert not asynchronous.keys() & times
    assert asynchronous["timing/wait"] >= 0


@pytest.mark.spec("metrics.time-shares")
def test_shares_of_step_and_evaluation() -> None:
    seconds = {"step": 3.0, "generate": 1.0, "sync": 0.5, "engine_idle": 2.0, "eval": 1.0}
    shares = time_shares({f"timing/{name}": value for name, value in seconds.items()})
    assert shares == {
        "timing/generate_share": 0.25,
        "timing/sync_share": 0.125,
        "timing/eval_share": 0.25,
        "timing/engine_idle_share": 0.5,
    }
    assert time_shares({"timing/step": 0.0, "timing/sync": 0.0}) == {}


@pytest.mark.spec("metrics.time-shares", "metrics.token-saving")
def test_a_run_reports_shares_and_savings(folder: Path) -> None:
    row = last_row(folder, "trees")
    idle = row["timing/generate"] + row["timing/environment"]
    assert row["timing/trainer_idle"] == pytest.approx(idle)
    step = row["timing/step"] + row.get("timing/eval", 0.0)
    assert row["timing/sync_share"] == pytest.approx(row["timing/sync"] / step)
    # All rows are visited, as trees: the saving is the ideal one but for last tokens.
    assert row["policy/tree_group_share"] == 1
    assert 0 < row["generate/batch_token_saving"] <= row["policy/token_saving"] < 1
    sequences = last_row(folder, "sequences", "trainer.row_layout=sequence")
    assert sequences["policy/token_saving"] < row["policy/token_saving"]
    assert sequences["generate/batch_token_saving"] == row["generate/batch_token_saving"]


def test_the_plot_of_times_has_the_phases_of_the_run() -> None:
    plotted: dict[str, Any] = {}
    axes = SimpleNamespace(
        stackplot=lambda x, y, labels, alpha: plotted.update(zip(labels, y, strict=True)),
        legend=lambda **_: None,
        set=lambda **_: None,
    )
    row = {"step": 1, "timing/step": 9.7, "timing/wait": 8.0, "timing/advantages": 1.6}
    stack_times(axes, [{"step": 0}, row, {**row, "step": 2, "timing/sync": 0.1}])
    assert plotted == {"wait": [8.0, 8.0], "advantages": [1.6, 1.6], "sync": [0.0, 0.1]}


@pytest.mark.spec("metrics.reward-spread")
def test_reward_spread() -> None:
    rewards = {"a": [1.0, 1.0], "b": [0.0, 1.0], "c": [0.5, 0.5], "d": [0.25]}
    batch = batch_from_trajectories(
        [
            replace(trajectory(uid, reward), repetition_id=number)
            for uid, group in rewards.items()
            for number, reward in enumerate(group)
        ]
    )
    # mean 4.25 / 7, mean of squares 3.5625 / 7
    std = (3.5625 / 7 - (4.25 / 7) ** 2) ** 0.5
    assert reward_spread(batch) == {
        "reward/std_raw_reward": pytest.approx(std),
        "reward/zero_variance_share": 0.75,
    }
    assert reward_spread(batch, tolerance=1.0)["reward/zero_variance_share"] == 1.0


@pytest.mark.spec("metrics.prefix-cache")
def test_share_of_cached_prompt_tokens() -> None:
    one = trajectory("a", 0.0, turns=[(8, "stop"), (8, "stop"), (8, "stop")])
    assert prefix_cache_metrics([one]) == {}
    lengths = [len(step.prompt_token_ids) for step in one.steps]
    one.steps[1].num_cached_tokens = 0
    one.steps[2].num_cached_tokens = lengths[2]
    share = lengths[2] / (lengths[1] + lengths[2])  # nothing is known of the first
    assert prefix_cache_metrics([one]) == {"generate/prefix_cache_share": share}


@pytest.mark.spec("metrics.truncated-turns", "metrics.too-long-prompts")
def test_truncated_turns() -> None:
    cut = trajectory("a", 0.0, turns=[(8, "stop"), (8, "length")])
    prompt_too_long = trajectory("a", 0.0, turns=[(8, "stop"), (3, "length")])
    prompt_too_long.stop_reason = cut.stop_reason = "length"
    first_too_long = trajectory("a", 0.0)
    first_too_long.steps = []
    first_too_long.stop_reason = "length"
    at_limit = trajectory("a", 0.0, turns=[(8, "length")])
    at_limit.stop_reason = "length"
    for trajectories, truncated, too_long in (
        ([cut, prompt_too_long], 0.25, 0.5),
        ([at_limit], 1.0, 0.0),
        ([first_too_long], 0.0, 1.0),
        ([], 0.0, 0.0),
    ):
        assert truncation_metrics(trajectories, 8) == {
            "generate/truncated_turn_share": truncated,
            "generate/too_long_prompt_share": too_long,
        }


STEP = {
    "reward/avg_raw_reward": 0.5,
    "reward/avg_pass_at_8": 0.75,
    "policy/loss": -0.0123456,
    "policy/policy_entropy": 1.25,
    "policy/clip_ratio": 0.0625,
    "policy/grad_norm": 2.5,
    "policy/rollout_train_logprobs_abs_diff_mean": 0.004,
    "generate/per_turn/avg_response_length": 91.7,
    "timing/step": 12.34,
    "environment/score": 3.0,
}


def shown(
    width: int,
    *,
    columns: list[str] | None = None,
    terminal: bool = True,
    step: dict[str, float] = STEP,
) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=terminal, color_system=None)
    display = ProgressDisplay(total_steps=9, start_step=0, columns=columns, console=console)
    with display:
        display.step(1, step)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.spec("metrics.progress")
def test_wide_terminal_shows_what_describes_the_update() -> None:
    text = shown(160)
    for label in ("loss", "entropy", "clipped", "grad norm", "response", "mismatch", "pass@n"):
        assert label in text
    for value in ("-0.0123", "1.250", "0.062", "2.5", "92", "4.0e-03", "0.750"):
        assert value in text
    assert " kl " not in text  # has no value


@pytest.mark.spec("metrics.progress")
def test_narrow_terminal_shows_the_first_columns_that_fit() -> None:
    text = shown(40)
    assert "reward" in text and "-0.0123" in text
    assert "mismatch" not in text
    table = text.splitlines()[-3:]
    assert max(map(len, table)) <= 60  # with control sequences; nothing is wrapped
    assert "…" not in text


@pytest.mark.parametrize("columns", [None, ["loss", "entropy"]])
def test_each_policy_has_columns(columns: list[str] | None) -> None:
    step = {"reward/avg_raw_reward": 0.5, "planner/policy/loss": 0.25, "solver/policy/loss": 2.0}
    line = shown(80, columns=columns, terminal=False, step=step)
    assert "planner loss 0.25  solver loss 2" in line
    table = shown(80, columns=columns, step=step)
    assert "planner loss" in table and "solver loss" in table


def test_a_line_of_a_file_has_as_many_columns_as_a_wide_terminal() -> None:
    (line,) = shown(20, terminal=False).splitlines()
    assert 100 < len(line) <= 120
    assert line.startswith("step 1/9  reward 0.500  loss -0.0123")


def test_chosen_columns() -> None:
    text = shown(80, columns=["entropy", "environment/score"], terminal=False)
    assert text == "step 1/9  entropy 1.250  environment/score 3\n"


# --- timelines of steps --------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.spec("run.timeline")
def test_spans_of_a_step(tmp_path: Path) -> None:
    clock = Clock()
    board = ActivityBoard(clock)
    timeline = Timeline(tmp_path, [2], board)
    early = board.enter("a", 0)
    board.set_phase(early, GENERATING, attempt=0, turn=0)
    clock.now = 110.0  # the early one began ten seconds before the step
    with timeline.of_step(1):
        timeline.phase("forward_backward", 110.0, 111.0)
    assert not list(tmp_path.iterdir())
    with timeline.of_step(2):
        late = board.enter("b", 3)
        clock.now = 111.0
        board.set_phase(late, GENERATING, attempt=1, turn=0)
        clock.now = 112.0
        board.set_phase(late, ACTING, attempt=1, turn=0)
        board.leave(early)
        clock.now = 112.5
        timeline.phase("wait", 110.0, 112.5)
    (path,) = tmp_path.iterdir()
    assert path.name == "step-00002.json"
    events = json.loads(path.read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    found = {(e["pid"], e["name"], e["ts"], e["dur"]) for e in spans}
    assert found == {
        (TRAINER, "wait", 0.0, 2.5e6),
        (ROLLOUTS, GENERATING, 0.0, 2e6),  # cut at the step's begin
        (ROLLOUTS, GENERATING, 1e6, 1e6),
        (ROLLOUTS, ACTING, 2e6, 0.5e6),  # still running at the end
    }
    names = {e["args"]["name"] for e in events if e["ph"] == "M"}
    assert {"trainer", "trajectories", "a/0", "b/3"} <= names
    counts = [(e["ts"], e["args"]["trajectories"]) for e in events if e["name"] == "generating"
              and e["ph"] == "C"]  # fmt: skip
    assert counts[0] == (0.0, 1) and max(n for _, n in counts) == 2 and counts[-1][1] == 0


@pytest.mark.spec("run.timeline")
def test_time_with_a_trajectory_in_generation() -> None:
    clock = Clock()
    board = ActivityBoard(clock)
    first, second = board.enter("a", 0), board.enter("a", 1)
    for entry, start in ((first, 100.0), (second, 101.0)):
        clock.now = start
        board.set_phase(entry, GENERATING, attempt=0, turn=0)
    clock.now = 103.0
    assert board.generating_seconds() == 3.0
    board.set_phase(first, ACTING, attempt=0, turn=0)
    board.leave(first)
    clock.now = 104.0
    board.leave(second)
    board.leave(second)  # a second time changes nothing
    clock.now = 110.0
    assert board.generating_seconds() == 4.0
    again = board.enter("a", 0)
    board.set_phase(again, GENERATING, attempt=0, turn=0)
    clock.now = 111.0
    board.enter("a", 0)  # replaces an abandoned one
    board.leave(again)
    clock.now = 120.0
    assert board.generating_seconds() == 5.0


def test_a_run_writes_the_chosen_steps(folder: Path) -> None:
    train(settings(folder, "run", "trainer.profile_steps=[2]", "trainer.max_training_steps=3"))
    (path,) = (folder / "run" / "timeline").iterdir()
    events = json.loads(path.read_text())["traceEvents"]
    phases = [e["name"] for e in events if e["ph"] == "X" and e["pid"] == TRAINER]
    assert {"rollout", "batch", "advantages", "forward_backward", "sync"} <= set(phases)


def test_pictures_have_all_steps_on_one_axis(tmp_path: Path) -> None:
    draw = pytest.importorskip("scripts.timeline_picture").draw
    clock = Clock()
    board = ActivityBoard(clock)
    timeline = Timeline(tmp_path, [1, 2], board)
    for number in (1, 2):  # no trajectory runs in the first
        with timeline.of_step(number):
            if number == 2:
                board.set_phase(board.enter("a", 0), GENERATING, attempt=0, turn=0)
            timeline.phase("wait", clock.now, clock.now + 1.0)
            clock.now += 1.0
    steps = {f"step {n}": tmp_path / f"step-0000{n}.json" for n in (1, 2)}
    for chosen in ({"step 1": steps["step 1"]}, steps):
        draw(tmp_path / "out.svg", chosen)
        text = (tmp_path / "out.svg").read_text()
        assert [f"<!-- {title} -->" in text for title in steps] == [t in chosen for t in steps]
        assert text.count("<!-- trajectory -->") == len(chosen)
