"""The trainer's step equals the reference, which is written from the specification alone."""

import ast
import dataclasses
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import reference
from _compared import Folders, compare, settings_of, write_models
from reference.advantages import compute_advantages
from reference.rows import Row, Sample, build_rows, complete_parts
from reference.update import learning_rate, mini_batches

from skyrl_fast.config import OptimizerConfig, check_config
from skyrl_fast.config.parse import as_config
from skyrl_fast.rollout.trajectory import Step, Trajectory

ALGORITHM = "trainer.algorithm"
CORRECTION = f"{ALGORITHM}.off_policy_correction"
LORA = "trainer.policy.model.lora"
DATA_TYPES = {
    ("skyrl_fast.rollout.trajectory", "Step"),
    ("skyrl_fast.rollout.trajectory", "Trajectory"),
}
SEED = 11


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return write_models(tmp_path_factory.mktemp("models"))


def test_the_reference_imports_types_of_data_alone() -> None:
    imported = set()
    (folder,) = reference.__path__
    files = sorted(Path(folder).glob("*.py"))
    assert len(files) > 5
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert node.module is not None and not node.level
                imported |= {(node.module, alias.name) for alias in node.names}
            elif isinstance(node, ast.Import):
                imported |= {(alias.name, "") for alias in node.names}
    own = {pair for pair in imported if pair[0].split(".")[0] == "skyrl_fast"}
    assert own == DATA_TYPES


# --- the reference itself: the worked examples of the specification --------------------------


def row(
    number: int, reward: float, *, mask: tuple[int, ...] = (1,), is_last: bool = True, **more: Any
) -> Row:
    length = len(mask)
    rewards = more.pop("rewards", [0.0] * (length - 1) + [reward])
    made = Row(
        "a", number, [1], [5] * length, list(mask), [-1.0] * length, list(rewards), "stop", **more
    )
    return dataclasses.replace(made, is_last=is_last)


def algorithm(estimator: str, **more: Any) -> Any:
    values = {
        "advantage_estimator": estimator,
        "advantage_batch_normalize": False,
        "grpo_norm_by_std": True,
        "gamma": 1.0,
        "turn_level_baseline": "turn",
        **more,
    }
    return SimpleNamespace(
        trainer=SimpleNamespace(algorithm=SimpleNamespace(**values)),
        generator=SimpleNamespace(n_samples_per_prompt=2),
    )


def test_outcomes_of_the_worked_example() -> None:
    rows = [row(0, 0.0, is_last=False), row(0, 1.0)]
    rows += [row(1, 0.0, is_last=False), row(1, 0.0, is_last=False), row(1, 0.0)]
    expected = {"grpo": 0.70710, "rloo": 1.0, "dr_grpo": 0.5, "maxrl": 0.999998}
    for estimator, value in expected.items():
        found = compute_advantages(rows, algorithm(estimator)).values
        signs = [value, value, -value, -value, -value]
        assert [one for (one,) in found] == pytest.approx(signs, abs=1e-5), estimator


def test_parts_of_the_worked_example() -> None:
    reports = [("a", 0.0, 0.0), ("a", 1.0, 0.0), ("b", 0.0, 0.0), ("b", 1.0, 1.0)]
    rows = [
        dataclasses.replace(row(number, 0.0), uid=uid, reported={"first": first, "second": second})
        for number, (uid, first, second) in enumerate(reports)
    ]
    settings = algorithm("gdpo", gdpo_weights={"first": 1.0, "second": 1.0})
    found = compute_advantages(rows, settings).values
    expected = [-0.54772, 0.54772, -1.09545, 1.09545]
    assert [one for (one,) in found] == pytest.approx(expected, abs=1e-5)


def test_turns_of_the_worked_example() -> None:
    rewards = [[1, 2], [4], [0, 0, 6]]
    rows = [
        row(number, float(reward), is_last=turn == len(own) - 1)
        for number, own in enumerate(rewards)
        for turn, reward in enumerate(own)
    ]
    expected = {"turn": [-2, -1, -0.5, 2.5, 5, 6], "episode": [-2, -3, -0.5, 2.5, 2.5, 2.5]}
    for baseline, values in expected.items():
        settings = algorithm("turn_level_group", turn_level_baseline=baseline)
        found = compute_advantages(rows, settings).values
        assert [one for (one,) in found] == pytest.approx(values), baseline
    returns = compute_advantages(rows, algorithm("turn_level_returns")).values
    assert [one for (one,) in returns] == [3, 2, 4, 6, 6, 6]


def test_gae_of_the_worked_example() -> None:
    rows = [
        row(0, 0.0, mask=(1, 1, 0), rewards=[0.0, 1.0, 2.0], is_last=False),
        row(0, 0.0, mask=(1, 0), rewards=[0.0, 4.0]),
    ]
    settings = algorithm("gae", gamma=0.5, lambd=0.5)
    found = compute_advantages(rows, settings, [[1.0, 2.0, 0.0], [4.0, 0.0]])
    assert found.returns == [[1.75, 5.0, 0.0], [4.0, 0.0]]
    # The advantages 0.75, 3 and 0, normalized.
    trained = [found.values[0][0], found.values[0][1], found.values[1][0]]
    assert sum(trained) == pytest.approx(0)
    assert (trained[1] - trained[2]) / (trained[0] - trained[2]) == pytest.approx(4)


