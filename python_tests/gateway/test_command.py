"""Commands as agents: what they get, how they are rewarded, and that no process remains."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _agents import CALL, FORKS, python, read_pids, wait_until_gone
from _gateway import played
from fake_envs import FakePrompt

from skyrl_fast.gateway.agents import command
from skyrl_fast.gateway.agents.command import CommandAgent
from skyrl_fast.gateway.agents.task import AgentTask
from skyrl_fast.rollout.env.errors import EnvError

pytest.importorskip("starlette")

ENGINE_KEY = "SKYRL_FAST_ENGINE_KEY"


@pytest.mark.spec("gateway.command")
def test_reward_by_exit_code_verifier_and_file(
    tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENGINE_KEY, "secret")
    hides = f"\nassert {ENGINE_KEY!r} not in os.environ"
    works, fails = CALL + hides, CALL + "\nsys.exit(3)"
    check = "import sys; sys.exit(open('answer.txt').read() != 'a0')"
    write = CALL + "\njson.dump({'reward': 0.5, 'lines': 2}, open('out.json', 'w'))"
    post = CALL.replace("/chat/completions", "/rewards").replace(
        '{"model": os.environ["OPENAI_MODEL"], "messages": row["prompt"]}', '{"reward": 0.25}'
    )
    posts = CALL + post.partition("text = ")[0]
    cases = [
        (CommandAgent(python(posts)), 0.25, {}),
        (CommandAgent(python(works)), 1.0, {}),
        (CommandAgent(python(fails)), 0.0, {}),
        (CommandAgent(python(fails), verifier=python(check)), 1.0, {}),
        (CommandAgent(python(write), reward_file="out.json"), 0.5, {"lines": 2.0}),
    ]
    for agent, reward, metrics in cases:
        out = played(agent, tiny_tokenizer, max_retries=0)
        (step,) = out.only.steps
        assert (step.text, step.reward, out.only.failure) == ("a0", reward, None)
        assert metrics.items() <= out.only.env_metrics.items()
    agent = CommandAgent(python(CALL + "\nprint('oh no')"), reward_file="out.json")
    out = played(agent, tiny_tokenizer, max_retries=0)
    assert "out.json: no such file; exit code 0; output: oh no" in str(out.only.failure)
    for made in (
        "os.mkfifo('out.json')",
        "os.symlink('/dev/zero', 'out.json')",
        "os.mkdir('out.json')",
    ):
        agent = CommandAgent(python(CALL + made), reward_file="out.json")
        out = played(agent, tiny_tokenizer, max_retries=0)
        assert "agent.reward_file: out.json:" in str(out.only.failure)
    out = played(CommandAgent(["no-such-program"]), tiny_tokenizer, max_retries=0)
    assert "no program 'no-such-program'" in str(out.only.failure)


@pytest.mark.spec("gateway.command-folder")
def test_a_program_that_trusts_its_environment_works_in_the_folder(
    tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PWD", str(tmp_path))  # as a shell leaves it for the trainer
    writes = CALL + "\nopen(os.path.join(os.environ['PWD'], 'out.txt'), 'w').write(text)"
    check = "assert open('out.txt').read() == 'a0'"
    agent = CommandAgent(python(writes), verifier=python(check))
    out = played(agent, tiny_tokenizer, max_retries=0)
    assert out.only.steps[0].reward == 1.0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.spec("gateway.command-row")
def test_a_command_gets_the_row_as_json_values(tiny_tokenizer: Any) -> None:
    row = {
        "ids": np.arange(2000),
        "solved": np.bool_(False),
        "nested": [{"at": np.float32(0.5), np.int64(3): (np.array(["a", "b"], object),)}],
        "day": np.array(["2025-01-02"], "datetime64[ns]"),
        "path": Path("x"),
        "tags": {"a"},
    }
    check = (
        CALL
        + """
