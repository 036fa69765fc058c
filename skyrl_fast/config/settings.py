"""The settings of a training run: plain dataclasses, with SkyRL's names wherever SkyRL has the key.

`config.parse` builds them from YAML and dotted overrides, `config.loading.check_config`
validates the values. Each field's metadata holds its limits and help text, so that validation and
documentation have a single source.
"""
# ruff: noqa: RUF009 - setting() returns dataclass fields

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import Field, dataclass, fields, is_dataclass, replace
from typing import Any

from skyrl_fast.config.agent import AgentConfig
from skyrl_fast.config.asynchronous import FullyAsyncConfig
from skyrl_fast.config.compaction import CompactionConfig
from skyrl_fast.config.corrections import (
    DynamicSamplingConfig,
    KlCtrlConfig,
    OffPolicyCorrectionConfig,
)
from skyrl_fast.config.distillation import DistillationConfig
from skyrl_fast.config.engine import InferenceEngineConfig
from skyrl_fast.config.modes import EnginePlace, EngineWeights
from skyrl_fast.config.progress import PROGRESS
from skyrl_fast.config.sampling import SamplingParams
from skyrl_fast.ops.advantage.estimators import ADVANTAGE_ESTIMATORS
from skyrl_fast.ops.policy_loss.losses import (
    KL_ESTIMATORS,
    POLICY_LOSSES,
    Cispo,
    ClipCovSelection,
    Dppo,
    KlCov,
    Sapo,
)
from skyrl_fast.setting import TRAINED_DTYPES, EnvironmentValue, setting
from skyrl_fast.setting import ConfigError as ConfigError

LOSS_REDUCTIONS = (
    "token_mean",
    "sequence_mean",
    "seq_mean_token_sum_norm",
    "prompt_mean",
    "trajectory_mean",
)
SCHEDULERS = ("constant_with_warmup", "linear", "cosine")
OPTIMIZERS = ("adamw", "adamw_8bit")
SCOPES = ("row", "trajectory")
ROWS = ("step", "merged", "trajectory")
LAYOUTS = ("auto", "sequence", "tree")
ALL_LINEAR = "all-linear"  # value of LoRA's target modules
INIT_METHODS = ("kaiming", "gaussian")
TURN_LIMIT = 64  # turns of a trajectory where generator.max_turns sets none
REFERENCE = "reference"  # with named policies: the model without an adapter, which is not trained


@dataclass(slots=True)
class DataConfig:
    """Files of prompts."""

    train_data: list[str] = setting(
        [], "training prompts: .jsonl, .json or .parquet files, or datasets on the hub"
    )
    val_data: list[str] = setting([], "evaluation prompts, as train_data; empty: no evaluation")
    mixture: dict[str, float] = setting(
        dict,
        "weights of the sources in training: by the rows' data_source, else by the file's name "
        "without folder and suffix; empty: each prompt once an epoch",
    )
    curriculum: str | None = setting(
        None,
        "module:function or file.py:function that is called after each step with its number and "
        "the statistics of each source, and returns new weights of the mixture, or None",
    )


@dataclass(slots=True)
class ModelConfig:
    """Source of a model."""

    path: str | None = setting(None, "folder or hub name of a transformers causal LM")


@dataclass(slots=True)
class LoraConfig:
    """A LoRA adapter, trained in place of the model's own weights."""

    rank: int = setting(0, "rank of the adapter; 0: all weights are trained", at_least=0)
    alpha: int = setting(16, "the adapter's output is scaled by alpha / rank", at_least=1)
    target_modules: list[str] = setting(
        [ALL_LINEAR],
        "names of the linear modules that get an adapter; all-linear: all in the layers",
    )
    exclude_modules: list[str] = setting([], "names of linear modules that get none")
    init_method: str = setting(
        "kaiming", "distribution of A's initial values; B starts at 0", choices=INIT_METHODS
    )
    use_rslora: bool = setting(False, "whether to scale by alpha / sqrt(rank) instead (rsLoRA)")
    path: str | None = setting(
        None,
        "PEFT adapter that training continues from; null: a new one. With policies a folder that "
        "has the adapter of each in a folder of its name",
    )
    policies: list[str] = setting(
        [],
        "names of the run's policies: each has an adapter, an optimizer and advantages of its own, "
        "and is called by its name; reference, the model without an adapter, is not trained. "
        "Empty: one policy",
    )
    weight_sync: str = setting(
        "adapter",
        "what engines get: the adapter alone, or the model's weights with the adapter merged in",
        choices=("adapter", "merged"),
    )


