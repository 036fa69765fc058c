"""Losses, log-probabilities and the trainer's step-wise block compared with SkyRL's."""

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from _losses import Waits
from _skyrl_cases import assert_same_outcome, outcome

from skyrl_fast.integrations import skyrl as ours
from skyrl_fast.integrations.skyrl.replacement import ORIGINALS

pytestmark = pytest.mark.peers


@pytest.fixture(autouse=True, scope="module")
def there_is_skyrl() -> None:
    pytest.importorskip("skyrl.train.trainer", reason="SkyRL is not installed")


LOSSES = {
    "regular": "ppo_policy_loss",
    "dual_clip": "ppo_policy_loss",
    "sapo": "sapo_policy_loss",
    "gspo": "gspo_policy_loss",
    "cispo": "compute_policy_loss_cispo",
    "rollout_is": "rollout_is_policy_loss",
    "dppo": "dppo_policy_loss",
    "clip_cov": "compute_policy_loss_clip_cov",
    "kl_cov": "compute_policy_loss_kl_cov",
    "cross_entropy": "cross_entropy_loss",
    "importance_sampling": "importance_sampling_loss",
}
# exp and float32 sums in another order; the drop-in page lists what differs and why.
CLOSE = {"rtol": 2e-6, "atol": 2e-6}


def algorithm(name: str) -> Any:
    from skyrl.train.config import AlgorithmConfig

    config = AlgorithmConfig(policy_loss_type=name, loss_reduction="sequence_mean")
    config.dppo.delta_low = config.dppo.delta_high = 0.05
    config.clip_cov.clip_cov_lb, config.clip_cov.clip_ratio = 0.0, 0.1
    return config