row = json.load(open("task.json"))
assert row["ids"] == list(range(2000)) and row["solved"] is False, row
assert row["nested"] == [{"at": 0.5, "3": [["a", "b"]]}] and row["path"] == "x", row
assert row["tags"] == ["a"], row
assert row["day"][0].startswith("2025-01-02"), row
"""
    )
    out = played(
        CommandAgent(python(check)), tiny_tokenizer, prompts=[FakePrompt("p", env_extras=row)]
    )
    assert (out.only.failure, out.only.steps[0].reward) == (None, 1.0)


LEFT_BEHIND = {  # what a command does to its folder, and what is said of the reward file
    "nothing": ("pass", "no such file; exit code 0; output: bye"),
    "fifo": ("os.mkfifo('r')", "not a regular file"),
    "fifo as output": ("os.remove('.agent_output'); os.mkfifo('.agent_output')", "output: bye"),
    "link to a fifo as output": (
        "os.mkfifo('f'); os.remove('.agent_output'); os.symlink('f', '.agent_output')",
        "output: bye",
    ),
    "output is a folder": ("os.remove('.agent_output'); os.mkdir('.agent_output')", "output: bye"),
    "output renamed": ("os.rename('.agent_output', 'r')", "Expecting value"),
    "output deleted": ("os.remove('.agent_output')", "output: bye"),
    "output is endless": (
        "os.remove('.agent_output'); os.symlink('/dev/zero', '.agent_output')",
        "output: bye",
    ),
    "device": ("os.symlink('/dev/zero', 'r')", "symbolic links"),
    "link": ("os.symlink('task.json', 'r')", "symbolic links"),
    "link to itself": ("os.symlink('r', 'r')", "symbolic links"),
    "hard link to a fifo": ("os.mkfifo('f'); os.link('f', 'r')", "not a regular file"),
    "socket": ("import socket; socket.socket(socket.AF_UNIX).bind('r')", "No such device"),
    "folder": ("os.mkdir('r')", "not a regular file"),
    "huge": ("open('r', 'w').truncate(1 << 40)", "expected at most 1,048,576 bytes, got more"),
    "padded": ("open('r', 'w').write('1' + ' ' * (1 << 20))", "expected at most 1,048,576 bytes"),
    "deep": ("open('r', 'w').write('[' * 500000)", "maximum recursion depth"),
    "digits": ("open('r', 'w').write('1' * 9999)", "4300 digits"),
    "not finite": ("open('r', 'w').write('1e999')", "expected a finite float32 number, got inf"),
    "beyond float32": ("open('r', 'w').write('1e39')", "expected a finite float32 number, got 1e"),
    "no JSON": ("open('r', 'wb').write(b'\\xff')", "codec can't decode"),
    "unreadable": ("open('r', 'w').close(); os.chmod('r', 0)", "agent.reward_file: r: "),
    "folder deleted": ("import shutil; shutil.rmtree(os.getcwd())", "agent."),
    "folder renamed": ("os.rename(os.getcwd(), os.getcwd() + '-moved')", "agent."),
    "folder is a file": (
        "d = os.getcwd(); os.rename(d, d + '-moved'); open(d, 'w').close()", "agent.",
    ),
    "folder is a fifo": ("d = os.getcwd(); os.rename(d, d + '-moved'); os.mkfifo(d)", "agent."),
    "deep folders": (
        "[(os.mkdir('d'), os.chdir('d')) for _ in range(3000)]",
        "no such file; exit code 0",
    ),
}  # fmt: skip


@pytest.mark.spec("gateway.command-left-behind")
@pytest.mark.parametrize("verified", [False, True])
def test_what_a_command_leaves_behind_ends_in_a_named_error(verified: bool, tmp_path: Path) -> None:
    verifier = python("pass") if verified else ()
    task = AgentTask({"prompt": []}, "http://nowhere", "key", "model")

    async def error_of(code: str) -> str:
        agent = CommandAgent(
            python(f"import os\nprint('bye', flush=True)\n{code}"),
            verifier=verifier,
            reward_file="r",
            parent=tmp_path,
        )
        with pytest.raises(EnvError) as caught:
            await asyncio.wait_for(agent.run(task), 60)
        return str(caught.value)

    cases = {
        name: case
        for name, case in LEFT_BEHIND.items()
        if not verified or "output" in name or "folder" in name
    }

    async def go() -> list[str]:
        return await asyncio.gather(*(error_of(code) for code, _ in cases.values()))

    for (name, (_, wanted)), error in zip(cases.items(), asyncio.run(go()), strict=True):
        assert error.startswith("agent.") and wanted in error, (name, error)
    left = [path.name for path in tmp_path.iterdir() if not path.name.endswith("-moved")]
    assert [name for name in left if (tmp_path / name).is_dir()] == []


async def test_a_command_without_a_reward_file_is_rewarded_whatever_it_leaves() -> None:
    task = AgentTask({"prompt": []}, "http://nowhere", "key", "model")
    runs = [
        CommandAgent(python(f"import os\n{code}")).run(task)
        for code, _ in LEFT_BEHIND.values()
        if "r'" not in code
    ]
    rewards = [outcome.reward for outcome in await asyncio.gather(*runs)]
    assert len(rewards) > 8 and set(rewards) == {1.0}


CHATTER = """
import os, sys
for number in range(40):
    os.write(1 + number % 2, b"x" * 65536)
