"""Rows go to the rank that computes them, and to no other; docs/spec.md section 7."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from _double_ranked import (
    NAMES,
    DoubleModels,
    double_models,
    double_models_by_twos,
    take_gradients,
)
from _trees import agent_batch
from hypothesis import given
from hypothesis import strategies as st
from test_micro_batch import assert_same, with_kept
from test_ranks import routed
from test_sequence_ranks import kept_tokens

from skyrl_fast.batch import StepBatch
from skyrl_fast.config import AlgorithmConfig
from skyrl_fast.train.model.critic import Critic
from skyrl_fast.train.model.forward_pass import response_positions
from skyrl_fast.train.model.micro_batch import MicroBatches, plan_micro_batches
from skyrl_fast.train.model.policy import Policy
from skyrl_fast.train.parallel.local_ranks import LocalRanks
from skyrl_fast.train.parallel.rank_processes import start_ranks
from skyrl_fast.train.parallel.rank_shares import Share, deal_passes, share_passes
from skyrl_fast.train.parallel.ranks import SINGLE_RANK, Ranks
from skyrl_fast.train.update import accumulate_gradient

# --- assignment of micro-batches to ranks ---------------------------------------------------------


class Passes:
    """Passes of rows by their numbers of tokens, like `MicroBatches`."""

    def __init__(self, passes: list[list[int]], lengths: list[int]) -> None:
        self.passes, self.lengths = passes, lengths

    def __len__(self) -> int:
        return len(self.passes)

    @property
    def num_tokens(self) -> np.ndarray:
        sizes = [sum(self.lengths[row] for row in rows) for rows in self.passes]
        return np.array([max(1, size) for size in sizes], dtype=np.int64)

    def choose(self, places: np.ndarray) -> Passes:
        return Passes([self.passes[i] if i >= 0 else [] for i in places.tolist()], self.lengths)


def passes_of(lengths: list[int]) -> Any:
    """Return a plan that fills passes with rows of these lengths, in order."""

    def plan(budget: int) -> Passes:
        parts: list[list[int]] = []
        for row, length in enumerate(lengths):
            if not parts or sum(lengths[r] for r in parts[-1]) + length > budget:
                parts.append([])
            parts[-1].append(row)
        return Passes(parts, lengths)

    return plan


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 200), st.integers(2, 5))
def test_each_row_is_assigned_once_and_ranks_get_equal_numbers_of_passes(
    lengths: list[int], budget: int, size: int
) -> None:
    shares = deal_passes(passes_of(lengths), budget, Ranks(0, size))
    assert len(shares) == size
    assert len({len(share) for share in shares}) == 1
    taken = [row for share in shares for rows in share.passes for row in rows]
    assert sorted(taken) == list(range(len(lengths)))
    longest = max([budget, *lengths])
    assert all(size <= longest for share in shares for size in share.num_tokens.tolist())


def test_no_pass_is_larger_than_the_budget() -> None:
    shares = deal_passes(passes_of([1] * 1000), 8, Ranks(0, 3))
    assert max(int(share.num_tokens.max()) for share in shares) == 8


def test_batch_below_the_budget_is_shared() -> None:
    plan = passes_of([10] * 8)
    shares = deal_passes(plan, 1000, Ranks(0, 4))
    assert [share.num_tokens.tolist() for share in shares] == [[20]] * 4
    undivided = deal_passes(plan, 1000, Ranks(0, 4), divisible=False)
    assert [share.num_tokens.tolist() for share in undivided] == [[80], [1], [1], [1]]


# --- the rows of a rank --------------------------------------------------------------------------


def plan_of(batch: StepBatch, **options: Any) -> Any:
    return lambda budget: plan_micro_batches(batch, budget, **options)


@pytest.mark.spec("update.ranks-rows")
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_share_has_the_rows_of_its_passes_alone(size: int, tree: bool) -> None:
    rng = np.random.default_rng(size)
    batch = with_kept(routed(agent_batch(size, num_groups=4)), rng)
    visited = rng.random(batch.num_rows) < 0.8
    plan = plan_of(batch, tree=tree, router_replay=True, rows=visited)
    dealt = deal_passes(plan, 40, Ranks(0, size))
    parts = share_passes(plan, 40, Ranks(0, size))
    shares = [parts.part(number) for number in range(size)]
    rows = torch.cat([share.rows for share in shares])
    trained = torch.zeros(batch.num_rows, dtype=torch.bool)
    for passes in dealt:
        for micro in passes:
            trained[micro.rows] = True
    assert sorted(rows.tolist()) == trained.nonzero()[:, 0].tolist()
    assert sum(share.batch.num_tokens for share in shares) == int(batch.lengths[trained].sum())
    numbers = torch.rand(batch.num_rows)
    for share, passes in zip(shares, dealt, strict=True):
        assert torch.equal(share.of_rows(numbers), numbers[share.rows])
        assert share.passes.num_tokens.tolist() == passes.num_tokens.tolist()
        sent = pickle.loads(pickle.dumps(share))
        for one, other, wanted in zip(share.passes, sent.passes, passes, strict=True):
            assert_same(one, other)
            assert torch.equal(sent.positions_of(other), response_positions(batch, wanted))
            assert torch.equal(sent.rows_of(other), wanted.rows)
            assert_same(replace(one, rows=wanted.rows), wanted)


def test_the_share_of_a_single_rank_is_the_batch() -> None:
    batch = agent_batch(3)
    share = share_passes(plan_of(batch), 40, SINGLE_RANK).here
    assert share.batch is batch and share.rows is None
    for micro in share.passes:
        assert share.rows_of(micro) is micro.rows
        assert torch.equal(share.positions_of(micro), response_positions(batch, micro))


def test_a_rank_without_rows_has_idle_passes() -> None:
    batch = agent_batch(3)
    parts = share_passes(plan_of(batch), 1 << 40, Ranks(0, 3), divisible=False)
    assert parts.part(0).batch.num_rows == len(parts.part(0).rows) > 0
    for number in (1, 2):
        share = parts.part(number)
        assert share.batch.num_rows == share.batch.num_tokens == 0
        assert share.passes.num_tokens.tolist() == [1]
        (idle,) = share.passes
        assert share.positions_of(idle).tolist() == share.rows_of(idle).tolist() == []


# --- gradients and values, in float64 ------------------------------------------------------------

SHAPES = [
    pytest.param((2, double_models), id="two"),
    pytest.param((4, double_models), id="four", marks=pytest.mark.slow),
    pytest.param((2, double_models_by_twos), id="two share sequences", marks=pytest.mark.slow),
    pytest.param((4, double_models_by_twos), id="four share by twos", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=SHAPES)
def models(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[DoubleModels, DoubleModels]]:
    """The models of one rank, and of several."""
    size, make = request.param
    starter = LocalRanks(tmp_path_factory.mktemp("ranks"))
    with start_ranks(size, make, cuda=False, starter=starter) as ranks:
        yield make(SINGLE_RANK), make(ranks)


CASES: dict[str, tuple[str, AlgorithmConfig]] = {
    "sequences": ("sequences", AlgorithmConfig()),
    "trees": ("trees", AlgorithmConfig(use_entropy_loss=True)),
    "routes and kept tokens": ("routes", AlgorithmConfig(policy_loss_type="gspo")),
    "loss of the full mini-batch": ("sequences", AlgorithmConfig(policy_loss_type="clip_cov")),
    "means of sequences": ("trees", AlgorithmConfig(loss_reduction="sequence_mean")),
    "an adapter": (NAMES[0], AlgorithmConfig()),
    "another adapter": (NAMES[1], AlgorithmConfig(observation_loss_coef=0.5)),
}


def trained_batch(name: str) -> StepBatch:
    batch = agent_batch(7, num_groups=4)
    if name == "routes":
        batch = kept_tokens(routed(batch))
    weights = torch.rand(len(batch.loss_mask), generator=torch.Generator().manual_seed(1))
    return batch.with_(cross_entropy_weights=weights * (batch.loss_mask == 0))


def gradient_of(
    policy: Policy, batch: StepBatch, algorithm: AlgorithmConfig
) -> tuple[dict[str, torch.Tensor], dict[str, float], torch.Tensor]:
    """Return the gradient, the metrics and the log-probabilities of a mini-batch."""
    torch.manual_seed(2)  # clip_cov draws tokens
    seen = torch.zeros_like(batch.rewards)
    metrics = accumulate_gradient(policy, batch, algorithm=algorithm, seen_logprobs=seen)
    return take_gradients(policy), metrics, seen


def assert_close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Assert that gradients differ by at most 1e-10 of their norm."""
    assert one.keys() == other.keys() and one
    norm = torch.stack([value.norm() for value in one.values()]).norm()
    assert norm > 0
    for name, value in one.items():
        assert value.dtype == torch.float64
        assert float((value - other[name]).norm()) <= 1e-10 * float(norm), name


