"""Two ranks and two engines on one machine, with real vLLM: results, faults, what is left."""

import os
import secrets
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from _cluster_run import TAG, share_of_e
from _engine_runs import (
    DRIVER,
    STEPS,
    after_step_2,
    kill_one,
    overrides_of,
    rows,
    run,
    same,
    servers,
    settings,
    wait_for_end,
    wait_for_step,
    write_prompts,
)
from safetensors.torch import load_file

from examples.asynchronous.soak import children, command_of
from skyrl_fast import train_agent

pytestmark = [
    pytest.mark.slow,
    pytest.mark.alone,
    pytest.mark.vllm,
    pytest.mark.timeout(600),  # each starts ranks and engines
]
HELPERS = Path(__file__).resolve().parents[1] / "helpers"
BOTH = [
    "trainer.placement.policy_num_gpus_per_node=2",
    "generator.inference_engine.num_engines=2",
]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mark this test's processes, which import its helpers."""
    monkeypatch.setenv(TAG, secrets.token_hex(8))
    paths = [str(HELPERS), str(HELPERS.parents[1]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Path:
    """Prompts, and the run `alone` of one process."""
    folder = tmp_path_factory.mktemp("runs")
    write_prompts(folder)
    train_agent(settings(folder, tiny_model_folder, "alone"), reward=share_of_e)
    return folder


@pytest.mark.spec("update.node-engines")
def test_two_ranks_and_two_engines_train_as_one_process(
    folder: Path, tiny_model_folder: Path
) -> None:
    seen: dict[str, Any] = {}

    def observe() -> None:
        wait_for_step(folder / "both", 2)
        seen["servers"] = len(servers())

    outcome = run(folder, tiny_model_folder, "both", *BOTH, during=observe)
    assert outcome.step == STEPS and seen == {"servers": 2}
    same(folder / "alone", folder / "both")
    last = rows(folder / "both")[-1]
    for engine in (0, 1):
        assert last[f"sync/num_bytes_of_engine_{engine}"] == last["sync/num_bytes"] > 0
    assert last["sync/logprob_abs_diff_max"] < 1e-4
    assert last["faults/engine_deaths"] == 0
    wait_for_end()


@pytest.mark.spec("update.node-engines")
def test_a_killed_engine_comes_back_alone(folder: Path, tiny_model_folder: Path) -> None:
    during = partial(after_step_2, folder / "lost", lambda: kill_one(servers()))
    outcome = run(folder, tiny_model_folder, "lost", *BOTH, during=during)
    assert outcome.step == STEPS
    last = rows(folder / "lost")[-1]
    assert last["faults/engine_deaths"] == last["faults/engine_restarts"] == 1
    same(folder / "alone", folder / "lost")
    wait_for_end()


def test_engines_get_the_adapter(folder: Path, tiny_model_folder: Path) -> None:
    lora = "trainer.policy.model.lora.rank=4"
    train_agent(settings(folder, tiny_model_folder, "alone-lora", lora), reward=share_of_e)
    outcome = run(folder, tiny_model_folder, "lora", *BOTH, lora, during=lambda: None)
    assert outcome.checkpoint is not None
    adapter = load_file(outcome.checkpoint / "policy/adapter_model.safetensors")
    last = rows(folder / "lora")[-1]
    assert last["sync/num_bytes_of_engine_1"] == sum(t.nbytes for t in adapter.values())
    same(folder / "alone-lora", folder / "lora")
    wait_for_end()


def other_ranks(trainer: int) -> list[int]:
    """Return the processes that a trainer has spawned, but for those of its engines."""
    of_engines = set(servers())
    for server in servers():
        of_engines |= set(children(server))
    others = set(children(trainer)) - of_engines
    return [pid for pid in others if "spawn_main" in command_of(pid)]


@pytest.mark.spec("update.node-engines")
@pytest.mark.parametrize("killed", ["trainer", "rank"])
def test_nothing_is_left_and_the_same_command_resumes(
    killed: str, folder: Path, tiny_model_folder: Path
) -> None:
    run_path = folder / f"killed-{killed}"
    (folder / "driver.py").write_text(DRIVER)
    command = [sys.executable, str(folder / "driver.py"), "trainer.resume_mode=latest", *BOTH]
    command += overrides_of(folder, tiny_model_folder, run_path.name)
    with subprocess.Popen(command) as driver:
        wait_for_step(run_path, 3)
        if killed == "trainer":
            driver.kill()
        else:
            kill_one(other_ranks(driver.pid))
    wait_for_end()
    subprocess.run(command, check=True)
    same(folder / "alone", run_path)
    wait_for_end()
