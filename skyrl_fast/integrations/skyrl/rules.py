"""The fixed rules: where SkyRL departs from the contract, and what is done instead."""

from __future__ import annotations

from dataclasses import dataclass

from skyrl_fast.integrations.skyrl.names import (
    BY_NAME,
    GYM_GENERATOR,
    TRAINER_UTILS,
    Target,
)


@dataclass(frozen=True, slots=True)
class Rule:
    """One switchable rule.

    Args:
        name: for `install(rules=...)`.
        target: what of SkyRL it replaces.
        stand_in: `module.function` of this package.
        today: what SkyRL does.
        instead: what happens with the rule, by the contract.
        upstream: SkyRL's issue or pull request about it; "" where none is known.
    """

    name: str
    target: Target
    stand_in: str
    today: str
    instead: str
    upstream: str = ""


LOOP = Target(
    "SkyRLGymGenerator.agent_loop",
    GYM_GENERATOR,
    {"492cbad768684742": "main", "afdc6687c0042788": "0.3.0"},
    "fixed_generation.agent_loop",
)
UPDATE = Target(
    "SkyRLGymGenerator._update_agent_loop_state_with_multiturn_chat_template",
    GYM_GENERATOR,
    {"db2fc5a83c65fa45": "main"},
    "fixed_generation.update_state",
)
NORMALIZE = BY_NAME["RayPPOTrainer._normalize_advantages"]
FILTER = Target(
    "handle_filter_sampling",
    TRAINER_UTILS,
    {"6e71c1a56e3422be": "0.1.0"},
    "fixed_sampling.handle_filter_sampling",
)
REPLACE = Target(
    "handle_replace_sampling",
    TRAINER_UTILS,
    {"d17a0108a90ba647": "main", "944e8cadcd0354e2": "0.1.0"},
    "fixed_sampling.handle_replace_sampling",
)

RULES = (
    Rule(
        "length_check",
        LOOP,
        "fixed_generation.agent_loop",
        "checks the length of the turn before, so a long observation slips through",
        "no step's prompt is over max_input_length; the last step says `length`; a trajectory "
        "without steps becomes a masked row",
        "#1539",
    ),
    Rule(
        "gen_only_rows",
        LOOP,
        "fixed_generation.agent_loop",
        "a step's response holds the observation too",
        "a step's response is what was sampled, and an appended end token",
        "#1539",
    ),
    Rule(
        "appended_eos",
        LOOP,
        "fixed_generation.agent_loop",
        "an end token appended to a whole conversation is trained",
        "its loss mask is 0: nobody sampled it",
    ),
    Rule(
        "routes_append",
        UPDATE,
        "fixed_generation.update_state",
        "each turn's routes of experts overwrite those recorded",
        "routes of new tokens are appended, recorded ones never change",
        "#1530",
    ),
    Rule(
        "merge_all_fields",
        BY_NAME["merge_stepwise_output"],
        "fixed.merge_stepwise_output",
        "fails with trajectory_time_splits, refuses routes, drops times and environment metrics",
        "merges all of them",
        "#1277",
    ),
    Rule(
        "validation",
        BY_NAME["validate_generator_output"],
        "fixed.validate_generator_output",
        "refuses numpy.bool_, does not see a group whose rows are apart",
        "the checks of the contract; ValueErrors that name the row",
    ),
    Rule(
        "trajectory_metrics",
        BY_NAME["concatenate_generator_outputs"],
        "fixed.concatenate_generator_outputs",
        "counts each step as a sample",
        "metrics per trajectory, turns under names of their own",
        "#1278",
    ),
    Rule(
        "dynamic_sampling_filter",
        FILTER,
        "fixed_sampling.handle_filter_sampling",
        "compares the rewards of all steps; cuts after train_batch_size * n rows",
        "compares outcomes of live trajectories; keeps whole groups",
        "#1278",
    ),
    Rule(
        "dynamic_sampling_replace",
        REPLACE,
        "fixed_sampling.handle_replace_sampling",
        "compares the rewards of all steps; copies join the original's group",
        "compares outcomes of live trajectories; a copy is a group of its own",
        "#1278",
    ),
    Rule(
        "advantage_normalization",
        NORMALIZE,
        "fixed.normalize",
        "the mean runs over padded cells, the variance counts padding rows",
        "mean and variance over real response tokens",
    ),
    Rule(
        "float32_logprobs",
        BY_NAME["logprobs_from_logits"],
        "fixed.logprobs_from_logits",
        "log-probabilities of bfloat16 logits are bfloat16",
        "they are float32",
    ),
)
