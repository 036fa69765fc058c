"""The table of settings that only some runs read, and what makes a run read them.

A setting that was given and that nothing reads is most often a switch that was forgotten. A run
says so once at its start (`warn_of_unread_settings`); docs/reference/combinations.md lists the
table.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from skyrl_fast.config.algorithm import estimator_spec, policy_loss_spec
from skyrl_fast.config.features import ALGORITHM, CORRECTION, ENGINE, FEATURES, LORA, assignment
from skyrl_fast.config.sampling import SamplingParams
from skyrl_fast.config.settings import AlgorithmConfig, Config, GeneratorConfig, leaves
from skyrl_fast.ops.advantage.estimators import ADVANTAGE_ESTIMATORS
from skyrl_fast.ops.policy_loss.custom import CustomLoss
from skyrl_fast.ops.policy_loss.losses import POLICY_LOSSES
from skyrl_fast.system.printable import shorten

logger = logging.getLogger(__name__)

FULLY_ASYNC = "trainer.fully_async"
DISTILLATION = f"{ALGORITHM}.distillation"
KL_CONTROL = f"{ALGORITHM}.kl_ctrl"
SAMPLING = f"{ALGORITHM}.dynamic_sampling"
COMPACTION = "generator.compaction"
SKYRL_GYM = "environment.skyrl_gym"
LOCAL_LOGGERS = frozenset(("jsonl", "tensorboard"))  # files of the run folder, without a project
_LONGEST_VALUE = 80  # characters of a value in the warning


@dataclass(frozen=True, slots=True)
class Reader:
    """What must hold for settings to be read.

    Args:
        settings: dotted keys; that of a section stands for all of its settings.
        words: clause that follows "has no effect" where it does not hold.
        is_on: whether it holds in a configuration.
        off: value that asks for nothing, and so for what happens; false and null do, too.
    """

    settings: tuple[str, ...]
    words: str
    is_on: Callable[[Config], bool]
    off: float | None = None

    def covers(self, key: str) -> bool:
        """Return whether a setting is one of these."""
        return any(key == name or key.startswith(f"{name}.") for name in self.settings)


def warn_of_unread_settings(config: Config, *, has_eval_prompts: bool = False) -> None:
    """Log one warning that names all settings that were given and that nothing reads."""
    unread = unread_settings(config, has_eval_prompts=has_eval_prompts)
    if unread:
        logger.warning("settings without effect: %s", "; ".join(unread))


def unread_settings(config: Config, *, has_eval_prompts: bool = False) -> list[str]:
    """Return a sentence for each reason why settings that differ from their defaults are not read.

    Args:
        has_eval_prompts: evaluation prompts are given in memory, so `data.val_data` may be empty.

    Example:
        >>> unread_settings(as_config({"trainer.algorithm.entropy_loss_coef": 0.1}))
        ['trainer.algorithm.entropy_loss_coef=0.1 has no effect without trainer.algorithm...']
    """
    absent = []
    for reader in READERS:
        is_given = reader is EVALUATION and has_eval_prompts
        if not is_given and not reader.is_on(config):
            absent.append(reader)
    unread: dict[str, list[str]] = {}
    for key, value in _given_settings(config):
        reasons = [reader for reader in absent if reader.covers(key) and value != reader.off]
        if reasons:
            given = shorten(assignment(config, key), len(key) + _LONGEST_VALUE)
            unread.setdefault(reasons[0].words, []).append(given)
    sentences = []
    for words, given_settings in unread.items():
        verb = "has" if len(given_settings) == 1 else "have"
        sentences.append(f"{', '.join(given_settings)} {verb} no effect {words}")
    return sentences


def _given_settings(config: Config) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of settings that ask for something else than their defaults."""
    complete = Config(generator=GeneratorConfig(eval_sampling_params=SamplingParams()))
    defaults = {key: value for key, value, _ in leaves(complete)}
    for key, value, _ in leaves(config):
        is_off = value is None or value is False
        if not is_off and value != defaults[key]:
            yield key, value


def _with_feature(settings: Sequence[str], *names: str, off: float | None = None) -> Reader:
    """Return the reader of settings that belong to one of these features."""
    wanted = []
    for name in names:
        feature = FEATURES[name]
        is_phrase = " " in feature.on
        value = f" ({feature.on})" if is_phrase else f"={feature.on}"
        wanted.append(feature.setting + value)

    def is_on(config: Config) -> bool:
        return any(FEATURES[name].is_on(config) for name in names)

    return Reader(tuple(settings), f"without {' or '.join(wanted)}", is_on, off)


def _algorithm(*names: str) -> tuple[str, ...]:
    return tuple(f"{ALGORITHM}.{name}" for name in names)


