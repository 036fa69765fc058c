"""SkyRL's trainer on a real local Ray: the same steps with replacements in driver and workers."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parents[1] / "helpers"
# Calls in two steps of SkyRL's train(), once without and once with merged steps.
IN_DRIVER = {
    "convert_prompts_responses_to_batch_tensors": 4,
    "compute_prompt_mini_batch_boundaries": 4,
    "validate_generator_output": 4,
    "merge_stepwise_output": 2,
    "get_rollout_metrics": 2,
    "get_metrics_from_generator_output": 4,
    "RayPPOTrainer.compute_advantages_and_returns": 4,
    "RayPPOTrainer.convert_to_training_input": 4,
    "RayPPOTrainer.postprocess_generator_output": 4,
    "RayPPOTrainer._normalize_advantages": 4,
}
# 2 runs of 2 steps of 2 mini-batches on 2 ranks; log-probabilities also before training.
IN_WORKERS = {"ppo_policy_loss": 16, "logprobs_from_logits": 20}


def run(how: str, folder: Path) -> tuple[dict[str, Any], str]:
    """Return what the run wrote, and its standard error."""
    out = folder / f"{how}.json"
    path = os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(HERE / "_skyrl_ray_run.py"), how, str(out)],
        env={**os.environ, "PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(out.read_text()), done.stderr


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, Any], str]]:
    """Return the runs of SkyRL alone and with the replacements."""
    pytest.importorskip("skyrl.train.trainer", reason="SkyRL is not installed")
    folder = tmp_path_factory.mktemp("runs")
    return {how: run(how, folder) for how in ("stock", "installed")}


@pytest.mark.peers
@pytest.mark.timeout(600)
def test_two_steps_of_skyrls_trainer_are_the_same(runs: Any) -> None:
    (stock, _), (installed, _) = runs["stock"], runs["installed"]
    for want, got in zip(stock["runs"], installed["runs"], strict=True):
        assert len(want["batches"]) == len(want["logs"]) == 2
        for original, ours in zip(want["batches"], got["batches"], strict=True):
            assert ours["metadata"] == original["metadata"]
            assert ours["tensors"].keys() == original["tensors"].keys()
            for name, value in original["tensors"].items():
                if name == "action_log_probs":  # from the workers' logits: rounding of a logsumexp
                    flat = [x for row in ours["tensors"][name] for x in row]
                    assert flat == pytest.approx([x for row in value for x in row], abs=4e-6)
                else:
                    assert ours["tensors"][name] == value, name
            assert ours["status"] == pytest.approx(original["status"], rel=1e-5, abs=1e-6)
        for kind in ("logs", "statuses"):
            for original, ours in zip(want[kind], got[kind], strict=True):
                assert ours == pytest.approx(original, rel=1e-5, abs=1e-6)


@pytest.mark.peers
@pytest.mark.timeout(600)
@pytest.mark.spec("dropin.report", "dropin.ray-workers")
def test_calls_of_driver_and_workers_are_counted(runs: Any) -> None:
    installed, errors = runs["installed"]
    for name, calls in IN_DRIVER.items():
        assert installed["driver"][name] == ["replaced", calls, 0], name
    workers = installed["workers"]
    assert workers == {"number": 4, "calls": {name: [n, 0] for name, n in IN_WORKERS.items()}}
    (line,) = [line for line in errors.splitlines() if line.startswith("skyrl_fast in SkyRL")]
    assert "(4 Ray workers included)" in line and "by SkyRL itself" not in line
    for name, calls in {**IN_DRIVER, **IN_WORKERS}.items():
        assert f"{name} {calls}" in line
    assert "never called: " in line and "gspo_policy_loss" in line.partition("never called: ")[2]