print("last words")
while not (start := open(".agent_output").read(30)):
    pass  # it is being written
print(os.path.getsize(".agent_output"), start, file=open(SEEN, "w"))
"""


@pytest.mark.spec("gateway.command-output")
def test_the_end_of_a_commands_output_is_kept(
    tiny_tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """2.5 MiB are written; the agent sees how large the file is, and the error quotes its end."""
    seen = tmp_path / "seen"
    agent = CommandAgent(
        python(CALL + CHATTER.replace("SEEN", repr(str(seen)))), reward_file="out.json"
    )
    out = played(agent, tiny_tokenizer, prompts=[FakePrompt("a"), FakePrompt("b")], max_retries=0)
    for trajectory in out.trajectories:
        assert "last words" in str(trajectory.failure)
    size, _, start = seen.read_text().partition(" ")
    assert int(size) <= 2 * command.KEPT_OUTPUT_BYTES + 100
    assert start.startswith("(the beginning of the output")
    said = [r for r in caplog.records if "only its end is kept" in r.message]
    assert [r.message for r in said] == [
        "agent.command: more than 512 KiB of output: only its end is kept; said once"
    ]


@pytest.mark.parametrize("seconds", [0, 600])
async def test_no_process_of_a_command_remains(seconds: float, tmp_path: Path) -> None:
    """After its end, and where it is cancelled."""
    pids = tmp_path / "pids"
    agent = CommandAgent(python(FORKS % (str(pids), seconds)))

    running = asyncio.create_task(agent.run(AgentTask({}, "http://gateway", "key", "policy")))
    while seconds and not (pids.exists() and " " in pids.read_text()):
        await asyncio.sleep(0.01)
    if seconds:
        running.cancel()
    await asyncio.wait([running])
    assert running.cancelled() == bool(seconds)
    wait_until_gone(read_pids(pids))


TRAINER = """
import asyncio, sys
from skyrl_fast.gateway.agents.command import CommandAgent
from skyrl_fast.gateway.agents.task import AgentTask
agent = CommandAgent([sys.executable, "-I", "-S", "-c", sys.argv[1]])
asyncio.run(agent.run(AgentTask({}, "http://gateway", "key", "policy")))
"""


def test_commands_and_their_folders_end_with_a_killed_trainer(tmp_path: Path) -> None:
    pids, folders = tmp_path / "pids", tmp_path / "tmp"
    folders.mkdir()
    environment = {**os.environ, "TMPDIR": str(folders)}
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, FORKS % (str(pids), 600)], env=environment
    )
    while not (pids.exists() and " " in pids.read_text()):
        assert trainer.poll() is None
        time.sleep(0.01)
    trainer.kill()
    trainer.wait()
    wait_until_gone(read_pids(pids))
    deadline = time.monotonic() + 60
    while list(folders.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert list(folders.iterdir()) == []


def test_each_task_has_a_folder_of_its_own(tiny_tokenizer: Any, tmp_path: Path) -> None:
    here = CALL + "\nassert sorted(os.listdir()) == ['.agent_output', 'answer.txt', 'task.json']"
    prompts = [FakePrompt(str(n), env_extras={"n": n}) for n in range(3)]
    agent = CommandAgent(python(here), parent=tmp_path)
    out = played(agent, tiny_tokenizer, prompts=prompts)
    assert [t.steps[0].reward for t in out.trajectories] == [1.0] * 3
    assert list(tmp_path.iterdir()) == []
