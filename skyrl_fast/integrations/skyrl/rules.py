"""The rules of mode "fixed": where SkyRL departs from the specification, and the correction.

Design: docs/design/017-skyrl-drop-in.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from skyrl_fast.integrations.skyrl.names import (
    AUGUST,
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
        instead: the behaviour with the rule, which the specification asks for.
        upstream: SkyRL's issue or pull request about it; "" if none is known.
    """

    name: str
    target: Target
    replacement: str
    today: str
    instead: str
    upstream: str = ""


LOOP = Target(
    "SkyRLGymGenerator.agent_loop",
    GYM_GENERATOR,
    {"6bb4c1f9d4193811": "0.4.0", "492cbad768684742": AUGUST, "afdc6687c0042788": "0.3.0"},
)
UPDATE = Target(
    "SkyRLGymGenerator._update_agent_loop_state_with_multiturn_chat_template",
    GYM_GENERATOR,
    {"db2fc5a83c65fa45": AUGUST},
    unneeded={"638ea5433378547e": "0.4.0"},
)
NORMALIZE = BY_NAME["RayPPOTrainer._normalize_advantages"]
FILTER = Target(
    "handle_filter_sampling",
    TRAINER_UTILS,
    {"6e71c1a56e3422be": "0.1.0"},
)
REPLACE = Target(
    "handle_replace_sampling",
    TRAINER_UTILS,
    {"d17a0108a90ba647": AUGUST, "944e8cadcd0354e2": "0.1.0"},
)

RULES = (
    Rule(
        "length_check",
        LOOP,
        "fixed_generation.agent_loop",
        "checks the length of the previous turn, so a long observation is not detected",
        "no step's prompt exceeds max_input_length; the last step's stop reason is `length`; a "
        "trajectory without steps becomes a masked row",
        "#1539",
    ),
    Rule(
        "gen_only_rows",
        LOOP,
        "fixed_generation.agent_loop",
        "a step's response includes the observation",
        "a step's response is the sampled tokens and an appended end token",
        "#1539",
    ),
    Rule(
        "appended_eos",
        LOOP,
        "fixed_generation.agent_loop",
        "an end token appended to a complete conversation is trained",
        "its loss mask is 0, since it was not sampled",
    ),
    Rule(
        "routes_append",
        UPDATE,
        "fixed_generation.update_state",
        "each turn's expert routes overwrite the recorded ones",
        "routes of new tokens are appended; recorded routes never change",
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
        "refuses numpy.bool_; does not detect a group whose rows are not adjacent",
        "the checks of the specification; each ValueError names the row",
    ),
    Rule(
        "trajectory_metrics",
        BY_NAME["concatenate_generator_outputs"],
        "fixed.concatenate_generator_outputs",
        "counts each step as a sample",
        "metrics per trajectory; metrics of turns under separate names",
        "#1278",
    ),
    Rule(
        "dynamic_sampling_filter",
        FILTER,
        "fixed_sampling.handle_filter_sampling",
        "compares the rewards of all steps; cuts after train_batch_size * n rows",
        "compares outcomes of live trajectories; keeps complete groups",
        "#1278",
    ),
    Rule(
        "dynamic_sampling_replace",
        REPLACE,
        "fixed_sampling.handle_replace_sampling",
        "compares the rewards of all steps; copies join the original's group",
        "compares outcomes of live trajectories; a copy is a separate group",
        "#1278",
    ),
    Rule(
        "advantage_normalization",
        NORMALIZE,
        "fixed.normalize",
        "the mean includes padded positions, the variance includes padding rows",
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
