"""Tree attention: every kind equals per-row attention, in values and gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from _trees import ROWS, forest, tree_of
from hypothesis import given

from skyrl_fast import _C
from skyrl_fast.ops.prefix_tree import tiles
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
LEVELS = ["baseline", "avx2", "avx512"]


@pytest.fixture(params=LEVELS)
def simd_level(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _C.simd_level()
    if LEVELS.index(request.param) > LEVELS.index(before):
        pytest.skip(f"this CPU has {before} at most")
    _C.set_simd_level(request.param)
    yield request.param
    _C.set_simd_level(before)


def tensors(
    num_nodes: int,
    dtype: torch.dtype = torch.float64,
    size: int = SIZE,
    heads: tuple[int, int] = (HEADS, KEY_HEADS),
) -> list[torch.Tensor]:
    torch.manual_seed(num_nodes)
    shapes = [(1, number, num_nodes, size) for number in (*heads, heads[1])]
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
@given(rows=ROWS.filter(lambda rows: any(rows)))
def test_small_trees_by_hand(rows: list[list[int]]) -> None:
    assert_equal_attention(tree_of(rows), "dense", torch.float64, 1e-12)
    assert_equal_attention(tree_of(rows), "tiles", torch.float32, 1e-5)


@pytest.mark.spec("tree.attention")
@pytest.mark.parametrize("seed", [0, 1])
def test_forests_by_hand(seed: int) -> None:
    assert_equal_attention(forest(seed), "tiles", torch.float64, 1e-12)
    # float32 rounding of sums of a hundred terms
    assert_equal_attention(forest(seed), "tiles", torch.float32, 2e-5)


def results(
    tree: PrefixTree, inputs: list[torch.Tensor], kind: str, scale: float | None = None
) -> list[torch.Tensor]:
    """Return attention and gradients."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    plan = plan_tree_attention(tree.parents, tree.ends, kind=kind)
    out = tree_attention(*inputs, plan, scale=scale)
    torch.manual_seed(1)
    weights = torch.randn(out.shape)
    return [out, *torch.autograd.grad((out * weights).sum(), inputs)]


# Head sizes that are no multiple of a vector, several chunks of keys, more threads than heads.
SHAPES = [
    (1, (1, 1), 1, 40),
    (7, (3, 1), 3, 40),
    (16, (2, 2), 2, 150),
    (24, (4, 2), 5, 700),
    (80, (2, 1), 4, 300),
]


@pytest.mark.spec("tree.attention")
@pytest.mark.parametrize(("size", "heads", "threads", "length"), SHAPES)
def test_tiles_match_a_dense_mask(
    size: int,
    heads: tuple[int, int],
    threads: int,
    length: int,
    simd_level: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tiles, "num_threads", lambda: threads)
    tree = forest(length, num_groups=2, size=length)
    low = tensors(tree.num_nodes, torch.float32, size, heads)
    scale = None if size > 1 else 3.0  # scores far apart
    got = results(tree, low, "tiles", scale)
    exact = results(tree, [x.double() for x in low], "dense", scale)
    for one, two in zip(got, exact, strict=True):
        bound = 1e-5 * (1 + two.abs().max())  # float32 rounding of sums of a thousand terms
        assert (one - two).abs().max() <= bound


@pytest.mark.spec("tree.attention")
def test_tiles_of_unusual_trees() -> None:
    """A long row with a leaf at each node, unrelated nodes, a comb of long branches, no node."""
    spine = list(range(100))
    comb = [[*spine[: n + 1], -1 - n] for n in range(99)]
    long_leaves = [[*range(300), *([1000 + n] * 90)] for n in range(5)]
    for rows in (comb, [[n] for n in range(70)], long_leaves, [[]]):
        tree = tree_of([[token + 2000 for token in row] for row in rows])
        low = tensors(tree.num_nodes, torch.float32)
        exact = results(tree, [x.double() for x in low], "dense")
        for one, two in zip(results(tree, low, "tiles"), exact, strict=True):
            torch.testing.assert_close(one.double(), two, atol=2e-5, rtol=2e-5)


def test_tiles_take_strided_heads_and_do_not_depend_on_the_number_of_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tree = forest(3, size=200)
    heads = [x.detach() for x in tensors(tree.num_nodes, torch.float32)]
    wanted = results(tree, heads, "tiles")
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in heads]
    last = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in heads]
    monkeypatch.setattr(tiles, "num_threads", lambda: KEY_HEADS)
    for inputs in (strided, last):
        assert all(map(torch.equal, results(tree, inputs, "tiles"), wanted))


@pytest.mark.parametrize(
    ("parents", "ends", "message"),
    [
        ([-1, 1], [2, 2], "wanted a parent before it"),
        ([-1, -2], [1, 2], "wanted a parent before it"),
        ([-1, 0], [3, 2], "at most 2"),
        ([-1, 0, 0], [2, 2, 3], "at most 2"),
        ([-1, 0, 0], [3, 3, 3], "wanted parent 1"),
        ([-1, 0], [2, 1], "wanted an end after it"),
    ],
)
def test_tiles_of_what_is_no_tree(parents: list[int], ends: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_tree_attention(*(torch.tensor(x, dtype=torch.int32) for x in (parents, ends)))


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


@pytest.mark.parametrize("kind", ["tiles", "dense", "flex"])
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
    assert kind_for(10, "cpu") == kind_for(10**6, "cpu") == "tiles"
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