def test_mini_batches_of_the_worked_example() -> None:
    counts = {"p0": 4, "p1": 2, "p2": 3, "p3": 2}
    rows = [
        dataclasses.replace(row(0, 0.0), uid=uid)
        for uid, number in counts.items()
        for _ in range(number)
    ]
    assert mini_batches(rows, 2) == [list(range(6)), list(range(6, 11))]


def test_rates_of_warm_up_and_schedule() -> None:
    settings = OptimizerConfig(lr=1.0, num_warmup_steps=2, scheduler="linear")
    rates = [learning_rate(step, settings, 6) for step in range(6)]
    assert rates == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]


@pytest.mark.parametrize(("drift", "rows"), [("fork", 2), ("realign", 1)])
def test_a_drifted_answer_begins_a_row_or_is_realigned(drift: str, rows: int) -> None:
    def step(prompt: list[int], response: list[int]) -> Step:
        ones = [1] * len(response)
        logprobs = [-1.0] * len(response)
        return Step(prompt, response, ones, logprobs, 0.5, "stop", 0, "", "", 0.0, 0.0)

    both = Trajectory("a", 0, [step([1], [5, 6]), step([1, 5, 8, 3], [7])])
    sample = Sample(both, [[False], [False, True, True, False]])
    config = as_config({"trainer.rows": "merged", "generator.merge_drift": drift})
    found = build_rows(complete_parts([sample]), config, sums_rewards=False)
    assert len(found) == rows
    assert found[-1].response == ([5, 8, 3, 7] if rows == 1 else [7])
    assert found[-1].mask == ([1, 0, 0, 1] if rows == 1 else [1])
    assert found[-1].is_observed == ([False, False, True, False] if rows == 1 else [False])


# --- the trainer ------------------------------------------------------------------------------

STEPS: dict[str, dict[str, Any]] = {
    "outcomes, two epochs": {
        "trainer.update_epochs_per_batch": 2,
        "trainer.policy.optimizer_config.scheduler": "cosine",
        "trainer.policy.optimizer_config.num_warmup_steps": 2,
    },
    "realigned rows, observations, a correction, kl": {
        "trainer.rows": "merged",
        "generator.merge_drift": "realign",
        f"{ALGORITHM}.observation_loss_coef": 0.5,
        f"{ALGORITHM}.policy_loss_type": "gspo",
        f"{ALGORITHM}.use_kl_loss": True,
        f"{ALGORITHM}.kl_loss_coef": 0.3,
        f"{CORRECTION}.token_mask_is_threshold_high": 1.3,
    },
    "policies by states": {
        f"{LORA}.rank": 4,
        f"{LORA}.policies": ["planner", "worker"],
        f"{ALGORITHM}.advantage_estimator": "gigpo",
    },
    "trees, kept tokens, entropy": {
        "trainer.row_layout": "tree",
        "generator.sampling_params.top_k": 5,
        "generator.sampling_params.temperature": 0.7,
        f"{ALGORITHM}.use_entropy_loss": True,
        f"{ALGORITHM}.entropy_loss_coef": 0.3,
        "trainer.max_tokens_per_microbatch": 16,
    },
    "filters, kl in the reward": {
        f"{ALGORITHM}.use_kl_in_reward": True,
        f"{ALGORITHM}.kl_loss_coef": 0.3,
        f"{ALGORITHM}.kl_ctrl.type": "adaptive",
        f"{ALGORITHM}.kl_ctrl.horizon": 100,
        f"{ALGORITHM}.zero_variance_filter": True,
        "generator.apply_overlong_filtering": True,
        "generator.zero_reward_on_non_stop": True,
    },
}


@pytest.mark.spec("update.optimizer")
@pytest.mark.parametrize("name", [*STEPS, "critic"])
def test_steps_equal_the_reference(name: str, folders: Folders, tmp_path: Path) -> None:
    """Rows, advantages, gradients, weights and metrics of two steps."""
    settings = settings_of(folders, tmp_path) | STEPS.get(name, {})
    if name == "critic":
        settings |= {
            f"{ALGORITHM}.advantage_estimator": "gae",
            f"{ALGORITHM}.lambd": 0.7,
            "trainer.critic.model.path": str(folders.critic),
            "trainer.critic.optimizer_config.lr": 0.01,
        }
    else:
        settings["trainer.ref.model.path"] = str(folders.reference)
    if "policies" in name:
        settings["trainer.ref.model.path"] = None
    config = as_config(settings)
    check_config(config, has_prompts=True)
    found = compare(config, folders, random.Random(SEED), num_prompts=8)
    assert not found.differences, "\n".join(map(str, found.differences[:20]))
    assert found.values > 100
    assert found.gradients > 100
