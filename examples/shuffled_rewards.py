"""A control: GRPO with the rewards of a step permuted over its trajectories.

    trainer.algorithm.advantage_estimator=examples.shuffled_rewards:shuffled

What still rises then is no effect of the rewards.
"""

from __future__ import annotations

import torch

from skyrl_fast import EstimatorInputs, group_advantage, register_advantage_estimator


@register_advantage_estimator("shuffled")
def shuffled(inputs: EstimatorInputs) -> torch.Tensor:
    """Return GRPO's advantages of shuffled rewards, (N,).

    The order depends on the number of response tokens alone, so that a run repeats it.
    """
    last = inputs.is_last_step
    generator = torch.Generator().manual_seed(int(inputs.cu_seqlens[-1]))
    order = torch.randperm(int(last.sum()), generator=generator)
    rewards = inputs.rewards.clone()
    rewards[last] = inputs.rewards[last][order]
    return group_advantage(rewards, inputs.group_ids, is_last_step=last)
