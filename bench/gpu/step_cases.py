"""Optimizer steps of models with published shapes and random weights: time, and memory by the plan.

The batch has one-turn rows of one prompt each, all of the same length.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from bench._tree_steps import LARGE, SMALL
from bench.gpu.case import OURS, Case
from skyrl_fast.batch import StepBatch
from skyrl_fast.config import Config
from skyrl_fast.config.loading import load_config
from skyrl_fast.train.memory.plan import plan_memory
from skyrl_fast.train.model.loading import checkpoint_gradients
from skyrl_fast.train.model.optimizer import Optimizer
from skyrl_fast.train.model.policy import Policy
from skyrl_fast.train.update import update_policy

SHAPES = {
    "Qwen2.5-0.5B": LARGE
    | {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
    },
    "Qwen2.5-1.5B": LARGE,
}
GROUP_SIZE = 4  # trajectories of a prompt


@dataclass(frozen=True, slots=True)
class Rows:
    """Sizes of a batch, in rows and tokens, and the budget of a forward pass."""

    rows: int
    prompt: int
    response: int
    budget: int


FULL = Rows(64, 512, 1024, 16_384)
TINY = Rows(8, 12, 20, 256)


def step_cases(device: str, *, large: bool, only: str) -> Iterator[Case]:
    """One group per shape, with and without recomputed activations, as rows and as trees."""
    shapes = SHAPES if large else {"a small model": SMALL}
    rows = FULL if large else TINY
    for name, sizes in shapes.items():
        for checkpointing, layout in ((True, "rows"), (True, "trees"), (False, "rows")):
            kind = "with" if checkpointing else "without"
            group = f"optimizer step: {name}, {kind} checkpointing, {layout}"
            if only in group:
                case = _case(group, sizes, rows, device, checkpointing, layout)
                yield case
                case.call = _nothing  # frees the model before the next one


def _nothing() -> None:
    pass


def _case(
    group: str, sizes: dict[str, object], rows: Rows, device: str, checkpointing: bool, layout: str
) -> Case:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    model_config = Qwen2Config(**sizes, max_position_embeddings=32_768)
    with tempfile.TemporaryDirectory() as folder:
        model_config.save_pretrained(folder)
        config = load_config(
            None,
            [
                "data.train_data=[unused.jsonl]",
                f"trainer.policy.model.path={folder}",
                f"trainer.policy.dtype={'bfloat16' if device == 'cuda' else 'float32'}",
                f"trainer.gradient_checkpointing={checkpointing}",
                f"trainer.max_tokens_per_microbatch={rows.budget}",
                f"trainer.max_prompt_length={rows.prompt}",
                f"generator.max_input_length={rows.prompt}",
                f"generator.sampling_params.max_generate_length={rows.response}",
                "trainer.policy.optimizer_config.lr=1e-6",
            ],
        )
        plan = plan_memory(config, capacity=0, with_engine=False).devices[0]
    with torch.device(device):
        model = Qwen2ForCausalLM(model_config).float()
    if checkpointing:
        checkpoint_gradients(model.train())
    policy = Policy(
        model,
        dtype=torch.bfloat16 if device == "cuda" else torch.float32,
        max_tokens_per_microbatch=rows.budget,
        tree=layout == "trees",
    )
    optimizer = Optimizer(policy, config.trainer.policy.optimizer_config, total_steps=1000)
    num_tokens = rows.rows * (rows.prompt + rows.response)
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    return Case(
        group,
        OURS,
        functools.partial(
            _step, policy, optimizer, _batch(rows, int(model_config.vocab_size)), config
        ),
        0.0,
        details={
            "tokens": num_tokens,
            "flops": 6 * num_weights * num_tokens,
            "plan_bytes": plan.total,
        },
    )


def _step(policy: Policy, optimizer: Optimizer, batch: StepBatch, config: Config) -> None:
    update_policy(
        policy,
        optimizer,
        batch,
        algorithm=config.trainer.algorithm,
        mini_batch_size=batch.num_groups,
    )


def _batch(rows: Rows, vocab_size: int) -> StepBatch:
    """Return rows of random tokens."""
    random = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        return torch.randint(0, vocab_size, (count,), generator=random).tolist()

    prompts = [tokens(rows.prompt) for _ in range(rows.rows // GROUP_SIZE)]
    output = {
        "prompt_token_ids": [prompts[i // GROUP_SIZE] for i in range(rows.rows)],
        "response_ids": [tokens(rows.response) for _ in range(rows.rows)],
        "trajectory_ids": [(f"p{i // GROUP_SIZE}", i % GROUP_SIZE) for i in range(rows.rows)],
        "is_last_step": [True] * rows.rows,
        "loss_masks": [[1] * rows.response] * rows.rows,
        "rewards": [0.0] * rows.rows,
        "rollout_logprobs": [[-12.0] * rows.response] * rows.rows,
    }
    batch = StepBatch.from_generator_output(output, step_wise=True)
    return batch.with_(advantages=torch.randn(batch.loss_mask.shape[0], generator=random))
