"""The demos of examples/asynchronous: their settings, and as slow tests the demos themselves."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("skyrl_gym")

from examples.asynchronous import kill_and_resume, quickstart_run, soak, two_servers
from skyrl_fast.config.loading import load_config

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "overrides",
    [
        quickstart_run.settings("run", staleness=None),
        quickstart_run.settings("run", staleness=2, seed=3, slow_eval=True),
        kill_and_resume.overrides("killed"),
        soak.overrides(200),
        [*quickstart_run.settings("servers", staleness=2), *two_servers.SMALL],
    ],
)
def test_settings_of_the_demos_are_valid(overrides: list[str]) -> None:
    config = load_config(quickstart_run.CONFIG, overrides)
    asynchronous = any("fully_async.enabled=true" in text for text in overrides)
    assert config.max_staleness == (2 if asynchronous else 0)
    env = config.environment.skyrl_gym.env_config["slow_text2sql"]
    assert env["db_path"] == "quickstart/data/databases"


def test_slow_environment_fails_and_hangs_at_the_given_rates(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from examples.asynchronous import slow_env

    database = tmp_path / "SynSQL-2.5M/databases/shop/shop.sqlite"
    database.parent.mkdir(parents=True)
    database.write_bytes(b"")
    extras = {"db_id": "shop", "data": "synsql", "reward_spec": {"ground_truth": "SELECT 1"}}
    slept: list[float] = []
    monkeypatch.setattr(slow_env.time, "sleep", slept.append)
    random.seed(0)
    raised = 0
    for _ in range(2000):
        env = slow_env.SlowText2SqlEnv(
            {"db_path": str(tmp_path), "failures": 0.05, "hanging": 0.01}, extras
        )
        try:
            env.step("no sql")
        except ConnectionError:
            raised += 1
    hung = slept.count(slow_env.HANGING_SECONDS)
    steps = [seconds for seconds in slept if seconds != slow_env.HANGING_SECONDS]
    assert 70 <= raised <= 130 and 8 <= hung <= 35
    assert min(steps) >= 0.05 and max(steps) <= 2.0
    assert sorted(steps)[len(steps) // 2] == pytest.approx(0.32, abs=0.06)  # most are short


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("kill_and_resume.py", ["--kills", "2", "--steps", "10"]),
        ("soak.py", ["--steps", "40"]),
        ("two_servers.py", ["--steps", "9"]),
        ("two_servers.py", ["--steps", "9", "--lora"]),
    ],
)
def test_demo_succeeds(tmp_path: Path, script: str, arguments: list[str]) -> None:
    command = [sys.executable, str(ROOT / "examples/asynchronous" / script), *arguments]
    subprocess.run([*command, "--base", str(tmp_path)], check=True)
