"""Engines, ranks and everything killed in each phase of a step: runs end with the same bits.

Ranks and as many engines of one machine. The engines are scripted servers, whose tokens depend on
weights, prompt and seed alone.
"""

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from _cluster_run import TAG, processes
from _engine_runs import SAMPLES, kill_one, overrides_of, samples, write_prompts
from _phases import FOLDER, PHASES, ask_to_pause, end_pause, wait_for_pause, wait_while
from _scripted_engines import scripted_servers
from _training import steady

from examples.asynchronous.soak import children, command_of

# Each starts ranks and engines, most of them twice.
pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(900)]
HELPERS = Path(__file__).resolve().parents[1] / "helpers"
STEPS = 4
DRIVER = """
import sys
from _phases import pause_in_phases, paused_share_of_e
from _scripted_engines import use_scripted_engines
from skyrl_fast import train_agent
from skyrl_fast.config.loading import load_config

if __name__ == "__main__":
    use_scripted_engines()
    pause_in_phases()
    train_agent(load_config(None, sys.argv[1:]), reward=paused_share_of_e)
"""
# Of the machine and the faults, not of what is trained.
OTHERS = ("faults/", "sync/", "traffic/", "memory/")


def mark_processes(patch: pytest.MonkeyPatch) -> None:
    """Mark this test's processes, which import its helpers."""
    patch.setenv(TAG, secrets.token_hex(8))
    paths = [str(HELPERS), str(HELPERS.parents[1]), os.environ.get("PYTHONPATH", "")]
    patch.setenv("PYTHONPATH", os.pathsep.join(paths))


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> int:
    number: int = request.param
    return number


@pytest.fixture(scope="module")
def folder(
    ranks: int, tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path
) -> Iterator[Path]:
    """Prompts, and the run `undisturbed` of so many ranks and engines."""
    folder = tmp_path_factory.mktemp("runs")
    write_prompts(folder)
    (folder / "driver.py").write_text(DRIVER)
    with pytest.MonkeyPatch.context() as patch:
        mark_processes(patch)
        subprocess.run(command_of_run(folder, tiny_model_folder, "undisturbed", ranks), check=True)
    yield folder


def command_of_run(folder: Path, model: Path, name: str, ranks: int) -> list[str]:
    return [
        sys.executable,
        str(folder / "driver.py"),
        *overrides_of(folder, model, name),
        f"trainer.placement.policy_num_gpus_per_node={ranks}",
        f"generator.inference_engine.num_engines={ranks}",
        f"trainer.max_training_steps={STEPS}",
        "trainer.resume_mode=latest",
    ]


def ranks_of(trainer: int) -> list[int]:
    """Return the processes of the other ranks."""
    return [pid for pid in children(trainer) if "spawn_main" in command_of(pid)]


def no_process_is_left() -> None:
    wait_while(lambda: bool(processes(lambda command: True)))


def assert_same_bits(one: Path, other: Path) -> None:
    """Compare all steps' metrics and samples, and the last checkpoint."""
    wanted, found = (steady(run / "metrics.jsonl", *OTHERS) for run in (one, other))
    assert found == wanted
    assert samples(one) == samples(other) and samples(one).total() == SAMPLES * STEPS
    last = f"checkpoints/step_{STEPS:06d}"
    files = sorted(path.relative_to(one / last) for path in (one / last).rglob("*.safetensors"))
    assert files
    for file in files:
        assert (one / last / file).read_bytes() == (other / last / file).read_bytes(), file


@pytest.mark.spec("update.node-engines")
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("killed", ["engine", "rank", "all"])
def test_a_run_ends_with_the_same_bits_whatever_is_killed(
    killed: str,
    phase: str,
    ranks: int,
    folder: Path,
    tiny_model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mark_processes(monkeypatch)
    monkeypatch.setenv(FOLDER, str(tmp_path))
    name = f"{killed}-{phase}"
    command = command_of_run(folder, tiny_model_folder, name, ranks)
    with subprocess.Popen(command) as driver:
        # Of a step in the middle: the first one's checkpoint is there.
        checkpoint = folder / name / "checkpoints/step_000001"
        wait_while(lambda: not checkpoint.exists() and driver.poll() is None)
        ask_to_pause(tmp_path, phase)
        wait_for_pause(tmp_path, phase)
        if killed == "engine":
            kill_one(scripted_servers())
            end_pause(tmp_path, phase)
        elif killed == "rank":
            kill_one(ranks_of(driver.pid))
            end_pause(tmp_path, phase)
        else:
            everything = processes(lambda command: True)
            assert driver.pid in everything and len(everything) >= 2 * ranks
            for pid in everything:
                os.kill(pid, signal.SIGKILL)
    no_process_is_left()
    if killed == "engine":
        assert driver.returncode == 0
    else:
        assert driver.returncode != 0
        for left in tmp_path.iterdir():
            left.unlink()
        subprocess.run(command, check=True)
        no_process_is_left()
    assert_same_bits(folder / "undisturbed", folder / name)
