"""Settings that differ from those of the checkpoint that a run resumes from."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from helpers._training import fill, settings, train

from skyrl_fast.config import Config, to_dict
from skyrl_fast.config.loading import as_config
from skyrl_fast.train.checkpoint.resumed_settings import find_changed_settings

pytestmark = pytest.mark.spec("run.changed-settings")


def changed(**values: Any) -> list[str]:
    return list(find_changed_settings(to_dict(Config()), to_dict(as_config(values))))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trainer.policy.optimizer_config.lr", 0.5),
        ("trainer.algorithm.policy_loss_type", "gspo"),
        ("trainer.rows", "tree"),
        ("generator.sampling_params.top_p", 0.5),
        ("generator.inference_engine.model_dtype", "bfloat16"),
        ("environment.env_class", "other"),
    ],
)
def test_settings_that_change_what_is_trained_are_found(key: str, value: Any) -> None:
    assert changed(**{key: value}) == [key]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trainer.run_path", "elsewhere"),
        ("trainer.logger", ["wandb"]),
        ("trainer.eval_interval", 3),
        ("trainer.max_tokens_per_microbatch", 5),
        ("generator.inference_engine.num_threads", 2),
        ("generator.eval_sampling_params", {"temperature": 0.0}),
    ],
)
def test_other_settings_may_change(key: str, value: Any) -> None:
    assert changed(**{key: value}) == []


@pytest.mark.parametrize("saved", [None, [], "text", {"trainer": 3}, {"other": {"a": 1}}])
def test_settings_that_a_checkpoint_does_not_have_are_ignored(saved: Any) -> None:
    assert find_changed_settings(saved, to_dict(Config())) == {}


def test_resumed_run_warns_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = fill(tmp_path, monkeypatch, num_prompts=8)
    rate = "trainer.policy.optimizer_config.lr"
    train(settings(folder, "run", "trainer.max_training_steps=2", f"{rate}=0.001"))
    resumed = ("trainer.max_training_steps=3", "trainer.resume_mode=latest")
    with caplog.at_level(logging.WARNING):
        train(settings(folder, "run", *resumed, f"{rate}=0.002", "trainer.plot=false"))
    (warning,) = (r.getMessage() for r in caplog.records if "settings differ" in r.getMessage())
    assert warning.endswith(f"{rate}: 0.001 -> 0.002")
