"""The replacements of SkyRL's losses on any device with kernels, without SkyRL installed."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from _losses import F32, Waits, batch

from skyrl_fast.integrations.skyrl import logprobs, losses
from skyrl_fast.integrations.skyrl.replacement import ORIGINALS, UnsupportedInputError
from skyrl_fast.ops.policy_loss.loss import policy_loss
from skyrl_fast.ops.policy_loss.losses import (
    Cispo,
    ClipCov,
    CrossEntropy,
    DualClip,
    Gspo,
    ImportanceSampling,
    KlCov,
    LossSettings,
    Sapo,
)

CONFIG = SimpleNamespace(
    policy_loss_type="dual_clip",
    loss_reduction="sequence_mean",
    eps_clip_low=0.2,
    eps_clip_high=0.3,
    clip_ratio_c=3.0,
    sapo=SimpleNamespace(tau_pos=1.0, tau_neg=1.05),
    cispo=SimpleNamespace(cispo_eps_clip_low=0.3, cispo_eps_clip_high=0.4, cispo_anchor="old"),
    off_policy_correction=SimpleNamespace(tis_ratio_type=None),
    dppo=SimpleNamespace(dppo_type="binary_tv", delta_low=0.2, delta_high=0.2),
    clip_cov=SimpleNamespace(clip_ratio=0.1, clip_cov_lb=-5.0, clip_cov_ub=5.0),
    kl_cov=SimpleNamespace(kl_cov_frac=0.2, ppo_kl_coef=1.0),
)
CLIP = {"eps_clip_low": 0.2, "eps_clip_high": 0.3}
# The replacement, and the same loss of this package.
CASES: list[tuple[Callable, LossSettings]] = [
    (losses.ppo_policy_loss, DualClip(**CLIP, clip_ratio_c=3.0)),
    (losses.sapo_policy_loss, Sapo(tau_pos=1.0, tau_neg=1.05)),
    (losses.gspo_policy_loss, Gspo(**CLIP)),
    (losses.compute_policy_loss_cispo, Cispo(0.3, 0.4)),
    (losses.compute_policy_loss_clip_cov, ClipCov(0.1, -5.0, 5.0, **CLIP)),
    (losses.compute_policy_loss_kl_cov, KlCov(kl_cov_frac=0.2, ppo_kl_coef=1.0)),
    (losses.cross_entropy_loss, CrossEntropy()),
    (losses.importance_sampling_loss, ImportanceSampling()),
]


@pytest.fixture(autouse=True)
def without_skyrl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be passed to SkyRL: input that a replacement does not support is an error."""
    monkeypatch.setattr(ORIGINALS, "function", lambda name: None)


def cells(device: str) -> dict[str, torch.Tensor]:
    data = {name: value.to(device) for name, value in batch((5, 33)).items()}
    return {**data, "mask": data["mask"].float()}


@pytest.mark.parametrize(
    ("replacement", "settings"), CASES, ids=[type(settings).__name__ for _, settings in CASES]
)
def test_losses_act_on_tensors_of_a_gpu(
    gpu: str, replacement: Callable, settings: LossSettings
) -> None:
    d = cells(gpu)
    current = d["logprobs"].clone().requires_grad_()
    torch.manual_seed(0)
    loss, metrics = replacement(current, d["old"], d["advantages"], CONFIG, d["mask"])
    loss.backward()
    assert loss.device == current.device
    assert current.grad is not None

    wide = {name: value.cpu().double() for name, value in d.items()}
    x = wide["logprobs"].requires_grad_()
    reads_all = not isinstance(settings, CrossEntropy)
    torch.manual_seed(0)
    want = policy_loss(
        x, wide["old"] if reads_all else None, wide["advantages"] if reads_all else None,
        wide["mask"], loss=settings, scope="row", row_weights=torch.ones(5), backend="torch",
    )  # fmt: skip
    want.loss.backward()
    torch.testing.assert_close(loss.detach().cpu().double(), want.loss.detach(), **F32)
    torch.testing.assert_close(current.grad.cpu().double(), x.grad, **F32)
    if isinstance(settings, ImportanceSampling):
        ratio_mean = float(want.metrics["ratio_mean"])
        assert metrics == {"importance_ratio": pytest.approx(ratio_mean, rel=1e-5)}
    elif isinstance(settings, Cispo):
        trained = wide["mask"] != 0
        ratio = (wide["logprobs"].detach() - wide["old"]).exp()[trained]
        assert metrics == {
            "clip_ratio": pytest.approx(float(want.metrics["clip_ratio"]), abs=1e-6),
            "cispo/ratio_mean": pytest.approx(float(ratio.mean()), rel=1e-5),
            "cispo/ratio_clamped_mean": pytest.approx(
                float(ratio.clamp(0.7, 1.4).mean()), rel=1e-5
            ),
            "cispo/ratio_max": pytest.approx(float(ratio.max()), rel=1e-5),
            "cispo/ratio_min": pytest.approx(float(ratio.min()), rel=1e-5),
        }
    elif isinstance(settings, (Sapo, KlCov, CrossEntropy)):
        assert metrics == {"clip_ratio": 0.0}
    else:
        assert metrics == {"clip_ratio": pytest.approx(float(want.metrics["clip_ratio"]), abs=1e-6)}


