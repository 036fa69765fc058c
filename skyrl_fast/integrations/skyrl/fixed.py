"""Mode "fixed": the specification's rules for outputs and tensors. N rows."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from skyrl_fast.batch import StepBatch, generator_output
from skyrl_fast.integrations.skyrl import logprobs, outputs, trainer_steps
from skyrl_fast.ops.logprob.selected import selected_logprob
from skyrl_fast.train.algorithm.advantages import normalize_advantages
from skyrl_fast.train.metrics.rollouts import Reports, rollout_metrics


def merge_stepwise_output(generator_output: Any) -> dict[str, Any]:
    """Return the output with merged steps, including time splits and expert routes."""
    steps = dict(generator_output)
    return outputs.merge_steps_and_support(steps, steps.pop(outputs.SUPPORT, None))


def validate_generator_output(
    num_prompts: int, generator_output: Any, step_wise: bool = False, routes_expected: bool = False
) -> None:
    """Check the rules of the specification: NumPy bools are valid, rows of a group are adjacent.

    Raises:
        ValueError: the first broken rule, with its row.
        AssertionError: routes or support of sampled tokens that SkyRL refuses.
    """
    _check(generator_output, num_prompts, step_wise)
    outputs.check_side_channels(generator_output, step_wise)
    if routes_expected and generator_output.get(outputs.ROUTES) is None:
        trained = any(any(mask) for mask in generator_output["loss_masks"])
        if trained:
            raise ValueError(
                "validate_generator_output: rollout_expert_indices must be given, since "
                "enable_return_routed_experts is on and tokens are trained; got None"
            )


def _check(output: Any, num_prompts: int, step_wise: bool) -> None:
    generator_output.validate_generator_output(output, num_prompts=num_prompts, step_wise=step_wise)


def concatenate_generator_outputs(
    generator_outputs: Any, step_wise: bool = False, **expected: bool
) -> Any:
    """Return SkyRL's concatenation, but step-wise metrics per trajectory instead of per row.

    `expected` is `routes_expected` in versions that have it.
    """
    result = outputs.concatenate_generator_outputs(generator_outputs, step_wise, **expected)
    if step_wise:
        result["rollout_metrics"].update(step_wise_metrics(result))
    return result


def step_wise_metrics(output: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a step-wise output's rollouts, per trajectory and per turn."""
    last = np.flatnonzero(output["is_last_step"]).tolist()

    def last_values(values: Any) -> list[Any] | None:
        return None if values is None else [values[row] for row in last]

    splits = output.get(outputs.TIME_SPLITS) or {}
    reports = Reports(
        stop_reasons=last_values(output.get("stop_reasons")),
        seconds=last_values(output.get(outputs.TIMES)),
        time_splits={name: last_values(values) or [] for name, values in splits.items()},
        env_metrics=last_values(output.get("env_metrics")),
    )
    rows = {name: output[name] for name in (*outputs.ALWAYS, "is_last_step", "trajectory_ids")}
    return rollout_metrics(StepBatch.from_generator_output(rows, step_wise=True), reports)


def logprobs_from_logits(
    logits: torch.Tensor, labels: torch.Tensor, inplace_backward: bool = True
) -> torch.Tensor:
    if logits.dtype not in (torch.bfloat16, torch.float16):
        return logprobs.logprobs_from_logits(logits, labels, inplace_backward)
    inplace = inplace_backward and logits.device.type == "cuda"
    out = selected_logprob(logits, labels, inplace_backward=inplace)
    assert isinstance(out, torch.Tensor)
    return out


@torch.no_grad()
def normalize(
    self: Any, data: Any, mini_batch_boundaries: Any, prompt_boundaries: Any = None
) -> Any:
    """Return the batch with advantages normalised over real response tokens, then as SkyRL does.

    SkyRL's mean includes padded positions, and its variance the tokens of padding rows.
    """
    scale = trainer_steps.normalize_advantages
    if not self.cfg.trainer.algorithm.advantage_batch_normalize:
        return scale(self, data, mini_batch_boundaries, prompt_boundaries)
    mask = data["response_mask"].clone()
    num_real = len(mask) - data.metadata.get("pad_size", 0)
    mask[num_real:] = 0
    data["advantages"] = normalize_advantages(data["advantages"], mask)
    trainer = copy.copy(self)
    trainer.cfg = copy.deepcopy(self.cfg)
    trainer.cfg.trainer.algorithm.advantage_batch_normalize = False
    return scale(trainer, data, mini_batch_boundaries, prompt_boundaries)
