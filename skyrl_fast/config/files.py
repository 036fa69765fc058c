"""Files and folders that the settings name, looked for before anything large is imported."""

from __future__ import annotations

from collections.abc import Sequence
from os.path import expanduser
from pathlib import Path

from skyrl_fast.config.model_folder import find_local_model
from skyrl_fast.config.settings import Config
from skyrl_fast.setting import ConfigError
from skyrl_fast.system.location import described_path

PLAIN_TEMPLATE_NAME = "plain"  # value of generator.chat_template
DATA_SUFFIXES = (".jsonl", ".json", ".parquet")  # of files of rows; other names may be on the hub


def check_data_files(setting: str, paths: Sequence[str]) -> None:
    """Raise ConfigError for a file of rows that does not exist."""
    for path in paths:
        file = Path(expanduser(path))  # unlike Path's, no error for an unknown user
        if file.suffix in DATA_SUFFIXES and not file.is_file():
            raise ConfigError(f"{setting}: data file not found: {described_path(path)}")


def check_local_model(config: Config) -> None:
    """Raise ConfigError for a policy model that is neither a folder nor a name on the hub.

    A run that resumes reads its checkpoint instead, so it is not checked here.
    """
    if config.trainer.resume_mode != "none":
        return
    try:
        find_local_model(str(config.trainer.policy.model.path))
    except ValueError as error:
        raise ConfigError(str(error)) from error


def chat_template_file(given: str | None) -> Path | None:
    """Return the file that `generator.chat_template` names; None: it names none."""
    if given is None or given == PLAIN_TEMPLATE_NAME or "{" in given:
        return None
    return Path(expanduser(given))


def check_chat_template(config: Config) -> None:
    """Raise ConfigError for a chat template that is neither a text nor a file."""
    given = config.generator.chat_template
    file = chat_template_file(given)
    if given is None or file is None or file.is_file():
        return
    raise ConfigError(
        f"generator.chat_template: expected plain, the text of a template, or its file, got "
        f"{described_path(given)}"
    )
