"""Training without step-wise fields: bit-exact results of the default path.

What is expected is written down or computed here from the definitions, not by the package.
"""

import statistics
from typing import Any

import numpy as np
import pytest

from skyrl_fast import convert_prompts_responses_to_batch_tensors, group_advantage
from skyrl_fast.batch import StepBatch
from skyrl_fast.batch.generator_output import validate_generator_output
from skyrl_fast.train.algorithm.advantages import compute_advantages

OPTIONAL_FIELDS = (
    "trajectory_ids",
    "is_last_step",
    "rollout_expert_indices",
    "trajectory_time_splits",
    "trajectory_generation_times",
    "stop_reasons",
    "env_metrics",
    "policy_versions",
)
PAD = 99
# Two prompts with three responses each, as in a single-turn run with rewards 0 and 1.
ROWS: dict[str, Any] = {
    "prompt_token_ids": [[1, 2, 3], [1, 2, 3], [1, 2, 3], [4], [4], [4]],
    "response_ids": [[10], [11, 12], [13, 14, 15], [16, 17], [18], [19, 20]],
    "loss_masks": [[1], [1, 1], [1, 0, 1], [1, 1], [1], [1, 1]],
    "rewards": [1.0, 0.0, 0.0, 1.0, 1.0, 0.25],
    "rollout_logprobs": [[-0.5], [-1.0, -2.0], [-0.25, 0.0, -3.0], [-1.5, -0.75], [-4.0], [-1, -1]],
    "rollout_metrics": {},
}
UIDS = ["q0", "q0", "q0", "q1", "q1", "q1"]
SEQUENCES = [
    [PAD, PAD, 1, 2, 3, 10],
    [PAD, 1, 2, 3, 11, 12],
    [1, 2, 3, 13, 14, 15],
    [PAD, PAD, PAD, 4, 16, 17],
    [PAD, PAD, PAD, PAD, 4, 18],
    [PAD, PAD, PAD, 4, 19, 20],
]
LOSS_MASK = [[0, 0, 1], [0, 1, 1], [1, 0, 1], [0, 1, 1], [0, 0, 1], [0, 1, 1]]
RESPONSE_MASK = [[0, 0, 1], [0, 1, 1], [1, 1, 1], [0, 1, 1], [0, 0, 1], [0, 1, 1]]
REWARDS = [[0, 0, 1], [0, 0, 0], [0, 0, 0], [0, 0, 1], [0, 0, 1], [0, 0, 0.25]]
LOGPROBS = [[0, 0, -0.5], [0, -1, -2], [-0.25, 0, -3], [0, -1.5, -0.75], [0, 0, -4], [0, -1, -1]]


def grpo_by_definition() -> list[float]:
    """Return the advantage of each row, in float64, rounded once."""
    values = []
    for group in (ROWS["rewards"][:3], ROWS["rewards"][3:]):
        mean, std = statistics.fmean(group), statistics.stdev(group)
        values += [float(np.float32((score - mean) / (std + 1e-6))) for score in group]
    return values


def variants() -> list[Any]:
    """No optional field; each of them as None; all of them as None."""
    keys = [(), *((field,) for field in OPTIONAL_FIELDS), OPTIONAL_FIELDS]
    return [pytest.param(dict.fromkeys(k), id="+".join(k) or "none") for k in keys]


@pytest.mark.spec("output.default-path")
@pytest.mark.parametrize("added", variants())
def test_default_path_is_bit_exact(added: dict[str, None]) -> None:
    output = {**ROWS, **added}
    validate_generator_output(output, num_prompts=6)
    batch = StepBatch.from_generator_output(output, uids=UIDS, num_prompts=6)
    padded = batch.padded(PAD)
    assert padded.pad_size == 0
    assert padded.sequences.tolist() == SEQUENCES
    assert padded.attention_mask.tolist() == [[int(t != PAD) for t in row] for row in SEQUENCES]
    assert padded.response_mask.tolist() == RESPONSE_MASK
    assert padded.loss_mask.tolist() == LOSS_MASK
    assert padded.rewards.tolist() == REWARDS
    assert padded.rollout_logprobs is not None
    assert padded.rollout_logprobs.tolist() == LOGPROBS
    assert padded.is_last_step == [True] * 6
    want = [
        value
        for value, row in zip(grpo_by_definition(), ROWS["response_ids"], strict=True)
        for _ in row
    ]
    assert compute_advantages(batch, estimator="grpo").advantages.tolist() == want


def test_conversion_and_advantages_are_bit_exact(backend: str) -> None:
    out = convert_prompts_responses_to_batch_tensors(
        PAD,
        ROWS["prompt_token_ids"],
        ROWS["response_ids"],
        ROWS["rewards"],
        ROWS["loss_masks"],
        ROWS["rollout_logprobs"],
        backend=backend,
    )
    want = [SEQUENCES, None, RESPONSE_MASK, REWARDS, LOSS_MASK, LOGPROBS]
    for tensor, values in zip(out, want, strict=False):
        assert values is None or tensor.tolist() == values
    got = group_advantage(out[3], UIDS, response_mask=out[2], backend=backend)
    assert got.tolist() == [
        [value * m for m in row]
        for value, row in zip(grpo_by_definition(), RESPONSE_MASK, strict=True)
    ]


# Two trajectories of two turns and one of one turn: sampled tokens and observation.
TURNS = [
    ("a", 0, [([1], [5, 6], [7, 8]), ([1, 5, 6, 7, 8], [9], [])], 1.0),
    ("a", 1, [([1], [5], [7, 7, 7]), ([1, 5, 7, 7, 7], [9, 9], [])], 0.0),
    ("a", 2, [([1], [4, 4, 4], [])], 0.5),
]