@dataclass(slots=True)
class PolicyModelConfig(ModelConfig):
    """Source of the policy."""

    lora: LoraConfig = setting(LoraConfig, "LoRA adapter")


@dataclass(slots=True)
class OptimizerConfig:
    """AdamW and its learning rate."""

    optimizer: str = setting(
        "adamw",
        "adamw_8bit: moments in 8 bits, by torchao, which is compiled at the first step",
        choices=OPTIMIZERS,
    )
    lr: float = setting(1e-6, "learning rate after the warm-up", at_least=0, finite=True)
    adam_betas: list[float] = setting([0.9, 0.999], "AdamW betas")
    weight_decay: float = setting(1e-2, "AdamW weight decay of matrices", at_least=0, finite=True)
    max_grad_norm: float = setting(1.0, "maximum norm of the gradient; 0: no clipping", at_least=0)
    num_warmup_steps: int = setting(0, "optimizer steps of linear warm-up", at_least=0)
    scheduler: str = setting(
        "constant_with_warmup", "learning-rate schedule after the warm-up", choices=SCHEDULERS
    )
    offload_after_step: bool | None = setting(
        None,
        "whether the moments are in main memory between optimizer steps; null: on a GPU, where the "
        "run would not fit otherwise",
    )


@dataclass(slots=True)
class PolicyConfig:
    """The trained model."""

    model: PolicyModelConfig = setting(PolicyModelConfig, "trained model")
    roles: list[str] = setting(
        [],
        "names of the roles that the one policy plays, such as the sides of a game: calls name "
        "theirs, and each is compared with itself alone. Empty: one role",
    )
    optimizer_config: OptimizerConfig = setting(OptimizerConfig, "its optimizer")
    dtype: str = setting(
        "auto",
        "dtype of the forward pass; auto: float32 on CPU, bfloat16 on GPU",
        choices=TRAINED_DTYPES,
    )
    lm_head_dtype: str = setting(
        "auto",
        "dtype of the LM head's matrix product; auto: dtype; float32: slower, more exact logprobs",
        choices=TRAINED_DTYPES,
    )
    moe_enable_routing_replay: bool = setting(
        False, "mixture of experts: whether to route tokens as the engine did (router replay)"
    )
    sequence_parallel_size: int = setting(
        1,
        "ranks that share the tokens of a pass, for long rows: each holds a part of the tokens, "
        "and during attention a part of the heads (Ulysses), of all models; divides the number of "
        "ranks and of query heads",
        at_least=1,
    )


@dataclass(slots=True)
class CriticOptimizerConfig(OptimizerConfig):
    """AdamW of the critic."""

    lr: float = setting(5e-6, "learning rate after the warm-up", at_least=0, finite=True)


@dataclass(slots=True)
class CriticConfig:
    """The model that estimates values, for `gae`."""

    model: ModelConfig = setting(
        ModelConfig,
        "backbone of the critic; null: no critic; with LoRA and the policy's path: an adapter of "
        "the critic, by the same settings, on the policy's weights",
    )
    optimizer_config: CriticOptimizerConfig = setting(CriticOptimizerConfig, "its optimizer")


@dataclass(slots=True)
class RefConfig:
    """The frozen reference model."""

    model: ModelConfig = setting(
        ModelConfig,
        "reference model; null: the initial policy; with LoRA: the policy without its adapter",
    )


