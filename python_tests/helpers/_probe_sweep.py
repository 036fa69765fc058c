"""Weight syncs of a simulated bfloat16 engine, good and faulty: what each check notices.

The engine is a bfloat16 copy of the trainer's model; everything else is the code of a run. Prints
the table of docs/design/007: `PYTHONPATH=. python python_tests/helpers/_probe_sweep.py`.
"""

import asyncio
import copy
import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from skyrl_fast.rollout.engine.weights.probe import (
    Logprobs,
    ProbeDifference,
    ProbeLimits,
    WeightProbe,
)
from skyrl_fast.rollout.engine.weights.receipt import (
    Receipt,
    WeightSyncError,
    check_receipts,
    dtype_name,
    record_digests,
)
from skyrl_fast.rollout.engine.weights.transfer import WorkerCall
from skyrl_fast.rollout.engine.weights.transports.file import receive_by_file, send_by_file
from skyrl_fast.train.model.policy import Policy

Weights = list[tuple[str, torch.Tensor]]
Fault = Callable[[Weights, random.Random], Weights]
VOCABULARY = 2048
PROBE_TOKENS = 48
LEARNING_RATES = (1e-6, 1e-6, 3e-6, 1e-5, 1e-5)  # of the updates of one model
LAYERS = (2, 4, 8, 12, 16, 20, 24, 28)
NUM_MODELS = 40
FORMER_LIMIT = 0.15  # on the maximum, which rounding alone exceeds


@dataclasses.dataclass(frozen=True, slots=True)
class ModelKind:
    """A random model; the logits of language models have a standard deviation of 1.5 to 3.5."""

    layers: int
    logit_std: float
    architecture: str = "Qwen2"
    tied: bool = False
    width: int = 128


def model_kinds(number: int = NUM_MODELS) -> list[ModelKind]:
    """Return kinds of all depths; the other properties take turns."""
    return [
        ModelKind(
            LAYERS[i % len(LAYERS)],
            (1.5, 2.5, 3.5)[i % 3],
            ("Qwen2", "Qwen3", "Llama")[i // len(LAYERS) % 3],
            tied=i % 5 == 0,
        )
        for i in range(number)
    ]


def make_model(kind: ModelKind, seed: int) -> Any:
    """Return the model in float32, with logits of the wanted size."""
    import transformers

    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind.architecture}Config")(
        vocab_size=VOCABULARY,
        hidden_size=kind.width,
        intermediate_size=3 * kind.width,
        num_hidden_layers=kind.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=kind.width // 4,
        max_position_embeddings=256,
        tie_word_embeddings=kind.tied,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = getattr(transformers, f"{kind.architecture}ForCausalLM")(config).eval()
    with torch.no_grad():
        logits = model(torch.randint(VOCABULARY, (1, PROBE_TOKENS))).logits
        model.get_output_embeddings().weight.mul_(kind.logit_std / logits.std(-1).mean())
    return model


def layer_missing(weights: Weights, choice: random.Random) -> Weights:
    """Lose the tensors of one layer."""
    lost = choice.choice(_layers_of(weights))
    return [(name, tensor) for name, tensor in weights if f".layers.{lost}." not in name]


def swapped(weights: Weights, choice: random.Random) -> Weights:
    """Exchange the value projections of two layers."""
    one, two = choice.sample(_layers_of(weights), 2)
    names = [f"model.layers.{layer}.self_attn.v_proj.weight" for layer in (one, two)]
    values = dict(weights)
    values[names[0]], values[names[1]] = values[names[1]], values[names[0]]
    return list(values.items())


def rounded_to_float16(weights: Weights, choice: random.Random) -> Weights:
    """Send the weights through float16."""
    return [(name, tensor.half().float()) for name, tensor in weights]


def read_as_float16(weights: Weights, choice: random.Random) -> Weights:
    """Read the bytes of bfloat16 as float16."""
    return [(name, tensor.bfloat16().view(torch.float16)) for name, tensor in weights]


