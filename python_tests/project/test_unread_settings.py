"""Settings that nothing in a run reads are named at its start, by one table."""

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from _features import ALGORITHM, BASE, ENGINE, EXAMPLES, LORA
from helpers._fakes import tiny_model
from helpers._trees import agent_batch

import skyrl_fast
from skyrl_fast.config import AlgorithmConfig, Config, SamplingParams, estimator_settings
from skyrl_fast.config.features import FEATURES
from skyrl_fast.config.parse import as_config, read_yaml
from skyrl_fast.config.settings import GeneratorConfig, leaves
from skyrl_fast.config.unread import (
    EVALUATION,
    READERS,
    Reader,
    unread_settings,
    warn_of_unread_settings,
)
from skyrl_fast.ops.advantage.estimators import ADVANTAGE_ESTIMATORS
from skyrl_fast.ops.policy_loss.losses import POLICY_LOSSES
from skyrl_fast.train.algorithm.advantages import compute_advantages
from skyrl_fast.train.model.policy import Policy
from skyrl_fast.train.update import accumulate_gradient

skyrl_fast.register_policy_loss("registered_here")(lambda inputs: -inputs.logprobs)

ROOT = Path(__file__).parents[2]
KL = {f"{ALGORITHM}.use_kl_loss": True}
CORRECTION = f"{ALGORITHM}.off_policy_correction"
# What makes a run read the settings of an entry, by a setting of it where features do not say it.
READ_WITH: Mapping[str, Mapping[str, Any]] = {
    f"{ALGORITHM}.max_seq_len": {f"{ALGORITHM}.loss_reduction": "seq_mean_token_sum_norm"},
    f"{ALGORITHM}.kl_loss_coef": KL,
    f"{ALGORITHM}.kl_estimator_type": KL,
    f"{ALGORITHM}.kl_ctrl": {
        f"{ALGORITHM}.use_kl_in_reward": True,
        f"{ALGORITHM}.kl_ctrl.type": "adaptive",
    },
    f"{ALGORITHM}.kl_ctrl.kl_target": {
        f"{ALGORITHM}.use_kl_in_reward": True,
        f"{ALGORITHM}.kl_ctrl.type": "adaptive",
    },
    f"{ALGORITHM}.entropy_loss_coef": EXAMPLES["entropy loss"],
    f"{ALGORITHM}.sequence_scope": EXAMPLES["zero-variance filter"],
    f"{CORRECTION}.token_tis_ratio_clip_high": {f"{CORRECTION}.tis_ratio_type": "token"},
    f"{CORRECTION}.sequence_tis_ratio_clip_high": {f"{CORRECTION}.tis_ratio_type": "sequence"},
    f"{CORRECTION}.geo_mask_high": {f"{CORRECTION}.sequence_mask_metric": "geometric"},
    f"{CORRECTION}.product_mask_high": {f"{CORRECTION}.sequence_mask_metric": "product"},
    f"{ALGORITHM}.dynamic_sampling.max_sample_batches": EXAMPLES["dynamic sampling"],
    f"{ALGORITHM}.dynamic_sampling.min_replace_ratio": {
        f"{ALGORITHM}.dynamic_sampling.type": "replace"
    },
    f"{ALGORITHM}.distillation.coef": {
        f"{ALGORITHM}.distillation.teachers": {"math": "http://127.0.0.1:8000", "code": "teacher"}
    },
    f"{ALGORITHM}.distillation.api_key_file": EXAMPLES["distillation"],
    f"{ALGORITHM}.distillation.engine_init_kwargs": EXAMPLES["teachers that the run starts"],
    f"{ALGORITHM}.value_clip": EXAMPLES["critic"],
    f"{LORA}.alpha": EXAMPLES["LoRA"],
    f"{LORA}.init_method": EXAMPLES["LoRA"],
    "trainer.resume_path": EXAMPLES["start from a checkpoint"],
    "trainer.fully_async.max_staleness_steps": {"trainer.fully_async.enabled": True},
    "trainer.fully_async.weight_update": {"trainer.fully_async.enabled": True},
    "generator.merge_drift": {"trainer.rows": "merged", "generator.merge_drift": "realign"},
    "generator.merge_max_drift_tokens": {
        "trainer.rows": "merged",
        "generator.merge_drift": "realign",
    },
    "trainer.project_name": {"trainer.logger": ["wandb"]},
    f"{ENGINE}.api_key_file": EXAMPLES["engines on servers"],
    "trainer.eval_interval": {"data.val_data": ["validation.jsonl"]},
    "generator.compaction": EXAMPLES["compaction"],
    "generator.compaction.budget": EXAMPLES["compaction"],
    "generator.sampling_params.max_kept_tokens": {"generator.sampling_params.top_p": 0.9},
    "agent.model": EXAMPLES["agent function"],
    "agent.untrained_models": EXAMPLES["agent function"],
}
# What makes a run not read them, where the default settings do.
UNREAD_WITH: Mapping[str, Mapping[str, Any]] = {
    f"{ALGORITHM}.advantage_batch_normalize": {f"{ALGORITHM}.advantage_estimator": "gae"},
    f"{LORA}.init_method": {f"{LORA}.rank": 4, f"{LORA}.path": "adapter"},
    "trainer.fully_async.weight_update": {
        "trainer.fully_async.enabled": True,
        "trainer.fully_async.max_staleness_steps": 0,
    },
    "generator.merge_max_drift_tokens": {"trainer.rows": "merged"},
    "generator.compaction.budget": {
        "generator.context": "compact",
        "generator.compaction.policy": "module:function",
    },
    f"{ALGORITHM}.kl_ctrl.kl_target": EXAMPLES["KL in the reward"],
    f"{ALGORITHM}.distillation.api_key_file": EXAMPLES["teachers that the run starts"],
    f"{ALGORITHM}.distillation.engine_init_kwargs": EXAMPLES["distillation"],
    "agent.model": {"agent.function": "m:f", "trainer.policy.roles": ["white", "black"]},
    "generator.context": EXAMPLES["agent function"],
    "generator.eval_sampling_params.max_kept_tokens": {"data.val_data": ["validation.jsonl"]},
}
# Values of settings for which the default's type or choices do not give another one.
VALUES: Mapping[str, Any] = {
    "trainer.critic.optimizer_config.offload_after_step": True,
    f"{ALGORITHM}.gdpo_weights": {"correct": 1.0},
    f"{ALGORITHM}.max_seq_len": 100,
    f"{ALGORITHM}.sequence_scope": "row",
    f"{ALGORITHM}.distillation.api_key_file": "key",
    "trainer.critic_mini_batch_size": 32,
    "trainer.critic.optimizer_config.adam_betas": [0.9, 0.95],
    "trainer.ref.model.path": "reference",
    "trainer.resume_path": "checkpoint",
    f"{ENGINE}.api_key_file": "key",
    "generator.compaction.budget": 100,
    "generator.compaction.request": "Write a summary.",
    "generator.compaction.max_summaries": 2,
    "generator.compaction.policy": "module:function",
    "generator.skip_special_tokens": True,
    "generator.context": "retemplate",
    "generator.eval_sampling_params.stop": ["stop"],
    "agent.host": "0.0.0.0",
}