@dataclass(slots=True)
class AlgorithmConfig:
    """Advantages and losses."""

    advantage_estimator: str = setting(
        "grpo",
        "how advantages are computed: per outcome, turn, context or token. One of "
        f"{', '.join(ADVANTAGE_ESTIMATORS)}, a registered one, or module:function",
    )
    advantage_estimator_kwargs: dict[str, Any] = setting(
        {}, "keyword arguments of a registered estimator or of module:function"
    )
    grpo_norm_by_std: bool = setting(
        True, "whether grpo and gigpo divide by the group's std; false: Dr. GRPO"
    )
    gdpo_weights: dict[str, float] = setting(
        dict,
        "weight of each part of the reward in gdpo, by the name under which environments, agents "
        "and reward functions report it as a metric; reward: the outcome",
    )
    advantage_batch_normalize: bool = setting(
        False,
        "whether to normalise to mean 0 and variance 1 over the batch's trained tokens; gae and "
        "reinforce++ always do",
    )
    gamma: float = setting(
        1.0,
        "discount per turn; in context_level_group per context, in gae and reinforce++ per token",
        at_least=0,
        at_most=1,
    )
    lambd: float = setting(1.0, "lambda of gae", at_least=0, at_most=1)
    value_clip: float | None = setting(
        0.2,
        "clip range of the value around the old value in the critic's loss; null: no clipping",
        above=0,
    )
    step_advantage_w: float = setting(
        1.0, "weight of gigpo's step advantage", at_least=0, finite=True
    )
    summary_weight: float = setting(
        1.0,
        "weight of the policy loss on the tokens of summaries, which do not act themselves; 0: "
        "they are not trained",
        at_least=0,
        finite=True,
    )
    mask_overflowed_summaries: bool = setting(
        False,
        "whether to mask trajectories with a summary that ended at a limit (length, turns, time), "
        "and summaries that were truncated (SUPO)",
    )
    turn_level_baseline: str = setting(
        "turn",
        "baseline of turn_level_group: the others' returns at the same turn, or of the episode; of "
        "context_level_group, with contexts as turns",
        choices=("turn", "episode"),
    )
    policy_loss_type: str = setting(
        "regular",
        f"policy loss: {', '.join(POLICY_LOSSES)}, a registered one, or module:function",
    )
    policy_loss_coef: float = setting(
        1.0,
        "weight of the policy loss; 0: only the other terms, such as that of distillation",
        at_least=0,
        finite=True,
    )
    observation_loss_coef: float = setting(
        0.0,
        "weight of the cross-entropy on the environment's tokens in merged rows; 0: not trained",
        at_least=0,
        finite=True,
    )
    policy_loss_kwargs: dict[str, Any] = setting(
        {}, "keyword arguments of a registered loss or of module:function"
    )
    loss_reduction: str = setting(
        "token_mean", "reduction of token losses over the mini-batch", choices=LOSS_REDUCTIONS
    )
    max_seq_len: int | None = setting(
        None, "denominator of seq_mean_token_sum_norm; null: longest input + generation", at_least=1
    )
    eps_clip_low: float = setting(0.2, "clip range of the ratio below 1", at_least=0)
    eps_clip_high: float = setting(0.2, "clip range of the ratio above 1", at_least=0)
    clip_ratio_c: float = setting(
        3.0, "cap of the ratio for negative advantages in dual_clip", above=1
    )
    cispo: Cispo = setting(Cispo, "settings of policy_loss_type=cispo")
    sapo: Sapo = setting(Sapo, "settings of policy_loss_type=sapo")
    dppo: Dppo = setting(Dppo, "settings of policy_loss_type=dppo")
    clip_cov: ClipCovSelection = setting(ClipCovSelection, "settings of policy_loss_type=clip_cov")
    kl_cov: KlCov = setting(KlCov, "settings of policy_loss_type=kl_cov")
    old_logprobs: str = setting(
        "auto",
        "denominator of the policy ratio. policy: the trainer's log-probabilities before the "
        "update; rollout: the engine's; auto: policy",
        choices=("auto", "policy", "rollout"),
    )
    sequence_scope: str = setting(
        "trajectory",
        "unit of a sequence for gspo, off_policy_correction, the filters and dynamic sampling; no "
        "difference if every trajectory has one row",
        choices=SCOPES,
    )
    off_policy_correction: OffPolicyCorrectionConfig = setting(
        OffPolicyCorrectionConfig, "correction for differences between trainer and engine"
    )
    zero_variance_filter: bool = setting(False, "whether to mask groups with equal rewards")
    zero_variance_filter_tol: float = setting(
        1e-6, "largest difference between rewards that count as equal", at_least=0
    )
    dynamic_sampling: DynamicSamplingConfig = setting(
        DynamicSamplingConfig, "handling of uninformative groups"
    )
    use_kl_in_reward: bool = setting(
        False, "whether to subtract kl_loss_coef * KL(policy, reference) from each token's reward"
    )
    kl_ctrl: KlCtrlConfig = setting(KlCtrlConfig, "coefficient of the KL in the reward")
    use_kl_loss: bool = setting(
        False, "whether to add kl_loss_coef * KL(policy, reference) to the loss"
    )
    kl_loss_coef: float = setting(
        0.001, "coefficient of the KL in loss or reward: its weight", at_least=0, finite=True
    )
    kl_estimator_type: str = setting("k3", "estimator of the KL", choices=tuple(KL_ESTIMATORS))
    use_entropy_loss: bool = setting(
        False, "whether to subtract entropy_loss_coef * entropy from the loss"
    )
    entropy_loss_coef: float = setting(0.01, "weight of the entropy term", at_least=0, finite=True)
    distillation: DistillationConfig = setting(
        DistillationConfig, "KL between the policy and a teacher, as a term of the loss"
    )


