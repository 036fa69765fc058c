"""The metrics of a run: meaning, unit and healthy range of each.

The reference page of metrics is written from this table, and a test compares it with what runs
report.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Any, Literal

EVAL_REWARD, REWARD = "eval/all/avg_score", "reward/avg_raw_reward"  # held out, and sampled
SPREAD = ("avg", "min", "max", "std")
GPU = "on a GPU"
LAYOUTS = (
    "where trees and sequences have other kernels: on a GPU, in bfloat16, or for layers with states"
)
ENGINE = "with vLLM"
AGENT = "with an agent"
RANKS = "with several ranks"
SUMMARIES = "with summaries"
TEACHERS = "with teachers"
OFFLOADED = "with moments in main memory"
OFFLOADED_WEIGHTS = "with weights in main memory"

# How an update's metrics add up, over its passes and over its mini-batches.
Over = Literal[
    "tokens",  # a mean over trained tokens
    "sequences",  # a mean over sequences with a trained token
    "cross_entropy_tokens",  # a mean over the tokens of the cross-entropy
    "mini_batches",  # one number for each mini-batch, and their mean
    "sum",  # over the passes of a mini-batch; the mean over mini-batches, in which 0 counts
    "max",
    "min",
    "std",  # over trained tokens, around the metric that ends with _mean
]


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric, or a family of them.

    Args:
        name: `{spread}` stands for avg, min, max and std, other braces for any text.
        unit: unit of the values; "" for a plain number.
        healthy: values to expect, or what to do about others; "" where any is fine.
        where: condition that tests of the trainer alone do not meet: one of the above.
        limit: median of a run's last quarter above which the run ends with a warning.
        unless: name of a metric; where it was above 0 the limit does not hold.
        over: how it adds up, if it is a metric of passes or mini-batches; None for others.
    """

    name: str
    meaning: str
    unit: str = ""
    healthy: str = ""
    where: str = ""
    limit: float = math.inf
    unless: str = ""
    over: Over | None = None

    def matches(self, name: str) -> bool:
        """Return whether a run's metric belongs to this entry."""
        pattern = re.escape(self.name).replace(r"\{spread\}", f"(?:{'|'.join(SPREAD)})")
        return re.fullmatch(re.sub(r"\\\{.*?\\\}", "[^/]+", pattern), name) is not None


def find_metric(name: str) -> Metric | None:
    """Return the entry of a run's metric, the first that matches; None if there is none.

    Example:
        >>> find_metric("generate/max_num_turns").unit
        'turns'
    """
    return next((metric for metric in METRICS if metric.matches(name)), None)


@cache
def find_over(name: str) -> Over:
    """Return how a metric of passes or mini-batches adds up.

    A name without an entry, as of a custom loss, is a maximum or minimum if it ends with _max or
    _min, and else a mean over trained tokens.

    Example:
        >>> find_over("policy/loss"), find_over("policy/my_distance_max")
        ('mini_batches', 'max')
    """
    metric = find_metric(name)
    if metric is not None and metric.over is not None:
        return metric.over
    if name.endswith("_max"):
        return "max"
    if name.endswith("_min"):
        return "min"
    return "tokens"


