"""SkyRL with this package's batches, advantages, merging and losses: one line, the same results.

    import skyrl_fast.integrations.skyrl
    skyrl_fast.integrations.skyrl.install()

The functions are also here one by one, under SkyRL's names.
"""

from __future__ import annotations

from skyrl_fast.integrations.calls import Report
from skyrl_fast.integrations.skyrl.advantages import (
    compute_advantages_and_returns,
    compute_grpo_outcome_advantage,
    compute_maxrl_advantage,
    compute_rloo_outcome_advantage,
)
from skyrl_fast.integrations.skyrl.batches import (
    convert_prompts_responses_to_batch_tensors,
    make_router_padding_mask,
    pad_training_input_batch,
)
from skyrl_fast.integrations.skyrl.boundaries import (
    compute_prompt_boundaries,
    compute_prompt_mini_batch_boundaries,
)
from skyrl_fast.integrations.skyrl.logprobs import logprobs_from_logits
from skyrl_fast.integrations.skyrl.losses import (
    apply_loss_reduction_to_advantages_minibatch,
    compute_policy_loss_cispo,
    compute_policy_loss_clip_cov,
    compute_policy_loss_kl_cov,
    cross_entropy_loss,
    dppo_policy_loss,
    gspo_policy_loss,
    importance_sampling_loss,
    ppo_policy_loss,
    rollout_is_policy_loss,
    sapo_policy_loss,
)
from skyrl_fast.integrations.skyrl.output_metrics import (
    get_metrics_from_generator_output,
    get_rollout_metrics,
)
from skyrl_fast.integrations.skyrl.outputs import (
    concatenate_generator_outputs,
    merge_stepwise_output,
    validate_generator_output,
)
from skyrl_fast.integrations.skyrl.ray_workers import calls_of_workers, runtime_env
from skyrl_fast.integrations.skyrl.switch import (
    SkyRLFastWarning,
    autoinstall,
    install,
    report,
    uninstall,
)
from skyrl_fast.integrations.skyrl.trainer_steps import (
    convert_to_training_input,
    normalize_advantages,
    postprocess_generator_output,
)

__all__ = [
    "Report",
    "SkyRLFastWarning",
    "apply_loss_reduction_to_advantages_minibatch",
    "autoinstall",
    "calls_of_workers",
    "compute_advantages_and_returns",
    "compute_grpo_outcome_advantage",
    "compute_maxrl_advantage",
    "compute_policy_loss_cispo",
    "compute_policy_loss_clip_cov",
    "compute_policy_loss_kl_cov",
    "compute_prompt_boundaries",
    "compute_prompt_mini_batch_boundaries",
    "compute_rloo_outcome_advantage",
    "concatenate_generator_outputs",
    "convert_prompts_responses_to_batch_tensors",
    "convert_to_training_input",
    "cross_entropy_loss",
    "dppo_policy_loss",
    "get_metrics_from_generator_output",
    "get_rollout_metrics",
    "gspo_policy_loss",
    "importance_sampling_loss",
    "install",
    "logprobs_from_logits",
    "make_router_padding_mask",
    "merge_stepwise_output",
    "normalize_advantages",
    "pad_training_input_batch",
    "postprocess_generator_output",
    "ppo_policy_loss",
    "report",
    "rollout_is_policy_loss",
    "runtime_env",
    "sapo_policy_loss",
    "uninstall",
    "validate_generator_output",
]