@dataclass(slots=True)
class PlacementConfig:
    """Devices of the trained models."""

    policy_num_gpus_per_node: int | None = setting(
        1,
        "GPUs over which weights, gradients and optimizer states of all models are sharded; "
        "without a GPU: number of CPU processes. null: all GPUs of the machine, in asynchronous "
        "training all that num_engines leaves, or where that is null half of them, more where the "
        "run fits only so; 1 without a GPU",
        at_least=1,
    )
    policy_num_nodes: int = setting(
        1, "number of machines; more than one needs a Ray cluster", at_least=1
    )
    colocate_all: bool = setting(
        True,
        "whether engines run on the machines of the ranks, on GPUs that no rank uses or else on "
        "the trainer's; false: engines are on GPUs of their own, of any node of a Ray cluster",
    )
    offload_weights: bool | None = setting(
        None,
        "whether the models' weights are in main memory while engines on their GPUs generate; "
        "null: on the GPUs, where the run would not fit otherwise",
    )

    @property
    def ranks_per_node(self) -> int:
        """Those of a machine; where the setting is null, 1 until GPUs are found."""
        return self.policy_num_gpus_per_node or 1

    @property
    def num_ranks(self) -> int:
        """Processes that train the models together."""
        return self.policy_num_nodes * self.ranks_per_node


