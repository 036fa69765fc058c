"""What ranks exchange is what the formulas of docs/design/022 say, within 5 %."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from _rank_models import Wide, wide_models, wide_models_in_bfloat16
from _training import folder as folder
from _training import settings, train

from scripts import scaling_table
from scripts.scaling_table import Model, Step, traffic
from skyrl_fast.batch import StepBatch
from skyrl_fast.config import AlgorithmConfig
from skyrl_fast.train.output.loggers import read_metrics
from skyrl_fast.train.output.metric_table import METRICS, RANKS
from skyrl_fast.train.parallel.local_ranks import LocalRanks
from skyrl_fast.train.parallel.rank_processes import start_ranks
from skyrl_fast.train.parallel.traffic import (
    CALLS,
    CHECKPOINT,
    ENGINE,
    GRADIENTS,
    KINDS,
    LAYERS,
    RESULTS,
)
from skyrl_fast.train.parallel.traffic import ROWS as SENT_ROWS
from skyrl_fast.train.update import update_policy

ROWS, LENGTH, RESPONSE = 32, 400, 200


def long_rows(rows: int = ROWS) -> StepBatch:
    """Return rows of equal lengths, all of whose responses are trained."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2, rows * RESPONSE, generator=generator)
    ends = torch.arange(rows + 1, dtype=torch.int32)
    numbers = torch.arange(rows, dtype=torch.int32)
    return StepBatch(
        tokens=torch.randint(1, 250, (rows * LENGTH,), generator=generator, dtype=torch.int32),
        cu_seqlens=ends * LENGTH,
        cu_responses=ends * RESPONSE,
        loss_mask=torch.ones(rows * RESPONSE, dtype=torch.uint8),
        rewards=torch.zeros(rows * RESPONSE),
        row_rewards=torch.zeros(rows),
        group_ids=numbers // 4,
        trajectory_ids=numbers,
        is_last_step=torch.ones(rows, dtype=torch.bool),
        policy_version=torch.zeros(rows, dtype=torch.int32),
        uids=tuple(f"prompt {number}" for number in range(rows // 4)),
        rollout_logprobs=-values[0].abs(),
        old_logprobs=-values[0].abs(),
        advantages=values[1],
    )


def update(models: Wide, batch: StepBatch) -> dict[str, float]:
    """Train on all rows at once, of groups of four."""
    return update_policy(
        models.policy,
        models.optimizer,
        batch,
        algorithm=AlgorithmConfig(),
        mini_batch_size=batch.num_rows // 4,
    )


def measured(models: Wide, folder: Path) -> tuple[Mapping[str, float], int]:
    """Return the counters of an update, the old log-probabilities, a sync and a checkpoint."""
    batch, ranks = long_rows(), models.ranks
    ranks.traffic.take()
    models.policy.batch_logprobs(batch)
    found = update(models, batch)
    updated = ranks.traffic.take()
    assert dict(models.policy.named_weights())
    models.policy.save(folder)
    ranks.files.start(folder)
    ranks.files.wait()
    of_weights = ranks.traffic.take()
    for kind in (ENGINE, CHECKPOINT):
        for what in ("messages", "bytes"):
            updated[f"traffic/{kind}_{what}"] = of_weights[f"traffic/{kind}_{what}"]
    passes = -(-int(found["policy/num_micro_batches"]) // ranks.size)
    return updated, passes


@pytest.mark.spec("update.ranks-traffic")
@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4, 8])
def test_counters_are_those_of_the_formulas(tmp_path: Path, size: int) -> None:
    with start_ranks(size, wide_models, cuda=False, starter=LocalRanks(tmp_path)) as ranks:
        models = wide_models(ranks)
        found, passes = measured(models, tmp_path / "policy")
    layers = list(models.policy.model.model.layers)
    counts = [p.numel() for p in models.policy.model.parameters()]
    inner = [p.numel() for p in layers[0].parameters()]
    root = sum(counts) - len(layers) * sum(inner)
    model = Model(sum(counts), root, sum(inner), len(layers), len(counts), active=sum(counts))
    step = Step(size, ROWS * LENGTH, ROWS * RESPONSE, ROWS, passes, forward=passes, batches=1)
    wanted = traffic(model, step)
    assert wanted.keys() == set(KINDS)
    for kind, (messages, num_bytes) in wanted.items():
        assert found[f"traffic/{kind}_messages"] == messages, kind
        # Each new setting of a loss makes a call longer.
        tolerance = 0.25 if kind == CALLS else 0.05
        assert found[f"traffic/{kind}_bytes"] == pytest.approx(num_bytes, rel=tolerance), kind
    if size == 2:  # by hand: half of all weights, three times but for those outside the layers
        weights = 4 * sum(counts) // 2
        assert wanted[ENGINE][1] == wanted[CHECKPOINT][1] == weights
        assert wanted[GRADIENTS] == (len(layers) + 1, weights)
        assert wanted[LAYERS][1] == passes * (3 * weights - 4 * root // 2)
        # The other rank has half of the rows, of which it gets advantages in the update alone.
        rows = ROWS / 2 * (2 * 4 * LENGTH + (17 + 5) * RESPONSE + 2 * 69)
        assert wanted[SENT_ROWS] == (2, rows + 2 * 1200)
        assert wanted[RESULTS] == (2, 2 * 12 * ROWS * RESPONSE / 2 + passes * 1900)


@pytest.mark.spec("update.ranks-gather-16")
def test_weights_are_gathered_in_the_dtype_of_the_products_and_no_bit_changes(
    tmp_path: Path,
) -> None:
    """Those of linear modules; norms and what is outside the layers stay float32."""
    rows = 16  # two passes of a rank
    size = 2
    batch = long_rows(rows)
    found: dict[str, Mapping[str, float]] = {}
    results: dict[str, list[torch.Tensor]] = {}
    make = wide_models_in_bfloat16
    with start_ranks(size, make, cuda=False, starter=LocalRanks(tmp_path)) as ranks:
        both = make(ranks)
        for name, models in both.items():
            ranks.traffic.take()
            results[name] = [models.policy.batch_logprobs(batch)]
            for _ in range(2):
                updated = update(models, batch)
            found[name] = ranks.traffic.take()
            results[name] += dict(models.policy.named_weights()).values()
    for one, other in zip(*results.values(), strict=True):
        assert torch.equal(one, other)
    layers = list(both["exact"].policy.model.model.layers)
    linear = [m for m in layers[0].modules() if isinstance(m, torch.nn.Linear)]
    rounded = len(layers) * sum(p.numel() for m in linear for p in m.parameters())
    counts = [p.numel() for p in both["exact"].policy.model.parameters()]
    inner = [p.numel() for p in layers[0].parameters()]
    root = sum(counts) - len(layers) * sum(inner)
    passes = -(-int(updated["policy/num_micro_batches"]) // size)
    model = Model(sum(counts), root, sum(inner), len(layers), len(counts), active=sum(counts))
    step = Step(
        ranks=size,
        tokens=rows * LENGTH,
        responses=rows * RESPONSE,
        rows=rows,
        trained=2 * passes,
        forward=passes,
        reductions=2,
    )
    for name, each in (("exact", model), ("rounded", replace(model, rounded=rounded))):
        wanted = traffic(each, step)
        for kind in (LAYERS, GRADIENTS):
            messages, num_bytes = wanted[kind]
            assert found[name][f"traffic/{kind}_messages"] == messages, (name, kind)
            assert found[name][f"traffic/{kind}_bytes"] == num_bytes, (name, kind)
    # By hand: half of the bytes, but for norms and embeddings.
    saved = found["exact"]["traffic/layers_bytes"] - found["rounded"]["traffic/layers_bytes"]
    assert saved == (2 * 2 + 1) * passes * 2 * rounded / size


@pytest.mark.slow  # starts a process
@pytest.mark.spec("metrics.table")
def test_a_run_of_two_ranks_reports_its_traffic(folder: Path) -> None:
    two = "trainer.placement.policy_num_gpus_per_node=2"
    rows = read_metrics(train(settings(folder, "run", two, "trainer.epochs=1")).metrics)
    steps = [row for row in rows if "policy/loss" in row]
    names = {metric.name for metric in METRICS if metric.where == RANKS}
    assert {name for name in steps[0] if name.startswith("traffic/")} == names
    assert all(row["traffic/gradients_bytes"] > 0 for row in steps)
    saved = [row["traffic/checkpoint_bytes"] for row in steps]  # of the step before
    assert saved[0] == 0


def test_page_is_up_to_date() -> None:
    text = scaling_table.PAGE.read_text(encoding="utf-8")
    assert scaling_table.with_tables(text) == text, "run python -m scripts.scaling_table"
