"""Write the tables of docs/design/022-a-thousand-gpus.md: memory, traffic and time by formula.

    python -m scripts.scaling_table

Needs neither GPUs nor weights. `python_tests/train/test_traffic.py` compares the traffic with the
counters of runs.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from scripts.published_models import model_folder
from skyrl_fast.rollout.engine.weights.buckets import BUCKET_BYTES
from skyrl_fast.train.memory.activations import load_model_config, model_size
from skyrl_fast.train.memory.device_plan import GIB
from skyrl_fast.train.memory.parts import (
    GATHERED_LAYERS,
    GRADIENT_BYTES,
    MOMENT_BYTES,
    ROOT_BYTES,
    SENT_BUCKETS,
    WEIGHT_BYTES,
    gathered_layer_bytes,
)
from skyrl_fast.train.parallel.traffic import (
    CALLS,
    CHECKPOINT,
    ENGINE,
    GRADIENTS,
    LAYERS,
    RESULTS,
    ROWS,
    SEQUENCES,
)

PAGE = Path(__file__).resolve().parent.parent / "docs/design/022-a-thousand-gpus.md"
BEGIN, END = "<!-- scaling_table -->\n", "<!-- end -->\n"

TOKEN_BYTES = 4  # of a batch, per token: its id
RESPONSE_BYTES = 17  # per response token: mask, reward, advantage, two log-probabilities
FORWARD_BYTES = 5  # per response token without gradients: mask, reward
ROW_BYTES = 69  # per row: its columns 25, its places in batch and pass 40, its weight 4
RESULT_BYTES = 12  # per trained token: position and log-probability
SENT_BYTES = 2  # per parameter that an engine gets: bfloat16
STORED_BYTES = 2  # per parameter of a published model's files: bfloat16
PASS_BYTES = 1900  # per trained pass: its metrics
CALL_BYTES = 90  # per call: the name of what is called
SETTINGS_BYTES = 2150  # per mini-batch: the settings of its loss
PART_BYTES = 1200  # per message with rows: the names of their columns
CALLS_OF_A_STEP = 3  # of an optimizer step: clear the gradients, add to them, update

LINK = 50e9  # bytes a second of a rank to others: a 400 Gb/s network interface for each GPU
FLOPS = 0.4 * 989e12  # of a rank: 40 % of an H100's bfloat16 peak
STORAGE = 2e9  # bytes a second that a rank writes, if the storage takes that of all
TOKENS, RESPONSE_SHARE, ROW_TOKENS = 2**24, 0.25, 8192  # of a step; 2,048 rows of 8,192 tokens
PASS_TOKENS = 16384  # trainer.max_tokens_per_microbatch
CAPACITY = 79 * GIB  # of a GPU
CASES = (
    ("Qwen/Qwen2.5-Coder-7B-Instruct", 8),
    ("Qwen/Qwen2.5-Coder-7B-Instruct", 1024),
    ("Qwen/Qwen2.5-32B-Instruct", 64),
    ("Qwen/Qwen2.5-32B-Instruct", 1024),
    ("Qwen/Qwen3-235B-A22B", 128),
    ("Qwen/Qwen3-235B-A22B", 1024),
)


@dataclass(frozen=True, slots=True)
class Model:
    """What the formulas read of a model.

    Args:
        parameters: P.
        root: of them, outside the layers.
        largest_layer: parameters of it.
        layers: their number.
        weights: number of tensors.
        active: parameters that a token visits.
        gathered_layer: bytes of the largest layer while it is gathered.
        largest_weight: parameters of the embedding.
        routes: bytes of a token's recorded routes; 0 without router replay.
        rounded: parameters of layers that are gathered in 16 bits: of linear modules, where the
            forward pass is bfloat16. The other ones of a layer are gathered by themselves then.
    """

    parameters: int
    root: int
    largest_layer: int
    layers: int
    weights: int
    active: int
    gathered_layer: int = 0
    largest_weight: int = 0
    routes: int = 0
    rounded: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """What the formulas read of a step and its ranks.

    Args:
        ranks: N.
        tokens, responses, rows: of the batch: S, trained tokens A, rows.
        trained, forward: passes of each rank with and without gradients.
        mini_batches: optimizer steps; each sends its rows once.
        reductions: of gradients: one per mini-batch where a rank holds them, else one per pass.
        batches: calls that send the full batch: log-probabilities of the old policy, a reference.
    """

    ranks: int
    tokens: int
    responses: int
    rows: int
    trained: int
    forward: int = 0
    mini_batches: int = 1
    reductions: int = 1
    batches: int = 0


def traffic(model: Model, step: Step) -> dict[str, tuple[float, float]]:
    """Return messages and bytes of rank 0 by kind, as `Traffic` counts them.

    Those of `ENGINE` and `CHECKPOINT` are of one weight sync and one checkpoint.
    """
    weights = WEIGHT_BYTES * (step.ranks - 1) / step.ranks  # received, per parameter
    inner, others = model.parameters - model.root, step.ranks - 1
    is_trained = step.mini_batches > 0
    returned = is_trained + step.batches  # times that each trained token is
    batch = (
        ((TOKEN_BYTES + model.routes) * step.tokens + ROW_BYTES * step.rows) * returned
        + RESPONSE_BYTES * step.responses * is_trained
        + FORWARD_BYTES * step.responses * step.batches
    )
    calls = CALLS_OF_A_STEP * step.mini_batches + step.batches
    parts = others * (step.mini_batches + step.batches)
    # A layer has its linear modules and the others in two collectives, where these are 16 bits.
    of_layers = model.layers * (2 if model.rounded else 1)
    units = of_layers + 1
    # In a forward or backward pass; bytes are counted in float32 parameters.
    read = model.parameters - model.rounded / 2
    read_again = inner - model.rounded / 2
    return {
        CALLS: (others * calls, others * (CALL_BYTES * calls + SETTINGS_BYTES * step.mini_batches)),
        ROWS: (parts, batch * others / step.ranks + PART_BYTES * parts),
        RESULTS: (
            others * (step.mini_batches + step.batches),
            RESULT_BYTES * step.responses * returned * others / step.ranks
            + PASS_BYTES * step.trained * others,
        ),
        LAYERS: (
            step.trained * (units + of_layers) + step.forward * units,
            weights * (step.trained * (read + read_again) + step.forward * read),
        ),
        GRADIENTS: (step.reductions * units, weights * step.reductions * model.parameters),
        ENGINE: (model.weights, weights * model.parameters),
        CHECKPOINT: (model.weights, weights * model.parameters),
        SEQUENCES: (0, 0),  # no ranks share a pass
    }


def model_of(name: str) -> Model:
    """Return the numbers of a published model."""
    with tempfile.TemporaryDirectory() as folder:
        config = load_model_config(str(model_folder(Path(folder), name)))
    size, layers = model_size(config), config.num_hidden_layers
    experts, chosen = getattr(config, "num_experts", 0), getattr(config, "num_experts_per_tok", 0)
    each = 3 * config.hidden_size * getattr(config, "moe_intermediate_size", 0)
    return Model(
        parameters=size.parameters,
        root=size.root_parameters,
        largest_layer=size.layer_parameters,
        gathered_layer=gathered_layer_bytes(size, torch.bfloat16),
        rounded=size.rounded_parameters,
        layers=layers,
        weights=0,
        active=size.parameters - layers * (experts - chosen) * each,
        largest_weight=size.vocab_size * size.hidden_size,
        routes=layers * chosen,
    )


def step_of(model: Model, ranks: int) -> Step:
    """Return the step of the tables: one mini-batch, of rows of equal lengths."""
    passes = -(-TOKENS // (ranks * PASS_TOKENS))
    holds = sum(_gpu_bytes(model, ranks)) <= CAPACITY
    return Step(
        *(ranks, TOKENS, int(RESPONSE_SHARE * TOKENS), TOKENS // ROW_TOKENS, passes),
        reductions=1 if holds else passes,
    )


def with_tables(text: str) -> str:
    """Return the page with new tables in place of those it has."""
    head, _, rest = text.partition(BEGIN)
    tail = rest.partition(END)[2]
    return head + BEGIN + tables() + END + tail


def tables() -> str:
    """Return both tables in Markdown."""
    models = {name: model_of(name) for name, _ in CASES}
    cases = [(name.partition("/")[2], models[name], ranks) for name, ranks in CASES]
    return (
        _table(
            "GiB|shards|gathered|held gradients|checkpoint copy|loading|weight sync: a file|"
            "a broadcast",
            [(f"{name}, {ranks} ranks", *_memory(model, ranks)) for name, model, ranks in cases],
        )
        + "\n"
        + _table(
            "seconds of a step|passes of a rank|compute|layers, gradients|rows from rank 0|"
            "all weights, for an engine or a checkpoint|writing a checkpoint",
            [(f"{name}, {ranks} ranks", *_times(model, ranks)) for name, model, ranks in cases],
        )
    )


def _memory(model: Model, ranks: int) -> list[str]:
    copy = (WEIGHT_BYTES + MOMENT_BYTES) * model.parameters / ranks
    # Its shards, and the rows of the largest stored weight.
    loading = (WEIGHT_BYTES * model.parameters + STORED_BYTES * model.largest_weight) / ranks
    layer = SENT_BYTES * max(model.largest_layer, model.largest_weight)
    # Rank 0's own, next to the file of all weights; one is cast while its layer is there.
    file = layer + SENT_BYTES * model.largest_weight
    bucket = max(BUCKET_BYTES, SENT_BYTES * model.largest_weight)
    sizes = (*_gpu_bytes(model, ranks), copy, loading, file, layer + SENT_BUCKETS * bucket)
    return [_short(value / GIB) for value in sizes]


def _gpu_bytes(model: Model, ranks: int) -> tuple[float, float, float]:
    """Return the bytes of shards, gathered layers and held gradients."""
    shards = (WEIGHT_BYTES + GRADIENT_BYTES + MOMENT_BYTES) * model.parameters / ranks
    gathered = GATHERED_LAYERS * model.gathered_layer + ROOT_BYTES * model.root
    return shards, gathered, GRADIENT_BYTES * model.parameters


def _times(model: Model, ranks: int) -> list[str]:
    step = step_of(model, ranks)
    moved = {kind: num_bytes / LINK for kind, (_, num_bytes) in traffic(model, step).items()}
    # Forward and backward are 6 operations a parameter and token; recomputed layers add 2.
    compute = 8 * model.active * step.trained * PASS_TOKENS / FLOPS
    write = (WEIGHT_BYTES + MOMENT_BYTES) * model.parameters / ranks / STORAGE
    seconds = (compute, moved[LAYERS] + moved[GRADIENTS], moved[ROWS], moved[ENGINE])
    return [str(step.trained), *map(_short, (*seconds, write))]


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.2g}"


def _table(head: str, rows: list[tuple[str, ...]]) -> str:
    names = head.split("|")
    lines = [" | ".join(names), "|".join(["---"] * len(names)), *(" | ".join(r) for r in rows)]
    return f"| {lines[0]} |\n|{lines[1]}|\n" + "".join(f"| {line} |\n" for line in lines[2:])


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
