"""KL in the reward, by hand and against loops; the adaptive coefficient."""

from typing import Any

import numpy as np
import pytest
import torch
from _rows import Row, batch_of
from hypothesis import given
from hypothesis import strategies as st

from skyrl_fast.batch import StepBatch
from skyrl_fast.config import KlCtrlConfig
from skyrl_fast.train.algorithm.advantages import compute_advantages
from skyrl_fast.train.algorithm.kl_reward import kl_in_reward, next_kl_coef
from skyrl_fast.train.algorithm.sequence_scope import sequences


def penalized(batch: StepBatch, **options: Any) -> tuple[StepBatch, dict[str, float]]:
    return kl_in_reward(batch, sequences(batch, "trajectory"), **options)


def with_differences(batch: StepBatch, differences: list[float]) -> StepBatch:
    """Return the batch with the given differences to the reference log-probabilities."""
    ref = torch.full((len(differences),), -2.0)
    return batch.with_(old_logprobs=ref + torch.tensor(differences), ref_logprobs=ref)


def two_trajectories() -> StepBatch:
    batch = batch_of(
        Row("a", 0, 0.0, mask="11"),
        Row("a", 0, 1.0, mask="10"),  # the last token is an appended end token
        Row("a", 1, 0.0, mask="11"),
    )
    return with_differences(batch, [0.5, 0.25, 1.0, 99.0, 0.0, 0.5])


@pytest.mark.spec("advantage.kl-in-reward")
def test_penalty_of_each_token_and_of_the_trajectory() -> None:
    batch, metrics = penalized(two_trajectories(), coef=0.1, estimator="k1", outcome=True)
    # The penalty of each token, and the first row's 0.075 on the last row's last token.
    want = [-0.05, -0.025, -0.1, 1.0 - 0.075, 0.0, -0.05]
    torch.testing.assert_close(batch.rewards, torch.tensor(want))
    # Scores: 1 minus the penalty of all trained tokens of the trajectory.
    torch.testing.assert_close(batch.row_rewards, torch.tensor([-0.075, 0.825, -0.05]))
    assert metrics == {
        "loss/avg_kl": pytest.approx(((0.5 + 0.25 + 1.0) / 3 + 0.5 / 2) / 2),
        "loss/avg_kl_max": pytest.approx((0.5 + 0.25 + 1.0) / 3),
        "loss/kl_loss_coef": 0.1,
    }
    gap = 0.825 + 0.05
    got = compute_advantages(batch, estimator="dr_grpo").advantages
    torch.testing.assert_close(got, torch.tensor([gap / 2] * 4 + [-gap / 2] * 2))


@pytest.mark.spec("advantage.kl-in-outcome")
def test_estimators_of_every_step_get_the_penalty_of_each_row() -> None:
    batch, _ = penalized(two_trajectories(), coef=0.1, estimator="k1", outcome=False)
    torch.testing.assert_close(batch.row_rewards, torch.tensor([-0.075, 0.9, -0.05]))
    torch.testing.assert_close(batch.rewards[3], torch.tensor(1.0))


def test_last_row_without_response_has_the_penalty_in_its_score() -> None:
    batch = with_differences(batch_of(Row("a", 0, 0.0), Row("a", 0, 1.0, mask="")), [0.5, 0.5])
    batch, _ = penalized(batch, coef=1.0, estimator="k1", outcome=True)
    assert batch.row_rewards.tolist() == [-1.0, 0.0]


def test_all_masked() -> None:
    batch = with_differences(batch_of(Row("a", 0, 1.0, mask="00")), [3.0, float("nan")])
    changed, metrics = penalized(batch, coef=0.5, estimator="k1", outcome=True)
    assert changed.row_rewards.tolist() == [1.0]
    assert metrics["loss/avg_kl"] == 0.0


@pytest.mark.parametrize("missing", ["old_logprobs", "ref_logprobs"])
def test_missing_logprobs(missing: str) -> None:
    with pytest.raises(ValueError, match=f"kl_in_reward: batch must have {missing}"):
        penalized(
            two_trajectories().with_(**{missing: None}), coef=1.0, estimator="k1", outcome=True
        )


turns = st.lists(st.sampled_from(["1", "11", "10", "0", "101"]), min_size=1, max_size=3)


@pytest.mark.spec("advantage.kl-in-outcome")
@given(st.lists(turns, min_size=1, max_size=5), st.integers(0, 999), st.booleans())
def test_any_batch(table: list[list[str]], seed: int, outcome: bool) -> None:
    rows = [Row("g", j, 1.0, mask=mask) for j, masks in enumerate(table) for mask in masks]
    num = sum(len(row.mask) for row in rows)
    random = np.random.default_rng(seed)
    batch = with_differences(batch_of(*rows), random.normal(size=num).tolist())
    changed, metrics = penalized(batch, coef=0.25, estimator="k2", outcome=outcome)
    kl = 0.5 * (batch.old_logprobs - batch.ref_logprobs).square() * batch.loss_mask
    per_row = [float(part.sum()) for part in kl.split([len(row.mask) for row in rows])]
    at, means = 0, []
    for masks in table:
        ours = per_row[at : at + len(masks)]
        want = [1.0 - 0.25 * value for value in ours]
        if outcome:
            want[-1] = 1.0 - 0.25 * sum(ours)
        assert changed.row_rewards[at : at + len(masks)].tolist() == pytest.approx(want, abs=1e-6)
        trained = sum(mask.count("1") for mask in masks)
        means += [sum(ours) / trained] if trained else []
        at += len(masks)
    assert metrics["loss/avg_kl"] == pytest.approx(np.mean(means) if means else 0.0)
    sums = [float(part.sum()) for part in changed.rewards.split([len(r.mask) for r in rows])]
    assert changed.row_rewards.tolist() == pytest.approx(sums, abs=1e-6)


def test_fixed_coefficient_is_constant() -> None:
    assert next_kl_coef(0.5, 9.0, 100, KlCtrlConfig()) == 0.5


@pytest.mark.spec("advantage.kl-controller")
@pytest.mark.parametrize(
    ("kl", "num", "want"),
    [(0.11, 100, 0.55), (0.1, 100, 0.5), (9.0, 100, 0.6), (0.0, 100, 0.4), (9.0, 10, 0.51)],
)
def test_adaptive_coefficient_moves_towards_the_target(kl: float, num: int, want: float) -> None:
    control = KlCtrlConfig(type="adaptive", kl_target=0.1, horizon=100)
    assert next_kl_coef(0.5, kl, num, control) == pytest.approx(want)
