"""Planned micro-batches equal those of a plain implementation, field by field."""

import gc
import pickle
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from _reference_passes import ReferencePasses
from _trees import agent_batch
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_fast.batch import StepBatch
from skyrl_fast.ops.passes.plan import PassLayout, PassPlan
from skyrl_fast.train.model import micro_batch
from skyrl_fast.train.model.forward_pass import MicroBatch, NodeTree
from skyrl_fast.train.model.micro_batch import MicroBatches, plan_micro_batches
from skyrl_fast.train.model.rope_limits import LONGROPE, RopeLimit, rope_limits
from skyrl_fast.train.model.row_layout import LayoutCosts


def assert_same(one: Any, two: Any) -> None:
    """Assert that all tensors of two micro-batches are equal, dtypes included."""
    for field in fields(one):
        a, b = getattr(one, field.name), getattr(two, field.name)
        if isinstance(a, NodeTree):
            assert_same(a, b)
        elif a is None or b is None:
            assert a is b, field.name
        else:
            assert a.dtype == b.dtype and a.tolist() == b.tolist(), field.name


def with_routes(batch: StepBatch, rng: np.random.Generator) -> StepBatch:
    """Return the batch with routes of all rows, which sometimes differ for equal tokens."""
    lengths = batch.lengths.numpy() - rng.integers(0, 2, batch.num_rows)
    cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    starts = batch.cu_seqlens.tolist()
    cells = np.concatenate(
        [batch.tokens[s : s + n].numpy() for s, n in zip(starts, lengths.tolist(), strict=False)]
    )
    cells = np.where(rng.random(len(cells)) < 0.05, cells + 1, cells)
    routes = torch.from_numpy(np.stack([cells, cells + 1], 1).astype(np.int16)[:, None])
    return batch.with_(expert_indices=routes, cu_experts=torch.from_numpy(cu))


def with_kept(batch: StepBatch, rng: np.random.Generator) -> StepBatch:
    """Return the batch with one of three sets of kept tokens for each response token."""
    sets = [[], [3, 4], [3, 5, 6]]
    numbers = rng.integers(0, 3, len(batch.loss_mask))
    counts = torch.tensor([len(sets[i]) for i in numbers], dtype=torch.int32)
    ids = torch.tensor([token for i in numbers for token in sets[i]], dtype=torch.int32)
    sums = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    return batch.with_(
        num_kept=counts, kept_ids=ids, cu_kept=sums[batch.cu_responses.long()].to(torch.int32)
    )


def assert_reference(batch: StepBatch, budget: int, rows: np.ndarray, **options: Any) -> None:
    reference = ReferencePasses(batch, rows, options.get("router_replay", False))
    wanted = reference.passes(
        budget,
        keep=options.get("keep_trajectories", False),
        tree=options.get("tree", False),
        costs=options.get("costs"),
        limits=[limit.length for limit in options.get("limits", ())],
    )
    planned = plan_micro_batches(batch, budget, rows=rows, **options)
    assert len(planned) == len(wanted)
    assert planned.num_tokens.tolist() == [micro.input_ids.numel() for micro in wanted]
    for one, two in zip(planned, wanted, strict=True):
        assert_same(one, two)
    if len(planned):
        assert_same_without_other_rows(planned.choose([*range(0, len(planned), 2), -1]))


def assert_same_without_other_rows(planned: MicroBatches) -> None:
    """Assert that passes do not depend on rows of other passes, also where they are sent."""
    alone, rows = planned.alone()
    assert alone.batch.num_rows == len(rows)
    assert alone.num_tokens.tolist() == planned.num_tokens.tolist()
    for received in (alone, pickle.loads(pickle.dumps(alone))):
        for one, two in zip(received, planned, strict=True):
            assert_same(replace(one, rows=rows[one.rows]), two)


