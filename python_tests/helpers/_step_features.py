"""Settings that a training step depends on, by factor and level, for arrays of their pairs."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from _compared import Folders, settings_of, write_models
from _covering import Case, Level
from reference.losses import CustomLoss

import skyrl_fast
from skyrl_fast.config import Config, ConfigError, check_config
from skyrl_fast.config.features import FEATURES
from skyrl_fast.config.parse import as_config
from skyrl_fast.train.model.models import make_models
from skyrl_fast.train.parallel.ranks import SINGLE_RANK

ALGORITHM = "trainer.algorithm"
CORRECTION = f"{ALGORITHM}.off_policy_correction"
LORA = "trainer.policy.model.lora"
OPTIMIZER = "trainer.policy.optimizer_config"
ESTIMATOR = f"{ALGORITHM}.advantage_estimator"
LOSS = f"{ALGORITHM}.policy_loss_type"
DISTILLATION = f"{ALGORITHM}.distillation"
TEACHERS = f"{DISTILLATION}.teachers"
REGISTERED = "registered_for_pairs"
BATCH = 4  # prompts
SPARE_BATCHES = 3

Settings = Mapping[str, Any]
NONE: Settings = {}
COMPACT: Settings = {"generator.context": "compact"}


@skyrl_fast.register_policy_loss(REGISTERED)
def _importance_sampling(inputs: Any) -> torch.Tensor:
    return -inputs.advantages * torch.exp(inputs.logprobs - inputs.old_logprobs)


def custom_loss_of(settings: Settings) -> CustomLoss | None:
    """Return the reference of the registered loss, if a case has it."""
    if settings.get(LOSS) != REGISTERED:
        return None
    return lambda tokens: -tokens.advantages * torch.exp(tokens.logprobs - tokens.old)


def _losses(*names: str) -> tuple[Settings, ...]:
    return tuple({LOSS: name} for name in names)


# Of each level: variants, of which a case has one. Models are named in braces.
FACTORS: dict[str, dict[str, Sequence[Settings]]] = {
    "rows": {
        "of steps": [NONE, {"trainer.row_layout": "sequence"}],
        "merged": [{"trainer.rows": "merged", "trainer.row_layout": "sequence"}],
        "merged steps": [{"generator.merge_stepwise_output": True}],
        "one": [{"trainer.rows": "trajectory"}],
        "trees": [{"trainer.row_layout": "tree"}],
        "trees of merged steps": [{"trainer.row_layout": "tree", "trainer.rows": "merged"}],
    },
    "drift": {"fork": [NONE], "realign": [{"generator.merge_drift": "realign"}]},
    "estimator": {
        "outcome": [
            NONE,
            {ESTIMATOR: "dr_grpo"},
            {ESTIMATOR: "maxrl"},
            {f"{ALGORITHM}.grpo_norm_by_std": False},
        ],
        "rloo": [{ESTIMATOR: "rloo"}],
        "parts": [
            {ESTIMATOR: "gdpo", f"{ALGORITHM}.gdpo_weights": weights}
            for weights in ({"correct": 1.0, "short": -0.5}, {"reward": 1.0, "correct": 0.3})
        ],
        "turns": [
            {ESTIMATOR: "turn_level_returns", f"{ALGORITHM}.gamma": 0.7},
            {ESTIMATOR: "turn_level_group", f"{ALGORITHM}.gamma": 0.7},
            {ESTIMATOR: "turn_level_group", f"{ALGORITHM}.turn_level_baseline": "episode"},
        ],
        "contexts": [
            {**COMPACT, ESTIMATOR: "context_level_group", f"{ALGORITHM}.gamma": 0.7},
            {
                **COMPACT,
                ESTIMATOR: "context_level_group",
                f"{ALGORITHM}.turn_level_baseline": "episode",
            },
        ],
        "states": [
            {ESTIMATOR: "gigpo", f"{ALGORITHM}.step_advantage_w": 0.5},
            {ESTIMATOR: "gigpo", f"{ALGORITHM}.grpo_norm_by_std": False},
        ],
        "values": [
            {
                ESTIMATOR: "gae",
                f"{ALGORITHM}.lambd": 0.7,
                "trainer.critic.model.path": path,
                "trainer.critic.optimizer_config.lr": 0.01,
                **more,
            }
            for path, more in (
                ("{critic}", {"trainer.critic_mini_batch_size": 1}),
                (
                    "{policy}",
                    {"trainer.critic_mini_batch_size": 2, f"{ALGORITHM}.value_clip": 0.01},
                ),
            )
        ],
        "tokens": [{ESTIMATOR: "reinforce++", f"{ALGORITHM}.gamma": 0.9}],
    },
    "samples": {"several": [NONE], "one": [{"generator.n_samples_per_prompt": 1}]},
    "normalized": {"no": [NONE], "yes": [{f"{ALGORITHM}.advantage_batch_normalize": True}]},
    "loss": {
        "of tokens": [
            NONE,
            {LOSS: "dual_clip", f"{ALGORITHM}.clip_ratio_c": 1.1},
            *_losses("cispo", "sapo", "importance_sampling"),
        ],
        "without advantages": _losses("cross_entropy"),
        "of sequences": _losses("gspo"),
        "of a mini-batch": [
            {LOSS: "kl_cov"},
            # All candidates are dropped: nothing is left to draw.
            {
                LOSS: "clip_cov",
                f"{ALGORITHM}.clip_cov.clip_ratio": 1.0,
                f"{ALGORITHM}.clip_cov.clip_cov_lb": 0.1,
            },
        ],
        "against the sampler": [
            {LOSS: "rollout_is"},
            {LOSS: "dppo"},
            {LOSS: "dppo", f"{ALGORITHM}.dppo.dppo_type": "binary_kl"},
            {LOSS: "cispo", f"{ALGORITHM}.cispo.cispo_ratio": "rollout"},
        ],
        "registered": _losses(REGISTERED),
    },
    "coefficient": {
        "one": [NONE],
        "half": [{f"{ALGORITHM}.policy_loss_coef": 0.5}],
        "none": [{f"{ALGORITHM}.policy_loss_coef": 0.0}],
    },
    "kl": {
        "none": [NONE],
        **{
            use: [
                {
                    f"{ALGORITHM}.use_kl_{use.replace(' ', '_')}": True,
                    f"{ALGORITHM}.kl_loss_coef": 0.3,
                    f"{ALGORITHM}.kl_estimator_type": estimator,
                    **more,
                }
                for estimator in ("k1", "abs", "k2", "k3")
                for more in (NONE, {"trainer.ref.model.path": "{reference}"})
                # A policy that is the reference still: rounding decides the gradient.
                if (use, estimator, more) != ("loss", "abs", NONE)
            ]
            for use in ("loss", "in reward")
        },
        "adaptive in reward": [
            {
                f"{ALGORITHM}.use_kl_in_reward": True,
                f"{ALGORITHM}.kl_loss_coef": 0.3,
                f"{ALGORITHM}.kl_ctrl.type": "adaptive",
                f"{ALGORITHM}.kl_ctrl.horizon": 100,
                "trainer.ref.model.path": "{reference}",
            }
        ],
    },
    "distillation": {
        "none": [NONE],
        "of tokens": [
            {TEACHERS: {"default": "{reference}"}, f"{DISTILLATION}.coef": 0.3},
            {TEACHERS: {"easy": "{reference}", "hard": "{critic}"}},
            {TEACHERS: {"hard": "{reference}"}},
        ],
        "of likely tokens": [
            {TEACHERS: {"default": "{reference}"}, f"{DISTILLATION}.top_k": 3},
            {TEACHERS: {"easy": "{reference}"}, f"{DISTILLATION}.top_k": 16},
        ],
        "forward": [
            {
                TEACHERS: {"default": "{reference}"},
                f"{DISTILLATION}.top_k": 4,
                f"{DISTILLATION}.direction": "forward",
                f"{DISTILLATION}.coef": 0.5,
            }
        ],
    },
    "entropy": {
        "no": [NONE],
        "yes": [{f"{ALGORITHM}.use_entropy_loss": True, f"{ALGORITHM}.entropy_loss_coef": 0.3}],
    },
    "observations": {"no": [NONE], "yes": [{f"{ALGORITHM}.observation_loss_coef": 0.5}]},
    "old": {"policy": [NONE], "rollout": [{f"{ALGORITHM}.old_logprobs": "rollout"}]},
    "correction": {
        "none": [NONE],
        "outliers": [
            {
                f"{CORRECTION}.outlier_token_is_threshold_low": 0.5,
                f"{CORRECTION}.outlier_token_is_threshold_high": 1.7,
            }
        ],
        "tokens": [
            {
                f"{CORRECTION}.token_mask_is_threshold_low": 0.7,
                f"{CORRECTION}.token_mask_is_threshold_high": 1.4,
            }
        ],
        "sequences": [
            {
                f"{CORRECTION}.sequence_mask_metric": "geometric",
                f"{CORRECTION}.geo_mask_low": 0.9,
                f"{CORRECTION}.geo_mask_high": 1.2,
            },
            {f"{CORRECTION}.sequence_mask_metric": "product"},
        ],
        "weights": [
            {
                f"{CORRECTION}.tis_ratio_type": "token",
                f"{CORRECTION}.token_tis_ratio_clip_high": 1.2,
            },
            {
                f"{CORRECTION}.tis_ratio_type": "sequence",
                f"{CORRECTION}.sequence_tis_ratio_clip_high": 1.3,
            },
        ],
        "all": [
            {
                f"{CORRECTION}.outlier_token_is_threshold_high": 2.0,
                f"{CORRECTION}.token_mask_is_threshold_low": 0.7,
                f"{CORRECTION}.tis_ratio_type": "sequence",
                f"{CORRECTION}.sequence_tis_ratio_clip_high": 1.3,
                f"{CORRECTION}.sequence_mask_metric": "product",
            }
        ],
    },
    "zero variance": {"no": [NONE], "filtered": [{f"{ALGORITHM}.zero_variance_filter": True}]},
    "overlong": {"no": [NONE], "filtered": [{"generator.apply_overlong_filtering": True}]},
    "non-stop": {"no": [NONE], "without reward": [{"generator.zero_reward_on_non_stop": True}]},
    "dynamic sampling": {
        "no": [NONE],
        "yes": [{f"{ALGORITHM}.dynamic_sampling.type": way} for way in ("filter", "replace")],
    },
    "model": {
        "all weights": [NONE],
        "adapter": [{f"{LORA}.rank": 4}, {f"{LORA}.rank": 4, f"{LORA}.use_rslora": True}],
        "trained adapter": [{f"{LORA}.rank": 4, f"{LORA}.path": "{adapter}"}],
        "merged adapter": [{f"{LORA}.rank": 4, f"{LORA}.weight_sync": "merged"}],
        "policies": [{f"{LORA}.rank": 4, f"{LORA}.policies": ["planner", "worker"]}],
        "roles": [
            {"trainer.policy.roles": ["white", "black"]},
            {"trainer.policy.roles": ["white", "black"], f"{LORA}.rank": 4},
        ],
    },
    "reduction": {
        name: [{f"{ALGORITHM}.loss_reduction": name}]
        for name in (
            "token_mean",
            "sequence_mean",
            "seq_mean_token_sum_norm",
            "prompt_mean",
            "trajectory_mean",
        )
    },
    "scope": {
        "trajectory": [NONE],
        "row": [{f"{ALGORITHM}.sequence_scope": "row"}],
    },
    "epochs": {"one": [NONE], "two": [{"trainer.update_epochs_per_batch": 2}]},
    "mini-batches": {"two": [NONE], "one": [{"trainer.policy_mini_batch_size": BATCH}]},
    "budget": {
        "large": [NONE],
        "small": [{"trainer.max_tokens_per_microbatch": number} for number in (1, 16, 40)],
    },
    "sampling": {
        "plain": [NONE],
        "changed": [
            {"generator.sampling_params.temperature": 0.7},
            {"generator.sampling_params.top_k": 5},
            {"generator.sampling_params.top_k": 3, "generator.sampling_params.temperature": 1.3},
        ],
    },
    "records": {
        "of the loop": [NONE],
        "of a function": [{"agent.function": "agents:act"}],
        "of a command": [{"agent.command": ["./agent"]}],
        "with summaries": [COMPACT],
        "with weighted summaries": [
            {**COMPACT, f"{ALGORITHM}.summary_weight": 0.0},
            {**COMPACT, f"{ALGORITHM}.summary_weight": 0.5},
            {"agent.function": "agents:act", f"{ALGORITHM}.summary_weight": 3.0},
        ],
        "with overflowed summaries": [
            {**COMPACT, f"{ALGORITHM}.mask_overflowed_summaries": True},
            {
                "agent.command": ["./agent"],
                f"{ALGORITHM}.mask_overflowed_summaries": True,
                f"{ALGORITHM}.summary_weight": 0.5,
            },
        ],
    },
    "schedule": {
        "constant": [NONE],
        "changing": [
            {f"{OPTIMIZER}.scheduler": shape, f"{OPTIMIZER}.num_warmup_steps": 1}
            for shape in ("linear", "cosine")
        ],
    },
    "moments": {
        "on the device": [NONE],
        "in main memory": [{f"{OPTIMIZER}.offload_after_step": True}],
    },
    "sources": {
        "one": [NONE],
        "mixed": [{"data.mixture": {"easy": 0.5, "hard": 0.5}}],
    },
    "generation": {
        "before training": [NONE],
        "meanwhile": [
            {"trainer.fully_async.enabled": True, "trainer.fully_async.max_staleness_steps": 1}
        ],
    },
}

_ENGINE = "is about where an engine runs, not what a step computes from its trajectories"
_WEIGHTS = "is about how weights reach an engine, after the step"
_PLAY = "is about how an agent is played; its trajectories are those of the agent levels"
_START = "is about the weights that a run begins with; the step is the same"
NOT_COVERED = {
    "router replay": "needs a mixture of experts, whose routers the reference does not have",
    "recorded experts": "only router replay reads them",
    "weights in main memory": "they are on the device in a step, and copied between steps",
    "several ranks": "needs processes; ranks are compared with one process",
    "ranks by the plan": "chooses the number of ranks",
    "several nodes": "their ranks are those of one machine",
    "start from a checkpoint": _START,
    "checkpoint to start from": _START,
    "engines on servers": _ENGINE,
    "engines on a cluster": _ENGINE,
    "several engines": _ENGINE,
    "sleeping engine": _ENGINE,
    "chosen GPUs of the engine": _ENGINE,
    "replicas of an engine": _ENGINE,
    "weights by CUDA IPC": _WEIGHTS,
    "weights by CUDA IPC of ranks": _WEIGHTS,
    "weights by broadcast": _WEIGHTS,
    "weights by vLLM's reload": _WEIGHTS,
    "weights by file": _WEIGHTS,
    "weights by file to a cluster": _WEIGHTS,
    "folder of weights": _WEIGHTS,
    "verifier of a command": _PLAY,
    "reward file of a command": _PLAY,
    "agents in processes": _PLAY,
    "compaction by a function": _PLAY,
    "curriculum": "changes the order of prompts that come after a step",
}


@dataclass(frozen=True, slots=True)
class StepModels:
    """Models on the disk, and a folder for runs."""

    folders: Folders
    adapter: Path
    run_path: Path


def write_step_models(folder: Path) -> StepModels:
    folders = write_models(folder)
    settings = settings_of(folders, folder / "run") | {f"{LORA}.rank": 4}
    trained = make_models(as_config(settings), None, BATCH, SINGLE_RANK).trained
    policy = trained[None].policy
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, value in policy.trained_parameters():
            value.copy_(0.1 * torch.randn(value.shape, generator=generator))
    policy.save(folder / "adapter")
    return StepModels(folders, folder / "adapter", folder / "run")


def levels() -> dict[str, list[str]]:
    return {name: list(values) for name, values in FACTORS.items()}


def variants() -> dict[str, list[str]]:
    """Return each variant of each level as a level of its own."""
    return {
        name: [f"{level}#{number}" for level, own in values.items() for number in range(len(own))]
        for name, values in FACTORS.items()
    }


def variants_of(level: Level) -> Sequence[Settings]:
    name, value = level
    chosen, _, number = value.partition("#")
    own = FACTORS[name][chosen]
    return [own[int(number)]] if number else own


class Chooser:
    """Chooses the variants of a case, each as often as the others."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._used: dict[tuple[str, str, int], int] = {}

    def settings_of(self, case: Case) -> dict[str, Any]:
        settings: dict[str, Any] = {}
        for level in case.items():
            own = variants_of(level)
            order = list(range(len(own)))
            self._rng.shuffle(order)
            number = min(order, key=lambda place: self._used.get((*level, place), 0))
            self._used[(*level, number)] = self._used.get((*level, number), 0) + 1
            settings |= own[number]
        return settings