@dataclass(slots=True)
class TrainerConfig:
    """Batches, intervals, folders."""

    policy: PolicyConfig = setting(PolicyConfig, "trained model")
    ref: RefConfig = setting(RefConfig, "frozen reference model of the KL term")
    critic: CriticConfig = setting(CriticConfig, "model that estimates values")
    algorithm: AlgorithmConfig = setting(AlgorithmConfig, "advantages and losses")
    fully_async: FullyAsyncConfig = setting(FullyAsyncConfig, "asynchronous training")
    placement: PlacementConfig = setting(PlacementConfig, "number of GPUs")
    seed: int = setting(42, "seed of data order and sampling", at_least=0, at_most=2**32 - 1)
    epochs: int = setting(1, "passes over the training prompts", at_least=1)
    max_training_steps: int | None = setting(None, "maximum batches; null: all epochs", at_least=1)
    train_batch_size: int = setting(64, "prompts per batch", at_least=1)
    policy_mini_batch_size: int = setting(64, "prompts per optimizer step", at_least=1)
    critic_mini_batch_size: int | None = setting(
        None, "prompts per optimizer step of the critic; null: policy_mini_batch_size", at_least=1
    )
    update_epochs_per_batch: int = setting(1, "passes over each batch", at_least=1)
    max_tokens_per_microbatch: int = setting(
        16384, "maximum tokens of a forward-backward pass", at_least=1
    )
    rows: str = setting(
        "step",
        "training rows. step: one per turn; merged: consecutive turns are one where the context "
        "only grew; trajectory: one per trajectory, whose context must only grow",
        choices=ROWS,
    )
    row_layout: str = setting(
        "auto",
        "layout of the rows in a forward pass. sequence: each row with all of its tokens; tree: "
        "prefix trees, in which each distinct token of a pass's rows is processed once; auto: the "
        "one that takes less time, of those that the model supports",
        choices=LAYOUTS,
    )
    profile_steps: list[int] = setting(
        [],
        "steps whose timeline is written to run_path/timeline, for https://ui.perfetto.dev",
    )
    gradient_checkpointing: bool | None = setting(
        None, "whether to recompute activations to save memory; null: on a GPU"
    )
    residual_dtype: str = setting(
        "float32",
        "dtype of the sums between layers. auto: that of the forward pass, which halves what is "
        "kept per checkpointed layer, at about 1.3 times the rounding error in bfloat16",
        choices=("float32", "auto"),
    )
    eval_before_train: bool = setting(True, "whether to evaluate before the first step")
    eval_interval: int = setting(5, "steps between evaluations; -1: only at the end", at_least=-1)
    eval_batch_size: int = setting(1024, "prompts per evaluation batch", at_least=1)
    run_path: str = setting("runs/default", "folder of all output of the run")
    ckpt_path: str | None = setting(
        None, "folder of checkpoints, null: run_path/checkpoints; or URL to upload those to"
    )
    ckpt_interval: int = setting(10, "steps between checkpoints; -1: only at the end", at_least=-1)
    max_ckpts_to_keep: int = setting(3, "newest checkpoints to keep; -1: all", at_least=-1)
    resume_mode: str = setting(
        "none",
        "where the run starts. none: a new run in an empty folder; latest: the newest intact "
        "checkpoint, if any; from_path: resume_path, and later checkpoints are set aside",
        choices=("none", "latest", "from_path"),
    )
    resume_path: str | None = setting(None, "checkpoint folder or URL for resume_mode=from_path")
    device: str = setting(
        "auto",
        "device of the models; auto: the GPU if there is one",
        choices=("auto", "cpu", "cuda"),
    )
    num_threads: int | None = setting(
        None,
        "CPU threads of each rank; null: torch's default, divided by the number of ranks",
        at_least=1,
    )
    logger: list[str] = setting(
        ["jsonl", "tensorboard"],
        "metric loggers: jsonl, tensorboard, wandb, mlflow, trackio, or module:Class of a Logger",
    )
    progress: list[str] | None = setting(
        None,
        f"columns of the progress display: {', '.join(PROGRESS)}, or names of metrics, such as "
        "environment/score; null: those that have values, as many as fit on a terminal or in 120 "
        "characters",
    )
    project_name: str = setting(
        "skyrl_fast", "project name in Weights & Biases, MLflow and Trackio"
    )
    run_name: str = setting("run", "name of the run in loggers")
    dump_trajectories: bool = setting(
        True, "whether to store all trajectories in the run folder, for `skyrl-fast view`"
    )
    plot: bool = setting(True, "whether to plot the learning curve at the end")
    sync_tolerance: float = setting(
        0.0,
        "largest allowed |trainer - engine| difference of any logprob after a weight update, in "
        "place of the limits of the engine's dtype; 0: those limits",
        at_least=0,
    )