@settings(max_examples=300)
@given(
    seed=st.integers(0, 1000),
    shape=st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 4)),
    vocabulary=st.sampled_from([1, 2, 12]),
    budget=st.sampled_from([1, 7, 15, 30, 60, 120, 300, 10_000, 1 << 62]),
    tree=st.sampled_from(["sequences", "trees", "costs"]),
    extras=st.sets(st.sampled_from(["keep", "routes", "kept", "rows", "sparse", "weights"])),
)
def test_passes_equal_those_of_the_reference(
    seed: int,
    shape: tuple[int, int, int],
    vocabulary: int,
    budget: int,
    tree: str,
    extras: set[str],
) -> None:
    rng = np.random.default_rng(seed)
    groups, samples, turns = shape
    batch = agent_batch(
        seed,
        num_groups=groups,
        samples=samples,
        turns=turns,
        stripped=rng.random(),
        vocabulary=vocabulary,
    )
    rows = rng.random(batch.num_rows) < (0.7 if "rows" in extras else 1.1)
    if "routes" in extras:
        batch = with_routes(batch, rng)
    if "kept" in extras:
        batch = with_kept(batch, rng)
    if "sparse" in extras:
        mask = batch.loss_mask.numpy() * (rng.random(len(batch.loss_mask)) < 0.2)
        batch = batch.with_(loss_mask=torch.from_numpy(mask.astype(np.uint8)))
    if "weights" in extras:
        weights = rng.random(len(batch.loss_mask)) * (rng.random(len(batch.loss_mask)) < 0.2)
        batch = batch.with_(cross_entropy_weights=torch.from_numpy(weights.astype(np.float32)))
    options: dict[str, Any] = {"tree": tree != "sequences", "router_replay": "routes" in extras}
    options["keep_trajectories"] = "keep" in extras
    if tree == "costs":
        options["costs"] = LayoutCosts(1.0, 0.01, *(2 * rng.random(3) * [1, 0.01, 2]).tolist())
    if tree == "sequences" and not options["keep_trajectories"]:
        limits = sorted(rng.integers(1, 30, 2).tolist())
        options["limits"] = [RopeLimit(LONGROPE, limit) for limit in limits]
    assert_reference(batch, budget, rows, **options)


@pytest.mark.parametrize("tree", [False, True])
def test_nothing_to_train(tree: bool) -> None:
    batch = agent_batch(0)
    nothing = torch.zeros_like(batch.loss_mask)
    for empty in (batch.rows(slice(0, 0)), batch.with_(loss_mask=nothing)):
        plan = plan_micro_batches(empty, 100, tree=tree, router_replay=True)
        assert list(plan) == [] and len(plan) == 0


@pytest.mark.parametrize("tree", [False, True])
def test_one_row_longer_than_the_budget(tree: bool) -> None:
    batch = agent_batch(0).rows(slice(0, 1))
    batch = batch.with_(loss_mask=torch.ones_like(batch.loss_mask))
    assert_reference(batch, 1, np.ones(1, dtype=bool), tree=tree)


@pytest.mark.spec("update.one-pass-in-memory")
def test_only_one_pass_is_in_memory() -> None:
    batch = agent_batch(0, num_groups=4)
    plan = plan_micro_batches(batch, 30)
    first, *_ = plan
    again, *_ = plan
    assert first.input_ids.data_ptr() != again.input_ids.data_ptr()  # written when it is reached
    assert_same(first, again)


@pytest.mark.spec("update.planned-once")
def test_the_same_rows_are_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, planned = agent_batch(0), []

    def counted(*arrays: torch.Tensor, **options: Any) -> PassPlan:
        planned.append(options)
        return PassPlan(*arrays, **options)

    monkeypatch.setattr(micro_batch, "PassPlan", counted)
    everything = np.ones(batch.num_rows, dtype=bool)
    for same in (batch, batch.with_(advantages=None), *batch.mini_batches(batch.num_groups)):
        plan_micro_batches(same, 100, tree=True)
        plan_micro_batches(same, 100, tree=True, rows=everything)
    assert len(planned) == 1
    everything[0] = False
    plan_micro_batches(batch, 100, tree=True, rows=everything)
    plan_micro_batches(batch, 100)
    plan_micro_batches(batch, 99, tree=True)
    routed = with_routes(batch, np.random.default_rng(0))
    plan_micro_batches(routed, 100, tree=True, router_replay=True)
    plan_micro_batches(routed.with_(expert_indices=routed.expert_indices + 1), 100, tree=True)
    assert len(planned) == 5
    mask = batch.loss_mask.clone()
    plan_micro_batches(batch.with_(loss_mask=mask), 100, tree=True)
    assert len(planned) == 5
    mask[int(mask.argmax())] = 0
    plan_micro_batches(batch.with_(loss_mask=mask), 100, tree=True)
    plan_micro_batches(batch.with_(tokens=batch.tokens.clone()), 100, tree=True)
    assert len(planned) == 7


@pytest.mark.spec("update.planned-once")
def test_plans_end_with_their_tokens() -> None:
    gc.collect()
    before = len(micro_batch.PASS_PLANS)
    batch = agent_batch(0)
    plan_micro_batches(batch, 100)
    assert len(micro_batch.PASS_PLANS) == before + 1
    del batch
    gc.collect()
    assert len(micro_batch.PASS_PLANS) == before


@pytest.mark.spec("update.micro-batches")
def test_chosen_and_idle_passes() -> None:
    batch = with_routes(agent_batch(0, num_groups=4), np.random.default_rng(0))
    plan = plan_micro_batches(batch, 30, router_replay=True)
    passes = list(plan)
    chosen = plan.choose([2, -1, 0])
    assert chosen.num_tokens.tolist() == [
        passes[2].input_ids.numel(),
        1,
        passes[0].input_ids.numel(),
    ]
    third, idle, first = chosen
    assert_same(third, passes[2])
    assert_same(first, passes[0])
    assert isinstance(idle, MicroBatch) and len(idle.target_ids) == len(idle.rows) == 0
    assert idle.expert_indices is not None and idle.expert_indices.shape == (1, 1, 1, 2)
    assert list(chosen.choose([1])) and chosen.choose([1]).num_tokens.tolist() == [1]