def find_warnings(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what in a run's metrics should be looked into, a line each.

    Args:
        rows: lines of metrics.jsonl.

    Example:
        >>> find_warnings([{"step": 1, "policy/clip_ratio": 0.5}])[0][:31]
        'policy/clip_ratio 0.5 at the en'
    """
    warnings = []
    by_name = {metric.name: metric for metric in METRICS}
    for name in dict.fromkeys(name for row in rows for name in row):
        # Those of one of several policies begin with its name.
        metric = by_name.get(name) or by_name.get(name.partition("/")[2])
        values = [row[name] for row in rows if row.get(name) is not None]
        if metric is None or not values:
            continue
        quarter = -(-len(values) // 4)
        start = median(values[:quarter])
        end = median(values[-quarter:])
        is_expected = any(row.get(metric.unless) for row in rows)
        if end > metric.limit and not is_expected:
            warnings.append(f"{name} {end:.2g} at the end; healthy: {metric.healthy}")
        elif metric.name == _ENTROPY and len(values) >= 8 and end < start / 10:
            warnings.append(f"{name} {start:.2g} -> {end:.2g}; healthy: {metric.healthy}")
    return warnings


_ENTROPY = "policy/policy_entropy"
_STALENESS = "async/token_staleness_mean"
_SHARE = "share"
_SECONDS = "s"
_NO_FAULTS = "0, or a few in a long run"

METRICS = (
    # --- rewards ---
    Metric(
        "reward/avg_raw_reward",
        "mean reward of the batch's trajectories, after the rollout filters",
        "",
        "rises",
    ),
    Metric(
        "reward/std_raw_reward",
        "standard deviation of the rewards over trajectories",
        "",
        "above 0; 0: nothing to learn from",
    ),
    Metric(
        "reward/zero_variance_share",
        "groups whose rewards are equal, which have no advantage",
        _SHARE,
        "below 0.5; near 1: the task is too hard or too easy, see dynamic_sampling",
        limit=0.8,
    ),
    Metric(
        "reward/avg_pass_at_{n}",
        "groups in which at least one of the n trajectories has a reward above 0",
        _SHARE,
        "above avg_raw_reward: there is something to learn",
    ),
    Metric(
        "reward/num_groups_without_baseline",
        "groups of which one trajectory is left, whose advantage is 0",
        "groups",
        "0; see generate/failed_trajectories, or a policy that few samples call",
    ),
    Metric(
        "reward/contexts_{number}",
        "mean outcome of trajectories with this number of contexts",
        "",
        "near each other, if nothing that is needed is lost with a context",
        SUMMARIES,
    ),
    Metric(
        "reward/mean_positive_reward",
        "mean over trajectories of the sum of those rewards of an outcome that are above 0",
    ),
    Metric(
        "reward/num_zero_variance_filtered",
        "groups that zero_variance_filter has masked",
        "groups",
    ),
    Metric(
        "data/{data set}/avg_raw_reward",
        "mean reward of each of several data sets in training, before the rollout filters",
        "",
        "rises",
    ),
    Metric(
        "data/{data set}/zero_variance_share",
        "groups of the data set whose rewards are equal",
        _SHARE,
        "below 0.5",
    ),
    Metric("data/{data set}/num_groups", "groups of the data set in the batch", "groups"),
    Metric(
        "data/{data set}/weight",
        "share of the data set in what is drawn next, with data.mixture",
        _SHARE,
    ),
    Metric(
        "eval/{data set}/avg_score", "mean reward of an evaluation; `all`: all data", "", "rises"
    ),
    Metric(
        "eval/{data set}/mean_positive_reward",
        "mean over trajectories of the sum of those rewards of an outcome that are above 0",
    ),
    Metric(
        "eval/{data set}/pass_at_{k}",
        "probability that one of k samples passes: has a reward above 0, however small",
        _SHARE,
    ),
    Metric(
        "eval/{data set}/environment/{name}",
        "mean of what environments or agents reported under a name in an evaluation, such as a "
        "named part of the reward",
    ),
    Metric("eval/all/avg_num_turns", "turns of a trajectory in an evaluation", "turns"),
    *(
        Metric(f"environment/{name}", f"{meaning}, per trajectory", "", good, AGENT)
        for name, meaning, good in (
            ("calls", "calls of an agent at the gateway", ""),
            ("first_prompts", "first prompts", "1"),
            ("continued_prompts", "prompts that begin with an earlier prompt and its answer", ""),
            ("forked_prompts", "prompts with an earlier answer, but other tokens before it", ""),
            ("restarted_prompts", "prompts without an earlier answer", ""),
            ("repeated_calls", "requests that a client sent again", "near 0"),
            ("undelivered_calls", "calls that were aborted, as no client waited", "near 0"),
            ("untrained_calls", "calls of `agent.untrained_models`", ""),
            ("upstream_calls", "calls that were sent on by `agent.upstreams`", ""),
            ("too_long_prompts", "prompts longer than max_input_length", "near 0"),
            ("answers_with_tool_calls", "answers in which tool calls were found", ""),
            (
                "left_out_tool_calls",
                "tool calls after the first of an answer, for clients that take one",
                "",
            ),
            ("answers_with_thoughts", "answers in which thoughts were found", ""),
        )
    ),
    Metric(
        "environment/unparsed_tool_calls",
        "answers with a call that could not be parsed or is not of an offered function, per "
        "trajectory",
        "",
        "near 0",
        "with generator.tool_parser",
    ),
    Metric(
        "environment/{name}",
        "mean of the finite numbers that the environment's `metrics` returned under a name",
    ),
    # --- the update ---
    Metric(
        "policy/loss",
        "loss of a mini-batch, with all its terms",
        "",
        "near 0 with a group baseline; it does not show progress",
        over="mini_batches",
    ),
    Metric(
        "policy/policy_loss", "the policy loss, weighted as in the loss", "", "near 0", over="sum"
    ),
    Metric(
        "policy/policy_entropy",
        "entropy of the policy's next token, mean over trained tokens",
        "nats",
        "falls slowly; a fall to 0 is a collapse: lower the learning rate, raise eps_clip_high",
        over="tokens",
    ),
    Metric(
        "policy/kl",
        "KL divergence from the reference model per token, by kl_estimator_type; only with "
        "use_kl_loss",
        "nats",
        "below 0.1 for a policy that stays close; grows with training",
        over="tokens",
    ),
    Metric(
        "policy/kl_loss", "KL divergence, weighted as in the loss, before kl_loss_coef", over="sum"
    ),
    Metric(
        "policy/approx_kl",
        "KL divergence of the policy in an update from the one before it, per token: the mean of "
        "r - 1 - log r of the loss's ratio r",
        "nats",
        "below 0.01; 0 with one optimizer step per batch",
        limit=0.1,
        over="tokens",
    ),
    Metric(
        "policy/clip_ratio",
        "trained tokens whose ratio is clipped, so that they have no gradient (cispo: a constant "
        "weight); clip_cov: tokens that it drops; 0 of losses without bounds",
        _SHARE,
        "0 to 0.2; more: fewer optimizer steps per batch, or a lower learning rate",
        limit=0.2,
        over="tokens",
    ),
    Metric(
        "policy/clip_ratio_low", "the same, clipped below 1 - eps_clip_low", _SHARE, over="tokens"
    ),
    Metric(
        "policy/clip_ratio_high", "the same, clipped above 1 + eps_clip_high", _SHARE, over="tokens"
    ),
    Metric(
        "policy/chosen_ratio",
        "trained tokens where dual_clip's cap applies, or that clip_cov or kl_cov choose",
        _SHARE,
        over="tokens",
    ),
    Metric(
        "policy/ratio_mean", "mean of the policy ratio over trained tokens", "", "1", over="tokens"
    ),
    Metric("policy/ratio_max", "largest policy ratio", "", "below 10", over="max"),
    Metric("policy/ratio_min", "smallest policy ratio", "", "above 0.1", over="min"),
    Metric(
        "policy/grad_norm",
        "norm of the gradient before clipping",
        "",
        "steady; peaks above 10 times its median: lower the learning rate",
        over="mini_batches",
    ),
    Metric("policy/lr", "learning rate", over="mini_batches"),
    Metric(
        "policy/nonfinite_steps_skipped",
        "optimizer steps skipped for an infinite or NaN gradient",
        _SHARE,
        "0",
        limit=0,
        over="mini_batches",
    ),
    Metric(
        "policy/offloaded_bytes",
        "AdamW's moments that move from main memory and back, in an optimizer step, of rank 0",
        "bytes",
        where=OFFLOADED,
        over="mini_batches",
    ),
    Metric("policy/optimizer_steps", "optimizer steps of the batch", "steps"),
    Metric(
        "policy/rollout_train_logprobs_abs_diff_mean",
        "mismatch: mean difference of the trainer's and the engine's log-probabilities of the "
        "sampled tokens, before any update of the batch",
        "nats",
        "below 0.02 in bfloat16 without staleness; more: off_policy_correction, or "
        "lm_head_dtype=float32",
        limit=0.05,
        unless=_STALENESS,
    ),
    Metric("policy/rollout_train_logprobs_abs_diff_max", "its maximum", "nats", "below 2"),
    Metric(
        "policy/rollout_update_logprobs_abs_diff_mean",
        "mean difference of the log-probabilities of the update's passes from the engine's: grows "
        "with each optimizer step of the batch",
        "nats",
        over="tokens",
    ),
    Metric("policy/rollout_update_logprobs_abs_diff_max", "its maximum", "nats", over="max"),
    Metric(
        "policy/cross_entropy",
        "mean cross-entropy: of the environment's tokens with observation_loss_coef, else of the "
        "answers in fine-tuning",
        "nats",
        "falls",
        over="cross_entropy_tokens",
    ),
    Metric(
        "policy/distillation_loss",
        "KL between policy and teacher, weighted as in the loss, before distillation.coef",
        "",
        "falls",
        TEACHERS,
        over="sum",
    ),
    Metric("policy/cross_entropy_loss", "cross-entropy, weighted as in the loss", over="sum"),
    Metric(
        "policy/cross_entropy_tokens",
        "tokens of the cross-entropy in a mini-batch",
        "tokens",
        over="sum",
    ),
    Metric(
        "policy/policy_tokens", "tokens of the policy loss in a mini-batch", "tokens", over="sum"
    ),
    Metric(
        "policy/summary_loss_share",
        "summaries' share of the sum of |advantage * weight| over trained tokens",
        "",
        "what the task needs; long summaries outweigh short actions, see summary_weight",
        SUMMARIES,
    ),
    Metric(
        "policy/trained_tokens",
        "tokens with a gradient in a mini-batch",
        "tokens",
        over="mini_batches",
    ),
    Metric(
        "policy/forward_tokens",
        "tokens of a mini-batch's forward passes, with padding",
        "tokens",
        over="mini_batches",
    ),
    Metric(
        "policy/row_tokens",
        "tokens of the rows that a mini-batch's passes visit",
        "tokens",
        over="mini_batches",
    ),
    Metric(
        "policy/token_saving",
        "1 - forward_tokens / row_tokens: tokens that the layout of the rows spares",
        _SHARE,
        "close to generate/batch_token_saving; negative: padding",
        over="mini_batches",
    ),
    Metric(
        "policy/tree_group_share",
        "share of the visited groups that were laid out as prefix trees",
        "",
        "1 where the model supports trees",
        over="mini_batches",
    ),
    *(
        Metric(
            f"policy/{layout}_{unit}_ns",
            f"time of a {unit} of a {layout}, measured at the start",
            "ns",
            "",
            LAYOUTS,
        )
        for layout, unit in (
            *(("sequence", unit) for unit in ("token", "pair")),
            *(("tree", unit) for unit in ("token", "pair", "segment")),
        )
    ),
    Metric(
        "policy/rows_without_gradient",
        "rows of a mini-batch that are skipped, as their gradient is 0",
        "rows",
        "see reward/zero_variance_share",
        over="mini_batches",
    ),
    Metric(
        "policy/num_micro_batches", "forward-backward passes of a mini-batch", over="mini_batches"
    ),
    Metric(
        "policy/is_ratio_mean",
        "importance ratio of trainer and engine, per token",
        "",
        "0.9 to 1.1",
        over="tokens",
    ),
    Metric("policy/is_ratio_std", "its standard deviation", "", "below 0.5", over="std"),
    Metric("policy/is_ratio_max", "its maximum", "", "below 10", over="max"),
    Metric("policy/is_ratio_min", "its minimum", "", "above 0.1", over="min"),
    Metric(
        "policy/tis_token_clip_high_ratio",
        "tokens whose ratio is capped, of those that the rules before leave",
        _SHARE,
        "below 0.05",
        over="tokens",
    ),
    Metric(
        "policy/tis_seq_clip_high_ratio",
        "sequences whose ratio is capped",
        _SHARE,
        "below 0.2",
        over="sequences",
    ),
    Metric(
        "policy/token_mask_ratio",
        "tokens masked for their ratio, of those that the outlier rule leaves",
        _SHARE,
        "below 0.05",
        over="tokens",
    ),
    Metric(
        "policy/outlier_seq_masked_ratio",
        "sequences masked for a token",
        _SHARE,
        "below 0.1",
        over="sequences",
    ),
    Metric(
        "policy/outlier_seq_over_high_ratio",
        "of these, for a ratio above the bound",
        _SHARE,
        over="sequences",
    ),
    Metric(
        "policy/outlier_seq_under_low_ratio",
        "of these, for a ratio below the bound",
        _SHARE,
        over="sequences",
    ),
    Metric(
        "policy/{metric}_sequence_mask_masked_ratio",
        "sequences masked for the product or geometric mean of their ratios",
        _SHARE,
        "below 0.2",
        over="sequences",
    ),
    Metric(
        "policy/{metric}_sequence_mask_over_high_ratio",
        "of these, above the bound",
        _SHARE,
        over="sequences",
    ),
    Metric(
        "policy/{metric}_sequence_mask_under_low_ratio",
        "of these, below the bound",
        _SHARE,
        over="sequences",
    ),
    Metric(
        "distillation/kl",
        "mean of log policy - log teacher over trained tokens: an estimate of KL(policy, teacher) "
        "per token, before the update of the batch",
        "nats",
        "falls; slightly below 0 by chance at the end",
        TEACHERS,
    ),
    Metric(
        "distillation/{data set}/kl",
        "the same of each of several data sets",
        "nats",
        "falls",
        TEACHERS,
    ),
    Metric(
        "distillation/teacher_top_mass",
        "probability of the teacher's top_k tokens, mean over trained tokens",
        "",
        "above 0.9; less: raise top_k",
        TEACHERS,
    ),
    Metric(
        "distillation/teacher_tokens",
        "tokens that the teachers have read; rows that begin another one are not read again",
        "tokens",
        "",
        TEACHERS,
    ),
    Metric(
        "loss/avg_kl",
        "KL divergence from the reference model per token, with use_kl_in_reward",
        "nats",
        "near kl_ctrl.kl_target where it is adaptive",
    ),
    Metric("loss/avg_kl_max", "largest mean KL divergence of a trajectory", "nats"),
    Metric("loss/kl_loss_coef", "weight of the KL divergence in the reward"),
    Metric(
        "critic/critic_loss", "loss of the critic in a mini-batch", "", "falls", over="mini_batches"
    ),
    Metric(
        "critic/values_mean",
        "mean of the critic's values",
        "",
        "near the mean return",
        over="tokens",
    ),
    Metric(
        "critic/values_clipfrac", "values that value_clip clips", _SHARE, "below 0.2", over="tokens"
    ),
    Metric(
        "critic/explained_variance",
        "variance of the returns that the values explain",
        "",
        "rises from 0 towards 1; below 0: worse than a constant",
    ),
    Metric(
        "critic/grad_norm",
        "norm of the critic's gradient before clipping",
        "",
        "steady",
        over="mini_batches",
    ),
    Metric("critic/lr", "learning rate of the critic", over="mini_batches"),
    Metric(
        "critic/nonfinite_steps_skipped",
        "its optimizer steps skipped",
        _SHARE,
        "0",
        over="mini_batches",
    ),
    Metric(
        "critic/offloaded_bytes",
        "its moments that move from main memory and back, in an optimizer step, of rank 0",
        "bytes",
        where=OFFLOADED,
        over="mini_batches",
    ),
    Metric("critic/optimizer_steps", "its optimizer steps of the batch", "steps"),
    Metric("trainer/epoch", "completed passes over the training prompts", "epochs"),
    # --- rollouts ---
    Metric("generate/num_trajectories", "trajectories of the batch", "trajectories"),
    Metric(
        "generate/num_empty_trajectories",
        "trajectories without tokens: failed, or with a first prompt that is too long",
        "trajectories",
        "0",
    ),
    Metric(
        "eval/{data set}/failed_share",
        "trajectories of an evaluation that failed, which count as reward 0",
        _SHARE,
        "0; the log names the reasons",
    ),
    Metric(
        "generate/failed_trajectories",
        "trajectories that failed after all retries",
        "trajectories",
        "0; the log names the reasons",
        limit=0,
    ),
    Metric("generate/{spread}_num_tokens", "response tokens of a trajectory", "tokens"),
    Metric("generate/avg_tokens_non_zero_rewards", "the same, of rewards above 0", "tokens"),
    Metric("generate/avg_tokens_zero_rewards", "the same, of rewards of 0", "tokens"),
    Metric(
        "generate/{spread}_assistant_tokens", "tokens of a trajectory with loss mask 1", "tokens"
    ),
    Metric("generate/{spread}_num_turns", "turns of a trajectory", "turns"),
    Metric(
        "generate/{spread}_final_context_length",
        "tokens of a trajectory's last prompt and response",
        "tokens",
        "max below max_input_length + max_generate_length",
    ),
    Metric("generate/per_turn/{spread}_response_length", "response tokens of a turn", "tokens"),
    Metric("generate/per_turn/{spread}_prompt_length", "prompt tokens of a turn", "tokens"),
    Metric("generate/per_turn/{spread}_num_tokens", "tokens of a turn", "tokens"),
    Metric(
        "generate/prefix_cache_share",
        "prompt tokens that the engine found in its prefix cache",
        "",
        "near 0: enable_prefix_caching is off, or the cache is too small for the running groups",
        ENGINE,
    ),
    Metric(
        "generate/truncated_turn_share",
        "turns whose response was cut at max_generate_length",
        _SHARE,
        "below 0.1; more: raise sampling_params.max_generate_length",
        limit=0.1,
    ),
    Metric(
        "generate/too_long_prompt_share",
        "trajectories that ended because the next prompt was longer than max_input_length",
        _SHARE,
        "below 0.1; more: raise generator.max_input_length, or shorten the observations",
        limit=0.1,
    ),
    Metric(
        "generate/stop_reason/{reason}",
        "trajectories that ended for this reason",
        _SHARE,
        "mostly stop; length: raise the limits of tokens; env_error: see the log",
    ),
    Metric("generate/trajectory_completion_time_mean", "time of a trajectory", _SECONDS),
    Metric(
        "generate/trajectory_completion_time_p90",
        "its 90th percentile",
        _SECONDS,
        "far above the mean: a few trajectories hold up the batch",
    ),
    Metric("generate/trajectory_completion_time_max", "its maximum", _SECONDS),
    Metric("generate/trajectory_time/llm_mean", "of a trajectory's time, in the engine", _SECONDS),
    Metric("generate/trajectory_time/llm_share", "the same", _SHARE),
    Metric(
        "generate/trajectory_time/env_mean", "of a trajectory's time, in the environment", _SECONDS
    ),
    Metric("generate/trajectory_time/env_share", "the same", _SHARE, "below 0.5"),
    Metric("generate/num_overlong_filtered", "sequences masked as overlong", "sequences"),
    Metric(
        "generate/num_overflowed_filtered",
        "trajectories with summaries that are masked, as they ended at a limit",
        "trajectories",
        "few: raise max_turns or the lengths, or shorten summaries",
        SUMMARIES,
    ),
    Metric(
        "generate/calls/{kind}",
        "calls of a trajectory by kind: act, summarise, other",
        "calls",
        "",
        SUMMARIES,
    ),
    Metric(
        "generate/calls/{kind}_token_share",
        "their share of the sampled tokens",
        where=SUMMARIES,
    ),
    Metric("generate/avg_num_contexts", "contexts of a trajectory", "contexts", where=SUMMARIES),
    Metric("generate/max_num_contexts", "the most of one trajectory", "contexts", where=SUMMARIES),
    Metric(
        "generate/avg_peak_prompt_length",
        "longest prompt of a trajectory",
        "tokens",
        where=SUMMARIES,
    ),
    Metric(
        "generate/max_peak_prompt_length",
        "longest prompt of the batch",
        "tokens",
        where=SUMMARIES,
    ),
    Metric(
        "generate/num_zeroed_rewards", "unfinished sequences whose reward is set to 0", "sequences"
    ),
    Metric("generate/batch_num_seq", "rows of the batch", "rows"),
    Metric("generate/batch_num_tokens", "tokens of the rows, prompts included", "tokens"),
    Metric("generate/batch_num_tokens_merged", "the same, with steps merged", "tokens"),
    Metric("generate/batch_num_tokens_tree", "the same, as prefix trees", "tokens"),
    Metric(
        "generate/batch_token_saving",
        "tokens that prefix trees of all rows spare: the most that a layout can",
        _SHARE,
    ),
    Metric("generate/batch_padded_seq_len", "tokens of the longest row", "tokens"),
    Metric("generate/batch_padding_share", "padding, if the batch were padded", _SHARE),
    Metric("generate/batch_trained_share", "trained tokens, if the batch were padded", _SHARE),
    Metric("generate/num_seq_before_merge", "rows before steps were merged", "rows"),
    Metric("generate/num_seq_after_merge", "rows after steps were merged", "rows"),
    Metric("dynamic_sampling/num_batches", "batches of prompts sampled for the step", "", "1 to 3"),
    Metric("dynamic_sampling/num_groups_sampled", "groups sampled for the step", "groups"),
    Metric("dynamic_sampling/num_groups_uninformative", "of these, with equal rewards", "groups"),
    Metric("dynamic_sampling/num_groups_unused", "informative groups beyond the batch", "groups"),
    Metric("dynamic_sampling/num_groups_replaced", "groups replaced by copies of others", "groups"),
    Metric("dynamic_sampling/avg_raw_reward", "mean reward of all that was sampled", "", "rises"),
    # --- asynchronous training ---
    Metric(
        "async/staleness_mean",
        "policy versions between a group's start and its training",
        "versions",
        "at most max_staleness_steps",
    ),
    Metric("async/staleness_max", "its maximum", "versions", "at most max_staleness_steps"),
    Metric("async/num_groups_of_staleness_{n}", "groups of this staleness", "groups"),
    Metric(_STALENESS, "the same, of each token", "versions"),
    Metric("async/token_staleness_max", "its maximum", "versions"),
    Metric("async/num_steps_of_several_versions", "turns during which weights changed", "turns"),
    Metric(
        "async/num_groups_ready",
        "finished groups that wait for their training",
        "groups",
        "above 0: generation keeps up with the trainer",
    ),
    Metric("async/num_groups_running", "groups that are being generated", "groups", "above 0"),
    # --- weights, faults ---
    Metric(
        "sync/logprob_abs_diff_mean",
        "difference of engine and trainer on the probe after a weight update",
        "nats",
        "near 0; the run ends beyond its limits",
        ENGINE,
    ),
    Metric("sync/logprob_abs_diff_q90", "its 90th percentile", "nats", "", ENGINE),
    Metric("sync/logprob_abs_diff_max", "its maximum", "nats", "", ENGINE),
    Metric("sync/logit_std", "standard deviation of the probe's logits", "", "", ENGINE),
    Metric(
        "sync/logprob_change_max",
        "largest change of the engine's log-probabilities by the update",
        "nats",
        "above 0 after a step",
        ENGINE,
    ),
    Metric("sync/update_seconds", "time to transfer the weights", _SECONDS, "", ENGINE),
    Metric(
        "sync/offloaded_bytes",
        "weights that move to main memory before an engine wakes up, and back, of rank 0",
        "bytes",
        where=OFFLOADED_WEIGHTS,
    ),
    Metric("sync/num_bytes", "bytes of the weights, for each engine", "bytes", "", ENGINE),
    Metric(
        "sync/update_seconds_of_engine_{n}",
        "the time of one of several engines",
        _SECONDS,
        "",
        ENGINE,
    ),
    Metric("sync/num_bytes_of_engine_{n}", "its bytes", "bytes", "", ENGINE),
    Metric("sync/verify_seconds", "time to compare the probe", _SECONDS, "", ENGINE),
    Metric("faults/dropped_groups", "groups given up, since the start", "groups", _NO_FAULTS),
    Metric("faults/retried_trajectories", "attempts that were repeated", "", _NO_FAULTS, ENGINE),
    Metric(
        "faults/environment_errors", "attempts that an environment failed", "", _NO_FAULTS, ENGINE
    ),
    Metric("faults/environment_timeouts", "late calls of environments", "", _NO_FAULTS, ENGINE),
    Metric("faults/engine_errors", "attempts that the engine failed", "", _NO_FAULTS, ENGINE),
    Metric(
        "faults/slow_trajectories",
        "trajectories half their deadline in one phase",
        "",
        _NO_FAULTS,
        ENGINE,
    ),
    Metric("faults/stuck_trajectories", "trajectories given up after it", "", "0", ENGINE),
    Metric("faults/engine_deaths", "engines that died", "", "0", ENGINE),
    Metric("faults/engine_restarts", "engines that were restarted", "", "0", ENGINE),
    Metric("faults/requests_sent_again", "requests repeated on another engine", "", "0", ENGINE),
    Metric("faults/teacher_restarts", "restarts of lost teachers", "", "0", TEACHERS),
    Metric(
        "faults/teacher_requests_sent_again", "sequences scored again", "", _NO_FAULTS, TEACHERS
    ),
    Metric("faults/requests_interrupted", "requests continued after new weights", "", "", ENGINE),
    *(
        Metric(f"faults/gateway_{name}", meaning, "", _NO_FAULTS, AGENT)
        for name, meaning in (
            ("refused_calls", "requests of agents that were answered with a 4xx status"),
            ("wrong_keys", "requests of agents with an unknown key"),
            ("late_calls", "requests of agents whose trajectory had ended"),
            ("lost_clients", "requests of agents that broke off before their answer"),
        )
    ),
    # --- traffic between ranks ---
    *(
        Metric(f"traffic/{kind}_{what}", f"{meaning}, {which}", unit, "", RANKS)
        for what, unit, which in (
            ("messages", "", "collectives or messages of rank 0"),
            ("bytes", "bytes", "that rank 0 sends or receives"),
        )
        for kind, meaning in (
            ("calls", "calls of rank 0 to the others, with their arguments"),
            ("rows", "rows that rank 0 sends to the ranks that compute them"),
            ("results", "results of the others' calls"),
            ("layers", "weights that passes gather"),
            ("gradients", "gradients that are reduced"),
            ("engine", "weights gathered for the engine"),
            ("checkpoint", "weights gathered for a checkpoint, counted in the next step"),
            ("sequences", "tokens and heads that ranks exchange which share a pass"),
        )
    ),
    # --- time and memory ---
    Metric("timing/step", "a step without its evaluation", _SECONDS),
    Metric("timing/generate", "generation, in synchronous training", _SECONDS),
    Metric("timing/environment", "environments, in synchronous training", _SECONDS),
    Metric(
        "timing/wait",
        "the trainer waiting for groups, in asynchronous training",
        _SECONDS,
        "near 0: otherwise generation is the bottleneck",
    ),
    Metric(
        "timing/engine_idle",
        "part of a step without a trajectory in generation",
        _SECONDS,
        "near 0 in asynchronous training",
        ENGINE,
    ),
    Metric(
        "timing/trainer_idle",
        "part of a step in which the trainer waits for trajectories",
        _SECONDS,
        "near 0 in asynchronous training",
    ),
    Metric(
        "timing/engine_idle_share",
        "engine_idle by the time of step and evaluation",
        _SHARE,
        "",
        ENGINE,
    ),
    Metric(
        "timing/{phase}_share",
        "share of a phase, or of trainer_idle, in the time of step and evaluation",
        _SHARE,
    ),
    Metric("timing/batch", "building the batch", _SECONDS, "a small share of timing/step"),
    Metric("timing/advantages", "advantages, with their forward passes", _SECONDS),
    Metric("timing/teachers", "waiting for the teachers", _SECONDS, "", TEACHERS),
    Metric("timing/forward_backward", "forward and backward passes and optimizer steps", _SECONDS),
    Metric("timing/sync", "transferring and verifying the weights", _SECONDS),
    Metric(
        "timing/store", "waiting until the previous trajectories are written", _SECONDS, "near 0"
    ),
    Metric("timing/store_background", "writing trajectories, during the step", _SECONDS),
    Metric("timing/eval", "an evaluation", _SECONDS),
    Metric(
        "timing/tokens_per_second",
        "sampled tokens of the step, dropped groups included, by timing/step",
        "tokens/s",
    ),
    Metric("timing/trained_tokens_per_second", "trained tokens by timing/step", "tokens/s"),
    Metric(
        "memory/peak_allocated_gib",
        "most that torch allocated on the trainer's GPU during the step",
        "GiB",
        "below the update's part of `skyrl-fast plan`",
        GPU,
    ),
    Metric(
        "memory/peak_reserved_gib",
        "most that torch reserved there",
        "GiB",
        "close to the allocated; far above: fragmentation",
        GPU,
    ),
)
