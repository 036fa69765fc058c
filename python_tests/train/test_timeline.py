"""Timelines of steps: spans of the trainer and of trajectories, in Chrome's trace format."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from _training import folder as folder  # a fixture
from _training import settings, train

from skyrl_fast.rollout.activity import ACTING, GENERATING, ActivityBoard
from skyrl_fast.train.output.timeline import ROLLOUTS, TRAINER, Timeline

pytestmark = pytest.mark.spec("run.timeline")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


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
