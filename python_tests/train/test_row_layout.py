"""Layout of rows: trees where the model allows them, group by group where their costs differ."""

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _fakes import tiny_model
from _ranked import measured
from _trees import agent_batch

from skyrl_fast.config import Config
from skyrl_fast.train.model import row_layout
from skyrl_fast.train.model.micro_batch import plan_micro_batches
from skyrl_fast.train.model.policy import Policy
from skyrl_fast.train.model.row_layout import LayoutCosts, measured_costs, uses_trees
from skyrl_fast.train.model.tree_forward import prepare_for_trees
from skyrl_fast.train.model.tree_states import TreeSegments
from skyrl_fast.train.parallel.local_ranks import LocalRanks
from skyrl_fast.train.parallel.rank_processes import start_ranks
from skyrl_fast.train.update import accumulate_gradient

CPU = torch.device("cpu")
CHEAP_PAIRS = LayoutCosts(1.0, 0.0, 1.0, 0.0)  # trees, as they have fewer tokens
DEAR_TREES = LayoutCosts(1.0, 0.0, 1000.0, 0.0)


def gradient_with(costs: LayoutCosts | None, tree: bool | None) -> tuple[torch.Tensor, Any]:
    policy = Policy(tiny_model(seed=1), tree=tree, max_tokens_per_microbatch=200)
    policy.layout_costs = costs
    metrics = accumulate_gradient(policy, agent_batch(3), algorithm=Config().trainer.algorithm)
    return torch.cat([p.grad.flatten() for p in policy.model.parameters()]), metrics


def mixed_costs() -> LayoutCosts:
    """Return costs by which some groups of the batch are trees, others not."""
    batch = agent_batch(3)
    sizes = []
    for tree in (False, True):
        plan = plan_micro_batches(batch, 1 << 40, tree=tree)
        sizes.append(sum(m.input_ids.numel() for m in plan))
    for ratio in np.linspace(1, 4, 31):
        costs = LayoutCosts(1.0, 0.0, float(ratio), 0.0)
        kinds = {m.tree is None for m in plan_micro_batches(batch, 200, tree=True, costs=costs)}
        if len(kinds) == 2:
            return costs
    raise AssertionError("no ratio of costs mixes the layouts")


@pytest.mark.spec("tree.layout-costs")
def test_gradients_are_equal_whatever_is_chosen() -> None:
    wanted, metrics = gradient_with(None, tree=False)
    assert metrics["policy/tree_group_share"] == 0
    for costs, shares in ((None, {1.0}), (CHEAP_PAIRS, {1.0}), (DEAR_TREES, {0.0})):
        got, metrics = gradient_with(costs, tree=True)
        torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-5)
        assert metrics["policy/tree_group_share"] in shares
    got, metrics = gradient_with(mixed_costs(), tree=True)
    torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-5)
    assert 0 < metrics["policy/tree_group_share"] < 1
    assert metrics["policy/sequence_token_ns"] == 1e9


@pytest.mark.spec("tree.layout-costs")
def test_each_group_has_the_layout_that_takes_less() -> None:
    batch, costs = agent_batch(3), mixed_costs()
    chosen = {}
    for micro in plan_micro_batches(batch, 200, tree=True, costs=costs):
        for group in batch.group_ids[micro.rows].tolist():
            assert chosen.setdefault(group, micro.tree is not None) == (micro.tree is not None)
    for group, as_tree in chosen.items():
        rows = (batch.group_ids == group).numpy()
        alone = plan_micro_batches(batch, 1, rows=rows)  # a sequence each: no padding
        tokens = sum(m.input_ids.numel() for m in alone)
        together = plan_micro_batches(batch, 1 << 40, rows=rows, tree=True)
        nodes = sum(m.input_ids.numel() for m in together)
        assert as_tree == (costs.tree_token * nodes <= costs.sequence_token * tokens)


def test_in_float32_on_a_cpu_nothing_is_measured() -> None:
    policy = Policy(tiny_model(), tree=None)
    assert policy.tree and policy.layout_costs is None


