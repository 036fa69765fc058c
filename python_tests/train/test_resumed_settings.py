"""What a resumed run says of settings that differ, and which of them it keeps."""

from pathlib import Path
from typing import Any

import pytest

from skyrl_fast.config import as_config, to_dict
from skyrl_fast.train.checkpoint.resumed_settings import find_changed_settings, with_kept_settings
from skyrl_fast.train.checkpoint.starting_point import StartingPoint, warn_of_another_schedule

THINKING = "generator.chat_template_kwargs"


@pytest.mark.spec("run.changed-settings")
@pytest.mark.parametrize(
    ("key", "before", "now"),
    [
        (THINKING, {}, {"enable_thinking": False}),
        (THINKING, {"enable_thinking": False}, {}),
        (THINKING, {"enable_thinking": False}, {"thinking": False}),
        (THINKING, {"enable_thinking": False}, {"enable_thinking": True}),
        ("generator.sampling_params.additional_kwargs", {}, {"min_tokens": 5}),
        ("trainer.algorithm.policy_loss_kwargs", {}, {"beta": 3.0}),
        ("environment.skyrl_gym.text2sql", {}, {"db_path": "other"}),
        ("agent.upstreams", {}, {"judge": {"base_url": "http://x/v1"}}),
    ],
)
def test_keys_of_mappings_are_compared(key: str, before: Any, now: Any) -> None:
    saved, resumed = (to_dict(as_config({key: value})) for value in (before, now))
    found = find_changed_settings(saved, resumed)
    assert found and all(name.startswith(key) for name in found)
    assert not find_changed_settings(saved, saved)


def test_settings_that_a_version_does_not_have_are_ignored() -> None:
    now = to_dict(as_config({}))
    saved = {**now, "generator": {k: v for k, v in now["generator"].items() if k != "max_turns"}}
    saved["trainer"] = {**now["trainer"], "of_another_version": 3}
    assert find_changed_settings(saved, now) == {}


@pytest.mark.spec("run.same-schedule")
@pytest.mark.parametrize("model", ["policy", "critic"])
def test_another_length_is_warned_of_for_each_schedule(
    model: str, caplog: pytest.LogCaptureFixture
) -> None:
    def settings(epochs: int) -> Any:
        return as_config(
            {
                "trainer.epochs": epochs,
                "trainer.critic.model.path": "m",
                f"trainer.{model}.optimizer_config.scheduler": "linear",
            }
        )

    start = StartingPoint(Path("x"), {"step": 1, "config": to_dict(settings(1))})
    warn_of_another_schedule(settings(4), start, 640)
    named = "linear schedule" if model == "policy" else "linear (critic) schedule"
    assert named in caplog.text
    assert "had 10 steps and now has 40" in caplog.text


def test_what_stays_is_what_the_run_reads(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    path = "trainer.policy.model.path"
    saved = to_dict(as_config({path: str(tmp_path / "first"), "trainer.epochs": 1}))
    now = as_config({path: str(tmp_path / "second"), "trainer.epochs": 2})
    kept = with_kept_settings(now, saved)
    assert kept.trainer.policy.model.path == str(tmp_path / "first")
    assert kept.trainer.epochs == 2


def test_a_first_model_that_is_gone_is_replaced_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = "trainer.policy.model.path"
    saved = to_dict(as_config({path: str(tmp_path / "gone")}))
    kept = with_kept_settings(as_config({path: "here"}), saved)
    assert kept.trainer.policy.model.path == "here"
    assert f"{tmp_path / 'gone'}, is gone" in caplog.text
