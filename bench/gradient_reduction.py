"""Seconds of an optimizer step of two ranks: gradients reduced once, or in every micro-batch.

    python -m bench.gradient_reduction [--model 26M] [--micro-batches 2 4 8] [--rounds 5]

Two processes of this machine share a random Llama by FSDP2 and gloo, with one thread each. Both
ways take turns in the same processes, on the same batch: `--micro-batches` of each rank, of
`--tokens` tokens: the fewer, the larger the part of a step that moves weights and gradients. The
gradients of each way are first compared with those of one rank: the column `difference` has the
largest one, as a part of the largest gradient.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import torch

from bench.weight_sync import SHAPES, create
from skyrl_fast.batch import StepBatch
from skyrl_fast.config import AlgorithmConfig, OptimizerConfig
from skyrl_fast.train.model.optimizer import Optimizer
from skyrl_fast.train.model.policy import Policy
from skyrl_fast.train.parallel.local_ranks import LocalRanks
from skyrl_fast.train.parallel.rank_processes import start_ranks
from skyrl_fast.train.parallel.ranks import SINGLE_RANK, Ranks, run_on_all_ranks
from skyrl_fast.train.parallel.sharding import full_weight
from skyrl_fast.train.parallel.traffic import GRADIENTS
from skyrl_fast.train.update import accumulate_gradient, update_policy

RANKS = 2
ROW_TOKENS = 32  # half of them the response
ALGORITHM = AlgorithmConfig(loss_reduction="token_mean")


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=SHAPES, default="26M")
    parser.add_argument("--micro-batches", nargs="*", type=int, default=[2, 4, 8])
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    vocabulary = SHAPES[options.model][-1]
    print(
        "| micro-batches of a rank | in every one, s | once, s | ratio | difference |\n"
        + "|---:" * 5
        + "|"
    )
    with tempfile.TemporaryDirectory() as folder:
        create(Path(folder), *SHAPES[options.model])
        make = partial(models_of, folder, options.tokens)
        alone, _ = make(SINGLE_RANK)
        with start_ranks(RANKS, make, cuda=False, starter=LocalRanks(Path(folder))) as ranks:
            policy, optimizer = make(ranks)
            for number in options.micro_batches:
                batch = batch_of(number * RANKS * options.tokens // ROW_TOKENS, vocabulary)
                difference = max(
                    largest_difference(alone, policy, batch, once=once) for once in (False, True)
                )
                seconds: dict[bool, list[float]] = {False: [], True: []}
                for _ in range(options.rounds + 1):
                    for once, times in seconds.items():
                        hold_gradients(policy, once)
                        started = time.perf_counter()
                        found = update_policy(
                            policy, optimizer, batch, algorithm=ALGORITHM, mini_batch_size=1
                        )
                        times.append(time.perf_counter() - started)
                        assert found["policy/num_micro_batches"] == number * RANKS
                each, once = (statistics.median(times[1:]) for times in seconds.values())
                row = f"{each:.2f} | {once:.2f} | {each / once:.2f} | {difference:.0e}"
                print(f"| {number} | {row} |", flush=True)


def models_of(folder: str, tokens: int, ranks: Ranks) -> tuple[Policy, Optimizer]:
    """Return policy and optimizer; `tokens` of a micro-batch."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    policy = Policy(model, max_tokens_per_microbatch=tokens, ranks=ranks)
    # The weights stay as they are, so that all gradients can be compared.
    return policy, Optimizer(policy, OptimizerConfig(lr=0.0), total_steps=1)


def batch_of(num_rows: int, vocabulary: int) -> StepBatch:
    """Return one group of rows of equal lengths, random tokens and advantages."""
    generator = torch.Generator().manual_seed(0)
    response = ROW_TOKENS // 2
    ends = torch.arange(num_rows + 1, dtype=torch.int32)
    tokens = torch.randint(1, vocabulary, (num_rows * ROW_TOKENS,), generator=generator)
    size = num_rows * response
    return StepBatch(
        tokens=tokens.int(),
        cu_seqlens=ends * ROW_TOKENS,
        cu_responses=ends * response,
        loss_mask=torch.ones(size, dtype=torch.uint8),
        rewards=torch.zeros(size),
        row_rewards=torch.zeros(num_rows),
        group_ids=torch.zeros(num_rows, dtype=torch.int32),
        trajectory_ids=ends[:-1],
        is_last_step=torch.ones(num_rows, dtype=torch.bool),
        policy_version=torch.zeros(num_rows, dtype=torch.int32),
        uids=("prompt",),
        advantages=torch.randn(size, generator=generator),
    )


@run_on_all_ranks
def hold_gradients(policy: Policy, once: bool) -> None:
    """Let a rank hold its gradients until they are reduced once, or reduce each micro-batch's."""
    policy.ranks.holds_gradients = once


@run_on_all_ranks
def take_gradients(policy: Policy) -> list[torch.Tensor]:
    """Return the full gradients, and clear them."""
    found = []
    for _, parameter in policy.trained_parameters():
        assert parameter.grad is not None
        found.append(full_weight(parameter.grad, policy.ranks, GRADIENTS))
        parameter.grad = None
    return found


def largest_difference(alone: Policy, policy: Policy, batch: StepBatch, *, once: bool) -> float:
    """Return the largest difference from one rank's gradients, divided by the largest of these."""
    hold_gradients(policy, once)
    for each in (alone, policy):
        accumulate_gradient(each, batch, algorithm=ALGORITHM)
    pairs = list(zip(take_gradients(alone), take_gradients(policy), strict=True))
    largest = max(float(one.abs().max()) for one, _ in pairs)
    return max(float((one - other).abs().max()) for one, other in pairs) / largest


if __name__ == "__main__":
    main()
