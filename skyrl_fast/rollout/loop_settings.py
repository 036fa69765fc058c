"""Settings of the agent loop, and what it needs from a prompt."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from skyrl_fast.config import Config, GeneratorConfig, check_limits
from skyrl_fast.config.files import PLAIN_TEMPLATE_NAME, chat_template_file

log = logging.getLogger(__name__)

PHASES = ("train", "eval")

# For base models, which have none: a line for each message, an end token after each answer.
PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message.role | capitalize }}: {{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}Assistant: {% endif %}"
)


class RolloutPrompt(Protocol):
    """One task: the attributes that a prompt needs for a rollout."""

    @property
    def uid(self) -> str:
        """Name of its group."""

    @property
    def messages(self) -> Sequence[Mapping[str, Any]]:
        """The first prompt as chat messages."""

    @property
    def env_class(self) -> str:
        """Name of its environment; see `EnvFactory.make`."""

    @property
    def env_extras(self) -> Mapping[str, Any]:
        """The `extras` that the environment's constructor gets."""

    @property
    def data_source(self) -> str | None:
        """Name of the data set, or None."""


def loop_settings(config: Config) -> GeneratorConfig:
    """Return the agent loop's settings: `generator` with its automatic values resolved.

    `chat_template` is Jinja text or None.
    """
    generator = config.generator
    evaluation = generator.eval_sampling_params
    if evaluation is not None and generator.sampling_params.stop and not evaluation.stop:
        log.warning(
            "generator.eval_sampling_params.stop is empty, so sampling_params.stop (%s) ends turns "
            "in training but not in evaluation; set it there too",
            ", ".join(generator.sampling_params.stop),
        )
    return replace(generator, chat_template=read_chat_template(generator.chat_template))


def check_loop_settings(generator: GeneratorConfig) -> None:
    """Raise ConfigError for a setting that is out of range."""
    check_limits(generator, "generator")


def read_chat_template(text_or_file: str | None) -> str | None:
    """Return the text of `generator.chat_template`; None: the tokenizer's own is used."""
    if text_or_file == PLAIN_TEMPLATE_NAME:
        return PLAIN_TEMPLATE
    file = chat_template_file(text_or_file)
    if file is not None:
        return file.read_text(encoding="utf-8")
    return text_or_file