def config_of(settings: Settings, models: StepModels | None) -> Config:
    """Return the configuration of a case; without models their names stay."""
    names = {}
    base: dict[str, Any] = {"data.train_data": ["given"], "trainer.policy.model.path": "{policy}"}
    if models is not None:
        folders = models.folders
        base = settings_of(folders, models.run_path)
        names = {
            "{policy}": str(folders.policy),
            "{reference}": str(folders.reference),
            "{critic}": str(folders.critic),
            "{adapter}": str(models.adapter),
        }
    given = {key: _named(value, names) for key, value in settings.items()}
    return as_config(base | {"generator.n_samples_per_prompt": 3} | given)


def _named(value: Any, names: Mapping[str, str]) -> Any:
    """Return a setting with models in place of their names."""
    if isinstance(value, str):
        return names.get(value, value)
    if isinstance(value, dict):
        return {key: _named(one, names) for key, one in value.items()}
    return value


def is_allowed(case: Case) -> bool:
    """Return whether the first variants of a case's levels run together."""
    settings: dict[str, Any] = {}
    for level in case.items():
        settings |= variants_of(level)[0]
    return error_of(settings) is None


def error_of(settings: Settings) -> str | None:
    try:
        check_config(config_of(settings, None), has_prompts=True)
    except ConfigError as error:
        return str(error)
    return None


@cache
def features_of(level: Level) -> frozenset[str]:
    """Return the features that a level turns on, of each of its variants."""
    off = _active(NONE) if level[0] != "rows" else frozenset()
    found = [_active(settings) - off for settings in variants_of(level)]
    return frozenset.union(*found)


@cache
def is_refused(one: Level, other: Level) -> bool:
    return bool(refusing_pairs(one, other))


def refusing_pairs(one: Level, other: Level) -> list[tuple[str, str]]:
    """Return pairs of features, one of each level, that the table does not combine."""
    return [
        (first, second)
        for first in sorted(features_of(one))
        for second in sorted(features_of(other))
        if second in FEATURES[first].excludes or first in FEATURES[second].excludes
    ]


def _active(settings: Settings) -> frozenset[str]:
    config = config_of(settings, None)
    return frozenset(name for name, feature in FEATURES.items() if feature.is_on(config))


def num_prompts_of(config: Config, batches: int) -> int:
    """Return the prompts of a run: dynamic sampling may use more than those of its batches."""
    has_spare = config.trainer.algorithm.dynamic_sampling.type is not None
    return BATCH * (batches + SPARE_BATCHES * has_spare)
