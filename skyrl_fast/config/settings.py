"""The settings of a training run: plain dataclasses, with SkyRL's names wherever SkyRL has the key.

`config.loading.load_config` reads YAML and dotted overrides into them, `check_config` there says
what is wrong with a value. Every field carries its limits and a line of help in its metadata, so
that checking and documentation come from one place.
"""
# ruff: noqa: RUF009 - setting() returns dataclass fields

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from skyrl_fast.config.asynchronous import FullyAsyncConfig
from skyrl_fast.config.corrections import (
    DynamicSamplingConfig,
    KlCtrlConfig,
    OffPolicyCorrectionConfig,
)
from skyrl_fast.config.engine import InferenceEngineConfig
from skyrl_fast.ops.advantage.estimators import ADVANTAGE_ESTIMATORS
from skyrl_fast.ops.policy_loss.losses import (
    POLICY_LOSSES,
    Cispo,
    ClipCovSelection,
    Dppo,
    KlCov,
    Sapo,
)
from skyrl_fast.setting import DTYPES, setting
from skyrl_fast.setting import ConfigError as ConfigError

LOSS_REDUCTIONS = (
    "token_mean",
    "sequence_mean",
    "seq_mean_token_sum_norm",
    "prompt_mean",
    "trajectory_mean",
)
KL_ESTIMATORS = ("k1", "abs", "k2", "k3")
SCHEDULERS = ("constant_with_warmup", "linear", "cosine")
SCOPES = ("row", "trajectory")
ROWS = ("auto", "step", "merged", "tree")


@dataclass(slots=True)
class DataConfig:
    """Files of prompts."""

    train_data: list[str] = setting([], "training prompts: .jsonl, .json or .parquet files")
    val_data: list[str] = setting([], "evaluation prompts; without them nothing is evaluated")


@dataclass(slots=True)
class ModelConfig:
    """Where a model comes from."""

    path: str | None = setting(None, "folder or hub name of a transformers causal LM")


@dataclass(slots=True)
class OptimizerConfig:
    """AdamW and its learning rate."""

    lr: float = setting(1e-6, "learning rate after the warm-up", at_least=0)
    adam_betas: list[float] = setting([0.9, 0.999], "AdamW betas")
    weight_decay: float = setting(1e-2, "AdamW weight decay of matrices", at_least=0)
    max_grad_norm: float = setting(
        1.0, "clip the gradient's norm to this; 0: no clipping", at_least=0
    )
    num_warmup_steps: int = setting(0, "optimizer steps of linear warm-up", at_least=0)
    scheduler: str = setting("constant_with_warmup", "after the warm-up", choices=SCHEDULERS)


@dataclass(slots=True)
class PolicyConfig:
    """The model that is trained."""

    model: ModelConfig = setting(ModelConfig, "the model that is trained")
    optimizer_config: OptimizerConfig = setting(OptimizerConfig, "its optimizer")
    dtype: str = setting(
        "auto", "of the forward pass; auto: float32 on CPU, bfloat16 on GPU", choices=DTYPES
    )
    lm_head_dtype: str = setting(
        "auto",
        "of the LM head's product; auto: dtype; float32 is slower and nearer to exact logprobs",
        choices=DTYPES,
    )
    moe_enable_routing_replay: bool = setting(
        False, "mixture of experts: tokens go to the experts that the engine sent them to"
    )


@dataclass(slots=True)
class CriticOptimizerConfig(OptimizerConfig):
    """AdamW of the critic."""

    lr: float = setting(5e-6, "learning rate after the warm-up", at_least=0)


@dataclass(slots=True)
class CriticConfig:
    """The model that estimates values, for `gae`."""

    model: ModelConfig = setting(ModelConfig, "backbone of the critic; null: there is none")
    optimizer_config: CriticOptimizerConfig = setting(CriticOptimizerConfig, "its optimizer")


@dataclass(slots=True)
class RefConfig:
    """The frozen reference model."""

    model: ModelConfig = setting(ModelConfig, "frozen reference; null: the policy at the start")


