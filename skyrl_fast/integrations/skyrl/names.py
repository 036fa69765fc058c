"""The replaced functions of SkyRL: their modules, known sources and replacements.

A source is identified by its fingerprint (see `source.fingerprint`): of the function itself and of
the private functions that it calls. A version with an unknown source keeps its own function.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

PREPROCESS = "skyrl.train.dataset.preprocess"
TRAINING_BATCH = "skyrl.backends.skyrl_train.training_batch"
GENERATORS = "skyrl.train.generators.utils"
TRAINER_UTILS = "skyrl.train.utils.trainer_utils"
PPO = "skyrl.backends.skyrl_train.utils.ppo_utils"
TORCH_UTILS = "skyrl.backends.skyrl_train.utils.torch_utils"
TRAINER = "skyrl.train.trainer"
GYM_GENERATOR = "skyrl.train.generators.skyrl_gym_generator"
# Of the package index; those before had few of the functions.
VERSIONS = ("0.2.0", "0.3.0", "0.4.0")
NEWEST = VERSIONS[-1]
AUGUST = "0.4.0.dev"  # SkyRL's main in August 2026, between 0.3.0 and 0.4.0


@dataclass(frozen=True, slots=True)
class Target:
    """One function or method of SkyRL.

    Args:
        name: name of the function, or `Class.method`.
        fingerprints: fingerprints of known sources, each with the first version that has it.
        home: module here that has its replacement, of the same name without underscores before it.
        uses: private functions of the same module that belong to the source.
        calls: other functions of this table that it calls. It is replaced only if their sources
            are known too.
    """

    name: str
    module: str
    fingerprints: Mapping[str, str]
    home: str
    uses: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()

    @property
    def short_name(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def replacement(self) -> str:
        """`module.function` of this package."""
        return f"{self.home}.{self.short_name.lstrip('_')}"


def _estimator(name: str, known: str, since: str = "0.1.0") -> Target:
    return Target(name, PPO, {known: since}, "advantages")


def _loss(name: str, known: str, since: str = "0.2.0") -> Target:
    return Target(name, PPO, {known: since}, "losses")


TARGETS = (
    Target(
        "convert_prompts_responses_to_batch_tensors",
        PREPROCESS,
        {"fefa367468cfa4a7": "0.4.0", "2e718702551576ba": AUGUST, "8b9b1157d9fb71ff": "0.2.0"},
        "batches",
        ("_verify_inputs", "_reward_to_numpy"),
    ),
    Target("make_router_padding_mask", PREPROCESS, {"9d906156cf90684a": AUGUST}, "batches"),
    Target(
        "compute_prompt_mini_batch_boundaries",
        PREPROCESS,
        {"d3bf0fda26e560c3": "0.2.0"},
        "boundaries",
    ),
    Target("compute_prompt_boundaries", PREPROCESS, {"6c5d9023672ddc7c": "0.3.0"}, "boundaries"),
    Target(
        "pad_training_input_batch",
        TRAINING_BATCH,
        {"9391891d6733bf08": "0.4.0", "ac531ca0fbf01f60": AUGUST, "d60fa884c02932f1": "0.2.0"},
        "batches",
    ),
    Target(
        "validate_generator_output",
        TRAINER_UTILS,
        {"1930ade6250c0a15": "0.4.0", "151a606d7f17e22a": "0.2.0"},
        "outputs",
        ("_validate_step_wise_fields",),
    ),
    Target(
        "get_metrics_from_generator_output",
        GENERATORS,
        {"1b1143ce5c7fb423": "0.1.0"},
        "output_metrics",
    ),
    Target(
        "get_rollout_metrics",
        GENERATORS,
        {"564ea46197873fef": AUGUST, "9db0604082455a9c": "0.3.0"},
        "output_metrics",
        ("compute_turn_token_counts", "_add_time_stats"),
    ),
    Target(
        "concatenate_generator_outputs",
        GENERATORS,
        {"242f4ea765c2c42e": "0.4.0", "87751c248e0ab789": AUGUST, "9f7dd8710bf61d69": "0.3.0"},
        "outputs",
        ("_flatten_field", "_concat_optional_field", "_last_step_only"),
        ("validate_generator_output", "get_rollout_metrics"),
    ),
    Target(
        "merge_stepwise_output",
        GENERATORS,
        {"8e9e89191b2d4c45": "0.4.0", "bf05bc3249e9a922": AUGUST, "d28f87beee8c5b93": "0.3.0"},
        "outputs",
        (
            "_is_prefix",
            "slice_generator_output",
            "_slice_generator_output",
            "_merge_single_trajectory",
        ),
        ("concatenate_generator_outputs", "validate_generator_output", "get_rollout_metrics"),
    ),
    _estimator("compute_grpo_outcome_advantage", "7f05e2a1f6daef00"),
    _estimator("compute_rloo_outcome_advantage", "6ad56a848d29b5fe"),
    _estimator("compute_maxrl_advantage", "eaabf958c85d9d83", "0.2.0"),
    Target(
        "RayPPOTrainer.compute_advantages_and_returns",
        TRAINER,
        {"a872ebf526bd473d": "0.2.0"},
        "advantages",
    ),
    Target(
        "RayPPOTrainer.convert_to_training_input",
        TRAINER,
        {"8f1f10ff516e5d45": "0.4.0", "87f0ac37486ca8d3": AUGUST, "b7aba4fd2d1c2137": "0.3.0"},
        "trainer_steps",
    ),
    Target(
        "RayPPOTrainer.postprocess_generator_output",
        TRAINER,
        {"13ace7ffcc38d592": "0.3.0"},
        "trainer_steps",
    ),
    Target(
        "RayPPOTrainer._normalize_advantages",
        TRAINER,
        {"ce6ad5a2c58d301b": "0.3.0"},
        "trainer_steps",
    ),
    Target(
        "apply_loss_reduction_to_advantages_minibatch", PPO, {"0e904c5e0272d876": "0.3.0"}, "losses"
    ),
    _loss("ppo_policy_loss", "0b95f8006e64490c"),
    _loss("sapo_policy_loss", "395407cec3d814e8"),
    _loss("gspo_policy_loss", "3699f00bcbd9c3f1"),
    Target(
        "compute_policy_loss_cispo",
        PPO,
        {"b4f6fba4eefbcd0b": AUGUST, "ccd8e9c3baa62e21": "0.2.0"},
        "losses",
    ),
    _loss("rollout_is_policy_loss", "3660846e61794815"),
    _loss("dppo_policy_loss", "1bda5e4f2b824be9", "0.3.0"),
    _loss("compute_policy_loss_clip_cov", "6a8d0bec94f18e44"),
    _loss("compute_policy_loss_kl_cov", "b0a5c49596ee0de3"),
    _loss("cross_entropy_loss", "f040be715480c385"),
    _loss("importance_sampling_loss", "3781a7625974a02b", "0.1.0"),
    Target(
        "logprobs_from_logits",
        TORCH_UTILS,
        {"cfa1d5814fd7c2a5": "0.4.0", "674b281eebaf8ca0": "0.1.0"},
        "logprobs",
        ("logprobs_from_logits_v2",),
    ),
)
BY_NAME = {target.name: target for target in TARGETS}

# Where SkyRL's trainer and workers spend the time that replacing saves (bench/results/peers.md).
HEAVY = (
    "convert_prompts_responses_to_batch_tensors",
    "merge_stepwise_output",
    "concatenate_generator_outputs",
    "RayPPOTrainer.convert_to_training_input",
    "logprobs_from_logits",
)

# Known to users of SkyRL, and not replaced.
KEPT = {
    "reduce_loss": "one product and one sum; the replaced policy losses do not call it",
}
