"""The adapters for verl and TRL, compared with the installed packages."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from skyrl_fast.integrations import trl as for_trl
from skyrl_fast.integrations import verl as for_verl

CLOSE = {"rtol": 2e-6, "atol": 2e-6}  # exp and sums of another order


@pytest.mark.spec("dropin.verl")
def test_verl_functions_without_verl() -> None:
    values = torch.arange(12.0).reshape(2, 3, 2)
    for mask in (
        torch.tensor([[0, 1, 1], [1, 1, 1]]),
        torch.tensor([[1, 1, 0], [1, 0, 0]]),
        torch.tensor([[0, 1, 0], [1, 0, 1]]),  # a padded prompt before a padded response; a hole
        torch.tensor([[0, 0, 0], [0, 0, 1]]),
    ):
        flat, indices, cu_seqlens, longest, lengths = for_verl.unpad_input(values, mask)
        assert torch.equal(flat, values[mask.bool()]) and longest == int(mask.sum(1).max())
        assert lengths.tolist() == mask.sum(1).tolist() and int(cu_seqlens[-1]) == len(flat)
        again = for_verl.pad_input(flat, indices, 2, 3)
        assert torch.equal(again, values * mask[..., None])


@pytest.mark.spec("dropin.trl")
def test_trl_functions_without_trl() -> None:
    logps, old = torch.tensor([[-1.0, -2.0]]).requires_grad_(), torch.tensor([[-1.0, -2.5]])
    mask, advantages = torch.ones(1, 2), torch.tensor([1.0])
    loss = for_trl.grpo_loss(logps, old, advantages, mask, loss_type="grpo")
    assert float(loss.detach()) == pytest.approx(-(1.0 + 1.2) / 2)  # exp(0.5) is clipped to 1.2
    loss.backward()
    assert logps.grad is not None and logps.grad[0, 1] == 0
    with pytest.raises(ValueError, match="loss_type"):
        for_trl.grpo_loss(logps, old, advantages, mask, loss_type="other")
    with pytest.raises(ValueError, match="importance_sampling_level"):
        for_trl.grpo_loss(logps, old, advantages, mask, importance_sampling_level="other")


@pytest.mark.peers
@pytest.mark.spec("dropin.verl")
def test_verl_estimators() -> None:
    core = pytest.importorskip("verl.trainer.ppo.core_algos", reason="verl is not installed")
    assert for_verl.register() == ["skyrl_fast_grpo", "skyrl_fast_rloo", "skyrl_fast_maxrl"]
    for_verl.register()  # a second time is no error
    torch.manual_seed(0)
    rewards, mask = torch.zeros(12, 7), (torch.rand(12, 7) < 0.7).float()
    rewards[:, -1] = torch.randint(0, 2, (12,)).float()
    index = np.array([f"p{i // 4}" for i in range(12)], dtype=object)
    for name, original, norm in (
        ("grpo", core.compute_grpo_outcome_advantage, True),
        ("grpo", core.compute_grpo_outcome_advantage, False),
        ("grpo", core.compute_grpo_vectorized_outcome_advantage, True),
        ("rloo", core.compute_rloo_outcome_advantage, True),
    ):
        extras = {"norm_adv_by_std_in_grpo": norm} if name == "grpo" else {}
        want, _ = original(rewards.clone(), mask, index, **extras)
        ours = core.get_adv_estimator_fn(f"skyrl_fast_{name}")
        got, returns = ours(token_level_rewards=rewards, response_mask=mask, index=index, **extras)
        torch.testing.assert_close(got, want, **CLOSE)
        assert torch.equal(got, returns)


@pytest.mark.peers
@pytest.mark.spec("dropin.verl")
def test_verl_logprobs_and_packing() -> None:
    functional = pytest.importorskip("verl.utils.torch_functional", reason="verl is not installed")
    torch.manual_seed(0)
    logits, labels = torch.randn(3, 5, 200) * 3, torch.randint(0, 200, (3, 5))
    want = functional.logprobs_from_logits(logits, labels)
    torch.testing.assert_close(for_verl.logprobs_from_logits(logits, labels), want, **CLOSE)
    padding = pytest.importorskip("verl.utils.npu_flash_attn_utils", reason="no padding functions")
    values, mask = torch.randn(4, 6, 3), torch.zeros(4, 6, dtype=torch.int64)
    for row, length in enumerate((6, 2, 1, 4)):
        mask[row, 6 - length :] = 1
    original, ours = padding.unpad_input(values, mask), for_verl.unpad_input(values, mask)
    for a, b in zip(original, ours, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
    padded = padding.pad_input(original[0], original[1], 4, 6)
    assert torch.equal(for_verl.pad_input(ours[0], ours[1], 4, 6), padded)


@pytest.mark.peers
@pytest.mark.spec("dropin.trl")
def test_trl_log_softmax() -> None:
    utils = pytest.importorskip("trl.trainer.utils", reason="TRL is not installed")
    original = utils.selective_log_softmax
    torch.manual_seed(0)
    logits, index = torch.randn(3, 5, 200) * 3, torch.randint(0, 200, (3, 5))
    mask = torch.tensor([1, 0, 1, 1, 0]).expand(3, 5)
    for extras in ({}, {"temperature": 0.7}, {"row_mask": mask}):
        want = original(logits, index, **extras)
        got = for_trl.selective_log_softmax(logits, index, **extras)
        torch.testing.assert_close(got, want, rtol=0, atol=4e-6)
    several = torch.randint(0, 200, (3, 5, 4))
    assert torch.equal(for_trl.selective_log_softmax(logits, several), original(logits, several))
    assert "trl.trainer.utils" in for_trl.install() and for_trl.install() == []
    assert utils.selective_log_softmax is for_trl.selective_log_softmax
    for_trl.uninstall()
    assert utils.selective_log_softmax is original


@pytest.mark.peers
@pytest.mark.spec("dropin.trl")
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "sapo"])
def test_trl_grpo_loss(loss_type: str, level: str) -> None:
    module = pytest.importorskip("trl.trainer.grpo_trainer", reason="TRL is not installed")
    if loss_type == "sapo" and level == "sequence":
        pytest.skip("not offered")
    torch.manual_seed(0)
    rows, width = 4, 9
    logps = -torch.rand(rows, width) * 2
    old = logps + 0.2 * torch.randn(rows, width)
    ref = logps + 0.2 * torch.randn(rows, width)
    mask = (torch.arange(width)[None] < torch.tensor([9, 3, 1, 6])[:, None]).long()
    advantages = torch.randn(rows)
    beta = 0.1 if level == "token" else 0.0
    trainer = MagicMock()
    current = logps.clone().requires_grad_()
    trainer._get_per_token_logps_and_entropies.return_value = (
        current,
        torch.ones(rows, width),
        None,
    )
    settings = dict(
        beta=beta, epsilon_low=0.2, epsilon_high=0.3, loss_type=loss_type, top_entropy_quantile=1.0,
        importance_sampling_level=level, off_policy_mask_threshold=None, use_vllm=False,
        current_gradient_accumulation_steps=1, max_completion_length=20, aux_loss_enabled=False,
        _entropy_bonus_enabled=False, _metrics=defaultdict(lambda: defaultdict(list)),
    )  # fmt: skip
    for name, value in settings.items():
        setattr(trainer, name, value)
    trainer.args = SimpleNamespace(
        delta=None, use_bias_correction_kl=False, sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05, steps_per_generation=1,
    )  # fmt: skip
    trainer.accelerator.num_processes = 1
    trainer.accelerator.gather = lambda x: x
    trainer.model.training = True
    inputs = {
        "prompt_ids": torch.ones(rows, 2).long(), "prompt_mask": torch.ones(rows, 2).long(),
        "completion_ids": torch.ones(rows, width).long(), "completion_mask": mask,
        "advantages": advantages, "old_per_token_logps": old, "ref_per_token_logps": ref,
        "num_items_in_batch": mask.sum(),
    }  # fmt: skip
    want = module.GRPOTrainer._compute_loss(trainer, None, inputs)
    want.backward()
    ours = logps.clone().requires_grad_()
    got = for_trl.grpo_loss(
        ours, old, advantages, mask, loss_type=loss_type, epsilon_low=0.2, epsilon_high=0.3,
        importance_sampling_level=level, beta=beta, ref_per_token_logps=ref,
        max_completion_length=20, num_items=mask.sum(),
    )  # fmt: skip
    got.backward()
    torch.testing.assert_close(got, want, **CLOSE)
    torch.testing.assert_close(ours.grad, current.grad, **CLOSE)