WRONG_LAYOUTS: dict[str, tuple[bool, list[list[int]], str]] = {
    "rows of another batch": (False, [[0, 9], [0, 1], [0, 0]], "ascending rows of the batch"),
    "descending rows": (False, [[1, 0], [0, 1], [0, 0]], "ascending rows of the batch"),
    "an untrained row": (False, [[0, 2], [0, 1], [0, 0]], "rows with a trained token"),
    "a row without a prompt": (False, [[0, 3], [0, 1], [0, 0]], "rows with a prompt"),
    "too many sequences": (False, [[0, 1], [0, 2], [0, 0]], "places among the rows"),
    "a sequence without a row": (False, [[0, 1], [1, 1], [0, 0]], "a row in each sequence"),
    "a row longer than its host": (False, [[0, 1], [0, 0], [0, 0]], "rows within their sequence"),
    "a row twice": (True, [[0, 1], [0, 0], [0, 0]], "each row of a tree once"),
    "a shared node too many": (True, [[0, 1], [0, 1], [0, 3]], "nodes that both rows have"),
    "nodes shared with no row": (True, [[0, 1], [0, 1], [1, 0]], "nodes that both rows have"),
}


@pytest.mark.parametrize("case", WRONG_LAYOUTS)
def test_layouts_of_other_rows_are_refused(case: str) -> None:
    is_tree, numbers, expected = WRONG_LAYOUTS[case]
    lengths = [5, 3, 3, 2]
    responses = [2, 2, 2, 2]
    trained = torch.ones(8, dtype=torch.bool)
    trained[4:6] = False
    batch = (
        torch.arange(13, dtype=torch.int32),
        torch.tensor([0, *lengths]).cumsum(0),
        torch.tensor([0, *responses]).cumsum(0),
        trained,
    )
    with pytest.raises(ValueError, match=f"plan_passes: layouts: expected {expected}"):
        PassPlan.from_layouts(*batch, [PassLayout(is_tree, np.array(numbers))])
    right = PassLayout(is_tree, np.array([[0, 1], [0, 1], [0, 0]]))
    assert len(PassPlan.from_layouts(*batch, [right])) == 1


@pytest.mark.spec("loss.rope-limits")
def test_rows_beyond_a_dynamic_limit_are_refused() -> None:
    batch = agent_batch(0)
    longest = int(batch.lengths.max())
    limits = [RopeLimit("dynamic", longest - 1)]
    row = int(batch.lengths.argmax())
    rows = np.arange(batch.num_rows) == row
    with pytest.raises(ValueError, match=f"row {row} has {longest} tokens.*={longest - 1}"):
        plan_micro_batches(batch, 100, limits=limits, rows=rows)
    others = (batch.lengths < longest).numpy()
    assert len(plan_micro_batches(batch, 100, limits=limits, rows=others))  # is not visited


def test_a_budget_below_one_token_is_refused() -> None:
    with pytest.raises(ValueError, match="token_budget: expected at least 1, got 0"):
        plan_micro_batches(agent_batch(0), 0)


@pytest.mark.parametrize("tree", [False, True])
def test_a_budget_may_exceed_the_kernels_integers(tree: bool) -> None:
    plan = plan_micro_batches(agent_batch(0), 1 << 70, tree=tree)
    assert len(plan) == len(plan_micro_batches(agent_batch(0), 1 << 40, tree=tree))


# --- limits of rotary embeddings whose frequencies depend on the longest row ---------------------

transformers = pytest.importorskip("transformers")


FACTORS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


PHI3 = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0}


def phi3(**rope: Any) -> Any:
    return transformers.Phi3Config(
        **PHI3, max_position_embeddings=64, original_max_position_embeddings=16, rope_scaling=rope
    )


def test_limits_of_configs() -> None:
    assert rope_limits(transformers.LlamaConfig()) == ()
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8}
    assert rope_limits(transformers.LlamaConfig(rope_scaling=yarn)) == ()
    assert rope_limits(phi3(rope_type="longrope", **FACTORS)) == (RopeLimit("longrope", 16),)
    nested = transformers.LlamaConfig()
    nested.rope_parameters = {
        "full_attention": {
            "rope_type": "longrope", "original_max_position_embeddings": 32, **FACTORS
        },
        "sliding_attention": {"rope_type": "default"},
    }  # fmt: skip
    assert rope_limits(nested) == (RopeLimit("longrope", 32),)
