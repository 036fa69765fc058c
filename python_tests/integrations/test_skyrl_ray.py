"""SkyRL's trainer on a real local Ray: the same step with replacements in driver and workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parents[1] / "helpers"


def run(how: str, folder: Path) -> dict[str, Any]:
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
    return json.loads(out.read_text())


@pytest.mark.peers
@pytest.mark.timeout(600)
@pytest.mark.spec("dropin.compat", "dropin.tolerance", "dropin.ray-workers")
def test_skyrl_trainer_step_is_the_same_in_driver_and_workers(tmp_path: Path) -> None:
    pytest.importorskip("skyrl.train.trainer", reason="SkyRL is not installed")
    stock, installed = run("stock", tmp_path), run("installed", tmp_path)
    for want, got in zip(stock["steps"], installed["steps"], strict=True):
        assert got["metadata"] == want["metadata"]
        assert got["tensors"].keys() == want["tensors"].keys()
        for name, value in want["tensors"].items():
            if name == "action_log_probs":  # from the workers' logits: rounding of a logsumexp
                flat = [x for row in got["tensors"][name] for x in row]
                assert flat == pytest.approx([x for row in value for x in row], abs=4e-6)
            else:
                assert got["tensors"][name] == value, name
        for kind in ("metrics", "status"):
            assert got[kind] == pytest.approx(want[kind], rel=1e-5, abs=1e-6)
        for original, ours in zip(want["statuses"], got["statuses"], strict=True):
            assert ours == pytest.approx(original, rel=1e-5, abs=1e-6)
        for worker in got["workers"]:
            assert worker["logprobs_from_logits"][0] > 0 == worker["logprobs_from_logits"][1]
            assert worker["ppo_policy_loss"][0] > 0 == worker["ppo_policy_loss"][1]
    used = (
        "convert_prompts_responses_to_batch_tensors", "pad_training_input_batch",
        "compute_prompt_mini_batch_boundaries", "validate_generator_output",
        "merge_stepwise_output", "get_rollout_metrics", "get_metrics_from_generator_output",
        "RayPPOTrainer.compute_advantages_and_returns",
        "RayPPOTrainer.convert_to_training_input",
        "RayPPOTrainer.postprocess_generator_output",
        "RayPPOTrainer._normalize_advantages",
    )  # fmt: skip
    for name in used:
        state, calls, handed_back = installed["driver"][name]
        assert state == "replaced" and calls > 0 == handed_back, name
