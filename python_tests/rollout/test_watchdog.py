"""Detection and handling of slow and stuck trajectories, with fake clocks."""

import asyncio
import logging
from collections import Counter
from typing import Any

import pytest
from fake_envs import Call, FakePrompt, ScriptedEngine, loop_config, register_fakes, says

from skyrl_fast.config import EnvironmentConfig
from skyrl_fast.rollout.activity import ACTING, GENERATING, MAKING, ActivityBoard
from skyrl_fast.rollout.engine.protocol import Generation
from skyrl_fast.rollout.engine.weights.gate import WeightGate
from skyrl_fast.rollout.env.factory import EnvFactory
from skyrl_fast.rollout.group_runner import GroupDroppedError, GroupRunner
from skyrl_fast.rollout.groups import environment_runner
from skyrl_fast.rollout.policy_calls import PolicyCalls
from skyrl_fast.rollout.trajectory import Trajectory

register_fakes()


class Clock:
    """A clock that the tests advance."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.spec("async.stuck-trajectory", "async.slow-phase")
def test_slow_is_reported_once_per_phase_and_stuck_after_every_deadline() -> None:
    clock = Clock()
    board = ActivityBoard(clock)
    entry = board.enter("7", 2)
    clock.now = 1000.0  # waiting for its turn is neither
    assert board.report_slow(10) == board.find_stuck("7", 30) == []
    board.set_phase(entry, MAKING, attempt=0, turn=0)
    clock.now += 9
    board.set_phase(entry, ACTING, attempt=1, turn=3)
    clock.now += 9
    assert board.report_slow(10) == []
    clock.now += 1
    assert board.report_slow(10) == [entry]
    assert entry.describe(clock.now) == "7/2: turn 4, attempt 2, in its environment for 10 s"
    assert board.report_slow(10) == []  # once is enough
    board.set_phase(entry, GENERATING, attempt=1, turn=4)
    clock.now += 10
    assert board.report_slow(10) == [entry]
    assert board.find_stuck("7", 30) == []
    clock.now += 1
    assert board.find_stuck("7", 30) == [entry]
    assert board.find_stuck("8", 30) == []
    board.leave(entry)
    assert board.find_stuck("7", 30) == []


def test_oldest_returns_the_entries_longest_in_their_phase() -> None:
    clock = Clock()
    board = ActivityBoard(clock)
    entries = [board.enter("a", i) for i in range(3)]
    for number, entry in enumerate(entries):
        clock.now = 10.0 - number
        board.set_phase(entry, ACTING, attempt=0, turn=0)
    assert board.oldest(["a"], 2) == [entries[2], entries[1]]
    assert board.oldest(["b"]) == []
    again = board.enter("a", 0)
    board.leave(entries[0])  # an earlier run of it
    assert again in board.of("a")


class Deaf:
    """An engine whose chosen requests never end and ignore cancellation.

    `deaf`: of each repetition, how many of its first requests.
    """

    def __init__(self, tokenizer: Any, deaf: dict[int, int]) -> None:
        self.answer = says(tokenizer, "a")
        self.deaf = Counter(deaf)
        self.let_go = asyncio.Event()

    async def generate(self, prompt_token_ids: Any, sampling: Any, **place: Any) -> Generation:
        repetition_id = int(place["session_id"].split("-")[-2])
        self.deaf[repetition_id] -= 1
        never = self.deaf[repetition_id] >= 0
        while never and not self.let_go.is_set():
            try:
                await self.let_go.wait()
            except asyncio.CancelledError:
                continue
        return self.answer


async def run_deaf(
    tokenizer: Any,
    deaf: dict[int, int],
    *,
    samples: int = 3,
    retries: int = 1,
    slots: int = 8,
    phase: str = "train",
) -> tuple[GroupRunner, list[Trajectory] | Exception]:
    """Run one group; whenever the event loop is idle the clock advances by ten deadlines."""
    clock = Clock()
    engine = Deaf(tokenizer, deaf)
    factory = EnvFactory(EnvironmentConfig())
    runner = environment_runner(
        PolicyCalls(engine, WeightGate(), tokenizer, 0),
        factory,
        loop_config(
            n_samples_per_prompt=samples,
            eval_n_samples_per_prompt=samples,
            max_retries=retries,
            max_concurrent_trajectories=slots,
        ),
        board=ActivityBoard(clock),
        env_timeout_seconds=1.0,
        poll_seconds=0.02,
    )

    async def time_passes() -> None:
        while True:
            await asyncio.sleep(0.2)
            clock.now += 1000.0

    passing = asyncio.create_task(time_passes())
    prompt = FakePrompt("p", env_extras={"turns": 1})
    try:
        return runner, await runner.group(prompt, phase=phase, policy_version=0)
    except GroupDroppedError as error:
        return runner, error
    finally:
        passing.cancel()
        engine.let_go.set()
        await asyncio.sleep(0.05)
        await factory.close()


@pytest.mark.spec("async.lost-group-members")
def test_a_stuck_trajectory_restarts_and_finished_ones_are_kept(
    tiny_tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        runner, got = asyncio.run(run_deaf(tiny_tokenizer, {1: 1}))
    assert isinstance(got, list)
    assert [(t.repetition_id, t.failure, len(t.steps)) for t in got] == [
        (i, None, 1) for i in range(3)
    ]
    assert runner.faults["stuck_trajectories"] == 1
    assert "STUCK: p/1: turn 1, generating for 1000 s; restarted" in caplog.text


@pytest.mark.spec("async.lost-group-members")
def test_permanently_stuck_trajectory_fails(tiny_tokenizer: Any) -> None:
    runner, got = asyncio.run(run_deaf(tiny_tokenizer, {0: 2}))
    assert isinstance(got, list)
    assert [len(t.steps) for t in got] == [0, 1, 1]
    assert got[0].failure == "stuck past every deadline, and given up"
    assert runner.faults["stuck_trajectories"] == 2


@pytest.mark.spec("async.lost-group")
def test_group_without_any_trajectory_is_dropped(tiny_tokenizer: Any) -> None:
    _, got = asyncio.run(run_deaf(tiny_tokenizer, {0: 9, 1: 9}, samples=2, retries=0))
    assert isinstance(got, GroupDroppedError)
    assert "group p: all 2 trajectories were stuck" in str(got)


def test_group_without_any_trajectory_is_kept_in_an_evaluation(tiny_tokenizer: Any) -> None:
    _, got = asyncio.run(run_deaf(tiny_tokenizer, {0: 9, 1: 9}, samples=2, retries=0, phase="eval"))
    assert isinstance(got, list)
    assert [(t.phase, t.steps, t.stop_reason) for t in got] == [("eval", [], "timeout")] * 2
    assert all(t.failure == "stuck past every deadline, and given up" for t in got)


@pytest.mark.spec("async.stuck-trajectory")
def test_stuck_trajectory_releases_its_slot(tiny_tokenizer: Any) -> None:
    runner, got = asyncio.run(run_deaf(tiny_tokenizer, {0: 1}, slots=1))
    assert isinstance(got, list)
    assert [t.failure for t in got] == [None] * 3
    assert not runner.slots.locked()


@pytest.mark.spec("async.slow-phase")
def test_slow_trajectories_are_logged_and_counted(
    tiny_tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        runner, _ = asyncio.run(run_deaf(tiny_tokenizer, {2: 1}))
    assert runner.faults["slow_trajectories"] == 1
    assert "slow: p/2: turn 1, generating for 1000 s" in caplog.text


def test_slow_trajectories_of_all_groups_are_one_line(
    tiny_tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        runner, _ = asyncio.run(run_deaf(tiny_tokenizer, {0: 1, 1: 1, 2: 1}))
    assert runner.faults["slow_trajectories"] == 3
    (line,) = [message for message in caplog.messages if message.startswith("slow")]
    assert line == "slow: p/0: turn 1, generating for 1000 s; and 2 more: p/1, p/2"


@pytest.mark.spec("async.fault-metrics")
async def test_failed_attempts_are_counted_by_name(tiny_tokenizer: Any) -> None:
    def answer(call: Call, number: int) -> Generation:
        return says(tiny_tokenizer, "a")

    factory = EnvFactory(EnvironmentConfig())
    calls = PolicyCalls(ScriptedEngine(answer), WeightGate(), tiny_tokenizer, 0)
    runner = environment_runner(calls, factory, loop_config(max_turns=2))
    prompt = FakePrompt("p", env_extras={"raise_at": 1})
    await runner.group(prompt, phase="train", policy_version=0)
    await factory.close()
    faults = runner.faults
    assert faults["environment_errors"] == 2
    assert faults["retried_trajectories"] == 1