def layer_scrambled(weights: Weights, choice: random.Random) -> Weights:
    """Reorder the weights of one layer, as a kernel that expects them packed would read them."""
    layer = choice.choice(_layers_of(weights))
    return [
        (name, tensor.flatten().flip(0).reshape(tensor.shape) if _is_in(name, layer) else tensor)
        for name, tensor in weights
    ]


def layer_off(weights: Weights, choice: random.Random) -> Weights:
    """Set the output projections of one layer to zero: it adds nothing."""
    layer = choice.choice(_layers_of(weights))
    off = [f"model.layers.{layer}.{name}.weight" for name in ("self_attn.o_proj", "mlp.down_proj")]
    return [(name, tensor * (name not in off)) for name, tensor in weights]


def nothing_new(weights: Weights, choice: random.Random) -> Weights:
    """Keep all old values."""
    return []


def _layers_of(weights: Weights) -> list[int]:
    return sorted({int(name.split(".")[2]) for name, _ in weights if ".layers." in name})


def _is_in(name: str, layer: int) -> bool:
    return f".layers.{layer}." in name


# Where the fault is: in what the loader is given, or in what the kernels make of it.
TRANSFER_FAULTS: dict[str, Fault] = {
    "engine stale by one update": nothing_new,
    "one layer missing": layer_missing,
    "two tensors swapped": swapped,
    "weights rounded to float16": rounded_to_float16,
    "bfloat16 read as float16": read_as_float16,
}
KERNEL_FAULTS: dict[str, Fault] = {
    "engine stale by one update": nothing_new,
    "one layer stale by one update": layer_missing,
    "one layer scrambled": layer_scrambled,
    "one layer off": layer_off,
    "two tensors swapped": swapped,
}
OTHER_DTYPE = "engine computes in float16"


class CopyEngine:
    """A copy of the model in 16 bits that loads files of weights; not a generating engine."""

    def __init__(self, model: Any, dtype: torch.dtype = torch.bfloat16) -> None:
        self.model = copy.deepcopy(model).to(dtype)
        self.compute_dtype: torch.dtype | None = None
        self.transfer: Fault | None = None
        self.kernels: Fault | None = None
        self.choice = random.Random(0)

    def load_weights_file(self, call: WorkerCall) -> None:
        """Load the call's file, with the faults; return normally if the receipt is accepted."""
        weights = list(receive_by_file(*call.arguments))
        arriving = self.transfer(weights, self.choice) if self.transfer else weights
        digests: dict[str, str] = {}
        taken = list(record_digests(arriving, digests))
        held = self.kernels(taken, self.choice) if self.kernels else taken
        self.model.load_state_dict(dict(held), strict=False)
        receipt = Receipt(digests, [], dtype_name(self.model.dtype))
        self.compute_dtype = self.model.dtype
        check_receipts([receipt], call.sent.digests)

    async def prompt_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Return logits in the engine's dtype, softmax in float32, as vLLM."""
        ids = torch.tensor([list(token_ids)])
        with torch.no_grad():
            values = self.model(ids).logits[0, :-1].float().log_softmax(-1)
        return values.gather(1, ids[0, 1:, None])[:, 0].tolist()


@dataclasses.dataclass(slots=True)
class Counts:
    """Cases, and how many of them each check refused."""

    cases: int = 0
    refused: Counter[str] = dataclasses.field(default_factory=Counter)
    differences: list[ProbeDifference] = dataclasses.field(default_factory=list)


def sweep(
    kinds: Sequence[ModelKind], learning_rates: Sequence[float] = LEARNING_RATES
) -> dict[tuple[str, str], Counts]:
    """Return the counts of each fault: by place ("none", "transfer", "kernels") and name."""
    counts: dict[tuple[str, str], Counts] = {}
    for seed, kind in enumerate(kinds):
        for place, name, refused, difference in _run_model(kind, seed, learning_rates):
            row = counts.setdefault((place, name), Counts())
            row.cases += 1
            row.refused.update(refused)
            row.refused["any"] += bool(refused)
            if difference is not None:
                row.differences.append(difference)
    return counts