@dataclass(slots=True)
class AlgorithmConfig:
    """Advantages and losses."""

    advantage_estimator: str = setting(
        "grpo",
        "how advantages are computed, per outcome, turn or token: "
        f"{', '.join(ADVANTAGE_ESTIMATORS)}, a registered one, or module:function",
    )
    advantage_estimator_kwargs: dict[str, Any] = setting(
        {}, "keyword arguments of a registered estimator or of module:function"
    )
    grpo_norm_by_std: bool = setting(
        True, "false: no division by the group's std in grpo (Dr. GRPO) and gigpo"
    )
    advantage_batch_normalize: bool = setting(
        False, "mean 0 and variance 1 over the batch's trained tokens; gae, reinforce++: always"
    )
    gamma: float = setting(
        1.0, "discount of a turn, in gae and reinforce++ of a token", at_least=0, at_most=1
    )
    lambd: float = setting(1.0, "lambda of gae", at_least=0, at_most=1)
    value_clip: float | None = setting(
        0.2, "a value's step away from the old one counts up to this; null: not clipped", above=0
    )
    step_advantage_w: float = setting(1.0, "weight of gigpo's step advantage", at_least=0)
    turn_level_baseline: str = setting(
        "turn",
        "of turn_level_group: the others' returns at the same turn, or of the whole episode",
        choices=("turn", "episode"),
    )
    turn_level_norm_by_std: bool = setting(
        False, "divide turn_level_group's advantages by their root mean square in the group"
    )
    policy_loss_type: str = setting(
        "regular",
        f"loss per token: {', '.join(POLICY_LOSSES)}, a registered one, or module:function",
    )
    policy_loss_kwargs: dict[str, Any] = setting(
        {}, "keyword arguments of a registered loss or of module:function"
    )
    loss_reduction: str = setting(
        "token_mean", "weights of tokens in the mini-batch", choices=LOSS_REDUCTIONS
    )
    max_seq_len: int | None = setting(
        None, "denominator of seq_mean_token_sum_norm; null: longest input + generation", at_least=1
    )
    eps_clip_low: float = setting(0.2, "ratio clipped at 1 - this", at_least=0)
    eps_clip_high: float = setting(0.2, "ratio clipped at 1 + this", at_least=0)
    clip_ratio_c: float = setting(3.0, "second clip of dual_clip", above=1)
    cispo: Cispo = setting(Cispo, "of policy_loss_type=cispo")
    sapo: Sapo = setting(Sapo, "of policy_loss_type=sapo")
    dppo: Dppo = setting(Dppo, "of policy_loss_type=dppo")
    clip_cov: ClipCovSelection = setting(ClipCovSelection, "of policy_loss_type=clip_cov")
    kl_cov: KlCov = setting(KlCov, "of policy_loss_type=kl_cov")
    old_logprobs: str = setting(
        "auto",
        "what the ratio is taken against: 'policy' is the trainer's before the update, 'rollout' "
        "the engine's; auto: policy",
        choices=("auto", "policy", "rollout"),
    )
    sequence_scope: str = setting(
        "trajectory",
        "what is one sequence for gspo, off_policy_correction, the filters and dynamic sampling; "
        "the same where every trajectory has one row",
        choices=SCOPES,
    )
    off_policy_correction: OffPolicyCorrectionConfig = setting(
        OffPolicyCorrectionConfig, "of the difference between trainer and engine"
    )
    zero_variance_filter: bool = setting(False, "mask groups whose trajectories have equal rewards")
    zero_variance_filter_tol: float = setting(
        1e-6, "rewards that differ by no more are equal", at_least=0
    )
    dynamic_sampling: DynamicSamplingConfig = setting(
        DynamicSamplingConfig, "of groups that teach nothing"
    )
    use_kl_in_reward: bool = setting(
        False, "subtract kl_loss_coef * KL(policy, reference) from the reward of each token"
    )
    kl_ctrl: KlCtrlConfig = setting(KlCtrlConfig, "coefficient of the KL in the reward")
    use_kl_loss: bool = setting(False, "add kl_loss_coef * KL(policy, reference) to the loss")
    kl_loss_coef: float = setting(0.001, "weight of the KL in loss or reward", at_least=0)
    kl_estimator_type: str = setting("k3", "estimator of the KL", choices=KL_ESTIMATORS)
    use_entropy_loss: bool = setting(False, "subtract entropy_loss_coef * entropy from the loss")
    entropy_loss_coef: float = setting(0.01, "weight of that term", at_least=0)


@dataclass(slots=True)
class PlacementConfig:
    """Where the models that are trained are."""

    policy_num_gpus_per_node: int = setting(
        1,
        "GPUs that share the update, and with it each weight, gradient and moment; the reference "
        "and the critic are divided as the policy is. Without a GPU: processes",
        at_least=1,
    )