def settings_of(reader: Reader) -> dict[str, Any]:
    """Return another value for each setting of an entry that can have one."""
    complete = Config(generator=GeneratorConfig(eval_sampling_params=SamplingParams()))
    result = {}
    for key, default, item in leaves(complete):
        if reader.covers(key) and default is not True:  # false asks for nothing
            result[key] = VALUES[key] if key in VALUES else _other(default, item.metadata)
    return result


def _other(default: Any, limits: Mapping[str, Any]) -> Any:
    if limits.get("choices"):
        return next(choice for choice in limits["choices"] if choice not in (default, None))
    if default is False:
        return True
    if isinstance(default, float):
        return default / 2 + 0.25 if default != 0.5 else 0.75
    if isinstance(default, int):
        return default + 7
    if isinstance(default, str):
        return f"{default}_2"
    if isinstance(default, list):
        return ["other"]
    assert isinstance(default, dict), default
    return {"other": 1}


def unread(*given: Mapping[str, Any]) -> str:
    merged: dict[str, Any] = dict(BASE)
    for settings in given:
        merged |= settings
    return "; ".join(unread_settings(as_config(merged)))


def _first_choice(reader: Reader) -> Mapping[str, Any]:
    """Return the first loss or estimator that the words of a derived entry name."""
    name = reader.words.rpartition("=")[2].partition(",")[0].partition(" ")[0]
    table = "policy_loss_type" if name in POLICY_LOSSES else "advantage_estimator"
    assert name in (*POLICY_LOSSES, *ADVANTAGE_ESTIMATORS)
    return {f"{ALGORITHM}.{table}": name}


def _off_choice(key: str) -> Mapping[str, Any]:
    """Return a loss and an estimator that read none of a derived entry's settings."""
    name = key.rpartition(".")[2]
    estimators = []
    for spec in ADVANTAGE_ESTIMATORS.values():
        if name not in spec.settings.values():
            estimators.append(spec.name)
    return {
        f"{ALGORITHM}.policy_loss_type": "importance_sampling",
        f"{ALGORITHM}.advantage_estimator": estimators[0],
    }


def _is_derived(reader: Reader) -> bool:
    tables = ("policy_loss_type", "advantage_estimator")
    return reader.words.startswith(tuple(f"without {ALGORITHM}.{table}=" for table in tables))