@dataclass(slots=True)
class GeneratorConfig:
    """Trajectories: number, length, context, engine."""

    inference_engine: InferenceEngineConfig = setting(InferenceEngineConfig, "inference engine")
    n_samples_per_prompt: int = setting(5, "trajectories per prompt in training", at_least=1)
    eval_n_samples_per_prompt: int = setting(1, "trajectories per prompt in evaluation", at_least=1)
    max_turns: int | None = setting(
        None,
        "maximum turns of a trajectory, or calls of an agent; null: until the environment or agent "
        f"is done or a length is reached, at most {TURN_LIMIT}",
        at_least=1,
    )
    max_input_length: int = setting(512, "longest prompt of any turn", at_least=1)
    sampling_params: SamplingParams = setting(SamplingParams, "sampling in training")
    eval_sampling_params: SamplingParams | None = setting(
        None,
        "sampling in evaluation; null: as in training. Missing keys have their defaults, not the "
        "values of training",
    )
    context: str = setting(
        "append",
        "how the prompt of the next turn is built. append: the previous tokens and the "
        "observation's; retemplate: the chat template on the full history; single: all turns and "
        "observations in one assistant message; compact: as append, and a context that has become "
        "too long is replaced by the first prompt and the model's summary",
        choices=("append", "retemplate", "single", "compact"),
    )
    compaction: CompactionConfig = setting(CompactionConfig, "settings of context=compact")
    append_eos_token_after_stop_str_in_multi_turn: bool = setting(
        True, "whether to append the EOS token after a stop string"
    )
    chat_template: str | None = setting(
        None,
        "chat template: Jinja source, a file, or plain, for base models, whose tokenizer has none; "
        "null: the tokenizer's",
    )
    chat_template_kwargs: dict[str, Any] = setting(
        {},
        "keyword arguments of the chat template, such as enable_thinking of models that can think; "
        "the column tools of a row takes precedence over its tools",
    )
    tool_parser: str | None = setting(
        None,
        "vLLM's parser of tool calls for the model's family, such as hermes or llama3_json: "
        "environments get the calls as action.tool_calls; null: only the text",
    )
    reasoning_parser: str | None = setting(
        None,
        "vLLM's parser of thoughts for the model's family, such as qwen3 or deepseek_r1: agents at "
        "the gateway get them apart from the answer's text; null: as a part of it",
    )
    skip_special_tokens: bool | None = setting(
        None,
        "whether the text that environments get is without special tokens; null: unless "
        "tool_parser is set",
    )
    zero_reward_on_non_stop: bool = setting(
        False, "whether truncated and failed trajectories get reward 0"
    )
    apply_overlong_filtering: bool = setting(
        False, "whether to mask trajectories that were truncated for their length"
    )
    merge_drift: str = setting(
        "fork",
        "of merged rows: handling of steps whose last tokens were re-tokenised. fork: start a new "
        "row; realign: merge, without training the changed tokens",
        choices=("fork", "realign"),
    )
    merge_max_drift_tokens: int = setting(8, "maximum tokens that realign drops", at_least=0)
    max_concurrent_trajectories: int = setting(256, "maximum concurrent agent loops", at_least=1)
    trajectory_timeout_seconds: float = setting(
        300.0, "timeout of a trajectory, in seconds", above=0
    )
    max_retries: int = setting(
        1, "retries before a failed trajectory is replaced by a masked placeholder", at_least=0
    )

    @property
    def turn_limit(self) -> int:
        """Maximum turns of a trajectory."""
        if self.max_turns is None:
            return TURN_LIMIT
        return self.max_turns

    @property
    def compaction_budget(self) -> int:
        """Longest prompt, in tokens, before `context=compact` asks for a summary."""
        budget = self.compaction.budget
        if budget is None:
            return self.max_input_length * 3 // 4
        return budget

    def samples(self, phase: str) -> int:
        """Return the trajectories per prompt in "train" or "eval"."""
        if phase == "train":
            return self.n_samples_per_prompt
        return self.eval_n_samples_per_prompt

    def sampling(self, phase: str) -> SamplingParams:
        """Return the sampling parameters of "train" or "eval"; evaluation records no tokens."""
        if phase == "train":
            return self.sampling_params
        return replace(self.eval_sampling_params or self.sampling_params, max_kept_tokens=None)


