"""Metrics of a step, each with what it is a mean over (section 8, docs/reference/metrics.md)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from reference.filters import groups_of, score_of, sequences_of
from reference.rows import Part, Row, merges_steps, rows_of_turns
from reference.update import Terms
from skyrl_fast.rollout.trajectory import Trajectory

ROUNDING = 1e-9  # of an advantage that is 0 in exact arithmetic


def mean(values: Sequence[float]) -> float:
    """Return the mean; 0 of nothing."""
    return math.fsum(values) / max(1, len(values))


def _deviation(values: Sequence[float]) -> float:
    """Return the standard deviation of all that there is, not of a sample."""
    return math.sqrt(mean([(value - mean(values)) ** 2 for value in values]))


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    return {
        name.format("avg"): mean(values),
        name.format("min"): float(min(values)),
        name.format("max"): float(max(values)),
        name.format("std"): _deviation(values),
    }


def rollout_metrics(parts: Sequence[Part], config: Any, *, sums_rewards: bool) -> dict[str, float]:
    """Return metrics of what was sampled, before the filters."""
    rows = rows_of_turns(parts)
    trajectories = sequences_of(rows, "trajectory")
    tokens = [sum(len(row.response) for row in own) for own in trajectories]
    scores = [score_of(own, sums_rewards=sums_rewards) for own in trajectories]
    of_above = [count for count, score in zip(tokens, scores, strict=True) if score > 0]
    of_zero = [count for count, score in zip(tokens, scores, strict=True) if score == 0]
    trained = [sum(sum(row.mask) for row in own) for own in trajectories]
    longest = config.generator.sampling_params.max_generate_length
    turns = [turn for part in parts for turn in part.turns]
    steps = [turn.step for turn in turns]
    cut = [step.stop_reason == "length" and len(step.response_ids) >= longest for step in steps]
    reasons = [part.stop for part in parts]
    last_lengths = [len(part.turns[-1].step.response_ids) if part.turns else 0 for part in parts]
    too_long = [
        reason == "length" and length < longest
        for reason, length in zip(reasons, last_lengths, strict=True)
    ]
    return {
        "generate/num_trajectories": float(len(trajectories)),
        "generate/num_empty_trajectories": float(tokens.count(0)),
        **_spread("generate/{}_num_tokens", tokens),
        "generate/avg_tokens_non_zero_rewards": mean(of_above) if of_above else 0.0,
        "generate/avg_tokens_zero_rewards": mean(of_zero) if of_zero else 0.0,
        **_spread("generate/{}_assistant_tokens", trained),
        **_spread(
            "generate/{}_num_turns",
            [sum(not any(row.is_summary) for row in own) for own in trajectories],
        ),
        **_spread(
            "generate/{}_final_context_length", [len(own[-1].tokens) for own in trajectories]
        ),
        **_spread("generate/per_turn/{}_response_length", [len(row.response) for row in rows]),
        **_spread("generate/per_turn/{}_prompt_length", [len(row.prompt) for row in rows]),
        **_spread("generate/per_turn/{}_num_tokens", [len(row.tokens) for row in rows]),
        "generate/truncated_turn_share": mean(cut) if cut else 0.0,
        "generate/too_long_prompt_share": mean(too_long) if too_long else 0.0,
        **{
            f"generate/stop_reason/{reason}": reasons.count(reason) / len(reasons)
            for reason in set(reasons)
        },
    }


def call_metrics(parts: Sequence[Part], config: Any, *, sums_rewards: bool) -> dict[str, float]:
    """Return metrics of calls by kind, and of contexts; none where there is nothing to tell."""
    own = [part for part in parts if part.turns and not part.has_failed]
    kinds = [turn.step.kind for part in own for turn in part.turns]
    if not own or (set(kinds) == {"act"} and config.generator.context != "compact"):
        return {}
    tokens = [sum(turn.step.loss_mask) for part in own for turn in part.turns]
    peaks = [max(len(turn.step.prompt_token_ids) for turn in part.turns) for part in own]
    result = {
        "generate/avg_peak_prompt_length": mean(peaks),
        "generate/max_peak_prompt_length": float(max(peaks)),
    }
    for kind in ("act", "summarise", "other"):
        of_kind = [count for count, one in zip(tokens, kinds, strict=True) if one == kind]
        result[f"generate/calls/{kind}"] = len(of_kind) / len(own)
        result[f"generate/calls/{kind}_token_share"] = sum(of_kind) / max(1, sum(tokens))
    return result


def summary_share(rows: Sequence[Row], values: Sequence[Sequence[float]], weight: float) -> Any:
    """Return the summaries' share of the sum of |advantage * weight|; none without summaries.

    Equal advantages that are normalized are 0 but for rounding, of which there is no share.
    """
    if not any(any(row.is_summary) for row in rows):
        return {}
    sizes = {True: 0.0, False: 0.0}
    for row, own in zip(rows, values, strict=True):
        for value, trained, is_summary in zip(own, row.mask, row.is_summary, strict=True):
            if abs(value) > ROUNDING:
                sizes[is_summary] += abs(value) * trained * (weight if is_summary else 1.0)
    total = sum(sizes.values())
    return {"policy/summary_loss_share": sizes[True] / total if total else 0.0}


def batch_metrics(rows: Sequence[Row], parts: Sequence[Part], config: Any) -> dict[str, float]:
    """Return metrics of the rows that are trained, before the filters."""
    width = max(len(row.tokens) for row in rows)
    cells = len(rows) * width
    tokens = sum(len(row.tokens) for row in rows)
    result = {
        "generate/batch_num_seq": float(len(rows)),
        "generate/batch_num_tokens": float(tokens),
        "generate/batch_padded_seq_len": float(width),
        "generate/batch_padding_share": 1 - tokens / cells,
        "generate/batch_trained_share": sum(sum(row.mask) for row in rows) / cells,
    }
    if merges_steps(config):
        result["generate/num_seq_before_merge"] = float(len(rows_of_turns(parts)))
        result["generate/num_seq_after_merge"] = float(len(rows))
    return result


def reward_metrics(
    rows: Sequence[Row], config: Any, *, sums_rewards: bool, compares_groups: bool
) -> dict[str, float]:
    """Return metrics of the rewards that the rollout filters have left."""
    groups = [
        [
            score_of(trajectory, sums_rewards=sums_rewards)
            for trajectory in sequences_of(group, "trajectory")
            if not trajectory[0].is_placeholder
        ]
        for group in groups_of(rows)
    ]
    groups = [group for group in groups if group]
    scores = [score for group in groups for score in group]
    positive = [
        sum(_positive_reward(row) for row in (own if sums_rewards else own[-1:]))
        for own in sequences_of(rows, "trajectory")
        if not own[0].is_placeholder
    ]
    samples = config.generator.n_samples_per_prompt
    result = {
        "reward/avg_raw_reward": mean(scores),
        "reward/std_raw_reward": _deviation(scores),
        "reward/mean_positive_reward": mean(positive),
        f"reward/avg_pass_at_{samples}": mean([float(max(group) > 0) for group in groups]),
    }
    if compares_groups:
        tolerance = config.trainer.algorithm.zero_variance_filter_tol
        equal = [float(max(group) - min(group) <= tolerance) for group in groups]
        result["reward/zero_variance_share"] = mean(equal)
    return result


def _positive_reward(row: Row) -> float:
    rewards = row.rewards or [row.leading + row.trailing]
    return math.fsum(max(reward, 0.0) for reward in rewards)


def source_metrics(trajectories: Sequence[Trajectory], *, sums_rewards: bool) -> dict[str, float]:
    """Return metrics of each source's trajectories, as they were sampled; failures are none."""
    groups: dict[str, dict[str, list[float]]] = {}
    for one in trajectories:
        if one.failure is None and one.steps:
            rewards = [step.reward for step in one.steps]
            outcome = sum(rewards) if sums_rewards else rewards[-1]
            groups.setdefault(one.data_source, {}).setdefault(one.uid, []).append(outcome)
    if len(groups) < 2:
        return {}
    result = {}
    for source, of_source in groups.items():
        outcomes = [outcome for group in of_source.values() for outcome in group]
        equal = [float(min(group) == max(group)) for group in of_source.values()]
        result[f"data/{source}/avg_raw_reward"] = mean(outcomes)
        result[f"data/{source}/zero_variance_share"] = mean(equal)
        result[f"data/{source}/num_groups"] = float(len(of_source))
    return result


