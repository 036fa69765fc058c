"""Custom losses and estimators in the trainer, with public names only."""

from pathlib import Path
from typing import Any

import custom_algorithms
import pytest
import torch
from _training import folder as folder  # a fixture
from _training import settings, train

import skyrl_fast
from skyrl_fast import CustomLoss, EstimatorInputs, LossInputs, LossOutput, policy_loss
from skyrl_fast.config import ConfigError
from skyrl_fast.train.output.loggers import read_metrics

LOSS, ESTIMATOR = "trainer.algorithm.policy_loss_type", "trainer.algorithm.advantage_estimator"
SAME = ("policy/loss", "policy/grad_norm", "reward/avg_raw_reward", "policy/clip_ratio")
RANKS = "trainer.placement.policy_num_gpus_per_node=2"


def metrics_of(folder: Path, name: str, *overrides: str) -> list[dict[str, Any]]:
    few = ("trainer.max_training_steps=3", "trainer.policy.optimizer_config.lr=0.0003")
    run = settings(folder, name, *few, *overrides)
    return read_metrics(train(run).metrics)


def assert_same_curve(one: list[dict[str, Any]], two: list[dict[str, Any]]) -> None:
    assert len(one) == len(two) > 1
    for a, b in zip(one, two, strict=True):
        for name in a.keys() & b.keys() & set(SAME):
            # float32 sums in another order; from the second step on through Adam's square root
            assert b[name] == pytest.approx(a[name], rel=1e-3, abs=1e-5), name
    assert any(row.get("policy/grad_norm", 0) > 0 for row in one)


# --- losses in the trainer ------------------------------------------------------------------------

WAYS = {
    "rows": ("trainer.update_epochs_per_batch=2",),
    "tree": ("trainer.row_layout=tree", "trainer.update_epochs_per_batch=2"),
    "async": ("trainer.fully_async.enabled=true", "trainer.fully_async.max_staleness_steps=0"),
    "corrected": ("trainer.algorithm.off_policy_correction.tis_ratio_type=token",),
    "kl_and_entropy": (
        "trainer.algorithm.use_kl_loss=true",
        "trainer.algorithm.use_entropy_loss=true",
        "trainer.max_tokens_per_microbatch=30",
    ),
}


@pytest.mark.spec("loss.custom")
@pytest.mark.parametrize("way", WAYS)
def test_custom_loss_trains_like_the_built_in_one(folder: Path, way: str) -> None:
    wanted = metrics_of(folder, "built_in", *WAYS[way])
    got = metrics_of(folder, "user", f"{LOSS}=custom_algorithms:ppo", *WAYS[way])
    assert_same_curve(wanted, got)
    trained = [row for row in got if "policy/my_ratio_max" in row]
    assert trained
    for row in trained:
        assert row["policy/my_ratio_max"] == pytest.approx(row["policy/ratio_max"])
    if way == "rows":
        assert any(row["policy/my_ratio_max"] > 1 for row in trained)


@pytest.mark.spec("loss.custom-scope")
def test_sequence_scope_loss_keeps_trajectories_together(folder: Path) -> None:
    extra = ("trainer.update_epochs_per_batch=2", "trainer.max_tokens_per_microbatch=30")
    wanted = metrics_of(folder, "built_in", f"{LOSS}=gspo", *extra)
    got = metrics_of(folder, "user", f"{LOSS}=test_gspo", *extra)
    assert_same_curve(wanted, got)
    # the decorator's options also apply to module:function
    other = metrics_of(folder, "named", f"{LOSS}=custom_algorithms:gspo", *extra)
    for row, same in zip(wanted, other, strict=True):
        assert row.get("policy/num_micro_batches") == same.get("policy/num_micro_batches")


@pytest.mark.spec("loss.custom-scope")
def test_mini_batch_scope_loss_is_not_split(folder: Path) -> None:
    rows = metrics_of(
        folder, "user", f"{LOSS}=test_centred", "trainer.max_tokens_per_microbatch=30"
    )
    assert {row["policy/num_micro_batches"] for row in rows if "policy/loss" in row} == {1.0}


def test_loss_from_a_file_with_settings(folder: Path) -> None:
    """With a tiny eps almost every token is clipped, which shows that the settings are used."""
    path = folder / "mine.py"
    path.write_text("from custom_algorithms import *\n")
    given = ("trainer.algorithm.policy_loss_kwargs.eps=0.0001", "trainer.update_epochs_per_batch=2")
    got = metrics_of(folder, "user", f"{LOSS}={path}:ppo", *given)
    eps = ("trainer.algorithm.eps_clip_low=0.0001", "trainer.algorithm.eps_clip_high=0.0001")
    wanted = metrics_of(folder, "built_in", "trainer.update_epochs_per_batch=2", *eps)
    assert_same_curve(wanted, got)


def without_gradient(inputs: LossInputs) -> torch.Tensor:
    return -inputs.advantages * inputs.logprobs.detach()