def _or(names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _readers_of_losses() -> Iterator[Reader]:
    """Yield the losses' sections, and the settings that several losses share."""
    defaults = AlgorithmConfig()
    shared: dict[str, list[str]] = {}
    for loss in POLICY_LOSSES.values():
        section = getattr(defaults, loss.name, None)
        if is_dataclass(section):
            yield _reader_of_choices(loss.name, "policy_loss_type", [loss.name])
        for item in fields(loss.settings):
            if not hasattr(section, item.name):
                shared.setdefault(item.name, []).append(loss.name)
    for key, losses in shared.items():
        yield _reader_of_choices(key, "policy_loss_type", losses)


def _reader_of_choices(key: str, chosen_by: str, names: Sequence[str]) -> Reader:
    """Return the reader of a setting that some choices of another setting read."""
    return Reader(
        _algorithm(key),
        f"without {ALGORITHM}.{chosen_by}={_or(names)}",
        lambda config: getattr(config.trainer.algorithm, chosen_by) in names,
    )


def _readers_of_estimators() -> Iterator[Reader]:
    defaults = AlgorithmConfig()
    readers: dict[str, list[str]] = {}
    for spec in ADVANTAGE_ESTIMATORS.values():
        for key in spec.settings.values():
            if getattr(defaults, key) is not True:  # else the only other value asks for nothing
                readers.setdefault(key, []).append(spec.name)
    for key, names in readers.items():
        yield _reader_of_choices(key, "advantage_estimator", names)


def _correction_reader(settings: Sequence[str], name: str, value: str) -> Reader:
    """Return the reader of settings that one value of another setting of the correction reads."""
    keys = tuple(f"{CORRECTION}.{setting}" for setting in settings)

    def is_on(config: Config) -> bool:
        correction = config.trainer.algorithm.off_policy_correction
        return bool(getattr(correction, name) == value)

    return Reader(keys, f"without {CORRECTION}.{name}={value}", is_on)


def _uses_sequences(config: Config) -> bool:
    loss = policy_loss_spec(config.trainer.algorithm)
    return isinstance(loss, CustomLoss) or loss.scope == "sequence" or _has_unit(config)


_FEATURES_OF_SEQUENCES = (
    "off-policy correction",
    "zero-variance filter",
    "dynamic sampling",
    "overlong filter",
    "no reward for truncated trajectories",
    "mask of overflowed summaries",
)


def _has_unit(config: Config) -> bool:
    return any(FEATURES[name].is_on(config) for name in _FEATURES_OF_SEQUENCES)


def _has_project(config: Config) -> bool:
    return not LOCAL_LOGGERS.issuperset(config.trainer.logger)


def _is_adaptive(config: Config) -> bool:
    return config.trainer.algorithm.kl_ctrl.type == "adaptive"


def _has_teacher_server(config: Config) -> bool:
    distillation = config.trainer.algorithm.distillation
    return len(distillation.started_models) < len(distillation.teachers)


def _excludes_tokens(config: Config) -> bool:
    # An agent's requests may have parameters of their own.
    return config.generator.sampling_params.excludes_tokens or config.agent.is_set


EVALUATION = Reader(
    (
        "trainer.eval_interval",
        "trainer.eval_batch_size",
        "generator.eval_n_samples_per_prompt",
        "generator.eval_sampling_params",
    ),
    "without data.val_data or, in Python, eval_prompts",
    lambda config: bool(config.data.val_data),
    off=-1,
)

_OF_ALGORITHM = (
    *_readers_of_estimators(),
    *_readers_of_losses(),
    Reader(
        _algorithm("advantage_batch_normalize"),
        f"with {ALGORITHM}.advantage_estimator=gae or reinforce++, which always normalize",
        lambda config: not estimator_spec(config.trainer.algorithm).always_normalized,
    ),
    _with_feature(
        (
            *_algorithm("value_clip"),
            "trainer.critic.optimizer_config",
            "trainer.critic_mini_batch_size",
        ),
        "critic",
    ),
    Reader(
        _algorithm("max_seq_len"),
        f"without {ALGORITHM}.loss_reduction=seq_mean_token_sum_norm",
        lambda config: config.trainer.algorithm.loss_reduction == "seq_mean_token_sum_norm",
    ),
    _with_feature(_algorithm("kl_loss_coef"), "KL in the loss", "KL in the reward", off=0),
    _with_feature(
        (*_algorithm("kl_estimator_type"), "trainer.ref.model.path"),
        "KL in the loss",
        "KL in the reward",
    ),
    _with_feature((KL_CONTROL,), "KL in the reward"),
    Reader(
        (f"{KL_CONTROL}.kl_target", f"{KL_CONTROL}.horizon"),
        f"without {KL_CONTROL}.type=adaptive",
        _is_adaptive,
    ),
    _with_feature(_algorithm("entropy_loss_coef"), "entropy loss", off=0),
    Reader(
        _algorithm("sequence_scope"),
        "without a loss, an off_policy_correction, a filter or dynamic sampling by sequences",
        _uses_sequences,
    ),
    _correction_reader(["token_tis_ratio_clip_high"], "tis_ratio_type", "token"),
    _correction_reader(["sequence_tis_ratio_clip_high"], "tis_ratio_type", "sequence"),
    _correction_reader(["geo_mask_high", "geo_mask_low"], "sequence_mask_metric", "geometric"),
    _correction_reader(
        ["product_mask_high", "product_mask_low"], "sequence_mask_metric", "product"
    ),
    _with_feature((f"{SAMPLING}.max_sample_batches",), "dynamic sampling"),
    Reader(
        (f"{SAMPLING}.min_replace_ratio",),
        f"without {SAMPLING}.type=replace",
        lambda config: config.trainer.algorithm.dynamic_sampling.type == "replace",
    ),
    _with_feature(
        (
            f"{DISTILLATION}.coef",
            f"{DISTILLATION}.api_key_file",
            f"{DISTILLATION}.engine_init_kwargs",
        ),
        "distillation",
    ),
    Reader(
        (f"{DISTILLATION}.api_key_file",),
        f"without a server among {DISTILLATION}.teachers",
        _has_teacher_server,
    ),
    _with_feature((f"{DISTILLATION}.engine_init_kwargs",), "teachers that the run starts"),
)

_OF_MODELS = (
    _with_feature(
        (
            f"{LORA}.alpha",
            f"{LORA}.target_modules",
            f"{LORA}.exclude_modules",
            f"{LORA}.init_method",
            f"{LORA}.use_rslora",
            f"{LORA}.weight_sync",
        ),
        "LoRA",
    ),
    Reader(
        (f"{LORA}.init_method",),
        f"with {LORA}.path, whose adapter has its values already",
        lambda config: config.trainer.policy.model.lora.path is None,
    ),
    Reader(
        ("trainer.resume_path",),
        "without trainer.resume_mode=from_path",
        lambda config: config.trainer.resume_mode == "from_path",
    ),
)

_OF_RUNS = (
    Reader(
        (f"{FULLY_ASYNC}.max_staleness_steps", f"{FULLY_ASYNC}.weight_update"),
        f"without {FULLY_ASYNC}.enabled=true",
        lambda config: config.trainer.fully_async.enabled,
        off=0,
    ),
    Reader(
        (f"{FULLY_ASYNC}.weight_update",),
        f"with {FULLY_ASYNC}.max_staleness_steps=0",
        lambda config: config.trainer.fully_async.max_staleness_steps > 0,
    ),
    Reader(
        ("generator.merge_drift", "generator.merge_max_drift_tokens"),
        "without trainer.rows=merged or trajectory",
        lambda config: config.trainer.rows != "step",
    ),
    _with_feature(("generator.merge_max_drift_tokens",), "realigned tokens"),
    Reader(
        ("trainer.project_name",),
        "without a logger that has projects, such as wandb, in trainer.logger",
        _has_project,
    ),
    _with_feature((f"{ENGINE}.api_key_file",), "engines on servers"),
    EVALUATION,
)

_OF_ROLLOUTS = (
    _with_feature((COMPACTION,), "compaction"),
    Reader(
        (f"{COMPACTION}.budget", f"{COMPACTION}.request"),
        f"with {COMPACTION}.policy, which decides in their place",
        lambda config: config.generator.compaction.policy is None,
    ),
    Reader(
        ("generator.sampling_params.max_kept_tokens",),
        "without top_p, top_k, min_p or another parameter that excludes tokens from sampling",
        _excludes_tokens,
    ),
    Reader(
        ("generator.eval_sampling_params.max_kept_tokens",),
        "in evaluation, which records no tokens",
        lambda config: False,
    ),
    _with_feature(
        (
            "agent.untrained_models",
            "agent.model",
            "agent.upstreams",
            "agent.host",
            "agent.port",
        ),
        "agent function",
        "agent command",
    ),
    Reader(
        ("agent.model",),
        f"with {LORA}.policies or trainer.policy.roles, whose names the agent calls",
        lambda config: not config.call_names,
    ),
    Reader(
        (
            "generator.context",
            "generator.skip_special_tokens",
            "environment.env_class",
            "environment.workers",
            "environment.timeout_seconds",
            SKYRL_GYM,
        ),
        "with agent.function or agent.command, which takes the environment's place",
        lambda config: not config.agent.is_set,
    ),
)

# In this order: the first that a setting lacks is named.
READERS = (*_OF_ALGORITHM, *_OF_MODELS, *_OF_RUNS, *_OF_ROLLOUTS)
