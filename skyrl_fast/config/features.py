"""The table of features: what each one needs, and what it cannot be combined with.

A feature is a behaviour of a run that other behaviours meet: a form of rows, an estimator's level,
a correction, several policies, an engine's place. Pairs of settings are refused by this table alone
(`check_features`), and docs/reference/combinations.md is generated from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any

from skyrl_fast.config.algorithm import (
    estimator_spec,
    is_ratio_to_rollout,
    policy_loss_spec,
)
from skyrl_fast.config.distillation import SETTING as DISTILLATION
from skyrl_fast.config.listing import shown
from skyrl_fast.config.modes import EnginePlace, EngineWeights
from skyrl_fast.config.settings import Config, leaves
from skyrl_fast.ops.policy_loss.custom import CustomLoss
from skyrl_fast.registry import importable_name
from skyrl_fast.setting import ConfigError, EnvironmentValue

ALGORITHM = "trainer.algorithm"
CORRECTION = f"{ALGORITHM}.off_policy_correction"
LORA = "trainer.policy.model.lora"
ENGINE = "generator.inference_engine"


@dataclass(frozen=True, slots=True)
class Need:
    """What a feature cannot do without.

    Args:
        any_of: names of features, of which at least one must be on.
        reason: clause that follows "as".
    """

    any_of: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Feature:
    """A behaviour that settings turn on.

    Args:
        name: unique noun phrase, as in the documentation.
        setting: dotted key that turns it on, named by errors.
        on: the values that turn it on, in words.
        off: a value that turns it off, in words, or a function that returns it.
        is_on: whether a configuration has it.
        needs: features that it depends on.
        excludes: name of each feature that it cannot be combined with -> reason, a clause that
            follows "as". Each pair is listed under one of the two.
    """

    name: str
    setting: str
    on: str
    off: str | Callable[[Config], str]
    is_on: Callable[[Config], bool]
    needs: Sequence[Need] = ()
    excludes: Mapping[str, str] = field(default_factory=dict)


def check_features(config: Config) -> None:
    """Raise ConfigError if a feature lacks what it needs, or meets one that it excludes."""
    active = [feature for feature in FEATURES.values() if feature.is_on(config)]
    names = {feature.name for feature in active}
    for feature in active:
        for other, reason in feature.excludes.items():
            if other in names:
                raise ConfigError(_refusal_text(config, feature, FEATURES[other], reason))
    for feature in active:
        for need in feature.needs:
            if names.isdisjoint(need.any_of):
                raise ConfigError(_missing_text(config, feature, need))


def _missing_text(config: Config, feature: Feature, need: Need) -> str:
    wanted = FEATURES[need.any_of[0]]
    others = []
    for name in need.any_of[1:]:
        others.append(f"{FEATURES[name].setting}: {FEATURES[name].on}")
    if others:
        alternatives = f" (or {'; '.join(others)})"
    else:
        alternatives = ""
    return (
        f"{wanted.setting}: expected {wanted.on}{alternatives} with "
        f"{assignment(config, feature.setting)}, as {need.reason}, got "
        f"{_shown_value(config, wanted.setting)}"
    )


def _refusal_text(config: Config, feature: Feature, other: Feature, reason: str) -> str:
    if callable(feature.off):
        off = feature.off(config)
    else:
        off = feature.off
    return (
        f"{feature.setting}: expected {off} with {assignment(config, other.setting)}, as "
        f"{reason}, got {_shown_value(config, feature.setting)}"
    )


def assignment(config: Config, key: str) -> str:
    return f"{key}={_shown_value(config, key)}"


def _shown_value(config: Config, key: str) -> str:
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    if is_dataclass(value):
        return ", ".join(_changed_settings(value))
    # A variable of the environment may be secret: as written in the file.
    if isinstance(value, EnvironmentValue):
        return value.written
    return shown(value)


def _changed_settings(section: Any) -> Iterator[str]:
    """Yield the settings of a section that differ from their defaults."""
    defaults = {name: value for name, value, _ in leaves(type(section)())}
    for name, value, _ in leaves(section):
        if value != defaults[name]:
            yield f"{name}={shown(value)}"


# Whether a feature is on.


def _algorithm(config: Config, name: str) -> Any:
    return getattr(config.trainer.algorithm, name)


def _engine(config: Config, name: str) -> Any:
    return getattr(config.generator.inference_engine, name)


def _selects_tokens_of_mini_batch(config: Config) -> bool:
    spec = policy_loss_spec(config.trainer.algorithm)
    return not isinstance(spec, CustomLoss) and spec.scope == "mini_batch"


def _has_ratio_to_rollout(config: Config) -> bool:
    return is_ratio_to_rollout(config.trainer.algorithm)


def _has_loss_of_this_process(config: Config) -> bool:
    spec = policy_loss_spec(config.trainer.algorithm)
    return isinstance(spec, CustomLoss) and ":" not in config.trainer.algorithm.policy_loss_type


def _importable_loss(config: Config) -> str:
    spec = policy_loss_spec(config.trainer.algorithm)
    if isinstance(spec, CustomLoss):
        name = importable_name(spec.function)
    else:
        name = None
    return name or "module:function"


def _sends_files_to_cluster(config: Config) -> bool:
    has_nodes = config.engine_place is EnginePlace.CLUSTER or config.spreads_engines
    return has_nodes and _engine(config, "weight_sync_backend") == "file"


def _reads_gpu(config: Config) -> bool:
    return bool(_engine(config, "weight_sync_backend") == "ipc")


def _reads_gpu_of_one(config: Config) -> bool:
    placement = config.trainer.placement
    # Where the plan chooses the number of ranks, features are checked again after that.
    is_open = placement.policy_num_gpus_per_node is None
    return _reads_gpu(config) and placement.num_ranks == 1 and not is_open


def _replicas(config: Config) -> int:
    return int(_engine(config, "engine_init_kwargs").get("data_parallel_size", 1))


_AGENTS_OR_COMPACTION = ("compaction", "agent function", "agent command")

_ROWS = (
    Feature(
        name="rows of steps",
        setting="trainer.rows",
        on="step",
        off="merged",
        is_on=lambda config: config.trainer.rows == "step",
    ),
    Feature(
        name="merged rows",
        setting="trainer.rows",
        on="merged",
        off="step",
        is_on=lambda config: config.trainer.rows == "merged",
    ),
    Feature(
        name="one row per trajectory",
        setting="trainer.rows",
        on="trajectory",
        off="step or merged",
        is_on=lambda config: config.trainer.rows == "trajectory",
        excludes={
            "agent function": "its contexts need not grow only",
            "agent command": "its contexts need not grow only",
        },
    ),
    Feature(
        name="prefix trees",
        setting="trainer.row_layout",
        on="tree",
        off="auto or sequence",
        is_on=lambda config: config.trainer.row_layout == "tree",
    ),
    Feature(
        name="realigned tokens",
        setting="generator.merge_drift",
        on="realign",
        off="fork",
        is_on=lambda config: config.generator.merge_drift == "realign",
    ),
)

_ADVANTAGES = (
    Feature(
        name="advantages of turns",
        setting=f"{ALGORITHM}.advantage_estimator",
        on="an estimator per turn",
        off="an estimator per outcome or token",
        is_on=lambda config: estimator_spec(config.trainer.algorithm).level == "turn",
        excludes={
            "one row per trajectory": "its advantages are per turn and need a row for each turn",
            "merged rows": "its advantages are per turn and need a row for each turn",
        },
    ),
    Feature(
        name="advantages of contexts",
        setting=f"{ALGORITHM}.advantage_estimator",
        on="context_level_group, or another estimator per context",
        off="an estimator per outcome, turn or token",
        is_on=lambda config: estimator_spec(config.trainer.algorithm).level == "context",
        needs=(Need(_AGENTS_OR_COMPACTION, "no other run has several contexts"),),
        excludes={
            "several policies": "a policy's calls are parts of contexts",
            "roles of one policy": "a role's calls are parts of contexts",
        },
    ),
    Feature(
        name="advantages from values",
        setting=f"{ALGORITHM}.advantage_estimator",
        on="gae, or another estimator that reads values,",
        off="an estimator that reads no values",
        is_on=lambda config: estimator_spec(config.trainer.algorithm).needs_values,
        needs=(Need(("critic",), "the estimator reads a critic's values"),),
    ),
    Feature(
        name="critic",
        setting="trainer.critic.model.path",
        on="a model",
        off="null",
        is_on=lambda config: config.trainer.critic.model.path is not None,
        needs=(Need(("advantages from values",), "no other estimator reads its values"),),
    ),
    Feature(
        name="baseline of the other samples",
        setting=f"{ALGORITHM}.advantage_estimator",
        on="rloo, or another estimator whose baseline leaves the sample out",
        off="another estimator",
        is_on=lambda config: estimator_spec(config.trainer.algorithm).needs_others,
    ),
    Feature(
        name="advantages of reward parts",
        setting=f"{ALGORITHM}.advantage_estimator",
        on="gdpo",
        off="another estimator",
        is_on=lambda config: estimator_spec(config.trainer.algorithm).needs_parts,
        needs=(Need(("weights of reward parts",), "it compares parts by name"),),
    ),
    Feature(
        name="weights of reward parts",
        setting=f"{ALGORITHM}.gdpo_weights",
        on="a weight for each part",
        off="{}",
        is_on=lambda config: bool(_algorithm(config, "gdpo_weights")),
        needs=(Need(("advantages of reward parts",), "no other estimator reads the parts"),),
    ),
    Feature(
        name="one sample per prompt",
        setting="generator.n_samples_per_prompt",
        on="1",
        off="at least 2",
        is_on=lambda config: config.generator.n_samples_per_prompt == 1,
        excludes={
            "baseline of the other samples": "its advantage is 0 in a group of one",
        },
    ),
    Feature(
        name="normalized advantages",
        setting=f"{ALGORITHM}.advantage_batch_normalize",
        on="true",
        off="false",
        is_on=lambda config: _algorithm(config, "advantage_batch_normalize"),
        excludes={
            "advantages of reward parts": "they are normalized over the batch's trajectories",
        },
    ),
)

_LOSSES = (
    Feature(
        name="loss by covariances of a mini-batch",
        setting=f"{ALGORITHM}.policy_loss_type",
        on="clip_cov or kl_cov",
        off="another loss",
        is_on=_selects_tokens_of_mini_batch,
    ),
    Feature(
        name="ratio to the sampler",
        setting=f"{ALGORITHM}.policy_loss_type",
        on="rollout_is, dppo, or cispo with cispo_ratio=rollout",
        off="another loss",
        is_on=_has_ratio_to_rollout,
    ),
    Feature(
        name="loss registered in this process",
        setting=f"{ALGORITHM}.policy_loss_type",
        on="a registered name",
        off=_importable_loss,
        is_on=_has_loss_of_this_process,
        excludes={"several ranks": "each rank imports the function"},
    ),
    Feature(
        name="no policy loss",
        setting=f"{ALGORITHM}.policy_loss_coef",
        on="0",
        off="more than 0",
        is_on=lambda config: _algorithm(config, "policy_loss_coef") == 0,
        needs=(
            Need(
                ("KL in the loss", "entropy loss", "observation loss", "distillation"),
                "the loss has no other term",
            ),
        ),
    ),
    Feature(
        name="KL in the loss",
        setting=f"{ALGORITHM}.use_kl_loss",
        on="true",
        off="false",
        is_on=lambda config: _algorithm(config, "use_kl_loss"),
    ),
    Feature(
        name="KL in the reward",
        setting=f"{ALGORITHM}.use_kl_in_reward",
        on="true",
        off="false",
        is_on=lambda config: _algorithm(config, "use_kl_in_reward"),
        excludes={
            "KL in the loss": "the KL would be counted twice",
            "advantages of reward parts": "no part of the reward has the penalty",
        },
    ),
    Feature(
        name="entropy loss",
        setting=f"{ALGORITHM}.use_entropy_loss",
        on="true",
        off="false",
        is_on=lambda config: _algorithm(config, "use_entropy_loss"),
    ),
    Feature(
        name="observation loss",
        setting=f"{ALGORITHM}.observation_loss_coef",
        on="more than 0",
        off="0",
        is_on=lambda config: _algorithm(config, "observation_loss_coef") > 0,
        excludes={
            "compaction": "no environment has shown the request for a summary",
            "rows of steps": "a row per step has no tokens of the environment (merged rows have)",
        },
    ),
    Feature(
        name="sampler's log-probabilities as old ones",
        setting=f"{ALGORITHM}.old_logprobs",
        on="rollout",
        off="policy",
        is_on=lambda config: _algorithm(config, "old_logprobs") == "rollout",
    ),
    Feature(
        name="off-policy correction",
        setting=CORRECTION,
        on="a weight, mask or outlier bound",
        off="none",
        is_on=lambda config: _algorithm(config, "off_policy_correction").enabled,
        excludes={
            "loss by covariances of a mini-batch": "its selection of tokens has no weights",
            "sampler's log-probabilities as old ones": (
                "it compares the trainer's log-probabilities (old_logprobs=policy) with the "
                "engine's"
            ),
        },
    ),
    Feature(
        name="importance weights",
        setting=f"{CORRECTION}.tis_ratio_type",
        on="token or sequence",
        off="null",
        is_on=lambda config: _algorithm(config, "off_policy_correction").tis_ratio_type is not None,
        excludes={
            "ratio to the sampler": "its ratio corrects already (cispo: with cispo_ratio=rollout)"
        },
    ),
)

_DISTILLATION = (
    Feature(
        name="distillation",
        setting=f"{DISTILLATION}.teachers",
        on="a teacher",
        off="{}",
        is_on=lambda config: _algorithm(config, "distillation").is_on,
    ),
    Feature(
        name="top-k distillation",
        setting=f"{DISTILLATION}.top_k",
        on="more than 0",
        off="0",
        is_on=lambda config: _algorithm(config, "distillation").top_k > 0,
        needs=(Need(("distillation",), "the tokens are a teacher's"),),
        excludes={
            "several ranks": "log-probabilities of other tokens than the sampled one are computed "
            "by one rank"
        },
    ),
    Feature(
        name="forward KL to the teacher",
        setting=f"{DISTILLATION}.direction",
        on="forward",
        off="reverse",
        is_on=lambda config: _algorithm(config, "distillation").direction == "forward",
        needs=(
            Need(
                ("top-k distillation",),
                "the sampled token says nothing of what the policy leaves out",
            ),
        ),
    ),
    Feature(
        name="teachers that the run starts",
        setting=f"{DISTILLATION}.teachers",
        on="a model",
        off="addresses of servers",
        is_on=lambda config: bool(_algorithm(config, "distillation").started_models),
        excludes={"engines on a cluster": "Ray chooses the GPUs of the run's engines"},
    ),
)

_FILTERS = (
    Feature(
        name="zero-variance filter",
        setting=f"{ALGORITHM}.zero_variance_filter",
        on="true",
        off="false",
        is_on=lambda config: _algorithm(config, "zero_variance_filter"),
    ),
    Feature(
        name="overlong filter",
        setting="generator.apply_overlong_filtering",
        on="true",
        off="false",
        is_on=lambda config: config.generator.apply_overlong_filtering,
    ),
    Feature(
        name="no reward for truncated trajectories",
        setting="generator.zero_reward_on_non_stop",
        on="true",
        off="false",
        is_on=lambda config: config.generator.zero_reward_on_non_stop,
    ),
    Feature(
        name="dynamic sampling",
        setting=f"{ALGORITHM}.dynamic_sampling.type",
        on="filter or replace",
        off="null",
        is_on=lambda config: _algorithm(config, "dynamic_sampling").type is not None,
    ),
)

_MODELS = (
    Feature(
        name="LoRA",
        setting=f"{LORA}.rank",
        on="more than 0",
        off="0",
        is_on=lambda config: config.trains_adapter,
    ),
    Feature(
        name="start from an adapter",
        setting=f"{LORA}.path",
        on="a PEFT adapter",
        off="null",
        is_on=lambda config: config.trainer.policy.model.lora.path is not None,
        needs=(Need(("LoRA",), "the rank is that of the adapter"),),
    ),
    Feature(
        name="merged adapter",
        setting=f"{LORA}.weight_sync",
        on="merged",
        off="adapter",
        is_on=lambda config: config.engine_weights is EngineWeights.MERGED,
    ),
    Feature(
        name="several policies",
        setting=f"{LORA}.policies",
        on="names",
        off="[]",
        is_on=lambda config: bool(config.policies),
        needs=(Need(("LoRA",), "each policy is an adapter"),),
        excludes={
            "critic": "a critic values one policy",
            "merged adapter": "the engine gets the adapters alone",
            "engines on servers": "servers get one policy's weights",
            "engines on a cluster": "engines of a cluster get one policy's weights",
        },
    ),
    Feature(
        name="roles of one policy",
        setting="trainer.policy.roles",
        on="names",
        off="[]",
        is_on=lambda config: bool(config.roles),
        excludes={
            "several policies": "each policy has one role, its name",
            "critic": "a critic's mini-batches do not have the groups of roles",
        },
    ),
    Feature(
        name="router replay",
        setting="trainer.policy.moe_enable_routing_replay",
        on="true",
        off="false",
        is_on=lambda config: config.trainer.policy.moe_enable_routing_replay,
        needs=(Need(("recorded experts",), "it repeats what the engine records"),),
    ),
    Feature(
        name="recorded experts",
        setting=f"{ENGINE}.enable_return_routed_experts",
        on="true",
        off="false",
        is_on=lambda config: _engine(config, "enable_return_routed_experts"),
    ),
    Feature(
        name="moments in main memory",
        setting="trainer.policy.optimizer_config.offload_after_step",
        on="true",
        off="null or false",
        is_on=lambda config: bool(config.trainer.policy.optimizer_config.offload_after_step),
    ),
    Feature(
        name="weights in main memory",
        setting="trainer.placement.offload_weights",
        on="true",
        off="null or false",
        is_on=lambda config: bool(config.trainer.placement.offload_weights),
        excludes={
            "asynchronous training": "the trainer computes while engines generate",
            "engines on servers": "their GPUs are not the trainer's",
            "engines on a cluster": "their GPUs are not the trainer's",
            "router replay": "the probe replays routes while the engine is awake",
            "weights by CUDA IPC": "a single rank's are not on the GPU when the engine loads them",
        },
    ),
    Feature(
        name="several ranks",
        setting="trainer.placement.policy_num_gpus_per_node",
        on="more than 1, or several nodes",
        off="1",
        is_on=lambda config: config.trainer.placement.num_ranks > 1,
    ),
    Feature(
        name="ranks by the plan",
        setting="trainer.placement.policy_num_gpus_per_node",
        on="null",
        off="a number",
        is_on=lambda config: config.trainer.placement.policy_num_gpus_per_node is None,
        excludes={
            "several nodes": "GPUs of other machines are not counted",
            "engines on a cluster": "GPUs of other machines are not counted",
            "chosen GPUs of the engine": "engines get those that have no rank",
        },
    ),
    Feature(
        name="several nodes",
        setting="trainer.placement.policy_num_nodes",
        on="more than 1",
        off="1",
        is_on=lambda config: config.trainer.placement.policy_num_nodes > 1,
        excludes={
            "chosen GPUs of the engine": "Ray numbers the GPUs of each node",
            "replicas of an engine": "num_engines says how many the nodes have",
            "weights by CUDA IPC of ranks": "engines of several nodes get a broadcast",
        },
    ),
    Feature(
        name="start from a checkpoint",
        setting="trainer.resume_mode",
        on="from_path",
        off="none",
        is_on=lambda config: config.trainer.resume_mode == "from_path",
        needs=(Need(("checkpoint to start from",), "the run starts from that checkpoint"),),
    ),
    Feature(
        name="checkpoint to start from",
        setting="trainer.resume_path",
        on="a checkpoint folder",
        off="null",
        is_on=lambda config: config.trainer.resume_path is not None,
    ),
)

_ENGINES = (
    Feature(
        name="asynchronous training",
        setting="trainer.fully_async.enabled",
        on="true, with trainer.fully_async.max_staleness_steps above 0",
        off="false",
        is_on=lambda config: config.max_staleness > 0,
    ),
    Feature(
        name="engines on servers",
        setting=f"{ENGINE}.external_server_urls",
        on="at least one address",
        off="none",
        is_on=lambda config: bool(_engine(config, "external_server_urls")),
    ),
    Feature(
        name="engines on a cluster",
        setting="trainer.placement.colocate_all",
        on="false",
        off="true",
        is_on=lambda config: config.engine_place is EnginePlace.CLUSTER,
    ),
    Feature(
        name="several engines",
        setting=f"{ENGINE}.num_engines",
        on="more than 1",
        off="null or 1",
        is_on=lambda config: config.num_engines > 1,
        excludes={
            "engines on servers": "the servers are those of external_server_urls",
            "several policies": "only an engine in the trainer's process has several adapters",
            "weights by CUDA IPC": "several engines need a rank on each of their GPUs",
        },
    ),
    Feature(
        name="sleeping engine",
        setting=f"{ENGINE}.enable_sleep_mode",
        on="true",
        off="null or false",
        is_on=lambda config: bool(_engine(config, "enable_sleep_mode")),
        excludes={
            "asynchronous training": "the engine generates during updates",
            "engines on servers": "servers do not sleep",
            "engines on a cluster": "Ray chooses GPUs on which no rank trains",
        },
    ),
    Feature(
        name="chosen GPUs of the engine",
        setting=f"{ENGINE}.gpu_ids",
        on="numbers of GPUs",
        off="null",
        is_on=lambda config: bool(_engine(config, "gpu_ids")),
        excludes={"engines on a cluster": "Ray chooses the engines' GPUs"},
    ),
    Feature(
        name="replicas of an engine",
        setting=f"{ENGINE}.engine_init_kwargs",
        on="data_parallel_size above 1",
        off="data_parallel_size=1",
        is_on=lambda config: _replicas(config) != 1,
    ),
    Feature(
        name="weights by CUDA IPC",
        setting=f"{ENGINE}.weight_sync_backend",
        on="ipc, with one rank",
        off="auto or file",
        is_on=_reads_gpu_of_one,
        excludes={
            "engines on servers": "servers read files",
            "engines on a cluster": "an engine there is on GPUs of its own",
        },
    ),
    Feature(
        name="weights by CUDA IPC of ranks",
        setting=f"{ENGINE}.weight_sync_backend",
        on="ipc, with several ranks",
        off="auto or file",
        is_on=lambda config: _reads_gpu(config) and config.trainer.placement.num_ranks > 1,
        excludes={
            "engines on servers": "servers read files",
            "engines on a cluster": "an engine there is on GPUs of its own",
            "replicas of an engine": "weights come to the workers of one replica",
            "LoRA": "ranks would merge adapters each by itself, and adapters are small",
        },
    ),
    Feature(
        name="weights by broadcast",
        setting=f"{ENGINE}.weight_sync_backend",
        on="nccl or gloo",
        off="auto or file",
        is_on=lambda config: _engine(config, "weight_sync_backend") in ("nccl", "gloo"),
        excludes={
            "engines on servers": "servers read files",
            "replicas of an engine": "weights are broadcast to the workers of one replica",
        },
    ),
    Feature(
        name="weights by vLLM's reload",
        setting=f"{ENGINE}.weight_sync_backend",
        on="reload",
        off="one of auto, ipc, nccl, gloo, file",
        is_on=lambda config: _engine(config, "weight_sync_backend") == "reload",
        needs=(Need(("engines on servers",), "it is for servers without this package"),),
    ),
    Feature(
        name="weights by file",
        setting=f"{ENGINE}.weight_sync_backend",
        on="file",
        off="auto",
        is_on=lambda config: _engine(config, "weight_sync_backend") == "file",
    ),
    Feature(
        name="weights by file to a cluster",
        setting=f"{ENGINE}.weight_sync_backend",
        on="file, with engines on several nodes",
        off="auto",
        is_on=_sends_files_to_cluster,
        needs=(Need(("folder of weights",), "an engine on another node reads it"),),
    ),
    Feature(
        name="folder of weights",
        setting=f"{ENGINE}.weight_sync_path",
        on="a folder that all nodes share",
        off="null",
        is_on=lambda config: _engine(config, "weight_sync_path") is not None,
    ),
)

_AGENTS = (
    Feature(
        name="agent function",
        setting="agent.function",
        on="module:function",
        off="null",
        is_on=lambda config: config.agent.function is not None,
    ),
    Feature(
        name="agent command",
        setting="agent.command",
        on="a command",
        off="[]",
        is_on=lambda config: bool(config.agent.command),
        excludes={"agent function": "a run has one agent"},
    ),
    Feature(
        name="verifier of a command",
        setting="agent.verifier",
        on="a command",
        off="[]",
        is_on=lambda config: bool(config.agent.verifier),
        needs=(Need(("agent command",), "it runs in the folder of that command"),),
    ),
    Feature(
        name="reward file of a command",
        setting="agent.reward_file",
        on="a file",
        off="null",
        is_on=lambda config: config.agent.reward_file is not None,
        needs=(Need(("agent command",), "it is in the folder of that command"),),
    ),
    Feature(
        name="agents in processes",
        setting="agent.workers",
        on="process",
        off="thread",
        is_on=lambda config: config.agent.workers != "thread",
        needs=(Need(("agent function", "agent command"), "there is no other agent"),),
    ),
)

_COMPACTION = (
    Feature(
        name="compaction",
        setting="generator.context",
        on="compact",
        off="append, retemplate or single",
        is_on=lambda config: config.generator.context == "compact",
        excludes={
            "one row per trajectory": "its contexts do not grow only",
            "agent function": "an agent at the gateway replaces its context itself",
            "agent command": "an agent at the gateway replaces its context itself",
        },
    ),
    Feature(
        name="compaction by a function",
        setting="generator.compaction.policy",
        on="module:function",
        off="null",
        is_on=lambda config: config.generator.compaction.policy is not None,
        needs=(Need(("compaction",), "no other context is replaced"),),
    ),
    Feature(
        name="weight of summaries",
        setting=f"{ALGORITHM}.summary_weight",
        on="another number than 1",
        off="1",
        is_on=lambda config: _algorithm(config, "summary_weight") != 1,
        needs=(Need(_AGENTS_OR_COMPACTION, "no other run has summaries"),),
    ),
    Feature(
        name="mask of overflowed summaries",
        setting=f"{ALGORITHM}.mask_overflowed_summaries",
        on="true",
        off="false",
        is_on=lambda config: _algorithm(config, "mask_overflowed_summaries"),
        needs=(Need(_AGENTS_OR_COMPACTION, "no other run has summaries"),),
    ),
)

_DATA = (
    Feature(
        name="mixture of sources",
        setting="data.mixture",
        on="weights of the sources",
        off="{}",
        is_on=lambda config: bool(config.data.mixture),
    ),
    Feature(
        name="curriculum",
        setting="data.curriculum",
        on="module:function",
        off="null",
        is_on=lambda config: config.data.curriculum is not None,
        needs=(Need(("mixture of sources",), "it changes the weights of one"),),
    ),
)

_GROUPS = (
    _ROWS,
    _ADVANTAGES,
    _LOSSES,
    _DISTILLATION,
    _FILTERS,
    _MODELS,
    _ENGINES,
    _AGENTS,
    _COMPACTION,
    _DATA,
)
FEATURES: dict[str, Feature] = {feature.name: feature for group in _GROUPS for feature in group}
