"""The steps of SkyRL's trainer from a generator output to scaled advantages, against SkyRL."""

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from skyrl_fast.integrations.skyrl.replacement import ORIGINALS

pytestmark = [pytest.mark.spec("dropin.compat"), pytest.mark.peers]
STEPS = ("postprocess_generator_output", "convert_to_training_input",
         "compute_advantages_and_returns", "_normalize_advantages")  # fmt: skip


@pytest.fixture(autouse=True)
def not_installed() -> Any:
    pytest.importorskip("skyrl.train.trainer", reason="SkyRL is not installed")
    from skyrl_fast.integrations.skyrl import uninstall

    uninstall()
    yield
    uninstall()


def trainer(dp_size: int, reduction: str, *, prompts: int, **changes: Any) -> Any:
    """Return the attributes of SkyRL's trainer that the steps read."""
    algorithm = SimpleNamespace(
        zero_variance_filter=False, max_seq_len=19, advantage_batch_normalize=False,
        off_policy_correction=SimpleNamespace(tis_ratio_type=None, sequence_mask_metric=None),
        advantage_estimator="grpo", gamma=1.0, lambd=1.0, grpo_norm_by_std=True,
        loss_reduction=reduction,
    )  # fmt: skip
    vars(algorithm).update(changes)
    generator = SimpleNamespace(
        step_wise_trajectories=True, merge_stepwise_output=False, n_samples_per_prompt=3
    )
    settings = SimpleNamespace(
        algorithm=algorithm, train_batch_size=prompts, policy_mini_batch_size=prompts // 2,
        critic=SimpleNamespace(model=SimpleNamespace(path=None)), micro_train_batch_size_per_gpu=2,
    )  # fmt: skip
    return SimpleNamespace(
        cfg=SimpleNamespace(generator=generator, trainer=settings), all_metrics={},
        tokenizer=SimpleNamespace(pad_token_id=7),
        dispatch=SimpleNamespace(get_lcm_dp_size=lambda: dp_size),
    )  # fmt: skip


def output(seed: int, *, per_token: bool) -> tuple[dict[str, Any], list[str]]:
    """Four prompts of three trajectories, whose contexts grow by shared objects."""
    from skyrl.train.generators.base import TrajectoryID

    rng = np.random.default_rng(seed)
    names = ("prompt_token_ids", "response_ids", "loss_masks", "rewards", "rollout_logprobs")
    out: dict[str, Any] = {name: [] for name in (*names, "trajectory_ids", "is_last_step")}
    for j in range(12):
        context, steps = rng.integers(300, 9000, rng.integers(1, 6)).tolist(), rng.integers(1, 5)
        for k in range(steps):
            response = rng.integers(300, 9000, rng.integers(1, 7)).tolist()
            out["prompt_token_ids"].append(context)
            out["response_ids"].append(response)
            out["loss_masks"].append(rng.integers(0, 2, len(response)).tolist())
            reward = rng.normal(size=len(response)).tolist() if per_token else [0.0] * len(response)
            reward[-1] = float(rng.integers(0, 2)) if k + 1 == steps and not per_token else 0.0
            out["rewards"].append(reward)
            out["rollout_logprobs"].append((-rng.random(len(response))).tolist())
            out["trajectory_ids"].append(TrajectoryID(f"p{j // 3}", j % 3))
            out["is_last_step"].append(bool(k + 1 == steps))
            context = context + response + rng.integers(300, 9000, 2).tolist()
    out |= {"stop_reasons": ["stop"] * len(out["rewards"]), "rollout_metrics": {}}
    return out, [f"{i.instance_id}" for i in out["trajectory_ids"]]


def run(stub: Any, generator_output: dict[str, Any], uids: list[str]) -> Any:
    from skyrl.train.trainer import RayPPOTrainer

    generator_output, uids = RayPPOTrainer.postprocess_generator_output(
        stub, dict(generator_output), uids
    )
    batch = RayPPOTrainer.convert_to_training_input(stub, generator_output, uids)
    batch["values"] = None
    batch = RayPPOTrainer.compute_advantages_and_returns(stub, batch)
    return RayPPOTrainer._normalize_advantages(
        stub, batch, batch.metadata["policy_mini_batch_boundaries"],
        batch.metadata["policy_prompt_boundaries"],
    )  # fmt: skip


def assert_same_batches(got: Any, want: Any) -> None:
    assert type(got) is type(want) and list(got) == list(want)
    for name, value in want.items():
        assert (got[name] is None) == (value is None), name
        if value is not None:
            assert got[name].dtype == value.dtype and torch.equal(got[name], value), name
            assert got[name].is_contiguous()
    metrics, want_metrics = got.metadata.pop("metrics"), want.metadata.pop("metrics")
    assert got.metadata == want.metadata
    assert metrics == pytest.approx(want_metrics, rel=1e-5, abs=1e-7)


@pytest.mark.spec("dropin.tolerance")
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("dp_size", [1, 3, 64])
@pytest.mark.parametrize(
    "reduction", ["token_mean", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean"]
)
def test_all_steps_give_the_same_batch(reduction: str, dp_size: int, per_token: bool) -> None:
    from skyrl_fast.integrations import skyrl as ours

    for seed in range(3):
        rows, uids = output(seed, per_token=per_token)
        stubs = [trainer(dp_size, reduction, prompts=4) for _ in range(2)]
        want = run(stubs[0], copy.deepcopy(rows), uids)
        ours.install(ray_workers=False)
        before = {f"RayPPOTrainer.{s}": ORIGINALS.counts[f"RayPPOTrainer.{s}"].handed_back
                  for s in STEPS}  # fmt: skip
        got = run(stubs[1], copy.deepcopy(rows), uids)
        for name, count in before.items():
            assert ORIGINALS.counts[name].handed_back == count, ORIGINALS.counts[name].last_reason
        ours.uninstall()
        assert_same_batches(got, want)
        assert stubs[1].all_metrics == pytest.approx(stubs[0].all_metrics, rel=1e-5, abs=1e-7)


def test_normalized_advantages_and_unusual_outputs_equal_skyrl() -> None:
    from skyrl_fast.integrations import skyrl as ours

    rows, uids = output(0, per_token=False)
    broken = copy.deepcopy(rows)
    broken["stop_reasons"].append("stop")  # SkyRL looks for its is_last_step
    results = []
    for installed in (False, True):
        if installed:
            ours.install(ray_workers=False)
        stub = trainer(8, "token_mean", prompts=4, advantage_batch_normalize=True)
        results.append(run(stub, copy.deepcopy(rows), uids))
        with pytest.raises(IndexError):
            run(stub, copy.deepcopy(broken), uids)
    assert_same_batches(results[1], results[0])


def test_user_defined_reduction_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    from skyrl.train import trainer as module

    from skyrl_fast.integrations import skyrl as ours

    monkeypatch.setattr(
        module, "apply_loss_reduction_to_advantages_minibatch",
        lambda advantages, **_: torch.full_like(advantages, 5.0),
    )  # fmt: skip
    ours.install(ray_workers=False)
    rows, uids = output(0, per_token=False)
    batch = run(trainer(1, "token_mean", prompts=4), rows, uids)
    assert bool((batch["advantages"] == 5.0).all())


def test_padding_outside_a_conversion_copies() -> None:
    from skyrl_fast.integrations import skyrl as ours

    ours.install(ray_workers=False)
    rows, uids = output(0, per_token=False)
    batch = run(trainer(1, "token_mean", prompts=4), rows, uids)
    padded = ours.pad_training_input_batch(batch, 2)
    padded["sequences"].zero_()
    assert bool((batch["sequences"] != 0).any())