@dataclass(slots=True)
class SkyRLGymConfig:
    """Settings of skyrl_gym and of its environments."""

    max_env_workers: int = setting(
        32, "maximum concurrent calls of environments on the trainer's node", at_least=1
    )
    text2sql: dict[str, Any] = setting({}, "settings of env_class text2sql, such as db_path")
    search: dict[str, Any] = setting({}, "settings of env_class search, such as search_url")
    llm_as_a_judge: dict[str, Any] = setting({}, "settings of env_class gsm8k_llm_as_a_judge")
    env_config: dict[str, Any] = setting({}, "settings of other environments, by env_class")


@dataclass(slots=True)
class EnvironmentConfig:
    """The environment of the agent."""

    env_class: str = setting(
        "gsm8k",
        "environment: module:Class or file.py:Class of an Env, or a name registered in skyrl_gym; "
        "the env_class of a row takes precedence",
    )
    import_row_env_classes: bool = setting(
        True,
        "whether the env_class of a row may name Python code, as module:Class or file.py:Class, "
        "which is imported and called; false: rows that name another than env_class are refused",
    )
    skyrl_gym: SkyRLGymConfig = setting(SkyRLGymConfig, "settings of skyrl_gym")
    register: list[str] = setting(
        [], "Python modules or files to import first, e.g. to call skyrl_gym.register"
    )
    workers: str = setting(
        "thread",
        "where environments run. thread: threads of the trainer; process: a process for each "
        "trajectory, which is killed if a call takes too long, also one that holds Python's lock",
        choices=("thread", "process"),
    )
    timeout_seconds: float = setting(60.0, "timeout of an environment call, in seconds", above=0)