def not_a_number(inputs: EstimatorInputs) -> torch.Tensor:
    return torch.full_like(inputs.rewards, float("nan"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            f"{LOSS}={__name__}:without_gradient",
            "without_gradient: expected losses with a gradient",
        ),
        (f"{ESTIMATOR}={__name__}:not_a_number", "not_a_number: expected finite advantages"),
    ],
)
def test_faults_of_a_users_function_have_its_name(
    override: str, message: str, folder: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        train(settings(folder, "run", override))


# --- outside the trainer -------------------------------------------------------------------------


def cells() -> dict[str, Any]:
    g = torch.Generator().manual_seed(0)
    logprobs, old, advantages = (torch.randn(3, 5, generator=g) for _ in range(3))
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [0, 0, 1, 1, 0]])
    return {"logprobs": logprobs, "old_logprobs": old, "advantages": advantages, "loss_mask": mask}


def test_policy_loss_accepts_a_custom_loss() -> None:
    results = []
    weights = torch.tensor([1.0, 0.0, 2.0, 1.0, 0.5]).expand(3, 5)
    for loss in ("regular", CustomLoss("ppo", custom_algorithms.ppo)):
        call = cells()
        call["logprobs"].requires_grad_()
        out = policy_loss(
            **call, loss=loss, token_weights=weights, ref_logprobs=call["old_logprobs"],
            kl_estimator="k3", kl_coef=0.3, reduction="sequence_mean",
        )  # fmt: skip
        out.loss.backward()
        results.append((out, call["logprobs"].grad))
    (a, a_grad), (b, b_grad) = results
    torch.testing.assert_close(a.loss, b.loss)
    torch.testing.assert_close(a_grad, b_grad)
    for name in ("kl_loss", "policy_loss", "clip_ratio", "clip_ratio_high", "ratio_mean"):
        torch.testing.assert_close(a.metrics[name], b.metrics[name], rtol=1e-6, atol=1e-7)
    assert "clip_ratio_low" not in b.metrics


def test_masked_and_dropped_tokens_do_not_contribute() -> None:
    call = cells()
    nan = float("nan")
    hidden = call["loss_mask"] == 0
    for name in ("logprobs", "old_logprobs", "advantages"):
        call[name][hidden] = nan
    call["advantages"][1, 1] = nan
    call["logprobs"].requires_grad_()
    weights = torch.ones(3, 5)
    weights[1, 1] = 0.0
    out = policy_loss(**call, loss=CustomLoss("ppo", custom_algorithms.ppo), token_weights=weights)
    out.loss.backward()
    assert out.loss.isfinite() and call["logprobs"].grad.isfinite().all()
    assert not call["logprobs"].grad[hidden].any() and call["logprobs"].grad[1, 1] == 0


BAD = [
    (lambda inputs: inputs.logprobs.mean(), ValueError, r"bad: .*shape \(15,\).*got \(\)"),
    (lambda inputs: 3.0, TypeError, "bad must return LossOutput or a tensor, got float"),
    (lambda inputs: inputs.loss_mask, TypeError, "bad: token_losses: expected a floating-point"),
    (lambda inputs: LossOutput(None), TypeError, "bad: token_losses: expected .*got NoneType"),
    (lambda inputs: 1 / 0, RuntimeError, "bad raised ZeroDivisionError: division by zero"),
    (
        lambda inputs: LossOutput(inputs.logprobs, {"x": torch.zeros(3)}),
        ValueError,
        r"bad: metric 'x': expected one number or shape \(15,\), got \(3,\)",
    ),
    (
        lambda inputs: LossOutput(inputs.logprobs, {"loss": 1.0}),
        ValueError,
        "bad: metric 'loss' is computed from token_losses",
    ),
]


