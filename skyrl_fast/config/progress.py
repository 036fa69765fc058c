"""Table of the progress display's columns: the name in `trainer.progress`, and what it shows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProgressColumn:
    """A column; a trailing * in the name of its metric matches any suffix."""

    label: str
    metric: str
    format: str = "{:.3g}"


# In the order in which they are shown by default, as far as they fit.
PROGRESS = {
    "reward": ProgressColumn("reward", "reward/avg_raw_reward", "{:.3f}"),
    "eval": ProgressColumn("eval", "eval/all/avg_score", "{:.3f}"),
    "loss": ProgressColumn("loss", "policy/loss"),
    "cross_entropy": ProgressColumn("cross-entropy", "policy/cross_entropy", "{:.3f}"),
    "step_seconds": ProgressColumn("step s", "timing/step", "{:.1f}"),
    "tokens_per_second": ProgressColumn("tokens/s", "timing/tokens_per_second", "{:,.0f}"),
    "entropy": ProgressColumn("entropy", "policy/policy_entropy", "{:.3f}"),
    "kl": ProgressColumn("kl", "policy/kl"),
    "clip_share": ProgressColumn("clipped", "policy/clip_ratio", "{:.3f}"),
    "grad_norm": ProgressColumn("grad norm", "policy/grad_norm"),
    "response_length": ProgressColumn(
        "response", "generate/per_turn/avg_response_length", "{:.0f}"
    ),
    "mismatch": ProgressColumn("mismatch", "policy/rollout_train_logprobs_abs_diff_mean", "{:.1e}"),
    "update_change": ProgressColumn(
        "update change", "policy/rollout_update_logprobs_abs_diff_mean", "{:.1e}"
    ),
    "pass_at_n": ProgressColumn("pass@n", "reward/avg_pass_at_*", "{:.3f}"),
    "turns": ProgressColumn("turns", "generate/avg_num_turns", "{:.2f}"),
    "generate": ProgressColumn("generate", "timing/generate_share", "{:.0%}"),
    "environment": ProgressColumn("env", "timing/environment_share", "{:.0%}"),
    "wait": ProgressColumn("wait", "timing/wait_share", "{:.0%}"),
    "batch": ProgressColumn("batch", "timing/batch_share", "{:.0%}"),
    "forward_backward": ProgressColumn("fwd-bwd", "timing/forward_backward_share", "{:.0%}"),
    "sync": ProgressColumn("sync", "timing/sync_share", "{:.0%}"),
    "evaluation": ProgressColumn("evaluation", "timing/eval_share", "{:.0%}"),
    "engine_idle": ProgressColumn("engine idle", "timing/engine_idle_share", "{:.0%}"),
    "trainer_idle": ProgressColumn("trainer idle", "timing/trainer_idle_share", "{:.0%}"),
    "trees": ProgressColumn("trees", "policy/tree_group_share", "{:.0%}"),
    "saving": ProgressColumn("tokens saved", "policy/token_saving", "{:.0%}"),
    "ideal_saving": ProgressColumn("ideally", "generate/batch_token_saving", "{:.0%}"),
    "approx_kl": ProgressColumn("approx kl", "policy/approx_kl"),
    "truncated": ProgressColumn("truncated", "generate/truncated_turn_share", "{:.3f}"),
    "zero_variance": ProgressColumn("zero var", "reward/zero_variance_share", "{:.3f}"),
    "learning_rate": ProgressColumn("lr", "policy/lr"),
}


def progress_columns(chosen: list[str] | None) -> list[ProgressColumn]:
    """Return the columns of `trainer.progress`; a name with "/" is that of a metric."""
    if chosen is None:
        return list(PROGRESS.values())
    result: list[ProgressColumn] = []
    for name in chosen:
        result.append(PROGRESS[name] if name in PROGRESS else ProgressColumn(name, name))
    return result