def cells(rows: int = 6, width: int = 40, seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    logprobs = -torch.rand(rows, width) * 3
    return {
        "logprobs": logprobs,
        "old": logprobs + 0.3 * torch.randn(rows, width),
        "rollout": logprobs + 0.3 * torch.randn(rows, width),
        "advantages": torch.randn(rows, width) / 50,
        "mask": (torch.rand(rows, width) < 0.6).float(),
    }


@pytest.mark.spec("dropin.tolerance")
@pytest.mark.parametrize("correction", [False, True])
@pytest.mark.parametrize("rollout", [False, True])
@pytest.mark.parametrize("name", list(LOSSES))
def test_losses_equal(name: str, rollout: bool, correction: bool) -> None:
    function = LOSSES[name]
    original = ORIGINALS.function(function)
    if original is None:
        pytest.skip("this SkyRL has no such loss")
    config, d = algorithm(name), cells()
    if correction:
        config.off_policy_correction.tis_ratio_type = "token"
        config.off_policy_correction.sequence_mask_metric = "geometric"
        config.off_policy_correction.geo_mask_low, config.off_policy_correction.geo_mask_high = (
            0.9,
            1.1,
        )
    results = []
    for loss in (original, getattr(ours, function)):
        current = d["logprobs"].clone().requires_grad_()
        torch.manual_seed(1)
        given = d["rollout"] if rollout or name == "rollout_is" else None
        value, metrics = loss(current, d["old"], d["advantages"], config, d["mask"], given)
        value.backward()
        results.append((value.detach(), current.grad, metrics))
    (want, want_grad, want_metrics), (got, got_grad, metrics) = results
    torch.testing.assert_close(got, want, **CLOSE)
    torch.testing.assert_close(got_grad, want_grad, **CLOSE)
    assert metrics.keys() == want_metrics.keys()
    for key, value in want_metrics.items():
        assert metrics[key] == pytest.approx(value, rel=1e-6, abs=1e-7), key
    if "clip_ratio" in want_metrics:
        assert metrics["clip_ratio"] == want_metrics["clip_ratio"]


@pytest.mark.spec("dropin.no-more-waits")
@pytest.mark.parametrize("name", list(LOSSES))
def test_losses_wait_for_a_gpu_no_more_often_than_skyrls(
    emulated_gpu: object, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    original = ORIGINALS.function(LOSSES[name])
    if original is None:
        pytest.skip("this SkyRL has no such loss")
    config, d = algorithm(name), cells()
    rollout = d["rollout"] if name == "rollout_is" else None
    counts = []
    before = ORIGINALS.counts[LOSSES[name]].handed_back
    for loss in (original, getattr(ours, LOSSES[name])):
        current = d["logprobs"].clone().requires_grad_()
        with Waits() as waits:
            value, _ = loss(current, d["old"], d["advantages"], config, d["mask"], rollout)
            value.backward()
        counts.append(waits.count)
    assert ORIGINALS.counts[LOSSES[name]].handed_back == before
    assert counts[1] <= counts[0]


@pytest.mark.spec("dropin.compat")
def test_losses_leave_unusual_input_to_skyrl() -> None:
    config, d = algorithm("regular"), cells()
    for change in (
        {"mask": None},
        {"mask": d["mask"] * 0.5},
        {"logprobs": d["logprobs"].bfloat16()},
        {"old": d["old"].double()},
        {"mask": torch.zeros_like(d["mask"])},
        {"advantages": d["advantages"] * float("nan")},
    ):
        given = {**d, **change}
        args = (given["logprobs"], given["old"], given["advantages"], config, given["mask"])
        want, want_metrics = ORIGINALS.function("ppo_policy_loss")(*args)
        got, metrics = ours.ppo_policy_loss(*args)
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, equal_nan=True)
        assert metrics == want_metrics
    with pytest.raises(AssertionError):
        config.policy_loss_type = "other"
        ours.ppo_policy_loss(d["logprobs"], d["old"], d["advantages"], config, d["mask"])


def test_fallback_to_skyrl_draws_the_same_tokens() -> None:
    config, d = algorithm("clip_cov"), cells()
    d["logprobs"][tuple(d["mask"].nonzero()[0])] += 40  # beyond the kernel's bounds
    results = []
    for loss in (
        ORIGINALS.function("compute_policy_loss_clip_cov"),
        ours.compute_policy_loss_clip_cov,
    ):
        current = d["logprobs"].clone().requires_grad_()
        torch.manual_seed(1)
        value, _ = loss(current, d["old"], d["advantages"], config, d["mask"])
        value.backward()
        results.append((value.detach(), current.grad, torch.rand(())))
    for want, got in zip(*results, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_equal(dtype: torch.dtype) -> None:
    original = ORIGINALS.function("logprobs_from_logits")
    torch.manual_seed(0)
    logits, labels = torch.randn(2, 5, 1000) * 4, torch.randint(0, 1000, (2, 5))
    results = []
    for function in (original, ours.logprobs_from_logits):
        given = logits.to(dtype).requires_grad_()
        out = function(given, labels)
        assert out.dtype == dtype
        out.float().sum().backward()
        results.append((out.detach(), given.grad))
    # a logsumexp near 16 is rounded to steps of 1e-6; bfloat16 near -16 to steps of 1/16
    close = {"rtol": 0.0, "atol": 4e-6} if dtype == torch.float32 else {"rtol": 2**-8, "atol": 0.0}
    torch.testing.assert_close(results[1][0], results[0][0], **close)
    # SkyRL's bfloat16 gradient goes through log-probabilities rounded to 8 bits
    rtol = 1e-4 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(results[1][1], results[0][1], rtol=rtol, atol=1e-5)
    for bad in (labels + 1000, labels[:1], labels.float()):
        assert_same_outcome(
            outcome(original, logits, bad), outcome(ours.logprobs_from_logits, logits, bad)
        )


def trainer_stub(estimator: str, *, step_wise: bool = True) -> Any:
    """Return the attributes of SkyRL's trainer that the method reads."""
    chosen = SimpleNamespace(
        advantage_estimator=estimator, grpo_norm_by_std=True, gamma=1.0, lambd=1.0
    )
    cfg = SimpleNamespace(
        trainer=SimpleNamespace(algorithm=chosen),
        generator=SimpleNamespace(step_wise_trajectories=step_wise),
    )
    return SimpleNamespace(cfg=cfg, all_metrics={})


def step_wise_batch(seed: int, *, token_rewards: bool = False) -> Any:
    from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch

    rng = np.random.default_rng(seed)
    flags, uids = [], []
    for trajectory in range(12):
        steps = int(rng.integers(1, 5))
        flags += [False] * (steps - 1) + [True]
        uids += [f"p{trajectory // 3}"] * steps
    pad = 3
    flags, uids = flags + [True] * pad, uids + [f"pad{i}" for i in range(pad)]
    rows, width = len(flags), 17
    lengths = torch.from_numpy(rng.integers(1, width + 1, rows))
    mask = (torch.arange(width)[None] >= width - lengths[:, None]).long()
    rewards = torch.zeros(rows, width)
    rewards[:, -1] = torch.from_numpy(rng.integers(0, 2, rows)).float()
    if token_rewards:
        rewards = torch.from_numpy(rng.normal(size=(rows, width))).float() * mask
    batch = TrainingInputBatch({"rewards": rewards, "response_mask": mask, "values": None})
    batch.metadata = {
        "uids": uids, "is_last_step": flags, "avg_response_length": 3.0, "pad_size": pad,
    }  # fmt: skip
    return batch


@pytest.mark.parametrize("token_rewards", [False, True])
@pytest.mark.parametrize("estimator", ["grpo", "maxrl"])
def test_step_wise_block_equals(estimator: str, token_rewards: bool) -> None:
    name = "RayPPOTrainer.compute_advantages_and_returns"
    original = ORIGINALS.function(name)
    for seed in range(5):
        batch = step_wise_batch(seed, token_rewards=token_rewards)
        stubs = trainer_stub(estimator), trainer_stub(estimator)
        before = ORIGINALS.counts[name].handed_back
        want = original(stubs[0], copy.deepcopy(batch))
        got = ours.compute_advantages_and_returns(stubs[1], copy.deepcopy(batch))
        assert ORIGINALS.counts[name].handed_back == before, ORIGINALS.counts[name].last_reason
        assert torch.equal(got["advantages"], want["advantages"])
        assert torch.equal(got["returns"], want["returns"])
        assert stubs[1].all_metrics == pytest.approx(stubs[0].all_metrics, rel=1e-5, abs=1e-7)
        assert got.metadata["metrics"] == pytest.approx(
            want.metadata["metrics"], rel=1e-5, abs=1e-7
        )


def test_step_wise_block_leaves_other_cases_to_skyrl() -> None:
    name = "RayPPOTrainer.compute_advantages_and_returns"
    original = ORIGINALS.function(name)
    for estimator, step_wise in (("grpo", False), ("reinforce++", False)):
        batch = step_wise_batch(0)
        before = ORIGINALS.counts[name].handed_back
        want = original(trainer_stub(estimator, step_wise=step_wise), copy.deepcopy(batch))
        got = ours.compute_advantages_and_returns(
            trainer_stub(estimator, step_wise=step_wise), copy.deepcopy(batch)
        )
        assert ORIGINALS.counts[name].handed_back == before + 1
        torch.testing.assert_close(got["advantages"], want["advantages"])
    broken = step_wise_batch(0)
    broken.metadata["is_last_step"][-1] = False
    for function in (original, ours.compute_advantages_and_returns):
        with pytest.raises(AssertionError):
            function(trainer_stub("grpo"), copy.deepcopy(broken))


def test_step_wise_rloo_with_padding_rows_is_served() -> None:
    name = "RayPPOTrainer.compute_advantages_and_returns"
    before = ORIGINALS.counts[name].handed_back
    want, got = (
        function(trainer_stub("rloo"), step_wise_batch(0))
        for function in (ORIGINALS.function(name), ours.compute_advantages_and_returns)
    )
    assert ORIGINALS.counts[name].handed_back == before
    assert torch.equal(got["advantages"], want["advantages"])