# Reads of a GPU's numbers in SkyRL 0.4.0's losses; clip_cov and kl_cov, which select tokens by
# many, are compared with SkyRL's in test_skyrl_compat.py.
WAITS = {Sapo: 0, CrossEntropy: 0, DualClip: 1, Gspo: 1, ImportanceSampling: 1, Cispo: 6}


@pytest.mark.spec("dropin.no-more-waits")
@pytest.mark.parametrize(
    ("replacement", "settings"),
    [(replacement, settings) for replacement, settings in CASES if type(settings) in WAITS],
    ids=[type(settings).__name__ for _, settings in CASES if type(settings) in WAITS],
)
def test_losses_wait_for_a_gpu_as_often_as_skyrl(
    gpu: str, replacement: Callable, settings: LossSettings
) -> None:
    d = cells(gpu)
    current = d["logprobs"].clone().requires_grad_()
    with Waits() as waits:
        loss, _ = replacement(current, d["old"], d["advantages"], CONFIG, d["mask"])
        loss.backward()
    assert waits.count <= WAITS[type(settings)]
    assert waits.count == (type(settings) not in (Sapo, CrossEntropy))


@pytest.mark.parametrize("replacement", [losses.sapo_policy_loss, losses.cross_entropy_loss])
def test_mask_of_a_loss_that_does_not_wait_is_a_weight(gpu: str, replacement: Callable) -> None:
    d = cells(gpu)
    given = (d["old"], d["advantages"], CONFIG)
    half, _ = replacement(d["logprobs"], *given, d["mask"] * 0.5)
    full, metrics = replacement(d["logprobs"], *given, d["mask"])
    torch.testing.assert_close(half * 2, full)
    assert metrics == {"clip_ratio": 0.0}


@pytest.mark.parametrize("flash_attention", [False, True])
def test_logprobs_on_a_gpu_have_the_dtype_of_skyrl(
    gpu: str, monkeypatch: pytest.MonkeyPatch, flash_attention: bool
) -> None:
    monkeypatch.setattr(logprobs, "_uses_flash_attention", lambda: flash_attention)
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 50, device=gpu).bfloat16()
    labels = torch.randint(0, 50, (2, 3), device=gpu)
    dtype = torch.float32 if flash_attention else torch.bfloat16
    want = logits.float().log_softmax(-1).gather(-1, labels[..., None])[..., 0].to(dtype)
    got = logprobs.logprobs_from_logits(logits, labels)
    tolerance = {torch.float32: 4e-6, torch.bfloat16: 0.04}[dtype]  # one step of bfloat16 near 8
    torch.testing.assert_close(got, want, rtol=0, atol=tolerance)


def test_device_without_kernels_falls_back_to_skyrl() -> None:
    d = cells("meta")
    with pytest.raises(UnsupportedInputError, match="a device without kernels"):
        losses.ppo_policy_loss(d["logprobs"], d["old"], d["advantages"], CONFIG, d["mask"])


def test_tensors_on_several_devices_fall_back_to_skyrl() -> None:
    d = cells("cpu")
    with pytest.raises(UnsupportedInputError, match="several devices"):
        losses.ppo_policy_loss(
            d["logprobs"], d["old"].to("meta"), d["advantages"], CONFIG, d["mask"]
        )


@pytest.mark.parametrize("cell", [0.5, -1.0, 2.0])
def test_non_binary_mask_falls_back_to_skyrl(cell: float) -> None:
    d = cells("cpu")
    d["mask"][0, 0] = cell
    with pytest.raises(UnsupportedInputError, match="a mask that is not 0 and 1"):
        losses.ppo_policy_loss(d["logprobs"], d["old"], d["advantages"], CONFIG, d["mask"])


@pytest.mark.parametrize(
    "replacement", [replacement for replacement, _ in CASES if replacement != CASES[-2][0]]
)
def test_missing_old_log_probs_fall_back_to_skyrl(replacement: Callable) -> None:
    d = cells("cpu")
    with pytest.raises(UnsupportedInputError, match="no old log-probabilities"):
        replacement(d["logprobs"], None, d["advantages"], CONFIG, d["mask"])


def test_losses_that_do_not_read_old_log_probs_accept_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "_correction", lambda *_: (None, {}))
    d = cells("cpu")
    given = (d["advantages"], CONFIG, d["mask"])
    for replacement in (losses.dppo_policy_loss, losses.rollout_is_policy_loss):
        want = replacement(d["logprobs"], d["old"], *given, d["old"] + 0.1)
        assert replacement(d["logprobs"], None, *given, d["old"] + 0.1) == want
    with pytest.raises(UnsupportedInputError, match="no old log-probabilities"):
        losses.dppo_policy_loss(d["logprobs"], None, *given)
    want = losses.cross_entropy_loss(d["logprobs"], d["old"], *given)
    assert losses.cross_entropy_loss(d["logprobs"], None, *given) == want


