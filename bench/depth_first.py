"""Memory and time of a training step on one tree: at once, path by path, and cut into passes.

    python -m bench.depth_first                     a few minutes
    python -m bench.depth_first --divisor 8 --budgets 800

One prompt of the agentic shape, lengths divided by 4, a Qwen2 of 6 M weights in float32 on a CPU.
"rows": sequences, "cut": trees of at most the budget, which repeat the nodes above a cut, "whole":
one tree, "path": the same tree with the budget as the most nodes in memory. Prints the tokens
through the model, those of the longest pass, the peak of the activations in MB, as counted by their
allocations, and the least processor time of the rounds. First the gradients are compared.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch

from bench._agents import HISTORIES, agents
from bench._tree_steps import gradient, policy
from skyrl_fast.batch import StepBatch
from skyrl_fast.train.memory.activations import StorageTracker
from skyrl_fast.train.model.forward_pass import response_positions
from skyrl_fast.train.model.loading import checkpoint_gradients
from skyrl_fast.train.model.micro_batch import plan_micro_batches
from skyrl_fast.train.model.policy import Policy

ALL = 1 << 40
TOLERANCE = 1e-4  # float32: different orders of summation
NUM_THREADS = 1  # threads that wait for each other take processor time
SIZES = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def step(model: Policy, batch: StepBatch, budget: int, tree: bool) -> list[int]:
    """Run the passes of a plan forward and backward; return the tokens of each."""
    model.model.zero_grad(set_to_none=True)
    assert batch.advantages is not None
    tokens = []
    for micro in plan_micro_batches(batch, budget, tree=tree):
        values, _ = model.logprobs(micro)
        (values * batch.advantages[response_positions(batch, micro)]).sum().backward()
        tokens.append(micro.input_ids.numel())
    return tokens


def measure(model: Policy, batch: StepBatch, rounds: int, **plan: Any) -> dict[str, Any]:
    """Return tokens, peak bytes and processor seconds of a step."""
    step(model, batch, **plan)
    existing = [*model.model.parameters(), *model.model.buffers()]
    with StorageTracker(existing) as tracker:
        tokens = step(model, batch, **plan)
    found = gradient(model).clone()
    seconds = []
    for _ in range(rounds):
        start = time.process_time()
        step(model, batch, **plan)
        seconds.append(time.process_time() - start)
    return {"tokens": tokens, "peak": tracker.peak, "seconds": min(seconds), "gradient": found}


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--divisor", type=int, default=4, help="of all lengths")
    parser.add_argument("--budgets", type=int, nargs="+", default=[1600, 2400, 4000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--checkpointing", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(NUM_THREADS)
    model = policy(SIZES, "cpu", torch.float32, ALL, tree=True)
    if options.checkpointing:
        checkpoint_gradients(model.model)
        model.model.train()
    print("| history | budget | form | tokens | longest pass | peak, MB | processor s |")
    print("|---|---|---|---|---|---|---|")
    for history in HISTORIES:
        batch = agents("agentic", history, num_groups=1, divisor=options.divisor)
        forms: list[tuple[str, int, int, bool]] = [("whole", ALL, ALL, True)]
        for budget in options.budgets:
            forms += [("rows", budget, budget, False), ("cut", budget, budget, True)]
            forms += [("path", budget, ALL, True)]
        expected = None
        for form, budget, planned, tree in forms:
            model.max_tokens_per_microbatch = budget
            found = measure(model, batch, options.rounds, budget=planned, tree=tree)
            expected = found["gradient"] if expected is None else expected
            error = float((found["gradient"] - expected).norm() / expected.norm())
            assert error <= TOLERANCE, f"{form}: gradients differ by {error:.1e}"
            shown = "" if budget == ALL else f"{budget:,}"
            print(
                f"| {history} | {shown} | {form} | {sum(found['tokens']):,} "
                f"| {max(found['tokens']):,} | {found['peak'] / 1e6:.0f} "
                f"| {found['seconds']:.2f} |",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