@pytest.mark.spec("run.unread-settings")
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.words)
def test_each_entry_warns_exactly_where_nothing_reads_its_settings(reader: Reader) -> None:
    first = reader.settings[0]
    values = settings_of(reader)
    for name in reader.settings:
        assert any(key == name or key.startswith(f"{name}.") for key in values), name
    if _is_derived(reader):
        off = _off_choice(first)
        on = _first_choice(reader)
    else:
        off = UNREAD_WITH.get(first, {})
        on = READ_WITH.get(first, {})
    for key, value in values.items():
        if key in off or key in on:
            continue
        assert f"{key}={_shown(value)}" in unread({key: value}, off), key
        assert unread({key: value}, off).endswith(reader.words), key
        if key != "generator.eval_sampling_params.max_kept_tokens":  # never read
            assert unread({key: value}, on) == "", key


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@pytest.mark.spec("run.unread-settings")
def test_one_line_names_all_settings_with_what_would_read_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    given = {
        f"{ALGORITHM}.kl_loss_coef": 0.5,
        f"{ALGORITHM}.entropy_loss_coef": 0.1,
        f"{LORA}.alpha": 32,
        f"{LORA}.target_modules": ["q_proj"],
    }
    with caplog.at_level(logging.WARNING):
        warn_of_unread_settings(as_config({**BASE, **given}))
    (record,) = caplog.records
    assert record.getMessage() == (
        "settings without effect: trainer.policy.model.lora.alpha=32, "
        "trainer.policy.model.lora.target_modules=['q_proj'] have no effect without "
        "trainer.policy.model.lora.rank (more than 0); trainer.algorithm.kl_loss_coef=0.5 has no "
        "effect without trainer.algorithm.use_kl_loss=true or "
        "trainer.algorithm.use_kl_in_reward=true; trainer.algorithm.entropy_loss_coef=0.1 has no "
        "effect without trainer.algorithm.use_entropy_loss=true"
    )


def test_defaults_and_values_that_ask_for_nothing_are_not_named() -> None:
    written = {key: value for key, value, _ in leaves(as_config(BASE)) if value is not None}
    assert unread(written) == ""
    off = {
        f"{ALGORITHM}.kl_loss_coef": 0.0,
        f"{ALGORITHM}.entropy_loss_coef": 0.0,
        f"{ALGORITHM}.value_clip": None,
        f"{ALGORITHM}.grpo_norm_by_std": False,
        f"{ALGORITHM}.advantage_estimator": "rloo",
        "trainer.fully_async.max_staleness_steps": 0,
        "trainer.eval_interval": -1,
    }
    assert unread(off) == ""


def test_prompts_in_memory_read_the_settings_of_evaluation() -> None:
    config = as_config({**BASE, "trainer.eval_interval": 2})
    assert unread_settings(config) == [f"trainer.eval_interval=2 has no effect {EVALUATION.words}"]
    assert unread_settings(config, has_eval_prompts=True) == []


def test_a_secret_of_the_environment_is_shown_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "a secret")
    settings = read_yaml(None, ["agent.host=${oc.env:JUDGE_KEY}"])
    (sentence,) = unread_settings(as_config(settings))
    assert sentence.startswith("agent.host=${oc.env:JUDGE_KEY} has no effect")


def _recipes() -> Iterator[Path]:
    for path in sorted([*ROOT.glob("examples/**/*.yaml"), *ROOT.glob("skyrl_fast/**/*.yaml")]):
        if "trainer" in (yaml.safe_load(path.read_text()) or {}):
            yield path


def test_no_recipe_of_the_repository_is_warned_of() -> None:
    recipes = list(_recipes())
    assert len(recipes) > 15
    for path in recipes:
        assert unread_settings(as_config(read_yaml(path))) == [], path


def test_only_features_that_wait_for_another_are_turned_on_in_vain() -> None:
    vain = []
    for name, feature in FEATURES.items():
        if not feature.needs and unread(EXAMPLES[name]):  # with needs: refused alone
            vain.append(name)
    assert vain == ["realigned tokens", "checkpoint to start from"]


@pytest.mark.parametrize(
    "options",
    [
        {"kl_loss_coef": 0.5},
        {"kl_estimator_type": "k1"},
        {"entropy_loss_coef": 0.5},
        {"clip_ratio_c": 7.0},
        {"value_clip": 0.9},
        {"max_seq_len": 7},
        {"sequence_scope": "row"},
        {"gamma": 0.5},
    ],
    ids=lambda options: next(iter(options)),
)
def test_a_setting_that_is_named_changes_neither_loss_nor_gradient(options: dict[str, Any]) -> None:
    assert unread({f"{ALGORITHM}.{key}": value for key, value in options.items()})
    plain = _loss_and_gradient(AlgorithmConfig())
    changed = _loss_and_gradient(AlgorithmConfig(**options))
    assert plain[0] == changed[0]
    assert torch.equal(plain[1], changed[1])
    assert plain[1].abs().sum() > 0


def test_the_same_setting_changes_the_loss_once_it_is_read() -> None:
    on = AlgorithmConfig(use_entropy_loss=True)
    more = AlgorithmConfig(use_entropy_loss=True, entropy_loss_coef=0.5)
    assert not torch.equal(_loss_and_gradient(on)[1], _loss_and_gradient(more)[1])


def _loss_and_gradient(algorithm: AlgorithmConfig) -> tuple[float, torch.Tensor]:
    batch = agent_batch(3, stripped=0.0).with_(advantages=None)
    batch = compute_advantages(
        batch, estimator=algorithm.advantage_estimator, **estimator_settings(algorithm)
    )
    model = tiny_model(dtype=torch.float64)
    policy = Policy(model, max_tokens_per_microbatch=64)
    metrics = accumulate_gradient(policy, batch, algorithm=algorithm)
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    return metrics["policy/loss"], gradient