@dataclass(slots=True)
class Config:
    """All settings of a training run.

    Args:
        data, trainer, generator, environment, agent: the sections; see the reference of settings.
    """

    data: DataConfig = setting(DataConfig, "prompts")
    trainer: TrainerConfig = setting(TrainerConfig, "training")
    generator: GeneratorConfig = setting(GeneratorConfig, "rollouts")
    environment: EnvironmentConfig = setting(EnvironmentConfig, "environment of the agent")
    agent: AgentConfig = setting(AgentConfig, "agent that calls the policy through the gateway")

    @property
    def engine_place(self) -> EnginePlace:
        """Where the engines run; asleep or awake once `enable_sleep_mode` is decided."""
        engine = self.generator.inference_engine
        if engine.external_server_urls:
            return EnginePlace.SERVERS
        if not self.trainer.placement.colocate_all:
            return EnginePlace.CLUSTER
        return EnginePlace.HERE_ASLEEP if engine.enable_sleep_mode else EnginePlace.HERE_AWAKE

    @property
    def num_engines(self) -> int:
        """Engines that the run starts; where the setting is null, 1 until GPUs are found."""
        return self.generator.inference_engine.num_engines or 1

    @property
    def spreads_engines(self) -> bool:
        """Whether every one of several nodes has colocated engines; else rank 0's alone may."""
        has_nodes = self.trainer.placement.policy_num_nodes > 1
        # Several policies are those of one engine, in rank 0's process.
        has_one = self.generator.inference_engine.num_engines == 1 or bool(self.policies)
        return has_nodes and self.engine_place.is_here and not has_one

    @property
    def engine_dtype(self) -> str:
        """Dtype of the engines, by name; "auto": the default of the device."""
        chosen = self.generator.inference_engine.model_dtype
        if chosen == "auto":
            return self.trainer.policy.dtype
        return chosen

    @property
    def engine_weights(self) -> EngineWeights:
        """What the engines get after an update."""
        if not self.trains_adapter:
            return EngineWeights.ALL
        if self.trainer.policy.model.lora.weight_sync == "adapter":
            return EngineWeights.ADAPTER
        return EngineWeights.MERGED

    @property
    def trains_adapter(self) -> bool:
        """Whether a LoRA adapter is trained in place of the policy's own weights."""
        return self.trainer.policy.model.lora.rank > 0

    @property
    def policies(self) -> tuple[str, ...]:
        """Names of the run's policies, each with an adapter; empty: one policy."""
        return tuple(self.trainer.policy.model.lora.policies)

    @property
    def roles(self) -> tuple[str, ...]:
        """Names of the roles of the one policy; empty: one role."""
        return tuple(self.trainer.policy.roles)

    @property
    def call_names(self) -> tuple[str, ...]:
        """Names of calls that are trained: those of policies or of roles; empty: one has none."""
        return self.policies or self.roles

    @property
    def shares_reference(self) -> bool:
        """Whether the reference model is the policy's without its adapter."""
        return self.trains_adapter and self.trainer.ref.model.path is None

    @property
    def shares_critic(self) -> bool:
        """Whether the critic is another adapter of the policy's base, and a head."""
        path = self.trainer.critic.model.path
        return self.trains_adapter and path == self.trainer.policy.model.path

    def offloads_base(self, place: EnginePlace) -> bool:
        """Return whether an adapter's base leaves the GPU while an engine of this place is awake.

        Trainer and engine have their copies on the GPU by turns, unless the probe of new weights
        replays routes, for which both are needed at once.
        """
        is_adapter = self.engine_weights is EngineWeights.ADAPTER
        replays = self.trainer.policy.moe_enable_routing_replay
        return place is EnginePlace.HERE_ASLEEP and is_adapter and not replays

    def offloads_weights(self, place: EnginePlace) -> bool:
        """Return whether all models leave the GPUs while engines of this place are awake.

        Of a policy with an adapter only the base does (`offloads_base`).
        """
        is_chosen = bool(self.trainer.placement.offload_weights)
        return place is EnginePlace.HERE_ASLEEP and is_chosen and not self.trains_adapter

    @property
    def max_staleness(self) -> int:
        """Maximum policy versions between a group's start and its training; 0: synchronous."""
        chosen = self.trainer.fully_async
        return chosen.max_staleness_steps if chosen.enabled else 0


def leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, Field[Any]]]:
    """Yield dotted name, value and field of each setting, also inside sections.

    Args:
        prefix: dotted name of the section `config`; "": all settings.
    """
    for item in fields(config):
        name = f"{prefix}.{item.name}".lstrip(".")
        value = getattr(config, item.name)
        if is_dataclass(value):
            yield from leaves(value, name)
        else:
            yield name, value, item


def max_response_length(config: Config) -> int:
    """Return the longest response of training and evaluation."""
    samplings = (config.generator.sampling_params, config.generator.eval_sampling_params)
    return max(s.max_generate_length for s in samplings if s is not None)


def to_dict(config: Any, *, resolved: bool = False) -> dict[str, Any]:
    """Return the config as nested dicts of plain values, for YAML and JSON.

    Args:
        resolved: whether to return the values of environment variables; otherwise the
            interpolations, such as "${oc.env:API_KEY}", which are safe to store.

    Example:
        >>> to_dict(Config())["trainer"]["seed"]
        42
    """
    result: dict[str, Any] = {}
    for item in fields(config):
        value = getattr(config, item.name)
        if hasattr(value, "__dataclass_fields__"):
            result[item.name] = to_dict(value, resolved=resolved)
        else:
            if resolved:
                result[item.name] = value
            else:
                result[item.name] = _without_environment_values(value)
    return result


def _without_environment_values(value: Any) -> Any:
    if isinstance(value, EnvironmentValue):
        return value.written
    if isinstance(value, dict):
        return {key: _without_environment_values(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_environment_values(item) for item in value]
    return value
