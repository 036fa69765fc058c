"""Tree attention: every kind equals per-row attention, in values and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from _trees import ROWS, forest, tree_of
from hypothesis import given

from skyrl_fast.ops.prefix_tree import blocks as tree_blocks
from skyrl_fast.ops.prefix_tree.attention import (
    FLEX_BLOCK,
    flex_block_mask,
    kind_for,
    node_pairs,
    pad_trees,
    padded_size,
    plan_tree_attention,
    tree_attention,
)
from skyrl_fast.ops.prefix_tree.tree import PrefixTree

HEADS, KEY_HEADS, SIZE = 4, 2, 8


def tensors(
    num_nodes: int, dtype: torch.dtype = torch.float64, size: int = SIZE
) -> list[torch.Tensor]:
    torch.manual_seed(num_nodes)
    shapes = [(1, heads, num_nodes, size) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def by_hand(tree: PrefixTree, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return softmax attention over a node and its ancestors, node by node."""
    mask, outs = tree.ancestor_mask(), []
    for node in range(tree.num_nodes):
        seen = mask[node].nonzero().flatten()
        heads = []
        for head in range(HEADS):
            other = head * KEY_HEADS // HEADS
            weights = (k[0, other, seen] @ q[0, head, node] / SIZE**0.5).softmax(0)
            heads.append(weights @ v[0, other, seen])
        outs.append(torch.stack(heads))
    return torch.stack(outs, 1)[None]


def assert_equal_attention(tree: PrefixTree, kind: str, dtype: Any, tolerance: float) -> None:
    plan = plan_tree_attention(tree.parents, tree.ends, kind=kind)
    inputs = tensors(tree.num_nodes, dtype)
    wanted = by_hand(tree, *inputs)
    got = tree_attention(*inputs, plan)
    torch.testing.assert_close(got, wanted, atol=tolerance, rtol=tolerance)
    weights = torch.randn_like(wanted)
    gradients = [torch.autograd.grad((x * weights).sum(), inputs) for x in (got, wanted)]
    for one, two in zip(*gradients, strict=True):
        torch.testing.assert_close(one, two, atol=tolerance, rtol=tolerance)


@pytest.mark.spec("tree.attention")
@pytest.mark.parametrize("kind", ["blocks", "dense"])
@given(rows=ROWS.filter(lambda rows: any(rows)))
def test_small_trees_by_hand(kind: str, rows: list[list[int]]) -> None:
    assert_equal_attention(tree_of(rows), kind, torch.float64, 1e-12)


@pytest.mark.spec("tree.attention")
@pytest.mark.parametrize("small", [1, 16, 64])
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3))])
def test_forests_by_hand(seed: int, small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_blocks, "SMALL_SUBTREES", small)
    for kind in ("blocks", "dense"):
        assert_equal_attention(forest(seed), kind, torch.float64, 1e-12)
    # float32 rounding of sums of a hundred terms
    assert_equal_attention(forest(seed), "blocks", torch.float32, 2e-5)


def test_bfloat16_is_close() -> None:
    tree = forest(0)
    exact = tensors(tree.num_nodes)
    plan = plan_tree_attention(tree.parents, tree.ends)
    low = [x.detach().bfloat16().requires_grad_() for x in exact]
    out = tree_attention(*low, plan)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    wanted = tree_attention(*[x.detach().double() for x in low], plan)
    # 8 significant bits, rounded several times
    torch.testing.assert_close(out.double(), wanted, atol=3e-2, rtol=3e-2)
    assert all(x.grad is not None and x.grad.dtype == torch.bfloat16 for x in low)


