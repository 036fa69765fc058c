"""Agents in processes: the same steps and errors as in the trainer, and nothing is left."""

import asyncio
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import process_agents
import pytest
from _agents import (
    CALL,
    FILE,
    FORKS,
    SOLVE,
    python,
    read_pids,
    says_hello,
    steps,
    task_of,
    wait_until_gone,
)
from _gateway import played, says_length
from fake_envs import FakePrompt

from skyrl_fast import train_agent
from skyrl_fast.config import AgentConfig, ConfigError
from skyrl_fast.config.loading import load_config
from skyrl_fast.gateway.agents.function import FunctionAgent
from skyrl_fast.gateway.agents.processes import AgentSettings
from skyrl_fast.gateway.agents.task import BlackBox
from skyrl_fast.gateway.start import black_box
from skyrl_fast.train.setup.errors import SetupError

pytest.importorskip("openai")
pytest.importorskip("starlette")


def in_process(**options: Any) -> BlackBox:
    return black_box(AgentConfig(workers="process", **options))


@pytest.fixture(autouse=True)
def without_anthropic(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes 2 s to import, and no agent here uses it."""
    monkeypatch.setattr(AgentSettings, "optional_modules", ("openai",))


@pytest.mark.spec("gateway.agent-processes")
@pytest.mark.parametrize("function", [process_agents.solve, process_agents.solve_sync])
def test_functions_give_the_same_steps_as_in_the_trainer(
    function: Any, tiny_tokenizer: Any
) -> None:
    prompts = [FakePrompt(str(n), messages=[says_hello(n)]) for n in range(5)]
    options: Any = {
        "prompts": prompts,
        "answer": says_length(tiny_tokenizer),
        "max_concurrent_trajectories": 2,
    }
    here = played(FunctionAgent(function), tiny_tokenizer, **options)
    there = played(in_process(function=f"{FILE}:{function.__name__}"), tiny_tokenizer, **options)
    assert steps(there) == steps(here)
    rewards = [step.reward for step in there.trajectories[0].steps]
    assert rewards == pytest.approx([0.3, 0.1] if function is process_agents.solve else [0.7])
    seen = [t.env_metrics for t in there.trajectories]
    pids = {int(metrics["pid"]) for metrics in seen}
    assert len(pids) == 2 and os.getpid() not in pids  # one agent at a time in each
    assert max(metrics["tasks"] for metrics in seen) >= 3
    wait_until_gone(list(pids))


@pytest.mark.spec("gateway.agent-processes")
def test_failing_agents_are_tried_again(tiny_tokenizer: Any, tmp_path: Path) -> None:
    place = r" \(.*process_agents.py:\d+\)"
    failures = {
        "raise": f"agent.function: LookupError: given up{place}",
        "sys_exit": f"agent.function: SystemExit: 3{place}",
        "cancel": f"agent.function: CancelledError: {place}",
        "exit": r"agent: its process exited \(3\)",
        "segfault": "agent: its process was killed by SIGSEGV",
    }
    prompts = [FakePrompt(do, env_extras={"do": do}) for do in failures]
    out = played(in_process(function=SOLVE), tiny_tokenizer, prompts=prompts, max_retries=0)
    for trajectory, text in zip(out.trajectories, failures.values(), strict=True):
        assert trajectory.stop_reason == "env_error"
        assert re.search(text, str(trajectory.failure))
        is_python = text.startswith("agent.function")
        assert ("in solve\n" in trajectory.failure_trace) is is_python
        assert "function.py" not in trajectory.failure_trace
    prompts = [FakePrompt(do, env_extras={"do": do, "once": str(tmp_path / do)}) for do in failures]
    out = played(in_process(function=SOLVE), tiny_tokenizer, prompts=prompts, max_retries=1)
    assert [(t.failure, len(t.steps)) for t in out.trajectories] == [(None, 2)] * len(failures)
    assert out.runner.faults["retried_trajectories"] == len(failures)


def test_a_lost_process_is_no_failure_by_a_full_context(
    tiny_tokenizer: Any, tmp_path: Path
) -> None:
    prompts = [FakePrompt("p", env_extras={"do": "exit", "once": str(tmp_path / "once")})]
    agent = in_process(function=f"{FILE}:until_refused")
    out = played(agent, tiny_tokenizer, prompts=prompts, max_turns=1, max_retries=1)
    assert [step.reward for step in out.only.steps] == [0.25]
    assert out.runner.faults["retried_trajectories"] == 1


@pytest.mark.spec("gateway.agent-failures")
def test_functions_that_exit_or_cancel_themselves_end_their_trajectory_only(
    tiny_tokenizer: Any,
) -> None:
    """In the trainer; they ended the run."""
    for function, kinds in (
        (process_agents.solve, ("sys_exit", "cancel")),
        (process_agents.solve_sync, ("sys_exit",)),
    ):
        prompts = [FakePrompt(do, env_extras={"do": do}) for do in (*kinds, "nothing")]
        out = played(function, tiny_tokenizer, prompts=prompts, max_retries=0)
        assert [t.stop_reason for t in out.trajectories] == ["env_error"] * len(kinds) + ["stop"]


async def test_late_agents_are_killed_with_what_they_started(tmp_path: Path) -> None:
    """Others continue, although one holds the interpreter's lock."""
    files = {do: tmp_path / do for do in ("hang", "hold_lock")}

    agent = in_process(function=f"{FILE}:act")
    late = [
        asyncio.create_task(agent.run(task_of({"do": do, "pids": str(file)})))
        for do, file in files.items()
    ]
    while not all(file.exists() and " " in file.read_text() for file in files.values()):
        assert not any(task.done() for task in late)
        await asyncio.sleep(0.01)
    assert (await agent.run(task_of({}))).reward == 1.0
    for task in late:
        task.cancel()
    await asyncio.wait(late)
    wait_until_gone([int(pid) for file in files.values() for pid in file.read_text().split()])
    assert (await agent.run(task_of({}))).reward == 1.0
    await agent.close()


def test_commands_are_run_as_in_the_trainer(tiny_tokenizer: Any) -> None:
    write = CALL + "\njson.dump({'reward': 0.5, 'lines': 2}, open('out.json', 'w'))"
    check = "import sys; sys.exit(open('answer.txt').read() != 'a0')"
    for options, reward, metrics in (
        ({"command": python(CALL + "\nsys.exit(3)"), "verifier": python(check)}, 1.0, {}),
        ({"command": python(CALL + "\nsys.exit(3)")}, 0.0, {}),
        ({"command": python(write), "reward_file": "out.json"}, 0.5, {"lines": 2.0}),
    ):
        out = played(in_process(**options), tiny_tokenizer, max_retries=0)
        (step,) = out.only.steps
        assert (step.text, step.reward, out.only.failure) == ("a0", reward, None)
        assert metrics.items() <= out.only.env_metrics.items()
    agent = in_process(command=python(CALL + "\nprint('oh no')"), reward_file="out.json")
    out = played(agent, tiny_tokenizer, max_retries=0)
    assert "out.json: no such file; exit code 0; output: oh no" in str(out.only.failure)


async def test_a_late_command_leaves_no_process_and_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids, folder = tmp_path / "pids", tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    agent = in_process(command=python(FORKS % (str(pids), 600)))

    running = asyncio.create_task(agent.run(task_of({})))
    while not (pids.exists() and " " in pids.read_text()):
        await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.wait([running])
    wait_until_gone(read_pids(pids))
    await agent.close()
    deadline = time.monotonic() + 60
    while list(folder.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert list(folder.iterdir()) == []


def test_functions_that_other_processes_cannot_import_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "solve", process_agents.solve, raising=False)
    with pytest.raises(ValueError, match=r"function that other processes can import .* got __mai"):
        black_box(AgentConfig(function="__main__:solve", workers="process"))
    config = {"trainer.policy.model.path": "m", "agent.workers": "process"}
    with pytest.raises(SetupError, match="agent: expected a function of a module, got <function"):
        train_agent(config, prompts=["p"], agent=lambda task: 1.0)


def test_agents_on_a_cluster_are_refused() -> None:
    needed = ["data.train_data=[a.jsonl]", "trainer.policy.model.path=m", "agent.command=[ls]"]
    with pytest.raises(ConfigError, match=r"agent.workers: .*'cluster'"):
        load_config(None, [*needed, "agent.workers=cluster"])
