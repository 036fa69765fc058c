"""A reference or critic reads the policy's token ids as the same tokens, or is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from skyrl_fast.config import as_config
from skyrl_fast.train.run import warn_of_the_reference
from skyrl_fast.train.setup.model_checks import check_models, check_vocabulary

SETTING = "trainer.ref.model.path"


def model(folder: Path, tokenizer: Any, size: int) -> Path:
    folder.mkdir()
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    values = {"model_type": "qwen2", "vocab_size": size}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def reversed_ids(tokenizer: Any) -> Any:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    state = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = state["model"]["vocab"]
    last = len(vocabulary) - 1
    state["model"]["vocab"] = {token: last - number for token, number in vocabulary.items()}
    made = Tokenizer.from_str(json.dumps(state))
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=tokenizer.eos_token)


def test_another_vocabulary_is_refused(tmp_path: Path, tiny_tokenizer: Any) -> None:
    size = len(tiny_tokenizer)
    policy = model(tmp_path / "policy", tiny_tokenizer, size)
    check_vocabulary(policy, model(tmp_path / "padded", tiny_tokenizer, size + 29), SETTING)
    check_vocabulary(policy, model(tmp_path / "without", None, size), SETTING)
    few = model(tmp_path / "few", None, 8)
    with pytest.raises(ValueError, match=rf"^{SETTING}: expected .* of {size} ids, got 8 in"):
        check_vocabulary(policy, few, SETTING)
    other = model(tmp_path / "other", reversed_ids(tiny_tokenizer), size)
    with pytest.raises(ValueError, match=rf"^{SETTING}: expected a model with the policy's token"):
        check_vocabulary(policy, other, SETTING)


@pytest.mark.parametrize(
    ("setting", "others"),
    [
        ("trainer.critic.model.path", {"trainer.algorithm.advantage_estimator": "gae"}),
        ("trainer.ref.model.path", {"trainer.algorithm.use_kl_loss": True}),
        ("trainer.algorithm.distillation.teachers.default", {}),
    ],
)
def test_the_vocabulary_of_each_second_model_is_compared(
    setting: str, others: dict[str, Any], tmp_path: Path, tiny_tokenizer: Any
) -> None:
    policy = model(tmp_path / "policy", tiny_tokenizer, len(tiny_tokenizer))
    few = model(tmp_path / "few", None, 8)
    settings = {"trainer.policy.model.path": str(policy), "trainer.device": "cpu", **others}
    config = as_config({**settings, setting: str(few)})
    with pytest.raises(ValueError, match=rf"^{setting}: expected .* got 8 in"):
        check_models(config, None)


def test_the_reference_of_a_continued_adapter_is_named(caplog: pytest.LogCaptureFixture) -> None:
    settings = {"trainer.algorithm.use_kl_loss": True, "trainer.policy.model.lora.rank": 4}
    warn_of_the_reference(as_config(settings))
    assert not caplog.text
    warn_of_the_reference(as_config({**settings, "trainer.policy.model.lora.path": "adapter"}))
    assert "the reference model of the KL term is the base" in caplog.text
