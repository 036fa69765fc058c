"""A micro-batch makes the host wait for the device twice, at its end: for metrics, for logprobs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from _fakes import tiny_model
from _pretended_device import Counts, held_by, move_model, pretended_device
from _rows import mixed_batch

from skyrl_fast.batch import StepBatch
from skyrl_fast.config import AlgorithmConfig, OptimizerConfig
from skyrl_fast.train.model.critic import Critic, ValueModel
from skyrl_fast.train.model.policy import Policy
from skyrl_fast.train.update import accumulate_gradient

ALL_AT_ONCE = 1 << 20  # tokens of a micro-batch
READS = 2
# Of transformers, before the first layer: whether positions say that rows are packed.
READS_OF_ROWS = 1
CASES: dict[str, dict[str, Any]] = {
    "ppo": {},
    "kl": {"use_kl_loss": True},
    "entropy": {"use_entropy_loss": True},
    "gspo": {"policy_loss_type": "gspo", "sequence_scope": "trajectory"},
    "cispo": {"policy_loss_type": "cispo"},
    "dual clip": {"policy_loss_type": "dual_clip"},
}


def rows_with_all() -> StepBatch:
    batch = mixed_batch()
    generator = torch.Generator().manual_seed(0)
    size = batch.loss_mask.shape

    def draw() -> torch.Tensor:
        return -torch.rand(size, generator=generator)

    return batch.with_(
        old_logprobs=draw(),
        ref_logprobs=draw(),
        rollout_logprobs=draw(),
        advantages=draw() + 0.5,
    )


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    return [held_by(p.grad) for p in model.parameters() if p.grad is not None]


def same(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    # Attention of a dense mask in place of the CPU's tiles: float32 noise.
    return all(torch.allclose(a, b, atol=1e-5) for a, b in zip(one, two, strict=True))


def assert_few_waits(counts: Counts, reads: int) -> None:
    assert not counts.pageable
    assert counts.reads.total() == reads, counts.reads
    assert counts.pinned  # what the passes need has been copied


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_a_micro_batch_of_the_policy(
    case: str, tree: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm = AlgorithmConfig(**CASES[case])
    batch = rows_with_all()
    policy = Policy(tiny_model(), max_tokens_per_microbatch=ALL_AT_ONCE, tree=tree)
    expected = accumulate_gradient(policy, batch, algorithm=algorithm)
    wanted = gradients(policy.model)
    policy = Policy(tiny_model(), max_tokens_per_microbatch=ALL_AT_ONCE, tree=tree)
    with pretended_device(monkeypatch) as counts:
        move_model(policy.model)
        metrics = accumulate_gradient(policy, batch, algorithm=algorithm)
    assert_few_waits(counts, READS if tree else READS + READS_OF_ROWS)
    assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert same(gradients(policy.model), wanted)


@pytest.mark.parametrize("tree", [False, True])
def test_a_micro_batch_of_the_critic(tree: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = rows_with_all()
    batch = batch.with_(values=batch.old_logprobs, returns=batch.advantages)

    def critic_of() -> Critic:
        torch.manual_seed(0)
        model = ValueModel(tiny_model().model)
        return Critic(
            model,
            OptimizerConfig(),
            total_steps=1,
            mini_batch_size=2,
            max_tokens_per_microbatch=ALL_AT_ONCE,
            tree=tree,
        )

    critic = critic_of()
    expected = critic.accumulate_gradient(batch)
    wanted = gradients(critic.model)
    critic = critic_of()
    with pretended_device(monkeypatch) as counts:
        move_model(critic.model)
        results = critic.accumulate_gradient(batch)
    reads = 1  # for its metrics
    assert_few_waits(counts, reads if tree else reads + READS_OF_ROWS)
    assert results == [pytest.approx(one, rel=1e-4, abs=1e-6) for one in expected]
    assert same(gradients(critic.model), wanted)
