"""Losses and estimators as users write them, with public names only."""

import torch

from skyrl_fast import (
    EstimatorInputs,
    EstimatorOutput,
    LossInputs,
    LossOutput,
    register_advantage_estimator,
    register_policy_loss,
)


def ratio(inputs: LossInputs) -> torch.Tensor:
    """exp(logprob - old), bounded."""
    return (inputs.logprobs - inputs.old_logprobs).clamp(-20, 20).exp()


@register_policy_loss("test_ppo", zero_where_advantage_is_zero=True)
def ppo(inputs: LossInputs, eps: float = 0.2) -> LossOutput:
    """`regular` in plain torch."""
    r, a = ratio(inputs), inputs.advantages
    free, bound = -a * r, -a * r.clamp(1 - eps, 1 + eps)
    clipped = bound > free
    return LossOutput(
        torch.maximum(free, bound),
        {"clip_ratio": clipped, "clip_ratio_high": clipped & (a > 0), "my_ratio_max": r},
    )


@register_policy_loss("test_gspo", scope="sequence", zero_where_advantage_is_zero=True)
def gspo(inputs: LossInputs) -> torch.Tensor:
    """`gspo` in plain torch: the ratio of a sequence's mean."""
    sequence = inputs.sequence_ids[inputs.row_ids]
    delta = inputs.logprobs - inputs.old_logprobs
    live = inputs.loss_mask.to(delta.dtype)
    num = int(inputs.sequence_ids.max()) + 1
    sums = delta.new_zeros(num).index_add(0, sequence, (delta * live).detach())
    counts = delta.new_zeros(num).index_add(0, sequence, live).clamp(min=1)
    r = (delta - delta.detach() + (sums / counts)[sequence]).exp()
    return torch.maximum(-inputs.advantages * r, -inputs.advantages * r.clamp(0.8, 1.2))


@register_policy_loss("test_centred", scope="mini_batch")
def centred(inputs: LossInputs) -> torch.Tensor:
    """A loss of the mini-batch: advantages minus their mean over all its tokens."""
    a = inputs.advantages
    mean = a[inputs.loss_mask].mean()
    return -(a - mean) * ratio(inputs)


def rloo(inputs: EstimatorInputs, scale: float = 1.0) -> torch.Tensor:
    """`rloo` in plain torch: (N,), the outcome minus the mean outcome of the group's others."""
    last = inputs.is_last_step
    trajectory = torch.cumsum(last.long(), 0) - last.long()  # rows of one are adjacent
    outcome = inputs.rewards[last].double()
    groups = inputs.group_ids[last]
    same = groups[:, None] == groups[None, :]
    n = same.sum(1)
    others = (same * outcome).sum(1) - outcome
    baseline = others / (n - 1).clamp(min=1)
    advantage = torch.where(n > 1, outcome - baseline, torch.zeros_like(outcome))
    return (scale * advantage[trajectory]).float()


@register_advantage_estimator("test_rewards_to_go", level="token")
def rewards_to_go(inputs: EstimatorInputs) -> EstimatorOutput:
    """(A,): the rewards from a token to the end of its trajectory."""
    cu = inputs.cu_seqlens.tolist()
    out = torch.zeros_like(inputs.token_rewards)
    total = 0.0
    for row in range(len(cu) - 2, -1, -1):
        if inputs.is_last_step[row]:
            total = 0.0
        for cell in range(cu[row + 1] - 1, cu[row] - 1, -1):
            total += float(inputs.token_rewards[cell])
            out[cell] = total
    return EstimatorOutput(out)
