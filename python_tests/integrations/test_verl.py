"""The adapters for verl, compared with the installed package."""

from __future__ import annotations

import numpy as np
import pytest
import torch

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