@pytest.mark.parametrize("kind", ["blocks", "dense", "flex"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_under_autocast_queries_may_differ_from_values(kind: str) -> None:
    """Rotary embeddings return float32 queries and keys; values keep the autocast dtype."""
    tree = forest(0)
    size = FLEX_BLOCK * -(-tree.num_nodes // FLEX_BLOCK)
    plan = plan_tree_attention(*pad_trees(tree.parents, tree.ends, size), kind=kind)
    query, key, value = (x.detach().float() for x in tensors(size))
    low = [x.bfloat16() for x in (query, key, value)]
    wanted = tree_attention(*low, plan)
    with torch.autocast("cpu", torch.bfloat16):
        out = tree_attention(query, key, low[2], plan)
        exact = tree_attention(*[x.double() for x in (query, key, value)], plan)
    assert torch.equal(out, wanted) and exact.dtype == torch.float64


@pytest.mark.parametrize("small", [1, 5, 64, 10_000])
def test_blocks_cover_every_node_once_and_attend_to_its_ancestors(
    small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree_blocks, "SMALL_SUBTREES", small)
    tree = forest(1)
    blocks = tree_blocks.tree_blocks(tree.parents.numpy(), tree.ends.numpy())
    assert [b.start for b in blocks] == [0, *[b.stop for b in blocks[:-1]]]
    assert blocks[-1].stop == tree.num_nodes
    seen = torch.zeros(tree.num_nodes, tree.num_nodes, dtype=torch.bool)
    for block in blocks:
        for start, stop in block.path:
            seen[block.start : block.stop, start:stop] = True
        size = block.stop - block.start
        own = torch.ones(size, size).tril() if block.mask is None else block.mask.exp()
        seen[block.start : block.stop, block.start : block.stop] = own.bool()
    assert torch.equal(seen, tree.ancestor_mask())


@pytest.mark.spec("tree.block-mask")
@pytest.mark.parametrize("seed", range(6))
def test_flex_blocks_match_the_node_ends(seed: int) -> None:
    tree = forest(seed, num_groups=4, size=200)
    size = padded_size(tree.num_nodes, "flex")
    assert size % FLEX_BLOCK == 0
    parents, ends = pad_trees(tree.parents, tree.ends, size)
    numbers = torch.arange(size)
    seen = (numbers[None] <= numbers[:, None]) & (numbers[:, None] < ends[None])
    per_block = seen.view(size // FLEX_BLOCK, FLEX_BLOCK, -1, FLEX_BLOCK)
    mask = flex_block_mask(ends)
    full, partial = (torch.zeros(len(per_block), len(per_block)) for _ in range(2))
    for counts, indices, target in (
        (mask.kv_num_blocks, mask.kv_indices, partial),
        (mask.full_kv_num_blocks, mask.full_kv_indices, full),
    ):
        for row, count in enumerate(counts[0, 0].tolist()):
            target[row, indices[0, 0, row, :count].long()] = 1
    assert torch.equal(full.bool(), per_block.all(3).all(1))
    # A fully masked block may be visited, but rarely is: nodes end at the same places.
    needed = per_block.any(3).any(1) & ~full.bool()
    assert bool((partial.bool() | ~needed).all())
    assert torch.equal(mask.mask_mod(0, 0, numbers[:, None], numbers[None]), seen)
    assert parents[tree.num_nodes :].eq(-1).all()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_without_compiling() -> None:
    tree = forest(3, num_groups=2)
    size = FLEX_BLOCK * -(-tree.num_nodes // FLEX_BLOCK)
    trees = pad_trees(tree.parents, tree.ends, size)
    inputs = [x.detach().float() for x in tensors(size)]
    outs = [
        tree_attention(*inputs, plan_tree_attention(*trees, kind=kind))
        for kind in ("flex", "dense")
    ]
    torch.testing.assert_close(*outs, atol=2e-5, rtol=2e-5)  # float32: other orders of sums


@pytest.mark.gpu
@pytest.mark.parametrize("size_of_head", [64, 128])  # torch's kernel takes 16 and more
def test_flex_attention_on_a_gpu(size_of_head: int) -> None:
    tree = forest(3, num_groups=20, size=200)
    size = padded_size(tree.num_nodes, "flex")
    trees = pad_trees(tree.parents, tree.ends, size)
    exact = tensors(size, torch.float32, size_of_head)
    results = []
    for kind, dtype in (("dense", torch.float32), ("dense", torch.bfloat16), ("flex", None)):
        inputs = [x.detach().to("cuda", dtype or torch.bfloat16).requires_grad_() for x in exact]
        out = tree_attention(*inputs, plan_tree_attention(*trees, device="cuda", kind=kind))
        results.append([out, *torch.autograd.grad(out.float().sum(), inputs)])
    for truth, dense, flex in zip(*results, strict=True):
        noise = (dense.float() - truth).norm()
        assert (flex.float() - truth).norm() <= 2 * noise + 1e-3  # as accurate as dense bfloat16


def test_kind_is_chosen_by_device_and_size() -> None:
    assert kind_for(10, "cpu") == kind_for(10**6, "cpu") == "blocks"
    assert (kind_for(100, "cuda"), kind_for(5000, "cuda")) == ("dense", "flex")
    assert kind_for(5000, "mps") == "dense"


def test_pair_count_matches_the_mask() -> None:
    tree = forest(5)
    assert node_pairs(tree.ends.numpy()) == int(tree.ancestor_mask().sum())


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8)), "query must be"),
        (((2, 2, 3, 8), (2, 2, 3, 8), (2, 2, 3, 8)), "query must be"),
        (((1, 2, 3, 8), (1, 2, 3, 4), (1, 2, 3, 4)), "key and value must be"),
        (((1, 3, 3, 8), (1, 2, 3, 8), (1, 2, 3, 8)), "a multiple of G"),
    ],
)
def test_invalid_shapes(shapes: Any, message: str) -> None:
    tree = tree_of([[1, 2], [1, 3]])
    plan = plan_tree_attention(tree.parents, tree.ends)
    with pytest.raises(ValueError, match=message):
        tree_attention(*[torch.zeros(shape) for shape in shapes], plan)


def test_unavailable_kinds() -> None:
    tree = tree_of([[1, 2], [1, 3]])
    for kind, message in (("other", "must be one of"), ("flex", "multiple of 128")):
        with pytest.raises(ValueError, match=message):
            plan_tree_attention(tree.parents, tree.ends, kind=kind)