def _run_model(
    kind: ModelKind, seed: int, learning_rates: Sequence[float]
) -> Iterator[tuple[str, str, set[str], ProbeDifference | None]]:
    """Train one model for some updates; yield place, fault, checks that refuse, and difference."""
    model = make_model(kind, seed)
    policy = Policy(model, dtype=torch.bfloat16)
    probe = torch.randint(VOCABULARY, (2, PROBE_TOKENS)).tolist()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    engine, choice = CopyEngine(model), random.Random(seed)
    trainer_logprobs: Logprobs = []
    sync = WeightProbe(
        engine,  # type: ignore[arg-type]
        probe=probe,
        trainer_logprobs=lambda _: trainer_logprobs,
        dtype=torch.bfloat16,
    )
    trainer_logprobs = policy.sequence_logprobs(probe)
    yield "none", "start", *_refusals(sync, None)
    for learning_rate in learning_rates:
        _step(model, optimizer, learning_rate)
        trainer_logprobs = policy.sequence_logprobs(probe)
        with send_by_file(policy.named_weights()) as call:
            for place, name, faulty in _faulty_engines(engine, choice):
                other = copy.copy(sync)
                other.engine = faulty  # type: ignore[assignment]
                yield place, name, *_refusals(other, call)
            yield "none", "update", *_refusals(sync, call)


def _step(model: Any, optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    ids = torch.randint(VOCABULARY, (2, 16))
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def _faulty_engines(
    engine: CopyEngine, choice: random.Random
) -> Iterator[tuple[str, str, CopyEngine]]:
    for place, faults in (("transfer", TRANSFER_FAULTS), ("kernels", KERNEL_FAULTS)):
        for name, fault in faults.items():
            faulty = CopyEngine(engine.model)
            faulty.choice = choice
            setattr(faulty, place, fault)
            yield place, name, faulty
    yield "kernels", OTHER_DTYPE, CopyEngine(engine.model, torch.float16)


def _refusals(
    sync: WeightProbe, call: WorkerCall | None
) -> tuple[set[str], ProbeDifference | None]:
    """Return the checks that refuse an update (None: the start), each asked, and the difference."""
    refused = set()
    if call is not None:
        try:
            sync.engine.load_weights_file(call)  # type: ignore[attr-defined]
        except WeightSyncError:
            refused.add("receipts")
    try:
        report = asyncio.run(sync.verify())
    except WeightSyncError as error:
        checks = {"computes in": "dtype", "logprobs differ": "probe", "did not": "standstill"}
        refused.add(next(check for text, check in checks.items() if text in str(error)))
        if "probe" not in refused:
            return refused, None
        unlimited = copy.copy(sync)
        unlimited.limits = ProbeLimits()
        report = asyncio.run(unlimited.verify())
    return refused, report.difference


def table(counts: dict[tuple[str, str], Counts]) -> str:
    """Return the counts as Markdown."""
    checks = ("receipts", "dtype", "probe", "standstill", "any")
    lines = [f"| place | fault | {' | '.join(checks)} | cases |", "|---" * (len(checks) + 3) + "|"]
    for (place, name), row in sorted(counts.items(), key=lambda item: item[0] != "none"):
        cells = " | ".join(str(row.refused[check]) for check in checks)
        lines.append(f"| {place} | {name} | {cells} | {row.cases} |")
    good = [d for key, row in counts.items() if key[0] == "none" for d in row.differences]
    bad = [d for row in counts.values() if row.refused["probe"] for d in row.differences]
    for name in ("mean", "quantile", "maximum"):
        largest = max(getattr(d, name) / d.logit_std for d in good)
        smallest = min(getattr(d, name) / d.logit_std for d in bad)
        lines.append(
            f"{name} / logit_std: without a fault <= {largest:.4f}, seen >= {smallest:.4f}"
        )
    above = sum(d.maximum > FORMER_LIMIT for d in good)
    lines.append(
        f"{above} of {len(good)} syncs without a fault have a maximum above {FORMER_LIMIT}"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(table(sweep(model_kinds())))