@pytest.mark.spec("loss.custom-errors")
@pytest.mark.parametrize(("function", "error", "message"), BAD)
def test_invalid_loss_output_is_named(function: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        policy_loss(**cells(), loss=CustomLoss("bad", function))


# --- estimators in the trainer --------------------------------------------------------------------


@pytest.mark.spec("advantage.custom")
@pytest.mark.parametrize(
    "way", [(), ("trainer.row_layout=tree",), ("trainer.fully_async.enabled=true",)]
)
def test_custom_estimator_trains_like_the_built_in_one(folder: Path, way: tuple[str, ...]) -> None:
    stale = ("trainer.fully_async.max_staleness_steps=0",)
    wanted = metrics_of(folder, "built_in", f"{ESTIMATOR}=rloo", *way, *stale)
    got = metrics_of(folder, "user", f"{ESTIMATOR}=custom_algorithms:rloo", *way, *stale)
    assert_same_curve(wanted, got)


def test_custom_estimator_settings_and_normalization(folder: Path) -> None:
    normalized = ("trainer.algorithm.advantage_batch_normalize=true",)
    wanted = metrics_of(folder, "built_in", f"{ESTIMATOR}=rloo", *normalized)
    scale = "trainer.algorithm.advantage_estimator_kwargs.scale=8.0"  # removed by the normalization
    name = f"{ESTIMATOR}=custom_algorithms:rloo"
    assert_same_curve(wanted, metrics_of(folder, "user", name, scale, *normalized))


@pytest.mark.spec("advantage.custom")
def test_token_level_estimator(folder: Path) -> None:
    plain = metrics_of(folder, "user", f"{ESTIMATOR}=test_rewards_to_go")
    assert any(row.get("policy/grad_norm", 0) > 0 for row in plain)
    normalized = "trainer.algorithm.advantage_batch_normalize=true"
    wanted = metrics_of(folder, "built_in", f"{ESTIMATOR}=reinforce++")
    got = metrics_of(folder, "normalized", f"{ESTIMATOR}=test_rewards_to_go", normalized)
    assert_same_curve(wanted, got)


# --- names ----------------------------------------------------------------------------------------


def test_registering_returns_the_name_for_the_settings() -> None:
    def inner(inputs: LossInputs) -> torch.Tensor:
        return inputs.logprobs

    assert skyrl_fast.register_policy_loss(inner, name="test_inner") == "test_inner"
    ppo = custom_algorithms.ppo
    assert skyrl_fast.register_policy_loss(ppo, name="test_other") == "custom_algorithms:ppo"
    rloo = custom_algorithms.rloo
    assert skyrl_fast.register_advantage_estimator(rloo) == "custom_algorithms:rloo"
    for name in ("regular", "a:b"):
        with pytest.raises(ValueError, match=f"expected a name without a colon .*got '{name}'"):
            skyrl_fast.register_policy_loss(inner, name=name)
    with pytest.raises(ValueError, match="scope: expected one of"):
        skyrl_fast.register_policy_loss(inner, scope="batch")


MISTAKES = [
    (f"{LOSS}=regulr", r"one of regular, .* or module:function, got 'regulr' \(did you mean"),
    (f"{LOSS}=test_gsp", "test_gspo.*did you mean"),
    (f"{LOSS}=no_such_module:f", "cannot import 'no_such_module': ModuleNotFoundError"),
    (f"{LOSS}=custom_algorithms:gone", "'custom_algorithms' has no 'gone'"),
    (f"{LOSS}=custom_algorithms:torch", "expected a function, custom_algorithms:torch is module"),
    (f"{LOSS}=/no/such/file.py:f", "cannot import '/no/such/file.py': ImportError: no Python file"),
    (f"{ESTIMATOR}=grop", "did you mean 'grpo'"),
    (f"{ESTIMATOR}=custom_algorithms:gone", "'custom_algorithms' has no 'gone'"),
    (
        "trainer.algorithm.policy_loss_kwargs.eps=1",
        "policy_loss_kwargs: expected none with policy_loss_type=regular",
    ),
]


@pytest.mark.parametrize(("override", "message"), MISTAKES)
def test_invalid_names_are_refused_by_the_settings(
    folder: Path, override: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(folder, "run", override)


def test_unknown_function_settings_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"policy_loss_kwargs: custom_algorithms:ppo: .*'epss'"):
        settings(
            *(folder, "run", f"{LOSS}=custom_algorithms:ppo"),
            "trainer.algorithm.policy_loss_kwargs.epss=1",
        )
    with pytest.raises(ConfigError, match=r"advantage_estimator_kwargs: .*'scal'"):
        settings(
            *(folder, "run", f"{ESTIMATOR}=custom_algorithms:rloo"),
            "trainer.algorithm.advantage_estimator_kwargs.scal=1",
        )


def test_several_ranks_require_an_importable_name(folder: Path) -> None:
    message = "expected custom_algorithms:gspo with .*=2, as each rank imports .*, got test_gspo"
    with pytest.raises(ConfigError, match=message):
        settings(folder, "run", f"{LOSS}=test_gspo", RANKS)


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (
            lambda inputs: 3.0,
            TypeError,
            "test_bad must return EstimatorOutput or a tensor, got flo",
        ),
        (
            lambda inputs: torch.zeros(99),
            ValueError,
            r"test_bad: advantages: expected shape \(16,\) or \(\d+,\), got \(99,\)",
        ),
        (
            lambda inputs: inputs.group_ids,
            TypeError,
            "advantages: expected a floating-point tensor",
        ),
        (lambda inputs: 1 / 0, RuntimeError, "test_bad raised ZeroDivisionError"),
    ],
)
def test_invalid_estimator_output_is_named(
    folder: Path, function: Any, error: type, message: str
) -> None:
    name = skyrl_fast.register_advantage_estimator(function, name="test_bad")
    with pytest.raises(error, match=message):
        metrics_of(folder, "user", f"{ESTIMATOR}={name}", "generator.step_wise_trajectories=false")
