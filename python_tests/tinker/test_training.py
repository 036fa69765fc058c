"""Training of adapters: numbers of the calls against transformers, PEFT and torch by hand."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _float64 import float64_throughout
from _tinker import call_of, load_adapted, make_datum, make_trainer, matrices, randomize

from skyrl_fast.cli import main
from skyrl_fast.tinker.checkpoints import (
    CONFIG,
    SAMPLER,
    WEIGHTS,
    CheckpointStore,
    SavedAdapter,
    TinkerPath,
)
from skyrl_fast.tinker.training import AdapterForm, AdapterTrainer, TrainedAdapter
from skyrl_fast.tinker.wire import Datum, RefusedCallError
from skyrl_fast.train.model.optimizer import StepNumbers

STEP = StepNumbers(lr=1e-3, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0, max_grad_norm=0.0)
CLOSE = 1e-12  # relative, in float64: sums in another order


@pytest.fixture
def in_float64(tiny_model_folder: Path) -> Iterator[None]:
    """Let transformers compute norms and positions in float64, too."""
    with float64_throughout(load_adapted(tiny_model_folder, None)):
        yield


def datums_with_prefixes(seed: int = 0) -> list[Datum]:
    random = np.random.default_rng(seed)
    prefix = random.integers(0, 200, 20)
    longer = np.append(prefix, random.integers(0, 200, 5))
    lengths = (3, 1, 4)
    return [
        *(make_datum(random, length, prefix) for length in lengths),
        make_datum(random, 2, longer),
        make_datum(random, 1),
        make_datum(random, 7),
    ]


def with_inputs(datum: Datum, seed: int, **more: Any) -> Datum:
    """Return the datum with what losses of sampled tokens read."""
    random = np.random.default_rng(seed)
    length = len(datum.tokens)
    inputs = {
        "target_tokens": datum.inputs["target_tokens"],
        "logprobs": -random.uniform(3, 8, length).astype(np.float32),
        "advantages": random.normal(size=length).astype(np.float32),
        **more,
    }
    return replace(datum, inputs=inputs)


def logprobs_by_hand(model: Any, datum: Datum) -> torch.Tensor:
    logits = model(torch.tensor(datum.tokens).long()[None]).logits[0]
    targets = torch.tensor(datum.inputs["target_tokens"])
    rows = targets.view(len(targets), -1)
    return logits.log_softmax(-1).gather(1, rows).view(targets.shape)


def new_adapter(trainer: AdapterTrainer, rank: int = 8, seed: int = 0) -> TrainedAdapter:
    adapter = trainer.create(AdapterForm(rank), seed=seed)
    randomize(adapter, seed)
    return adapter


@pytest.mark.spec("tinker.all-positions")
@pytest.mark.parametrize("width", [None, 3])
def test_logprobs_of_all_positions_are_those_of_peft(
    tiny_model_folder: Path, tmp_path: Path, width: int | None
) -> None:
    trainer = make_trainer(tiny_model_folder, torch.float32)
    adapter = new_adapter(trainer)
    trainer.save(adapter, tmp_path / "a", optimizer=False)
    model = load_adapted(tiny_model_folder, tmp_path / "a")
    random = np.random.default_rng(0)
    prefix = random.integers(0, 200, 9)
    datums = [make_datum(random, n, prefix, width=width) for n in (1, 5, 12)]
    outputs = trainer.forward_backward(adapter, call_of(datums, forward_only=True))
    for datum, got in zip(datums, outputs.logprobs, strict=True):
        expected = logprobs_by_hand(model, datum).detach().numpy()
        assert got.shape == expected.shape
        np.testing.assert_allclose(got, expected, atol=1e-5)  # float32, in another order
    loss = -sum(
        (d.inputs["weights"] * o).sum() for d, o in zip(datums, outputs.logprobs, strict=True)
    )
    assert outputs.metrics["loss:sum"] == pytest.approx(loss, rel=1e-5)


def _ratio(p: torch.Tensor, d: dict[str, torch.Tensor]) -> torch.Tensor:
    return (p - d["logprobs"]).exp()


def _surrogate(ratio: torch.Tensor, d: dict[str, torch.Tensor], low: Any, high: Any) -> Any:
    clipped = ratio.clamp(low, high)
    return -torch.minimum(ratio * d["advantages"], clipped * d["advantages"]).sum()


def _gspo(p: torch.Tensor, d: dict[str, torch.Tensor]) -> torch.Tensor:
    marked = d["sequence_ratio_mask"] != 0
    mean = (p.detach() - d["logprobs"])[marked].mean()
    return _surrogate((mean + p - p.detach()).exp(), d, 0.8, 1.2)


BY_HAND: dict[str, tuple[Callable[..., Any], dict[str, float]]] = {
    "cross_entropy": (lambda p, d: -(p * d["weights"]).sum(), {}),
    "importance_sampling": (lambda p, d: -(_ratio(p, d) * d["advantages"]).sum(), {}),
    "ppo": (
        lambda p, d: _surrogate(_ratio(p, d), d, 0.5, 2.0),
        {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0},
    ),
    "cispo": (
        lambda p, d: -(_ratio(p, d).clamp(0.8, 1.2).detach() * d["advantages"] * p).sum(),
        {},
    ),
    "dro": (
        lambda p, d: -(p * d["advantages"] - 0.1 * (p - d["logprobs"]) ** 2).sum(),
        {"beta": 0.2},
    ),
    "gspo": (_gspo, {}),
}


@pytest.mark.spec("tinker.losses")
@pytest.mark.parametrize("loss", BY_HAND)
@pytest.mark.usefixtures("in_float64")
def test_a_step_is_the_one_of_torch(tiny_model_folder: Path, tmp_path: Path, loss: str) -> None:
    trainer = make_trainer(tiny_model_folder)
    adapter = new_adapter(trainer)
    trainer.save(adapter, tmp_path / "a", optimizer=False)
    datums = datums_with_prefixes()
    if loss != "cross_entropy":
        datums = [with_inputs(datum, n) for n, datum in enumerate(datums)]
    if loss == "gspo":
        masks = [np.arange(len(datum.tokens)) % 3 > 0 for datum in datums[:-2]]
        marked = zip(datums[:-2], masks, strict=True)
        datums = [
            replace(d, inputs={**d.inputs, "sequence_ratio_mask": mask.astype(np.float32)})
            for d, mask in marked
        ]
    formula, options = BY_HAND[loss]
    outputs = trainer.forward_backward(adapter, call_of(datums, loss, **options))
    numbers = replace(STEP, weight_decay=0.1, max_grad_norm=0.5, eps=1e-8)
    measured = trainer.optim_step(adapter, numbers)

    model = load_adapted(tiny_model_folder, tmp_path / "a", torch.float64)
    trained = [p for name, p in model.named_parameters() if "lora_" in name]
    for parameter in trained:
        parameter.requires_grad_(True)
    total = 0.0
    for datum in datums:
        values = {k: torch.tensor(v).double() for k, v in datum.inputs.items()}
        one = formula(logprobs_by_hand(model, datum), values)
        one.backward()
        total += float(one.detach())
    norm = torch.nn.utils.clip_grad_norm_(trained, 0.5)
    torch.optim.AdamW(trained, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1).step()
    assert outputs.metrics["loss:sum"] == pytest.approx(total, rel=1e-9)
    assert measured["grad_norm"] == pytest.approx(float(norm), rel=1e-6)
    for got, expected in zip(adapter.parameters(), trained, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)


@pytest.mark.spec("tinker.sums")
@pytest.mark.usefixtures("in_float64")
def test_gradients_add_over_calls_in_any_order(tiny_model_folder: Path) -> None:
    trainer = make_trainer(tiny_model_folder)
    at_once = new_adapter(trainer)
    in_parts = new_adapter(trainer)
    backwards = new_adapter(trainer)
    datums = datums_with_prefixes()
    trainer.forward_backward(at_once, call_of(datums))
    for datum in datums:
        trainer.forward_backward(in_parts, call_of([datum]))
    trainer.forward_backward(backwards, call_of(datums[::-1]))
    for adapter in (at_once, in_parts, backwards):
        trainer.optim_step(adapter, STEP)
    for one, other in zip(matrices(at_once), matrices(in_parts), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)  # Adam divides by |g|
    for one, other in zip(matrices(at_once), matrices(backwards), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.spec("tinker.trees")
@pytest.mark.parametrize("width", [None, 2])
@pytest.mark.usefixtures("in_float64")
def test_datums_as_a_tree_are_datums_as_rows(tiny_model_folder: Path, width: int | None) -> None:
    trees = make_trainer(tiny_model_folder, tree=True)
    rows = make_trainer(tiny_model_folder, tree=False)
    random = np.random.default_rng(1)
    prefix = random.integers(0, 200, 30)
    datums = [make_datum(random, n, prefix, width=width) for n in (1, 2, 3, 4)]
    results = []
    for trainer in (trees, rows):
        adapter = new_adapter(trainer)
        outputs = trainer.forward_backward(adapter, call_of(datums))
        results.append((outputs, [p.grad for p in adapter.parameters()]))
    (of_tree, tree_gradients), (of_rows, row_gradients) = results
    assert of_tree.metrics["forward_tokens:sum"] == 30 + 1 + 2 + 3 + 4
    assert of_rows.metrics["forward_tokens:sum"] >= of_rows.metrics["row_tokens:sum"] == 130
    assert of_tree.metrics["loss:sum"] == pytest.approx(of_rows.metrics["loss:sum"], rel=CLOSE)
    for one, other in zip(tree_gradients, row_gradients, strict=True):
        difference = float((one - other).abs().max() / other.abs().max())
        assert difference < CLOSE


@pytest.mark.spec("tinker.forward-only")
def test_forward_alone_leaves_no_gradient(tiny_model_folder: Path) -> None:
    trainer = make_trainer(tiny_model_folder)
    adapter = new_adapter(trainer)
    datums = datums_with_prefixes()
    trainer.forward_backward(adapter, call_of(datums, forward_only=True))
    assert all(p.grad is None for p in adapter.parameters())
    before = matrices(adapter)
    trainer.optim_step(adapter, STEP)
    for one, other in zip(before, matrices(adapter), strict=True):
        assert torch.equal(one, other)


@pytest.mark.spec("tinker.nothing-half")
def test_a_refused_call_leaves_gradients_as_they_were(tiny_model_folder: Path) -> None:
    trainer = make_trainer(tiny_model_folder)
    adapter = new_adapter(trainer)
    datums = datums_with_prefixes()
    trainer.forward_backward(adapter, call_of(datums[:2]))
    before = [p.grad.clone() for p in adapter.parameters()]
    # The last datum's width makes a pass of its own, after that of the others.
    wrong = make_datum(np.random.default_rng(0), 3, width=2)
    wrong.inputs["weights"][1, 0] = np.nan
    with pytest.raises(RefusedCallError, match=r"weights: expected finite numbers, got nan"):
        trainer.forward_backward(adapter, call_of([*datums[2:], wrong]))
    for parameter, expected in zip(adapter.parameters(), before, strict=True):
        assert torch.equal(parameter.grad, expected)


@pytest.mark.spec("tinker.resume")
def test_a_resumed_run_is_the_undisturbed_one(tiny_model_folder: Path, tmp_path: Path) -> None:
    trainer = make_trainer(tiny_model_folder, torch.float32)
    undisturbed = new_adapter(trainer)

    def train(owner: AdapterTrainer, adapter: TrainedAdapter, steps: range) -> None:
        for step in steps:
            owner.forward_backward(adapter, call_of(datums_with_prefixes(step)))
            owner.optim_step(adapter, STEP)

    train(trainer, undisturbed, range(3))
    trainer.save(undisturbed, tmp_path / "s", optimizer=True)
    train(trainer, undisturbed, range(3, 6))
    another = make_trainer(tiny_model_folder, torch.float32)
    another.create(AdapterForm(4), seed=0)  # so that names in the model differ
    resumed = another.load(AdapterForm(8), tmp_path / "s", optimizer=True)
    assert resumed.num_steps == 3
    train(another, resumed, range(3, 6))
    for one, other in zip(matrices(undisturbed), matrices(resumed), strict=True):
        assert torch.equal(one, other)
    fresh = another.load(AdapterForm(8), tmp_path / "s", optimizer=False)
    train(another, fresh, range(3, 6))
    assert not torch.equal(matrices(undisturbed)[0], matrices(fresh)[0])


def test_an_exported_adapter_opens_in_peft_and_merged_in_transformers(
    tiny_model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = make_trainer(tiny_model_folder, torch.float32)
    adapter = new_adapter(trainer)
    store = CheckpointStore(tmp_path / "runs")
    path = TinkerPath("run", SAMPLER, "first")
    with store.writing(path, SavedAdapter("base", 8, True, True, store.now())) as folder:
        trainer.save(adapter, folder, optimizer=False)
    saved, out = str(store.folder(path)), str(tmp_path / "out")
    assert main(["export", saved, out, "--to", "adapter"]) == 0
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [CONFIG, WEIGHTS]
    datum = make_datum(np.random.default_rng(0), 9)
    expected = trainer.forward_backward(adapter, call_of([datum], forward_only=True)).logprobs[0]
    got = logprobs_by_hand(load_adapted(tiny_model_folder, tmp_path / "out"), datum)
    np.testing.assert_allclose(got.detach().numpy(), expected, atol=1e-5)
    assert main(["export", saved, out, "--to", "adapter"]) == 2
    assert "which exists" in capsys.readouterr().err
    assert main(["export", saved, str(tmp_path / "model"), "--to", "model"]) == 0
    merged = load_adapted(tmp_path / "model", None)
    assert not any("lora" in name for name, _ in merged.named_parameters())
    got = logprobs_by_hand(merged, datum)
    np.testing.assert_allclose(got.detach().numpy(), expected, atol=1e-5)
    usual = (tmp_path / "model/config.json").stat().st_mode
    assert {file.stat().st_mode for file in (tmp_path / "model").iterdir()} == {usual}
    assert (tmp_path / "model/tokenizer.json").is_file()
    (store.folder(path) / WEIGHTS).write_bytes(b"x")
    for form in ("adapter", "model"):
        assert main(["export", saved, str(tmp_path / "d"), "--to", form]) == 2
    assert "adapter_model.safetensors is damaged" in capsys.readouterr().err


@pytest.mark.spec("tinker.clients")
def test_interleaved_adapters_are_each_as_if_alone(tiny_model_folder: Path) -> None:
    def work(rank: int, rate: float) -> list[tuple[int, float, int]]:
        return [(rank, rate, step) for step in range(4)]

    def run(trainer: AdapterTrainer, order: list[tuple[int, float, int]]) -> Any:
        forms = {rank: AdapterForm(rank, train_mlp=rank != 8) for rank, _, _ in order}
        adapters = {rank: trainer.create(form, seed=rank) for rank, form in sorted(forms.items())}
        for rank, rate, step in order:
            datums = datums_with_prefixes(step + rank)
            trainer.forward_backward(adapters[rank], call_of(datums))
            trainer.optim_step(adapters[rank], replace(STEP, lr=rate))
        return {rank: matrices(adapter) for rank, adapter in adapters.items()}

    small = work(8, 1e-3)
    large = work(32, 3e-3)
    mixed = [one for pair in zip(small, large, strict=True) for one in pair]
    together = run(make_trainer(tiny_model_folder, torch.float32), mixed)
    for alone in (small, large):
        rank = alone[0][0]
        expected = run(make_trainer(tiny_model_folder, torch.float32), alone)[rank]
        assert all(map(torch.equal, together[rank], expected))


def test_a_removed_adapter_frees_its_place(tiny_model_folder: Path) -> None:
    trainer = make_trainer(tiny_model_folder, torch.float32)
    kept = new_adapter(trainer)
    expected = trainer.forward_backward(kept, call_of(datums_with_prefixes(), forward_only=True))
    other = new_adapter(trainer, rank=4, seed=3)
    count = sum(1 for _ in trainer.base.model.parameters())
    trainer.remove(other)
    assert sum(1 for _ in trainer.base.model.parameters()) < count
    got = trainer.forward_backward(kept, call_of(datums_with_prefixes(), forward_only=True))
    assert all(map(np.array_equal, expected.logprobs, got.logprobs))


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (AdapterForm(33), r"rank: expected 1 to 32 \(--max-rank\), got 33"),
        (AdapterForm(0), "got 0"),
        (AdapterForm(8, train_attn=False, train_mlp=False), "train_attn or train_mlp"),
    ],
)
def test_impossible_adapters_are_refused(
    tiny_model_folder: Path, form: AdapterForm, message: str
) -> None:
    trainer = make_trainer(tiny_model_folder, torch.float32)
    with pytest.raises(RefusedCallError, match=message):
        trainer.create(form)


def test_modules_of_an_adapter_are_chosen(tiny_model_folder: Path) -> None:
    trainer = make_trainer(tiny_model_folder, torch.float32)
    attention = trainer.create(AdapterForm(4, train_mlp=False), seed=0)
    names = {name.split(".")[-4] for name, _ in attention.policy.trained_parameters()}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj"}
    mlp = trainer.create(AdapterForm(4, train_attn=False), seed=0)
    names = {name.split(".")[-4] for name, _ in mlp.policy.trained_parameters()}
    assert names == {"gate_proj", "up_proj", "down_proj"}


HOSTILE = {
    "no datum": ([], "at least one datum"),
    "empty datum": (
        [Datum(np.zeros(0, np.int32), {"target_tokens": np.zeros(0, np.int64)})],
        r"data\[0\].model_input: expected 1 to 512 tokens, got 0",
    ),
    "too long": (
        [Datum(np.zeros(513, np.int32), {"target_tokens": np.zeros(513, np.int64)})],
        "expected 1 to 512 tokens, got 513",
    ),
    "no targets": ([Datum(np.ones(2, np.int32), {})], "expected target_tokens"),
    "fewer targets": (
        [Datum(np.ones(3, np.int32), {"target_tokens": np.ones(2, np.int64)})],
        r"target_tokens: expected shape \(3,\) or \(3, K\)",
    ),
    "targets of three dimensions": (
        [Datum(np.ones(2, np.int32), {"target_tokens": np.ones((2, 1, 1), np.int64)})],
        r"got \(2, 1, 1\)",
    ),
    "unknown word": (
        [Datum(np.ones(2, np.int32), {"target_tokens": np.array([1, 10**6])})],
        "expected token ids from 0 to .*, got 1000000",
    ),
    "negative word": (
        [Datum(np.array([1, -1], np.int32), {"target_tokens": np.ones(2, np.int64)})],
        "got -1",
    ),
    "targets of another dtype": (
        [Datum(np.ones(2, np.int32), {"target_tokens": np.ones(2, np.float32)})],
        "expected integers, got float32",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_impossible_datums_are_refused_in_words(tiny_model_folder: Path, case: str) -> None:
    datums, message = HOSTILE[case]
    trainer = make_trainer(tiny_model_folder, torch.float32)
    adapter = new_adapter(trainer)
    with pytest.raises(RefusedCallError, match=message):
        trainer.forward_backward(adapter, call_of(datums))


def test_the_longest_datum_is_computed(tiny_model_folder: Path) -> None:
    trainer = make_trainer(tiny_model_folder, torch.float32)
    adapter = new_adapter(trainer)
    datum = make_datum(np.random.default_rng(0), 512)
    outputs = trainer.forward_backward(adapter, call_of([datum]))
    assert outputs.logprobs[0].shape == (512,)
    assert np.isfinite(outputs.logprobs[0]).all()
