"""TRL's AsyncGRPOTrainer on a CPU: synthetic rollouts, no weight transfer, attention by torch.

TRL takes a rollout worker and a weight transfer from its user; without them it needs a vLLM server
and NCCL. Its attention is a FlashAttention 3 kernel, for GPUs only, so `run_on_cpu`
replaces that.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

GROUP = 4  # answers of a prompt
PROMPT = 32  # tokens


class Rollouts:
    """A rollout worker whose buffer holds all samples of a run before it starts."""

    def __init__(self, samples: int, response: int) -> None:
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        rng = np.random.default_rng(0)
        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[Any] = queue.Queue()
        for i in range(samples):
            prompt = np.arange(PROMPT) + 3 + i // GROUP
            answer = rng.integers(3, 500, response)
            mask = np.repeat([0, 1], [PROMPT, response])
            logprobs = np.where(mask == 1, rng.normal(-10.4, 0.1, len(mask)), 0.0)
            advantage = float(i % GROUP) - (GROUP - 1) / 2
            self.rollout_buffer.put(
                RolloutSample(
                    prompt=[], completion=[], input_ids=np.concatenate([prompt, answer]),
                    completion_mask=mask, old_log_probs=logprobs.astype(np.float32),
                    advantage=advantage, model_version=0, group_id=i // GROUP, metrics={},
                )
            )  # fmt: skip

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def update_model_version(self, model_version: int) -> None: ...

    def check_health(self, stale_after_s: float) -> None:
        """Raise, for the trainer asks only when the buffer is empty."""
        raise RuntimeError("the rollouts of this run are used up")


class NoTransfer:
    """A weight transfer to no server."""

    def init_weight_transfer(self) -> None: ...

    def pause(self) -> None: ...

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None: ...

    def resume(self) -> None: ...

    def destroy(self) -> None: ...


def make_trainer(
    folder: Path, common: dict[str, Any], shared: dict[str, Any], response: int
) -> Any:
    """Return the trainer, for a model saved in `folder`; answers have `response` tokens."""
    run_on_cpu()
    from datasets import Dataset
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    rows = common["per_device_train_batch_size"]
    config = AsyncGRPOConfig(
        **common, num_generations=GROUP, max_staleness=common["max_steps"], token_budget=-1
    )
    return AsyncGRPOTrainer(
        model=str(folder),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["w1"]}),
        rollout_worker=Rollouts((common["max_steps"] + 1) * rows, response),
        weight_transfer=NoTransfer(),
        **shared,
    )


def run_on_cpu() -> None:
    """Let TRL's tree attention call torch in place of its kernel, and not ask for a GPU's name."""
    from trl.experimental.async_grpo import async_grpo_trainer, packing

    packing._flash_attn = lambda: TorchAttention
    async_grpo_trainer.get_peak_flops_per_device = lambda accelerator, dtype: None


class TorchAttention:
    """Causal attention of packed segments by `scaled_dot_product_attention`."""

    @staticmethod
    def flash_attn_varlen_func(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        starts_q: torch.Tensor,
        starts_k: torch.Tensor,
        *_: Any,
        softmax_scale: float,
        **__: Any,
    ) -> torch.Tensor:
        """Return (tokens, heads, dims); a segment's queries are the last ones of its path."""
        q = query.tensor_split(starts_q[1:-1].long())
        k = key.tensor_split(starts_k[1:-1].long())
        v = value.tensor_split(starts_k[1:-1].long())
        return torch.cat([attend(*one, softmax_scale) for one in zip(q, k, v, strict=True)])


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the attention of one segment, (tokens, heads, dims)."""
    mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
    heads = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(
        *heads, attn_mask=mask, scale=scale, enable_gqa=True
    )
    return out[0].transpose(0, 1)
