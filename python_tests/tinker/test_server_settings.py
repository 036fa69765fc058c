"""Each of the trainer's settings applies to a server, or is refused with a reason."""

import itertools
import re
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from skyrl_fast.commands.tinker import make_config
from skyrl_fast.config import Config
from skyrl_fast.config.settings import leaves
from skyrl_fast.rollout.engine.vllm_start import engine_args, engine_environment
from skyrl_fast.tinker.settings import APPLIED, WITHOUT_MEANING, check_settings, reason_without
from skyrl_fast.tinker.start import TinkerOptions, make_service
from skyrl_fast.tinker.training import AdapterForm

ROOT = Path(__file__).parents[2]
NAMES = [name for name, _, _ in leaves(Config())]


def with_value(section: Any, name: str, value: Any) -> Any:
    """Return a copy of a section in which the setting of a dotted name has another value."""
    first, _, rest = name.partition(".")
    if rest:
        value = with_value(getattr(section, first), rest, value)
    return replace(section, **{first: value})


@pytest.mark.spec("tinker.settings")
@pytest.mark.parametrize("name", NAMES)
def test_a_setting_applies_or_is_refused_with_its_reason(name: str) -> None:
    defaults = make_config("m", [])
    config = with_value(defaults, name, "another value")
    reason = reason_without(name)
    if reason is None:
        check_settings(config, defaults)
    else:
        with pytest.raises(ValueError, match="has no meaning for skyrl-fast tinker") as caught:
            check_settings(config, defaults)
        text = str(caught.value)
        assert text.startswith(f"{name}: ") and reason in text and text.endswith("another value")


def test_the_table_names_settings_and_sections_only() -> None:
    assert not APPLIED - set(NAMES)
    sections = {
        name.rpartition(".")[0] for name in itertools.chain(NAMES, (f"{n}.x" for n in NAMES))
    }
    above = {section.rpartition(".")[0] for section in sections}
    assert not WITHOUT_MEANING.keys() - (sections | above)
    assert not APPLIED & WITHOUT_MEANING.keys()


def test_settings_that_apply_are_read(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of them would be dropped silently."""
    pytest.importorskip("tinker", reason="the Tinker SDK is not installed")
    config = make_config(str(tiny_model_folder), ["generator.inference_engine.gpu_ids=[0]"])
    read: set[str] = set()

    def watch(section: Any, prefix: str) -> None:
        kind = type(section)
        usual = kind.__getattribute__

        def record(one: Any, name: str) -> Any:
            read.add(f"{prefix}.{name}")
            return usual(one, name)

        for name in kind.__dataclass_fields__:
            if is_dataclass(value := getattr(section, name)):
                watch(value, f"{prefix}.{name}".lstrip("."))
        monkeypatch.setattr(kind, "__getattribute__", record)

    for name in ("trainer", "generator"):
        watch(getattr(config, name), name)
    service = make_service(config, TinkerOptions(folder=tmp_path))
    setup = service._sampler.engine._setup
    service.models._shared.trainer.create(AdapterForm(2), seed=0)
    engine_environment(setup)
    for on_cpu in (True, False):
        monkeypatch.setattr(type(setup), "computes_on_cpu", property(lambda _, is_so=on_cpu: is_so))
        engine_args(setup)
    assert not APPLIED - read


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trainer.epochs=2", "trainer.epochs: has no meaning .* program's own; got 2"),
        ("trainer.policy.model.lora.rank=8", "up to --max-rank; got 8"),
        ("trainer.policy.model.path=other", "the command's MODEL is it; got other"),
        ("generator.sampling_params.temperature=0.5", "with each call; got 0.5"),
        ("generator.inference_engine.num_engines=2", "starts one engine"),
        ("trainer.algorithm.policy_loss_type=gspo", "name loss, thresholds"),
    ],
)
def test_the_command_refuses_what_would_have_no_effect(override: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_config("m", [override])


def test_the_command_takes_what_applies() -> None:
    config = make_config("m", ["trainer.seed=3", "trainer.policy.model.lora.alpha=8"])
    assert config.trainer.seed == 3
    assert config.trainer.policy.model.lora.alpha == 8
    assert make_config("m", []).trainer.policy.model.lora.alpha == 32
    # What has no meaning, but is as it is anyway.
    assert make_config("m", ["trainer.epochs=1"]).trainer.epochs == 1


def test_the_guide_lists_what_applies() -> None:
    guide = (ROOT / "docs/guide/tinker.md").read_text()
    table = guide.partition("these apply:")[2].partition("Any other is refused")[0]
    named = {one.rpartition(".")[2] for one in re.findall(r"`([\w.]+)`", table)}
    assert named == {name.rpartition(".")[2] for name in APPLIED} | {"inference_engine"}
