"""Steps of SkyRL's trainer around the replaced functions. N rows, J trajectories, R cells.

Where SkyRL's own method is not the bottleneck it is called, with less data to read.
"""

from __future__ import annotations

from itertools import compress
from typing import Any

import torch

from skyrl_fast.integrations.skyrl import losses
from skyrl_fast.integrations.skyrl.batches import SPARE
from skyrl_fast.integrations.skyrl.output_metrics import REWARD
from skyrl_fast.integrations.skyrl.replacement import (
    ORIGINALS,
    replaces,
    require,
)
from skyrl_fast.ops import _backend

CONVERT = "RayPPOTrainer.convert_to_training_input"
POSTPROCESS = "RayPPOTrainer.postprocess_generator_output"
NORMALIZE = "RayPPOTrainer._normalize_advantages"


def _require_known(method: str, name: str) -> None:
    """Raise if the method calls another function of this name than SkyRL's or ours."""
    called = ORIGINALS.namespace(method).get(name)
    require(ORIGINALS.is_known(name, called), f"another {name} than SkyRL's")


@replaces(CONVERT)
def convert_to_training_input(self: Any, generator_output: Any, uids: Any) -> Any:
    """Return the padded batch, as the method of SkyRL's trainer of that name, which is called.

    The padding rows are allocated with the batch, so that padding copies nothing.
    """
    original = ORIGINALS.require(CONVERT)
    with SPARE.allocate(-len(generator_output["response_ids"]) % self.dispatch.get_lcm_dp_size()):
        return original(self, generator_output, uids)


@replaces(POSTPROCESS)
def postprocess_generator_output(
    self: Any,
    generator_output: Any,
    uids: Any,
    metrics_generator_output: Any = None,
    metrics_uids: Any = None,
) -> Any:
    """Return rewards per token and uids, as the method of SkyRL's trainer, which is called.

    For its metrics that method copies every field of the last steps, but reads only their rewards.
    With `metrics_generator_output` or `metrics_uids` the call is passed to SkyRL.
    """
    original = ORIGINALS.require(POSTPROCESS)
    require(self.cfg.generator.step_wise_trajectories is True, "training that is not step-wise")
    require(metrics_generator_output is None and metrics_uids is None, "metrics of another output")
    _require_known(POSTPROCESS, REWARD)
    last = generator_output["is_last_step"]
    require(isinstance(last, list) and set(map(type, last)) <= {bool}, "unsupported is_last_step")
    lists = [value for value in generator_output.values() if isinstance(value, list)]
    require(all(len(value) == len(last) for value in lists), "fields of different lengths")
    rewards = generator_output["rewards"]
    require(isinstance(rewards, list) and len(uids) == len(last), "unsupported rewards or uids")
    last_rewards = list(compress(rewards, last))
    metrics_output = {"rewards": last_rewards, "is_last_step": [True] * len(last_rewards)}
    return original(self, generator_output, uids, metrics_output, list(compress(uids, last)))


@replaces(NORMALIZE)
@torch.no_grad()
def normalize_advantages(
    self: Any, data: Any, mini_batch_boundaries: Any, prompt_boundaries: Any = None
) -> Any:
    """Return the batch with scaled advantages, as the method of SkyRL's trainer of that name.

    Args:
        self: SkyRL's RayPPOTrainer; with advantage_batch_normalize the call is passed to SkyRL.
        data: SkyRL's TrainingInputBatch with advantages and loss_mask, (N, R).
        mini_batch_boundaries: (start, end) rows of each mini-batch; rows after them become 0.
        prompt_boundaries: (start, end) rows of each prompt; for "prompt_mean".
    """
    algorithm = self.cfg.trainer.algorithm
    require(not algorithm.advantage_batch_normalize, "advantages normalised over the batch")
    _require_known(NORMALIZE, losses.REDUCTION)
    advantages = data["advantages"]
    mask = data["loss_mask"]
    starts, ends = (list(edge) for edge in zip(*mini_batch_boundaries, strict=True))
    require(starts == [0, *ends[:-1]], "mini-batches apart")
    require(all(map(int.__lt__, starts, ends)) and ends[-1] <= len(advantages), "empty mini-batch")
    require(mask.shape == advantages.shape, "different shapes")
    out = _backend.empty(advantages.shape, torch.float32)
    for start, end in zip(starts, ends, strict=True):
        prompts = prompt_boundaries
        if prompts is not None:
            prompts = [(a - start, b - start) for a, b in prompts if start <= a < end]
        losses.reduce_into(
            out[start:end],
            advantages[start:end],
            mask[start:end],
            algorithm.loss_reduction,
            algorithm.max_seq_len,
            prompts,
        )
    out[ends[-1] :] = 0
    data["advantages"] = out
    return data
