"""Small generator outputs whose merging can be checked by hand."""

from typing import Any

from skyrl_fast.batch.generator_output import TrajectoryID


def worked_output() -> dict[str, Any]:
    """Trajectory a/0 grows for three turns; a/1 rewrites its context after the first."""
    return {
        "prompt_token_ids": [
            [1, 2],
            [1, 2, 3, 9],
            [1, 2, 3, 9, 4, 5, 8],
            [1, 2],
            [1, 7],
            [1, 7, 6],
        ],
        "response_ids": [[3], [4, 5], [6], [3], [6], []],
        "loss_masks": [[1], [1, 0], [1], [1], [1], []],
        "rewards": [0.25, 0.5, 1.0, 0.0, 0.0, 2.0],
        "rollout_logprobs": [[-0.5], [-1.0, 0.0], [-2.0], [-0.25], [-4.0], []],
        "stop_reasons": ["stop", "stop", "length", "stop", "stop", "done"],
        "trajectory_ids": [TrajectoryID("a", 0)] * 3 + [TrajectoryID("a", 1)] * 3,
        "is_last_step": [False, False, True, False, False, True],
        "policy_versions": [4, 5, 6, 5, 5, 4],
        "trajectory_generation_times": [3.0, 3.0, 3.0, 2.0, 2.0, 2.0],
        "trajectory_time_splits": {"llm": [2.5, 2.5, 2.5, 1.5, 1.5, 1.5]},
        "env_metrics": [{"n": i} for i in range(6)],
        "rollout_metrics": {"generate/avg_num_turns": 3.0},
    }


def drifted(prompt: list[int], *, mask: list[int] | None = None) -> dict[str, Any]:
    """One turn of prompt 1 2 and response 3 4 5 6, then a turn with this prompt."""
    return {
        "prompt_token_ids": [[1, 2], prompt],
        "response_ids": [[3, 4, 5, 6], [7]],
        "loss_masks": [mask or [1, 1, 1, 1], [1]],
        "rewards": [[0.0, 0.0, 0.0, 1.0], [2.0]],
        "rollout_logprobs": [[-1.0, -2.0, -3.0, -4.0], [-5.0]],
        "trajectory_ids": [("a", 0)] * 2,
        "is_last_step": [False, True],
    }
