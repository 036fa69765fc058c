"""Steps of SkyRL's trainer around the functions that stand in. N rows, J trajectories, R cells.

Each runs SkyRL's own method where that is not the cost, with less to walk through.
"""

from __future__ import annotations

import inspect
from itertools import compress
from typing import Any

import torch

from skyrl_fast.integrations.skyrl import losses
from skyrl_fast.integrations.skyrl.batches import SPARE
from skyrl_fast.integrations.skyrl.output_metrics import REWARD
from skyrl_fast.integrations.skyrl.stand_in import ORIGINALS, NotOursError, require, stand_in
from skyrl_fast.ops import _backend

CONVERT = "RayPPOTrainer.convert_to_training_input"
POSTPROCESS = "RayPPOTrainer.postprocess_generator_output"
NORMALIZE = "RayPPOTrainer._normalize_advantages"


def _original(name: str) -> Any:
    original = ORIGINALS.function(name)
    if original is None:
        raise NotOursError("SkyRL is not there, whose method this is")
    return original


def _require_known(method: Any, name: str) -> None:
    """Raise where the method calls another function of this name than SkyRL's or ours."""
    require(
        ORIGINALS.is_known(name, inspect.unwrap(method).__globals__.get(name)),
        f"another {name} than SkyRL's",
    )


@stand_in(CONVERT)
def convert_to_training_input(self: Any, generator_output: Any, uids: Any) -> Any:
    """Return the padded batch, as SkyRL's trainer's method of that name, which makes it.

    The padding rows are made with the batch, so that padding copies nothing.

    Args:
        self: SkyRL's RayPPOTrainer.
        generator_output: SkyRL's mapping of lists.
        uids: N, the prompt of each row.
    """
    original = _original(CONVERT)
    with SPARE.made(-len(generator_output["response_ids"]) % self.dispatch.get_lcm_dp_size()):
        return original(self, generator_output, uids)


@stand_in(POSTPROCESS)
def postprocess_generator_output(
    self: Any,
    generator_output: Any,
    uids: Any,
    metrics_generator_output: Any = None,
    metrics_uids: Any = None,
) -> Any:
    """Return rewards per token and uids, as SkyRL's trainer's method, which makes them.

    For its metrics it copies every field of the last steps; only their rewards are read.

    Args:
        self: SkyRL's RayPPOTrainer.
        generator_output: SkyRL's mapping of lists.
        uids: N, the prompt of each row.
        metrics_generator_output, metrics_uids: where given, all is SkyRL's.
    """
    original = _original(POSTPROCESS)
    require(self.cfg.generator.step_wise_trajectories is True, "training that is not step-wise")
    require(metrics_generator_output is None and metrics_uids is None, "metrics of another output")
    _require_known(original, REWARD)
    last = generator_output["is_last_step"]
    require(isinstance(last, list) and set(map(type, last)) <= {bool}, "other is_last_step")
    lists = [value for value in generator_output.values() if isinstance(value, list)]
    require(all(len(value) == len(last) for value in lists), "fields of other lengths")
    rewards = generator_output["rewards"]
    require(isinstance(rewards, list) and len(uids) == len(last), "other rewards or uids")
    of_last = list(compress(rewards, last))
    known = {"rewards": of_last, "is_last_step": [True] * len(of_last)}
    return original(self, generator_output, uids, known, list(compress(uids, last)))


@stand_in(NORMALIZE)
@torch.no_grad()
def normalize_advantages(
    self: Any, data: Any, mini_batch_boundaries: Any, prompt_boundaries: Any = None
) -> Any:
    """Return the batch with scaled advantages, as SkyRL's trainer's method of that name.

    Args:
        self: SkyRL's RayPPOTrainer; with advantage_batch_normalize all is SkyRL's.
        data: SkyRL's TrainingInputBatch with advantages and loss_mask, (N, R).
        mini_batch_boundaries: (start, end) rows of each mini-batch; rows behind them become 0.
        prompt_boundaries: (start, end) rows of each prompt; for "prompt_mean".
    """
    algorithm = self.cfg.trainer.algorithm
    require(not algorithm.advantage_batch_normalize, "advantages normalised over the batch")
    _require_known(_original(NORMALIZE), losses.REDUCTION)
    advantages, mask = data["advantages"], data["loss_mask"]
    starts, ends = (list(edge) for edge in zip(*mini_batch_boundaries, strict=True))
    require(starts == [0, *ends[:-1]], "mini-batches apart")
    require(all(map(int.__lt__, starts, ends)) and ends[-1] <= len(advantages), "empty mini-batch")
    require(mask.shape == advantages.shape, "other shapes")
    out = _backend.empty(advantages.shape, torch.float32)
    for start, end in zip(starts, ends, strict=True):
        prompts = prompt_boundaries
        if prompts is not None:
            prompts = [(a - start, b - start) for a, b in prompts if start <= a < end]
        losses.reduce_into(
            out[start:end], advantages[start:end], mask[start:end], algorithm.loss_reduction,
            algorithm.max_seq_len, prompts,
        )  # fmt: skip
    out[ends[-1] :] = 0
    data["advantages"] = out
    return data
