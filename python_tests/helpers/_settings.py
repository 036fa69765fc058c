"""The minimal settings, and the error message of invalid settings."""

import pytest

from skyrl_fast.config import ConfigError, load_config

NEEDED = ["data.train_data=[train.jsonl]", "trainer.policy.model.path=model"]


def error_of(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [*NEEDED, *overrides])
    return str(caught.value)
