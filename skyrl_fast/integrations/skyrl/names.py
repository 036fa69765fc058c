"""The replaced functions of SkyRL: their modules, known sources and replacements.

A source is identified by its fingerprint (see `source.fingerprint`): of the function itself and of
SkyRL's functions that it calls, directly or through another (see `source.called_functions`). A
version with an unknown source keeps its own function.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

PACKAGE = "skyrl"
PREPROCESS = "skyrl.train.dataset.preprocess"
TRAINING_BATCH = "skyrl.backends.skyrl_train.training_batch"
GENERATORS = "skyrl.train.generators.utils"
TRAINER_UTILS = "skyrl.train.utils.trainer_utils"
PPO = "skyrl.backends.skyrl_train.utils.ppo_utils"
TORCH_UTILS = "skyrl.backends.skyrl_train.utils.torch_utils"
TRAINER = "skyrl.train.trainer"
GYM_GENERATOR = "skyrl.train.generators.skyrl_gym_generator"
# Versions of the package index; those before had few of the functions.
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
        calls: other functions of this table, which its fingerprint leaves out. It is replaced only
            if their sources are known too.
    """

    name: str
    module: str
    fingerprints: Mapping[str, str]
    home: str
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


def _loss(name: str, fingerprints: Mapping[str, str]) -> Target:
    return Target(name, PPO, fingerprints, "losses")


TARGETS = (
    Target(
        "convert_prompts_responses_to_batch_tensors",
        PREPROCESS,
        {"256b8898749373c3": "0.4.0", "a9fd9e598a913668": AUGUST, "8b9b1157d9fb71ff": "0.2.0"},
        "batches",
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
        {"3fdbd934c47c4b16": "0.4.0", "b44be25aca58e5a3": AUGUST, "d60fa884c02932f1": "0.2.0"},
        "batches",
    ),
    Target(
        "validate_generator_output",
        TRAINER_UTILS,
        {"41cf69c24cfb2b4a": "0.4.0", "151a606d7f17e22a": "0.2.0"},
        "outputs",
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
        {"b2eae37a1a8a7c22": AUGUST, "9db0604082455a9c": "0.3.0"},
        "output_metrics",
    ),
    Target(
        "concatenate_generator_outputs",
        GENERATORS,
        {"f45abada315a6318": "0.4.0", "6f6a137700fb1765": AUGUST, "9f7dd8710bf61d69": "0.3.0"},
        "outputs",
        ("validate_generator_output", "get_rollout_metrics"),
    ),
    Target(
        "merge_stepwise_output",
        GENERATORS,
        {"fa0ba7ebac817e19": "0.4.0", "19e366093d4368c1": AUGUST, "6859b870a4d3f56e": "0.3.0"},
        "outputs",
        ("concatenate_generator_outputs", "validate_generator_output", "get_rollout_metrics"),
    ),
    _estimator("compute_grpo_outcome_advantage", "7f05e2a1f6daef00"),
    _estimator("compute_rloo_outcome_advantage", "6ad56a848d29b5fe"),
    _estimator("compute_maxrl_advantage", "eaabf958c85d9d83", "0.2.0"),
    Target(
        "RayPPOTrainer.compute_advantages_and_returns",
        TRAINER,
        {"f7a6b742c60cee89": "0.2.0"},
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
        {"6df6e7c0da155433": "0.3.0"},
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
    _loss(
        "ppo_policy_loss",
        {"2d9bb07791348945": "0.3.0", "3c760df1523b8421": "0.2.0"},
    ),
    _loss(
        "sapo_policy_loss",
        {"95da81d2afd0b489": "0.3.0", "4e0f0c6269dc43bf": "0.2.0"},
    ),
    _loss(
        "gspo_policy_loss",
        {"3dcd242ef74cd924": "0.3.0", "654fe2954ef22f9f": "0.2.0"},
    ),
    _loss(
        "compute_policy_loss_cispo",
        {"30e9706dc82fbd34": AUGUST, "08b3deb59dc46b21": "0.3.0", "c0ee6996ae36eece": "0.2.0"},
    ),
    _loss(
        "rollout_is_policy_loss",
        {"a1de7208559c61c3": "0.3.0", "8cc8cd97bad4fecc": "0.2.0"},
    ),
    _loss("dppo_policy_loss", {"c36fce3ab5052b45": "0.3.0"}),
    _loss("compute_policy_loss_clip_cov", {"eadab7104eb29f60": "0.2.0"}),
    _loss("compute_policy_loss_kl_cov", {"b524678c07b7ce04": "0.2.0"}),
    _loss("cross_entropy_loss", {"e92e9fff84a43a28": "0.2.0"}),
    _loss("importance_sampling_loss", {"3781a7625974a02b": "0.1.0"}),
    Target(
        "logprobs_from_logits",
        TORCH_UTILS,
        {"c05d4123990fbec5": "0.4.0", "f0f2e96fbcaf540f": "0.1.0"},
        "logprobs",
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
