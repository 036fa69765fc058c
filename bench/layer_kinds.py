"""Time of a training step by layout of rows, of models whose layers are of several kinds.

    python -m bench.layer_kinds                    on a quiet machine; half an hour to an hour
    python -m bench.layer_kinds --rounds 1 --shapes sql --models windowed

The six shapes of agents, lengths divided by 16, models of 20 M weights and more in float32, two
threads: forward and backward of rows, of merged rows and of prefix trees where the model has them,
and what `trainer.row_layout=auto` chooses. First all layouts are checked to give the same
gradients; one that then takes twice as long as the fastest is not timed again. Prints a table of
medians in milliseconds, by turns, with the ratio of `auto` to the fastest layout; where `auto` has
the passes of a layout its time is that one's. Exits with 1 if that ratio is above 1.05 somewhere.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import torch

from bench._agents import HISTORIES, SHAPES
from bench._tree_steps import SMALL_DIVISOR, batch_of, gradient, planned, policy, step
from skyrl_fast.train.model.forward_pass import MicroBatch
from skyrl_fast.train.model.policy import Policy

BUDGET = 8192  # tokens of a pass
TOLERANCE = 1e-3  # float32: different orders of summation
LARGEST_RATIO = 1.05  # of auto to the fastest layout
SLOW = 2.0  # times the fastest layout: not timed again
NUM_THREADS = 2
SIZES = {
    "vocab_size": 1024,
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "windowed": (
        "gemma3_text",
        {
            "num_hidden_layers": 10,
            "sliding_window": 64,
            "query_pre_attn_scalar": 64,
            "layer_types": ["sliding_attention", "full_attention"] * 5,
        },
    ),
    "gated delta net": (
        "qwen3_5_text",
        {
            "num_hidden_layers": 8,
            "linear_num_key_heads": 6,
            "linear_num_value_heads": 6,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "layer_types": [*["linear_attention"] * 3, "full_attention"] * 2,
        },
    ),
    "mamba 2": (
        "granitemoehybrid",
        {
            "num_local_experts": 0,
            "shared_intermediate_size": 1536,
            "mamba_n_heads": 12,
            "mamba_d_head": 64,
            "mamba_d_state": 64,
            "layer_types": [*["linear_attention"] * 3, "full_attention"] * 2,
        },
    ),
}


def layouts(name: str) -> dict[str, tuple[str, Policy]]:
    """Return the contender of each layout and the policy that computes it."""
    kind, own = MODELS[name]

    def make(tree: bool | None) -> Policy:
        return policy(SIZES | own, "cpu", torch.float32, BUDGET, tree=tree, kind=kind)

    rows, auto = make(False), make(None)
    result = {"rows": ("sequences", rows), "merged": ("joined", rows)}
    if auto.tree:
        result["tree"] = ("tree", auto)
    return {**result, "auto": ("skyrl_fast", auto)}


def compare(models: dict[str, tuple[str, Policy]], batch: Any, rounds: int) -> dict[str, float]:
    """Return the median seconds of each layout, taken by turns."""
    plans = {
        layout: list(planned(contender, batch, model)[1])
        for layout, (contender, model) in models.items()
    }
    auto = plans.pop("auto")
    same = next((layout for layout, plan in plans.items() if is_same(auto, plan)), None)
    timed = {layout: model for layout, model in models.items() if layout != "auto" or same is None}
    gradients, seconds = {}, {}
    for layout, (contender, model) in timed.items():
        seconds[layout] = [time_step(contender, model, batch)]
        gradients[layout] = gradient(model).clone()
    expected = gradients["rows"]
    for layout, got in gradients.items():
        error = float((got - expected).norm() / expected.norm())
        assert error <= TOLERANCE, f"{layout}: gradients differ by {error:.1e}"
    least = min(first for (first,) in seconds.values())
    near = [layout for layout, (first,) in seconds.items() if first < SLOW * least]
    for layout in near:
        seconds[layout].clear()  # it warmed up
    for _ in range(rounds):
        for layout in near:
            seconds[layout].append(time_step(*timed[layout], batch))
    medians = {layout: statistics.median(values) for layout, values in seconds.items()}
    return medians if same is None else {**medians, "auto": medians[same]}


def time_step(contender: str, model: Policy, batch: Any) -> float:
    start = time.perf_counter()
    step(contender, model, batch)
    return time.perf_counter() - start


def is_same(plan: list[MicroBatch], other: list[MicroBatch]) -> bool:
    """Return whether two plans have the same passes, of the same layout."""
    return len(plan) == len(other) and all(
        (one.tree is None) == (two.tree is None) and torch.equal(one.input_ids, two.input_ids)
        for one, two in zip(plan, other, strict=True)
    )


def main() -> int:
    """Print the table; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    options = parser.parse_args()
    torch.set_num_threads(NUM_THREADS)
    print("| model | agents | rows | merged | tree | auto | auto / fastest |")
    print("|---|---|---|---|---|---|---|")
    largest = 0.0
    for name in options.models:
        models = layouts(name)
        million = sum(p.numel() for p in models["auto"][1].model.parameters()) / 1e6
        for shape in options.shapes:
            for history in HISTORIES:
                batch = batch_of(shape, history, SMALL_DIVISOR)
                taken = compare(models, batch, options.rounds)
                ratio = taken["auto"] / min(taken.values())
                largest = max(largest, ratio)
                cells = [f"{1000 * taken[x]:.0f}" if x in taken else "" for x in
                         ("rows", "merged", "tree", "auto")]  # fmt: skip
                shown = f"{name}, {million:.0f} M | {shape} {history} | {' | '.join(cells)}"
                print(f"| {shown} | {ratio:.2f} |", flush=True)
    return int(largest > LARGEST_RATIO)


if __name__ == "__main__":
    sys.exit(main())
