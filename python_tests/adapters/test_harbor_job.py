"""Finished jobs of Harbor as trajectories: their tokens, rewards and failures."""

import json
from pathlib import Path
from typing import Any

import pytest

from skyrl_fast.adapters.harbor_job import read_job
from skyrl_fast.batch import batch_from_trajectories

TURNS = {
    "prompt_token_ids": [[1, 2], [1, 2, 3, 4, 5]],
    "completion_token_ids": [[3, 4], [6]],
    "logprobs": [[-0.5, -0.25], [-1.0]],
}
SUMMARY = {"prompt_token_ids": [[9]], "completion_token_ids": [[8]], "logprobs": [[-2.0]]}


def write(job: Path, trial: str, task: str, rewards: Any, **result: Any) -> None:
    """Write a trial's result, with the keys of Harbor's that are read."""
    folder = job / trial
    folder.mkdir()
    known = {
        "task_name": task,
        "verifier_result": {"rewards": rewards},
        "agent_result": {"rollout_details": [TURNS]},
        "exception_info": None,
        "step_results": None,
    }
    (folder / "result.json").write_text(json.dumps(known | result))


@pytest.mark.spec("gateway.harbor-jobs")
def test_trials_of_a_task_are_a_group(tmp_path: Path) -> None:
    write(tmp_path, "a1", "a", {"reward": 1.0, "style": 0.5})
    write(tmp_path, "a2", "a", {"tests": 0.25})
    write(tmp_path, "b1", "b", {"reward": 0}, agent_result={"rollout_details": [TURNS, SUMMARY]})
    (tmp_path / "result.json").write_text("{}")  # the job's own
    trajectories = read_job(tmp_path)
    assert [(t.uid, t.repetition_id) for t in trajectories] == [("a", 0), ("a", 1), ("b", 0)]
    assert [[s.reward for s in t.steps] for t in trajectories] == [[0, 1.0], [0, 0.25], [0, 0, 0]]
    assert trajectories[0].env_metrics == {"style": 0.5}
    assert [t.failure for t in trajectories] == [None] * 3
    batch = batch_from_trajectories(trajectories)
    assert batch.num_rows == 7
    step = trajectories[2].steps[2]
    assert (step.prompt_token_ids, step.response_ids, step.rollout_logprobs) == ([9], [8], [-2.0])


@pytest.mark.spec("gateway.harbor-jobs")
@pytest.mark.parametrize(
    ("rewards", "changes", "failure"),
    [
        (None, {}, "expected a reward called 'reward', got none"),
        ({"a": 1, "b": 2}, {}, "expected a reward called 'reward', got a, b"),
        ({"reward": 1}, {"agent_result": None}, "expected rollout details of the agent, got none"),
        (
            {"reward": 1},
            {"exception_info": {"exception_type": "AgentTimeoutError", "exception_message": "60"}},
            "AgentTimeoutError: 60",
        ),
    ],
)
def test_failed_trials(rewards: Any, changes: Any, failure: str, tmp_path: Path) -> None:
    write(tmp_path, "a1", "a", rewards, **changes)
    (trajectory,) = read_job(tmp_path)
    assert trajectory.failure == failure


@pytest.mark.parametrize(
    ("details", "expected"),
    [
        (TURNS | {"logprobs": [[-1.0]]}, "expected one of each for every call, got 2 prompt_token"),
        (TURNS | {"logprobs": [[-1.0], [-1.0]]}, "a log-probability for each of 2 tokens, got 1"),
        ([], "AttributeError"),
    ],
)
def test_malformed_results(details: Any, expected: str, tmp_path: Path) -> None:
    write(tmp_path, "a1", "a", {"reward": 1}, agent_result={"rollout_details": [details]})
    with pytest.raises(ValueError, match=expected):
        read_job(tmp_path)


def test_results_that_are_no_job(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected folders with result.json in .*, got none"):
        read_job(tmp_path)
    write(tmp_path, "a1", "a", {"reward": float("nan")})
    with pytest.raises(ValueError, match=r"a1/result\.json: .*: reward: expected a finite float32"):
        read_job(tmp_path)