@dataclass(slots=True)
class TrainerConfig:
    """Batches, intervals, folders."""

    policy: PolicyConfig = setting(PolicyConfig, "the model that is trained")
    ref: RefConfig = setting(RefConfig, "the frozen reference of the KL term")
    critic: CriticConfig = setting(CriticConfig, "the model that estimates values")
    algorithm: AlgorithmConfig = setting(AlgorithmConfig, "what is optimised")
    fully_async: FullyAsyncConfig = setting(FullyAsyncConfig, "generation beside training")
    placement: PlacementConfig = setting(PlacementConfig, "on how many GPUs")
    seed: int = setting(42, "of data order and sampling", at_least=0, at_most=2**32 - 1)
    epochs: int = setting(1, "passes over the training prompts", at_least=1)
    max_training_steps: int | None = setting(None, "stop after so many batches", at_least=1)
    train_batch_size: int = setting(64, "prompts per batch", at_least=1)
    policy_mini_batch_size: int = setting(64, "prompts per optimizer step", at_least=1)
    critic_mini_batch_size: int | None = setting(
        None, "prompts per optimizer step of the critic; null: policy_mini_batch_size", at_least=1
    )
    update_epochs_per_batch: int = setting(1, "passes over each batch", at_least=1)
    max_tokens_per_microbatch: int = setting(16384, "tokens of one forward-backward", at_least=1)
    rows: str = setting(
        "auto",
        "auto: as the generator's settings say; step: one per turn; merged: turns joined where the "
        "context only grew; tree: as the generator's settings say, and each distinct token of a "
        "prompt's rows goes through the model once",
        choices=ROWS,
    )
    gradient_checkpointing: bool = setting(False, "recompute activations to save memory")
    max_prompt_length: int = setting(512, "where generator.max_input_length is null", at_least=1)
    eval_before_train: bool = setting(True, "evaluate once before the first step")
    eval_interval: int = setting(
        5, "evaluate every so many steps; -1: only at the end", at_least=-1
    )
    eval_batch_size: int = setting(1024, "prompts evaluated at a time", at_least=1)
    run_path: str = setting("runs/default", "folder of everything this run writes")
    ckpt_path: str | None = setting(None, "folder of checkpoints; null: run_path/checkpoints")
    ckpt_interval: int = setting(
        10, "checkpoint every so many steps; -1: only at the end", at_least=-1
    )
    max_ckpts_to_keep: int = setting(3, "older ones are deleted; -1: keep all", at_least=-1)
    resume_mode: str = setting(
        "none",
        "none: a new run in an empty folder; latest: from the newest checkpoint if there is one; "
        "from_path: from resume_path",
        choices=("none", "latest", "from_path"),
    )
    resume_path: str | None = setting(None, "checkpoint folder for resume_mode=from_path")
    device: str = setting("auto", "auto: the GPU if there is one", choices=("auto", "cpu", "cuda"))
    num_threads: int | None = setting(
        None, "CPU threads of each rank; null: torch's, divided among them", at_least=1
    )
    logger: list[str] = setting(
        ["jsonl", "tensorboard"],
        "where metrics go: jsonl, tensorboard, wandb, mlflow, trackio, or module:Class of a Logger",
    )
    project_name: str = setting("skyrl_fast", "of Weights & Biases, MLflow, Trackio")
    run_name: str = setting("run", "shown by loggers")
    dump_trajectories: bool = setting(
        True, "keep every trajectory, for people and `skyrl-fast view`"
    )
    plot: bool = setting(True, "draw the learning curve at the end")
    sync_tolerance: float = setting(
        0.0,
        "largest allowed |trainer - engine| logprob difference after a weight update; 0: by dtype",
        at_least=0,
    )


@dataclass(slots=True)
class SamplingParams:
    """How tokens are sampled."""

    max_generate_length: int = setting(1024, "longest answer of one turn, in tokens", at_least=1)
    temperature: float = setting(1.0, "of sampling; 0: greedy", at_least=0)
    top_p: float = setting(1.0, "nucleus", above=0, at_most=1)
    top_k: int = setting(-1, "-1: all tokens", at_least=-1)
    min_p: float = setting(0.0, "least probability relative to the best", at_least=0, at_most=1)
    repetition_penalty: float = setting(1.0, "1: none", above=0)
    stop: list[str] | None = setting(None, "strings that end a turn")
    additional_kwargs: dict[str, Any] = setting({}, "further vLLM sampling parameters")