@pytest.mark.parametrize("case", [case for case in CASES if CASES[case][0] != "routes"])
def test_gradients_equal_those_of_one_rank(
    models: tuple[DoubleModels, DoubleModels], case: str
) -> None:
    name, algorithm = CASES[case]
    batch = trained_batch(name)
    alone, shared = (gradient_of(each.policies[name], batch, algorithm) for each in models)
    assert_close(alone[0], shared[0])
    assert shared[1]["policy/loss"] == pytest.approx(alone[1]["policy/loss"], rel=1e-6)
    torch.testing.assert_close(alone[2], shared[2], rtol=0, atol=1e-6)


@pytest.mark.spec("update.ranks-rows")
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_ranks_that_have_all_rows(
    models: tuple[DoubleModels, DoubleModels], case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, algorithm = CASES[case]
    batch = trained_batch(name)
    policy = models[1].policies[name]
    policy.ranks.traffic.take()
    gradient, metrics, seen = gradient_of(policy, batch, algorithm)
    sent = policy.ranks.traffic.take()["traffic/rows_bytes"]
    monkeypatch.setattr(Share, "of", all_rows)
    other, other_metrics, other_seen = gradient_of(policy, batch, algorithm)
    if policy.ranks.size > policy.ranks.sequence.size:
        assert sent < policy.ranks.traffic.take()["traffic/rows_bytes"]
    assert gradient.keys() == other.keys()
    assert all(torch.equal(value, other[key]) for key, value in gradient.items())
    assert metrics == other_metrics
    assert torch.equal(seen, other_seen)


def all_rows(passes: MicroBatches) -> Share:
    """Return a share that has all rows of the batch, next to its passes."""
    return Share(passes)


def test_values_equal_those_of_one_rank(models: tuple[DoubleModels, DoubleModels]) -> None:
    for name in models[0].policies:
        batch = trained_batch(name)
        one, other = (each.policies[name].batch_logprobs(batch) for each in models)
        # Of one model in float32, of the others rounded to it.
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        bases = [each.policies[name].batch_logprobs(batch, adapter=False) for each in models]
        if name in NAMES:
            torch.testing.assert_close(*bases, rtol=0, atol=1e-6)
            assert not torch.equal(bases[0], one)
    batch = trained_batch("critic")
    one, other = (each.critic.batch_values(batch) for each in models)
    torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_gradients_of_a_critic_equal_those_of_one_rank(
    models: tuple[DoubleModels, DoubleModels],
) -> None:
    batch = trained_batch("critic")
    noise = torch.randn(2, len(batch.rewards), generator=torch.Generator().manual_seed(4))
    batch = batch.with_(values=noise[0], returns=noise[1])

    def gradient(critic: Critic) -> dict[str, torch.Tensor]:
        critic.accumulate_gradient(batch)
        return take_gradients(critic)

    assert_close(*(gradient(each.critic) for each in models))
