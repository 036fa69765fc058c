"""Settings of a resumed run that differ from those of its checkpoint."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any

from skyrl_fast.config import Config, to_dict
from skyrl_fast.system.printable import log_line

logger = logging.getLogger(__name__)

# Settings that do not change what is trained, or whose change has a message of its own: batch size,
# seed and prompts are refused by the sampler, another length of the schedule is warned of.
_WITHOUT_EFFECT = (
    "data.",
    "trainer.seed",
    "trainer.train_batch_size",
    "trainer.epochs",
    "trainer.max_training_steps",
    "trainer.placement.",
    "trainer.max_tokens_per_microbatch",
    "trainer.gradient_checkpointing",
    "trainer.eval_",
    "trainer.run_",
    "trainer.ckpt_",
    "trainer.max_ckpts_to_keep",
    "trainer.resume_",
    "trainer.device",
    "trainer.num_threads",
    "trainer.logger",
    "trainer.project_name",
    "trainer.dump_trajectories",
    "trainer.plot",
    "trainer.sync_tolerance",
    "generator.eval_",
    "generator.max_concurrent_trajectories",
    "generator.trajectory_timeout_seconds",
    "generator.max_retries",
    "environment.workers",
    "environment.timeout_seconds",
    "environment.skyrl_gym.max_env_workers",
)
_LORA = "trainer.policy.model.lora."
# What an adapter begins with: one that is resumed has it.
_OF_ADAPTER = tuple(_LORA + name for name in ("target_", "exclude_", "init_method", "path"))
_WEIGHTS = "trainer.policy.model.path", "trainer.critic.model.path"
_KL_COEF = "trainer.algorithm.kl_loss_coef"
_ENGINE = "generator.inference_engine."
_OF_SAMPLES = (_ENGINE + "model_dtype", _ENGINE + "engine_init_kwargs")


def find_changed_settings(saved: Any, now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the settings that change what is trained: dotted key -> (value before, value now).

    Args:
        saved: settings of the checkpoint, nested; whatever its file holds.
        now: those of the resumed run. Settings that one of them does not have are ignored; keys of
            a setting that is a mapping are None where they are missing.
    """
    if isinstance(saved, Mapping):
        before = dict(_leaves(saved))
    else:
        before = {}
    after = dict(_leaves(now))
    changed = {}
    for key in {**after, **before}:
        ignored = key.startswith(_WITHOUT_EFFECT)
        ignored |= key.startswith(_ENGINE) and not key.startswith(_OF_SAMPLES)
        if ignored or not (_is_known(key, saved) and _is_known(key, now)):
            continue
        pair = before.get(key), after.get(key)
        if pair[0] != pair[1]:
            changed[key] = pair
    return changed


def warn_of_changed_settings(saved: Any, now: Mapping[str, Any]) -> None:
    changed = find_changed_settings(saved, now)
    kept = _kept_settings(now)
    for stays, text in (
        (False, "resume: settings differ from the checkpoint's and apply from here on: %s"),
        (True, "resume: settings differ from the checkpoint's, whose values stay: %s"),
    ):
        listed = []
        for key, (old, new) in changed.items():
            if key.startswith(kept) == stays:
                listed.append(f"{key}: {old!r} -> {new!r}")
        if listed:
            logger.warning(text, log_line(", ".join(listed)))


def with_kept_settings(config: Config, saved: Any) -> Config:
    """Return a resumed run's settings with the checkpoint's values where only these apply.

    So every part of the run reads them, such as the reference model, which is the model that the
    run began with.
    """
    now = to_dict(config)
    kept = _kept_settings(now)
    for key, (value, _) in find_changed_settings(saved, now).items():
        if not key.startswith(kept):
            continue
        if key in _WEIGHTS and isinstance(value, str) and _is_lost(value):
            logger.warning(
                "resume: %s: the model that the run began with, %s, is gone: where the run reads "
                "it, as for a reference, it reads %s",
                key,
                value,
                config.trainer.policy.model.path,
            )
            continue
        *sections, name = key.split(".")
        section: Any = config
        for part in sections:
            section = getattr(section, part)
        setattr(section, name, value)
    return config


def _is_lost(path: str) -> bool:
    return os.path.isabs(path) and not os.path.exists(path)


def _kept_settings(now: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the beginnings of settings that only a new run reads."""
    values = dict(_leaves(now))
    # The base of an adapter is loaded again.
    weights = _WEIGHTS[1:] if values.get(_LORA + "rank") else _WEIGHTS
    is_controlled = values.get("trainer.algorithm.kl_ctrl.type") == "adaptive"
    return (*_OF_ADAPTER, *weights, *([_KL_COEF] if is_controlled else []))


def _is_known(key: str, settings: Any) -> bool:
    """Return whether settings have a key, or a mapping of a user's that may have it."""
    default: Any = to_dict(Config())
    for name in key.split("."):
        if isinstance(default, Mapping) != isinstance(settings, Mapping):
            return False
        if not isinstance(settings, Mapping):
            return False
        if isinstance(default, Mapping) and not default:
            return True  # a mapping, whose keys are the user's
        if not isinstance(default, Mapping) or name not in default or name not in settings:
            return False
        default = default[name]
        settings = settings[name]
    return isinstance(default, Mapping) == isinstance(settings, Mapping)


def _leaves(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
