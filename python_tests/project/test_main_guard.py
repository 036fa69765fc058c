"""A script without a guard is named before anything is loaded."""

import subprocess
import sys
from pathlib import Path

import pytest

from skyrl_fast.config.loading import load_config
from skyrl_fast.rollout.engine.protocol import EngineDeadError
from skyrl_fast.rollout.engine.vllm_start import MainModule, check_can_spawn
from skyrl_fast.system.main_guard import Place, find_unguarded_call, runs_on_import
from skyrl_fast.train.run import imports_main_module

CALL = """
import logging
import skyrl_fast

log = logging.getLogger(__name__)

def train():
    return skyrl_fast.train_agent(
        {"trainer.policy.model.path": "nosuch/model"}, prompts=["a"] * 64, reward=len
    )
"""
UNGUARDED = CALL + "\nfor _ in range(1):\n    train()\n"
GUARDED = CALL + '\nif __name__ == "__main__":\n    train()\n'


def error_of(script: str, folder: Path) -> str:
    """Return the last line of a script's error."""
    file = folder / "script.py"
    file.write_text(script)
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, cwd=folder)
    assert done.returncode == 1
    return done.stderr.strip().splitlines()[-1]


@pytest.mark.spec("run.main-guard")
def test_a_script_without_a_guard_is_named_with_its_line_at_once(tmp_path: Path) -> None:
    last = error_of(UNGUARDED, tmp_path)
    line = UNGUARDED.splitlines().index("    train()") + 1
    assert f"train_agent: {tmp_path}/script.py, line {line}: the processes that training" in last
    assert last.endswith('put the call below `if __name__ == "__main__":`')


def test_a_script_with_a_guard_goes_on(tmp_path: Path) -> None:
    assert "reward: expected a function that can be called as" in error_of(GUARDED, tmp_path)


@pytest.mark.spec("run.main-guard")
@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], True),
        (["engine.num_engines=1"], True),
        (["engine.num_engines=2"], False),  # servers of their own
        (["engine.gpu_ids=[0,1]"], False),
        (["engine.gpu_ids=[0,1]", "engine.tensor_parallel_size=2"], True),
        (["engine.num_engines=2", "trainer.placement.policy_num_gpus_per_node=2"], True),
        (["engine.external_server_urls=[http://nowhere]"], False),
        (["engine.num_engines=2", "trainer.placement.policy_num_gpus_per_node=null"], True),
    ],
)
def test_who_imports_the_main_module(overrides: list[str], expected: bool) -> None:
    names = [override.replace("engine.", "generator.inference_engine.") for override in overrides]
    config = load_config(None, ["data.train_data=[none]", "trainer.policy.model.path=m", *names])
    assert imports_main_module(config, has_engines=True) is expected


def test_a_script_of_several_engines_needs_no_guard(tmp_path: Path) -> None:
    script = UNGUARDED.replace("{", '{"generator.inference_engine.num_engines": 2, ', 1)
    assert "reward: expected a function that can be called as" in error_of(script, tmp_path)


@pytest.mark.parametrize(
    ("script", "line", "expected"),
    [
        ("train()\n", 1, True),
        ("a = __name__\ntrain()\n", 2, True),
        ("if a:\n    train()\n", 2, True),
        ("if __name__ == '__main__':\n    train()\n", 2, False),
        ("if True and '__main__' == __name__:\n    train()\n", 2, False),
        ("if __name__ != '__main__':\n    raise SystemExit\ntrain()\n", 3, False),
        ("if multiprocessing.parent_process() is None:\n    train()\n", 2, False),
        ("match __name__:\n    case '__main__':\n        train()\n", 3, False),
        ("train(\n    1,\n)\nif __name__ == '__main__':\n    other()\n", 2, True),
        ("not python(\n", 1, False),
    ],
)
def test_lines_that_run_on_import(script: str, line: int, expected: bool, tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    file.write_text(script)
    assert runs_on_import(file, line) is expected


def test_a_main_module_that_is_not_a_script_is_never_named() -> None:
    assert find_unguarded_call() is None  # pytest's
    assert runs_on_import(Path("nosuch.py"), 1) is False


def test_an_engine_is_not_started_without_a_guard() -> None:
    with pytest.raises(EngineDeadError, match=r"script\.py, line 3, starts the engine without"):
        check_can_spawn(MainModule(None), Place("script.py", 3))
