"""The prompts of a run."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from skyrl_fast.config import Config, EnvironmentConfig
from skyrl_fast.rollout.compaction import load_compaction_policy
from skyrl_fast.rollout.env.reward_functions import TEXT_PROMPT
from skyrl_fast.train.data.mixture import check_mixture, load_curriculum
from skyrl_fast.train.data.prompts import Prompt, PromptSource, load_prompts, prompts_from

logger = logging.getLogger(__name__)


MAX_NAMED = 5  # environments in a warning
EVAL_UID = "eval-"  # prefix of the uids of evaluation prompts


@dataclass(frozen=True, slots=True)
class RunData:
    """The prompts to train and to evaluate on."""

    train: list[Prompt]
    evaluation: list[Prompt]

    def with_text_marked(self) -> RunData:
        """Tell environments which prompts were text, not chats."""
        return RunData(text_marked(self.train), text_marked(self.evaluation))


def text_marked(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return the prompts with a word to their environments of which were text, not chats."""
    result: list[Prompt] = []
    for prompt in prompts:
        result.append(
            replace(prompt, env_extras={**prompt.env_extras, TEXT_PROMPT: prompt.is_text})
        )
    return result


def run_data(
    config: Config,
    prompts: PromptSource | None,
    eval_prompts: PromptSource | None,
    *,
    one_env: bool,
) -> RunData:
    data = RunData(
        _load(config, prompts, config.data.train_data, "", "train", one_env),
        eval_data(config, eval_prompts, one_env=one_env),
    )
    if not one_env:
        _warn_of_row_environments(config, data)
    if config.data.mixture:
        check_mixture(data.train, config.data.mixture)
    load_curriculum(config.data.curriculum)
    load_compaction_policy(config.generator.compaction.policy)
    # An epoch of less than a batch would never train.
    wanted = config.trainer.train_batch_size
    if len(data.train) < wanted:
        source = "data.train_data" if prompts is None else "prompts"
        raise ValueError(
            f"{source}: expected at least trainer.train_batch_size={wanted} prompts, "
            f"got {len(data.train)}"
        )
    return data


def eval_data(config: Config, eval_prompts: PromptSource | None, *, one_env: bool) -> list[Prompt]:
    """Return the prompts to evaluate on: the given ones, else those of `data.val_data`."""
    return _load(config, eval_prompts, config.data.val_data, EVAL_UID, "test", one_env)


def _load(
    config: Config,
    given: PromptSource | None,
    files: list[str],
    prefix: str,
    split: str,
    one_env: bool,
) -> list[Prompt]:
    env_class = config.environment.env_class
    if given is None:
        found = load_prompts(
            files,
            default_env_class=env_class,
            prefix=prefix,
            split=split,
            names_sources=bool(config.data.mixture),
        )
    else:
        found = prompts_from(given, default_env_class=env_class, prefix=prefix, split=split)
    # One factory makes the environments of all rows, whatever their own `env_class`.
    if one_env:
        return [replace(prompt, env_class=env_class) for prompt in found]
    return found


def _warn_of_row_environments(config: Config, data: RunData) -> None:
    """Warn if rows name another environment than one that was set explicitly."""
    chosen = config.environment.env_class
    prompts = [*data.train, *data.evaluation]
    others = Counter(p.env_class for p in prompts if p.env_class != chosen)
    if not others or chosen == EnvironmentConfig().env_class:
        return
    logger.warning(
        "environment.env_class=%s is not used for %d of %d rows, whose column env_class takes "
        "precedence: %s",
        chosen,
        others.total(),
        len(prompts),
        ", ".join(f"{name} ({number})" for name, number in others.most_common(MAX_NAMED)),
    )