@pytest.mark.spec("tree.layout-costs")
def test_layers_with_states_are_measured_in_float32_too() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Lfm2Config(
        **{"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0},
        layer_types=["conv", "full_attention"],
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    policy = Policy(model, tree=None, max_tokens_per_microbatch=512)
    assert policy.tree and policy.layout_costs is not None
    assert policy.layout_costs.metrics()["policy/tree_token_ns"] > 0


@pytest.mark.spec("tree.layout-costs")
def test_groups_of_short_segments_are_sequences_where_segments_cost_more() -> None:
    batch = agent_batch(3)
    sizes = []
    for segment in (0.0, 1000.0):
        costs = LayoutCosts(1.0, 0.0, 1.0, 0.0, segment)
        plan = plan_micro_batches(batch, 200, tree=True, costs=costs)
        sizes.append({micro.tree is None for micro in plan})
    assert sizes == [{False}, {True}]


@pytest.mark.spec("tree.layout-costs")
@pytest.mark.parametrize(("segment", "same_kernels"), [(0.0, False), (5e-5, False), (5e-5, True)])
def test_costs_are_found_from_the_times_of_two_shapes(segment: float, same_kernels: bool) -> None:
    model = tiny_model().base_model
    prepare_for_trees(model)
    tree = (2e-6, 3e-9) if same_kernels else (4e-6, 1e-9)
    true = LayoutCosts(2e-6, 3e-9, *tree, segment)
    now, last = [0.0], [0.0]

    def passed(*_: Any, **__: Any) -> Any:
        micro = seen[-1]
        size = micro.input_ids.shape
        if micro.tree is None:
            last[0] = true.sequence_token * size.numel()
            last[0] += true.sequence_pair * size[0] * size[1] * (size[1] + 1) / 2
        else:
            pairs = int((micro.tree.positions + 1).sum())
            last[0] = true.tree_token * size[1] + true.tree_pair * pairs
            parents = micro.tree.parents
            forks = ((parents >= 0) & (parents != torch.arange(size[1]) - 1)).any()
            count = TreeSegments(parents, CPU).num_segments
            last[0] += true.tree_segment * count * float(forks)
        now[0] += last[0]

    seen: list[Any] = []
    real = row_layout.last_hidden_states

    def watched(backbone: Any, micro: Any, device: Any) -> torch.Tensor:
        seen.append(micro)
        passed()
        return real(backbone, micro, device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_layout, "last_hidden_states", watched)
        patch.setattr(row_layout, "has_states", lambda _: segment > 0)
        costs = measured_costs(
            model,
            CPU,
            most_tokens=200,
            autocast=contextlib.nullcontext,
            same_kernels=same_kernels,
            clock=lambda: now[0],
        )
    assert costs is not None
    shapes = (2 if same_kernels else 4) + (segment > 0)
    assert len(seen) == shapes * (1 + row_layout.REPEATS)
    names = ("sequence_token", "sequence_pair", "tree_token", "tree_pair", "tree_segment")
    for name in names:
        assert getattr(costs, name) == pytest.approx(getattr(true, name), rel=1e-6)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("trained", [True, False])
def test_bfloat16_measures_both_layouts(trained: bool) -> None:
    model = tiny_model().requires_grad_(trained)  # False: a reference
    policy = Policy(model, tree=None, dtype=torch.bfloat16, max_tokens_per_microbatch=64)
    assert policy.tree and policy.layout_costs is not None
    assert min(policy.layout_costs.metrics().values()) >= 0
    assert max(policy.layout_costs.metrics().values()) > 0


def test_several_ranks_measure_both_layouts(tmp_path: Path) -> None:
    """Their weights are gathered for each pass, as its backward pass frees them."""
    with start_ranks(2, measured, cuda=False, starter=LocalRanks(tmp_path)) as ranks:
        policy = measured(ranks)
    assert policy.tree and policy.layout_costs is not None


@pytest.mark.spec("tree.auto-unsupported")
def test_what_trees_cannot_do_is_done_as_sequences(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model()
    model.config.alibi = True
    caplog.set_level("INFO")
    policy = Policy(model, tree=None)
    assert not policy.tree and "adds a term per distance (ALiBi)" in caplog.text
    with pytest.raises(ValueError, match="adds a term per distance"):
        Policy(model, tree=True)


@pytest.mark.spec("tree.auto-unsupported")
def test_a_failed_probe_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    before, ids = model.config._attn_implementation, torch.arange(9)[None]
    wanted = model(ids).logits
    monkeypatch.setattr("skyrl_fast.train.model.tree_forward._probe", lambda *_: 0.5)
    policy = Policy(model, tree=None)
    assert not policy.tree and model.config._attn_implementation == before
    assert torch.equal(model(ids).logits, wanted)


def test_a_kernel_that_fails_leaves_sequences(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(row_layout, "measured_costs", broken)
    policy = Policy(tiny_model(), tree=None, dtype=torch.bfloat16)
    assert not policy.tree and "no such instruction" in caplog.text


@pytest.mark.spec("tree.rows-setting")
def test_setting() -> None:
    found = {layout: uses_trees(layout) for layout in ("auto", "sequence", "tree")}
    assert found == {"auto": None, "sequence": False, "tree": True}
