"""The table of policy losses: agreement with the kernels, and between both loss functions."""

import re
from pathlib import Path

import pytest
import torch

import skyrl_fast
from skyrl_fast.config import AlgorithmConfig, policy_loss_settings
from skyrl_fast.ops.advantage.estimators import ADVANTAGE_ESTIMATORS
from skyrl_fast.ops.advantage.group import ESTIMATORS
from skyrl_fast.ops.logprob.masked_loss import TOKEN_LOSSES
from skyrl_fast.ops.policy_loss.losses import (
    KERNEL_PARAMS,
    LOSS_CODES,
    POLICY_LOSSES,
    Cispo,
    ClipCov,
    Dppo,
    DualClip,
    LossSettings,
    Sapo,
    kernel_params,
)

CSRC = Path(__file__).parents[2] / "csrc"


def source(name: str) -> str:
    (path,) = CSRC.rglob(name)
    return path.read_text()


def snake_case(name: str) -> str:
    return re.sub(r"(?<!^)([A-Z])", r"_\1", name).lower()


def test_kernels_have_the_same_loss_codes() -> None:
    (body,) = re.findall(r"enum class LossKind : int \{(.*?)\};", source("token_loss.h"), re.S)
    in_cpp = {snake_case(name): int(code) for name, code in re.findall(r"k(\w+) = (\d+)", body)}
    assert in_cpp == LOSS_CODES


def test_kernels_take_parameters_in_the_same_order() -> None:
    (body,) = re.findall(r"fields\[kNumParams\] = \{(.*?)\};", source("loss_params_bind.h"), re.S)
    assert re.findall(r"&p\.(\w+)", body) == [*KERNEL_PARAMS, "kl_coef"]


def test_settings_fill_the_kernel_parameters() -> None:
    got = dict(
        zip((*KERNEL_PARAMS, "kl_coef"), kernel_params(DualClip(0.1, 0.3, 2.0), 0.5), strict=True)
    )
    assert {name: got[name] for name in ("clip_low", "clip_high", "clip_ratio_c", "kl_coef")} == {
        "clip_low": 0.9,
        "clip_high": 1.3,
        "clip_ratio_c": 2.0,
        "kl_coef": 0.5,
    }


def test_every_loss_setting_is_read_from_the_configuration() -> None:
    algorithm = AlgorithmConfig(policy_loss_type="clip_cov", eps_clip_low=0.1, eps_clip_high=0.3)
    assert policy_loss_settings(algorithm) == ClipCov(0.0002, 1.0, 5.0, 0.1, 0.3)
    for name, spec in POLICY_LOSSES.items():
        assert policy_loss_settings(AlgorithmConfig(policy_loss_type=name)) == spec.settings()


@pytest.mark.parametrize(
    "loss", [*TOKEN_LOSSES, Cispo(0.1, 0.3, "rollout"), Dppo("binary_kl"), Sapo(2.0, 0.5)], ids=str
)
def test_loss_is_the_same_in_both_functions(loss: str | LossSettings, backend: str) -> None:
    g = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(4, 5, 7, generator=g), torch.randint(0, 7, (4, 5), generator=g)
    logprobs = skyrl_fast.selected_logprob(logits, targets)
    assert isinstance(logprobs, torch.Tensor)
    old, rollout = (logprobs + torch.randn(4, 5, generator=g) for _ in range(2))
    advantages, mask = torch.randn(4, 5, generator=g), torch.rand(4, 5, generator=g) < 0.7
    arguments = {
        "loss": loss,
        "rollout_logprobs": rollout,
        "row_weights": torch.tensor([0.5, 0.1, 0.0, 0.3]),
        "token_weights": torch.rand(4, 5, generator=g),
        "ref_logprobs": rollout,
        "kl_estimator": "k3",
        "backend": backend,
    }
    cells = (old, advantages, mask)
    one = skyrl_fast.policy_loss(logprobs, *cells, **arguments)
    other = skyrl_fast.masked_logprob_loss(logits, targets, *cells, **arguments)
    torch.testing.assert_close(one.loss, other.loss, rtol=1e-5, atol=1e-6)  # order of float sums
    assert one.metrics.keys() == other.metrics.keys()
    for name, value in one.metrics.items():
        torch.testing.assert_close(value, other.metrics[name], rtol=1e-5, atol=1e-6)


def test_row_weights_of_ragged_rows() -> None:
    logits, targets = torch.zeros(3, 4), torch.tensor([0, 1, 2])
    got = skyrl_fast.masked_logprob_loss(
        *(logits, targets, None, None),
        loss="cross_entropy",
        row_weights=torch.tensor([1.0, 0.25]),
        cu_seqlens=torch.tensor([0, 1, 3]),
    )
    assert got.loss.item() == pytest.approx(1.5 * torch.log(torch.tensor(4.0)).item())


def test_outcome_estimators_have_the_kernels_codes() -> None:
    (body,) = re.findall(r"enum class Estimator : int \{(.*?)\};", source("estimator.h"), re.S)
    in_cpp = [code for _, code in re.findall(r"k(\w+) = (\d+)", body)]
    assert [int(code) for code in in_cpp] == list(ESTIMATORS.values())
    outcome = [spec.name for spec in ADVANTAGE_ESTIMATORS.values() if spec.level == "outcome"]
    assert outcome == [*ESTIMATORS, "gdpo"]  # which calls the kernel of grpo for each part