def update_metrics(
    steps: Sequence[Terms],
    norms: Sequence[float],
    rates: Sequence[float],
    *,
    corrects: bool,
    known_before: str,
    epochs: int,
) -> dict[str, float]:
    """Return the metrics of an update.

    Args:
        steps: of each optimizer step, epoch after epoch.
        known_before: as of `tokens_known_before`.
        corrects: whether there is an off-policy correction.
        norms, rates: of its gradient before clipping, and its learning rate.
    """
    result = {
        "grad_norm": mean(norms),
        "lr": mean(rates),
        "optimizer_steps": float(len(steps)),
        "nonfinite_steps_skipped": 0.0,
        "loss": mean([step.sums.get("loss", 0.0) for step in steps]),
    }
    for name in ("policy_loss", "kl_loss", "distillation_loss"):
        # Of rows that are not visited it is 0, and without any of them it is not computed.
        if any(any(step.is_visited) for step in steps) and any(name in step.sums for step in steps):
            result[name] = mean([step.sums.get(name, 0.0) for step in steps])
    tokens: dict[str, list[float]] = {}
    for step in steps:
        for name, values in step.tokens.items():
            visited = zip(values, step.is_visited, strict=True)
            tokens.setdefault(name, []).extend(value for value, is_in in visited if is_in)
    for name in ("policy_entropy", "kl", "clip_ratio", "clip_ratio_low", "clip_ratio_high"):
        if tokens.get(name):
            result[name] = mean(tokens[name])
    if tokens.get("chosen_ratio"):
        result["chosen_ratio"] = mean(tokens["chosen_ratio"])
        result["ratio_mean"] = mean(tokens["ratio"])
        result["ratio_max"] = max(tokens["ratio"])
        result["ratio_min"] = min(tokens["ratio"])
        result["rollout_update_logprobs_abs_diff_mean"] = mean(tokens["update_change"])
        result["rollout_update_logprobs_abs_diff_max"] = max(tokens["update_change"])
        result["approx_kl"] = mean(tokens["approx_kl"])
    mismatch = _mismatch(steps[: len(steps) // epochs], known_before)
    if mismatch:
        result["rollout_train_logprobs_abs_diff_mean"] = mean(mismatch)
        result["rollout_train_logprobs_abs_diff_max"] = max(mismatch)
    observed = [value for step in steps for value in step.observed]
    if observed:
        result["cross_entropy"] = mean(observed)
        losses = [step.sums.get("cross_entropy_loss", 0.0) for step in steps]
        result["cross_entropy_loss"] = mean(losses)
        result["cross_entropy_tokens"] = len(observed) / len(steps)
        result["policy_tokens"] = sum(sum(step.is_visited) for step in steps) / len(steps)
    result |= _correction_metrics(steps, is_enabled=corrects)
    return {f"policy/{name}": value for name, value in result.items()}


def _mismatch(steps: Sequence[Terms], known_before: str) -> list[float]:
    """Return the differences of the tokens that the trainer computed before any update."""
    found: list[float] = []
    for number, step in enumerate(steps):
        if known_before == "all" or (known_before == "later" and number > 0):
            found += step.mismatch
        elif number == 0:
            visited = zip(step.mismatch, step.is_visited, strict=True)
            found += [value for value, is_in in visited if is_in]
    return found


def _correction_metrics(steps: Sequence[Terms], *, is_enabled: bool) -> dict[str, float]:
    corrections = [step.correction for step in steps if step.correction is not None]
    result: dict[str, float] = {}
    counts: dict[str, list[tuple[float, int]]] = {}
    for correction in corrections:
        for name, share in correction.shares.items():
            counts.setdefault(name, []).append(share)
    for name, shares in counts.items():
        total = sum(of for _, of in shares)
        result[name] = sum(number for number, _ in shares) / max(1, total)
    if not is_enabled:
        return {}
    ratios = [ratio for correction in corrections for ratio in correction.ratios]
    if ratios:
        result["is_ratio_mean"] = mean(ratios)
        result["is_ratio_max"] = max(ratios)
        result["is_ratio_min"] = min(ratios)
    if len(ratios) > 1:
        middle = mean(ratios)
        squares = math.fsum((ratio - middle) ** 2 for ratio in ratios)
        result["is_ratio_std"] = math.sqrt(squares / (len(ratios) - 1))
    return result