@pytest.mark.parametrize(
    "replacement", [losses.compute_policy_loss_clip_cov, losses.compute_policy_loss_kl_cov]
)
def test_fallback_to_skyrl_restores_the_random_state(gpu: str, replacement: Callable) -> None:
    d = cells(gpu)
    d["logprobs"][tuple(d["mask"].nonzero()[0])] += 40  # beyond the kernel's bounds

    def states() -> list[torch.Tensor]:
        return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if gpu == "cuda" else [])]

    before = states()
    with pytest.raises(UnsupportedInputError, match="ratios beyond the kernel's bounds"):
        replacement(d["logprobs"], d["old"], d["advantages"], CONFIG, d["mask"])
    assert all(map(torch.equal, before, states()))


def skyrl_kl_cov(d: dict[str, torch.Tensor]) -> torch.Tensor:
    """Compute KL-Cov as SkyRL 0.3.0 does: covariances in float32 on the CPU, then topk."""
    delta = d["logprobs"] - d["old"]
    losses = -d["advantages"] * delta.exp()
    valid = (d["mask"] > 0).reshape(-1).nonzero().reshape(-1)
    advantages, logprobs = (d[name].reshape(-1)[valid].cpu() for name in ("advantages", "logprobs"))
    covariances = (advantages - advantages.mean()) * (logprobs - logprobs.mean())
    num = max(1, int(len(covariances) * CONFIG.kl_cov.kl_cov_frac))
    penalised = torch.zeros(losses.numel(), dtype=torch.bool)
    penalised[valid[covariances.topk(num).indices]] = True
    losses = losses + CONFIG.kl_cov.ppo_kl_coef * delta.abs() * penalised.view_as(losses)
    return (losses * d["mask"]).sum()


def skyrl_clip_cov(d: dict[str, torch.Tensor], config: SimpleNamespace) -> torch.Tensor:
    """Compute Clip-Cov as SkyRL 0.3.0 does: means over padded cells, draws by torch.randperm."""
    advantages, mask = d["advantages"], d["mask"]
    ratio = (d["logprobs"] - d["old"]).exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - config.eps_clip_low, 1 + config.eps_clip_high)
    adv_mean, mean = ((d[name] * mask).sum() / mask.sum() for name in ("advantages", "logprobs"))
    covariances = (advantages - adv_mean) * (d["logprobs"] - mean)
    covariances[(mask == 0) | ((clipped > plain) & (mask > 0))] = -torch.inf
    bounds = config.clip_cov
    inside = (covariances < bounds.clip_cov_ub) & (covariances > bounds.clip_cov_lb) & (mask > 0)
    candidates = inside.nonzero()
    num = max(int(bounds.clip_ratio * mask.sum().item()), 1)
    rows, columns = candidates[torch.randperm(len(candidates))[:num]].T
    kept = torch.ones_like(advantages)
    kept[rows, columns] = 0
    return (torch.maximum(plain, clipped) * kept * mask).sum()


@pytest.mark.spec("loss.covariance")
@pytest.mark.parametrize("advantage", [0.1, 0.7311, -1.2247])
@pytest.mark.parametrize("shape", [(17, 2), (1, 300), (5, 33)])
def test_kl_cov_selects_the_tokens_of_skyrl_where_all_advantages_are_equal(
    shape: tuple[int, int], advantage: float
) -> None:
    d = batch(shape)
    d = {**d, "mask": d["mask"].float(), "advantages": torch.full(shape, advantage)}
    loss, _ = losses.compute_policy_loss_kl_cov(
        d["logprobs"], d["old"], d["advantages"], CONFIG, d["mask"]
    )
    torch.testing.assert_close(loss, skyrl_kl_cov(d), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("advantage", [0.1, 0.7311, -1.2247])
@pytest.mark.parametrize("shape", [(17, 2), (1, 300), (5, 33)])
def test_clip_cov_selects_the_tokens_of_skyrl_where_all_advantages_are_equal(
    shape: tuple[int, int], advantage: float
) -> None:
    bounds = SimpleNamespace(clip_ratio=0.3, clip_cov_lb=0.0, clip_cov_ub=5.0)
    config = SimpleNamespace(**{**vars(CONFIG), "clip_cov": bounds})
    d = batch(shape)
    d = {**d, "mask": d["mask"].float(), "advantages": torch.full(shape, advantage)}
    torch.manual_seed(3)
    loss, _ = losses.compute_policy_loss_clip_cov(
        d["logprobs"], d["old"], d["advantages"], config, d["mask"]
    )
    torch.manual_seed(3)
    torch.testing.assert_close(loss, skyrl_clip_cov(d, config), rtol=2e-6, atol=1e-6)
