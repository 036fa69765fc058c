"""A real engine ends with its trainer, also while it starts."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
START_SECONDS = 120.0  # for the engine's process to appear
END_SECONDS = 30.0  # of a loaded machine; alone it takes 1.5 s

TRAIN = """
import sys
import skyrl_fast

def reward(answer, row):
    return 0.0

if __name__ == "__main__":
    model, run_path = sys.argv[1:]
    settings = {
        "trainer.policy.model.path": model,
        "trainer.run_path": run_path,
        "trainer.train_batch_size": 2,
        "trainer.policy_mini_batch_size": 2,
        "generator.max_input_length": 64,
        "generator.sampling_params.max_generate_length": 8,
    }
    prompts = [{"prompt": f"question {i}"} for i in range(4)]
    skyrl_fast.train_agent(settings, prompts=prompts, reward=reward)
"""


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def descendants(pid: int) -> set[int]:
    try:
        lists = [(t / "children").read_text() for t in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:  # it has exited meanwhile
        return set()
    children = {int(child) for text in lists for child in text.split()}
    return children.union(*map(descendants, children))


def engine_processes(pid: int) -> set[int]:
    """Return all descendants once the engine's process is among them."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        found = descendants(pid)
        if any("spawn_main" in command_line(one) for one in found):
            return found
        time.sleep(0.05)
    raise AssertionError("no engine process")


def left_over(pids: set[int]) -> list[str]:
    deadline = time.monotonic() + END_SECONDS
    while (left := [command_line(pid) for pid in pids if command_line(pid)]) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.05)
    for pid in pids:
        if command_line(pid):
            os.kill(pid, signal.SIGKILL)
    return left


@pytest.mark.slow
@pytest.mark.spec("run.engine-lifetime", "run.signals")
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_engine_that_starts_ends_with_the_trainer(
    number: int, code: int, tiny_model_folder: Path, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    command = [sys.executable, str(script), str(tiny_model_folder), str(tmp_path / "run")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as trainer:
        processes = engine_processes(trainer.pid)
        time.sleep(1.0)  # into the start; any time will do
        processes |= descendants(trainer.pid)
        trainer.send_signal(number)
        assert left_over({trainer.pid, *processes}) == []
        assert trainer.wait() == code


TRAIN_AND_STOP = """
import os
import signal
import sys
import time

import skyrl_fast

def reward(answer, row):
    return float(len(answer))

def loss(inputs):
    os.killpg(0, signal.SIGTERM)  # as `timeout` does: to the trainer and its engine
    time.sleep(5)  # the engine has ended when its weights are due
    return -inputs.logprobs

if __name__ == "__main__":
    model, run_path = sys.argv[1:]
    settings = {
        "trainer.policy.model.path": model,
        "trainer.run_path": run_path,
        "trainer.train_batch_size": 2,
        "trainer.policy_mini_batch_size": 2,
        "trainer.plot": False,
        "generator.max_input_length": 64,
        "generator.sampling_params.max_generate_length": 8,
    }
    prompts = [{"prompt": f"question {i}"} for i in range(8)]
    result = skyrl_fast.train_agent(settings, prompts=prompts, reward=reward, loss=loss)
    print(result.step, result.signal, result.checkpoint.name)
"""


@pytest.mark.slow
@pytest.mark.spec("run.engines-of-a-stop")
def test_a_signal_to_all_processes_ends_a_run_without_another_engine(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN_AND_STOP)
    command = [sys.executable, str(script), str(tiny_model_folder), str(tmp_path / "run")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, start_new_session=True
    )
    assert ended.stdout == f"1 {int(signal.SIGTERM)} step_000001\n", ended.stderr
    assert "stopping with a checkpoint" in ended.stderr
    assert ended.stderr.count("engine: ready after") == 1
    assert "DEAD" not in ended.stderr
