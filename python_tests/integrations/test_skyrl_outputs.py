"""The replacement of SkyRL's merge, without SkyRL installed."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from skyrl_fast.integrations.skyrl import outputs
from skyrl_fast.integrations.skyrl.replacement import ORIGINALS


@pytest.fixture(autouse=True)
def without_skyrl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be passed to SkyRL: input that a replacement does not support is an error."""
    monkeypatch.setattr(ORIGINALS, "function", lambda name: None)
    monkeypatch.setattr(outputs.output_metrics, "get_rollout_metrics", lambda *_, **__: {})


@dataclass
class TrajectoryID:
    """As SkyRL's."""

    instance_id: str
    repetition_id: int = 0

    def to_string(self) -> str:
        return f"{self.instance_id}_{self.repetition_id}"


@pytest.mark.parametrize("mixed", [False, True])
def test_merge_returns_rows_of_logprobs_as_lists(mixed: bool) -> None:
    first = np.array([-0.5], np.float32)
    output: dict[str, Any] = {
        "prompt_token_ids": [[1], [1, 2, 3], [7]],
        "response_ids": [[2], [4], [8]],
        "loss_masks": [[1], [1], [1]],
        "rewards": [0.0, 1.0, 1.0],
        "rollout_logprobs": [first, [-0.25] if mixed else first / 2, first * 3],
        "trajectory_ids": [TrajectoryID("a"), TrajectoryID("a"), TrajectoryID("b")],
        "is_last_step": [False, True, True],
    }
    merged = outputs.merge_stepwise_output(output)["rollout_logprobs"]
    assert [type(row) for row in merged] == [list, list]
    assert merged == [[-0.5, 0.0, -0.25], [-1.5]]
    types = [[type(value) for value in row] for row in merged]  # SkyRL joins the rows' elements
    last = float if mixed else np.float32
    assert types == [[np.float32, float, last], [np.float32]]