@dataclass(slots=True)
class GeneratorConfig:
    """Trajectories: how many, how long, by which engine."""

    inference_engine: InferenceEngineConfig = setting(InferenceEngineConfig, "vLLM")
    n_samples_per_prompt: int = setting(5, "trajectories of one group", at_least=1)
    eval_n_samples_per_prompt: int = setting(1, "the same in evaluation", at_least=1)
    max_turns: int = setting(1, "steps of one trajectory at most", at_least=1)
    max_input_length: int | None = setting(
        None, "longest prompt of any turn; null: trainer.max_prompt_length", at_least=1
    )
    sampling_params: SamplingParams = setting(SamplingParams, "in training")
    eval_sampling_params: SamplingParams | None = setting(
        None,
        "in evaluation; null: as training. What is left out has its default, not training's value",
    )
    use_conversation_multi_turn: bool = setting(True, "each turn is a message of its own")
    context: str = setting(
        "auto",
        "append: keep the tokens and add the observation's; retemplate: apply the chat template to "
        "the history each turn; single: one conversation of one answer; auto: append, or single "
        "without use_conversation_multi_turn",
        choices=("auto", "append", "retemplate", "single"),
    )
    append_eos_token_after_stop_str_in_multi_turn: bool = setting(True, "after a stop string")
    chat_template: str | None = setting(None, "Jinja text or file; null: the tokenizer's")
    chat_template_kwargs: dict[str, Any] = setting({}, "passed to the chat template")
    zero_reward_on_non_stop: bool = setting(
        False, "reward 0 where a trajectory was cut off or failed"
    )
    apply_overlong_filtering: bool = setting(
        False, "mask trajectories that were cut off for their length"
    )
    step_wise_trajectories: bool = setting(
        True, "a row per step; false: one row per trajectory, for contexts that only grow"
    )
    merge_stepwise_output: bool = setting(
        False, "with step_wise_trajectories: join consecutive steps whose context only grew"
    )
    merge_drift: str = setting(
        "fork",
        "joining where the last tokens were tokenised anew. fork: the step starts a row; realign: "
        "it joins, and what changed is not trained",
        choices=("fork", "realign"),
    )
    merge_max_drift_tokens: int = setting(8, "most tokens that realign drops", at_least=0)
    max_concurrent_trajectories: int = setting(256, "agent loops at once", at_least=1)
    trajectory_timeout_seconds: float = setting(300.0, "deadline of one trajectory", above=0)
    max_retries: int = setting(1, "of a failed trajectory before it becomes a stub", at_least=0)

    def samples(self, phase: str) -> int:
        """Return the trajectories per prompt in "train" or "eval"."""
        return self.n_samples_per_prompt if phase == "train" else self.eval_n_samples_per_prompt

    def sampling(self, phase: str) -> SamplingParams:
        """Return the sampling parameters of "train" or "eval"."""
        if phase == "eval" and self.eval_sampling_params is not None:
            return self.eval_sampling_params
        return self.sampling_params


@dataclass(slots=True)
class SkyRLGymConfig:
    """Settings of skyrl_gym and of its environments."""

    max_env_workers: int = setting(32, "threads that step environments", at_least=1)
    text2sql: dict[str, Any] = setting({}, "settings of env_class text2sql, such as db_path")
    search: dict[str, Any] = setting({}, "settings of env_class search, such as search_url")
    llm_as_a_judge: dict[str, Any] = setting({}, "settings of env_class gsm8k_llm_as_a_judge")
    env_config: dict[str, Any] = setting({}, "settings of further env classes, by their names")


@dataclass(slots=True)
class EnvironmentConfig:
    """What the agent acts in."""

    env_class: str = setting(
        "gsm8k",
        "module:Class or file.py:Class of an Env, or a name registered in skyrl_gym; a row's own "
        "env_class goes first",
    )
    skyrl_gym: SkyRLGymConfig = setting(SkyRLGymConfig, "skyrl_gym's settings")
    register: list[str] = setting(
        [], "Python modules or files imported first, such as those that call skyrl_gym.register"
    )
    timeout_seconds: float = setting(60.0, "deadline of one environment call", above=0)


@dataclass(slots=True)
class Config:
    """Everything a training run can be told."""

    data: DataConfig = setting(DataConfig, "prompts")
    trainer: TrainerConfig = setting(TrainerConfig, "training")
    generator: GeneratorConfig = setting(GeneratorConfig, "rollouts")
    environment: EnvironmentConfig = setting(EnvironmentConfig, "what the agent acts in")

    @property
    def max_staleness(self) -> int:
        """Policy versions from a group's start to its training at most; 0: synchronous."""
        chosen = self.trainer.fully_async
        return chosen.max_staleness_steps if chosen.enabled else 0


def max_input_length(config: Config) -> int:
    """Longest prompt of any turn: generator.max_input_length, else trainer.max_prompt_length."""
    own = config.generator.max_input_length
    return config.trainer.max_prompt_length if own is None else own


def merges_steps(config: Config) -> bool:
    """Whether consecutive steps become one row where the context only grew."""
    return config.generator.merge_stepwise_output or config.trainer.rows == "merged"


def to_dict(config: Any) -> dict[str, Any]:
    """The config as nested dicts of plain values, for YAML and JSON.

    Example:
        >>> to_dict(Config())["trainer"]["seed"]
        42
    """
    result: dict[str, Any] = {}
    for item in fields(config):
        value = getattr(config, item.name)
        result[item.name] = to_dict(value) if hasattr(value, "__dataclass_fields__") else value
    return result
