"""Tree attention: every kind equals per-row attention, in values and gradients."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from _trees import ROWS, forest, tree_of
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from skyrl_fast import _C
from skyrl_fast.ops.prefix_tree import attention
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
from skyrl_fast.ops.prefix_tree.tree import PrefixTree, ancestor_mask

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


def path_of(parents: list[int], node: int) -> list[int]:
    """Return the node and its ancestors, root first."""
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def by_hand(
    parents: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None = None,
    *,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Return softmax attention over a node and its ancestors, node by node."""
    outs, above = [], parents.tolist()
    for node in range(len(above)):
        path = path_of(above, node)
        last = len(path) - 1
        seen = [
            other
            for depth, other in enumerate(path)
            if (window is None or last - depth < window)
            and (chunk is None or depth // chunk == last // chunk)
        ]
        heads = []
        for head in range(q.shape[1]):
            other = head * k.shape[1] // q.shape[1]
            scores = k[0, other, seen] @ q[0, head, node] / q.shape[3] ** 0.5
            if softcap is not None:
                scores = softcap * (scores / softcap).tanh()
            exps = scores.exp()
            total = exps.sum() + (0.0 if sinks is None else sinks[head].exp())
            heads.append((exps / total) @ v[0, other, seen])
        outs.append(torch.stack(heads))
    return torch.stack(outs, 1)[None]


def assert_equal_attention(
    tree: PrefixTree, kind: str, dtype: Any, tolerance: float, **options: Any
) -> None:
    size = padded_size(tree.num_nodes, kind)
    if kind == "flex":  # not compiled here: blocks suffice
        size = FLEX_BLOCK * -(-tree.num_nodes // FLEX_BLOCK)
    parents, ends = pad_trees(tree.parents, tree.ends, size)
    plan = plan_tree_attention(parents, ends, kind=kind)
    inputs = [x.detach().requires_grad_(kind != "flex") for x in tensors(size, dtype)]
    if options.pop("sinks", False):
        inputs.append(torch.linspace(-2, 1, HEADS, dtype=dtype).requires_grad_(kind != "flex"))
    exact = [x.detach().double().requires_grad_() for x in inputs]
    wanted = by_hand(parents, *exact, **options)
    sinks = inputs[3] if len(inputs) > 3 else None
    got = tree_attention(*inputs[:3], plan, sinks=sinks, **options)
    torch.testing.assert_close(got.double(), wanted, atol=tolerance, rtol=tolerance)
    if kind == "flex":  # which has gradients on a GPU only
        return
    weights = torch.randn(wanted.shape)
    gradients = [
        torch.autograd.grad((out * weights).sum(), leaves)
        for out, leaves in ((got, inputs), (wanted, exact))
    ]
    for one, two in zip(*gradients, strict=True):
        torch.testing.assert_close(one.double(), two, atol=tolerance, rtol=tolerance)


# The values of a path of three nodes and a second child of the first are 1, 2, 4 and 8.
@pytest.mark.parametrize("kind", ["tiles", "dense", "flex"])
@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, [1, 3 / 2, 7 / 3, 9 / 2]),
        ({"window": 1}, [1, 2, 4, 8]),
        ({"window": 2}, [1, 3 / 2, 3, 9 / 2]),
        ({"window": 3}, [1, 3 / 2, 7 / 3, 9 / 2]),
        ({"chunk": 1}, [1, 2, 4, 8]),
        ({"chunk": 2}, [1, 3 / 2, 4, 9 / 2]),
        ({"chunk": 2, "window": 1}, [1, 2, 4, 8]),
        ({"sinks": torch.zeros(1)}, [1 / 2, 1, 7 / 4, 3]),
        ({"sinks": torch.zeros(1), "window": 2}, [1 / 2, 1, 2, 3]),
        ({"softcap": 5.0}, [1, 3 / 2, 7 / 3, 9 / 2]),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_table_of_equal_scores(kind: str, options: dict[str, Any], wanted: list[float]) -> None:
    parents, ends = torch.tensor([[-1, 0, 1, 0], [4, 3, 3, 4]], dtype=torch.int32)
    size = FLEX_BLOCK if kind == "flex" else 4
    plan = plan_tree_attention(*pad_trees(parents, ends, size), kind=kind)
    values = torch.zeros(1, 1, size, 16)  # the fewest that FlexAttention takes before torch 2.7
    values[0, 0, :4, 0] = torch.tensor([1.0, 2.0, 4.0, 8.0])
    zeros = torch.zeros_like(values)
    out = tree_attention(zeros, zeros, values, plan, **options)
    torch.testing.assert_close(out[0, 0, :4, 0], torch.tensor(wanted, dtype=torch.float32))


def test_cap_of_a_score() -> None:
    """Scores 6 and 0 of two nodes, capped at 2: weights e^(2 tanh 3) and 1."""
    tree = tree_of([[1, 2]])
    plan = plan_tree_attention(tree.parents, tree.ends)
    query, key, value = (torch.zeros(1, 1, 2, 1) for _ in range(3))
    query[0, 0, 1, 0], key[0, 0, 0, 0], value[0, 0, 0, 0] = 2.0, 3.0, 1.0
    out = tree_attention(query, key, value, plan, softcap=2.0)[0, 0, 1, 0]
    weight = math.exp(2 * math.tanh(3.0))
    assert float(out) == pytest.approx(weight / (weight + 1), rel=1e-6)


OPTIONS = [
    {"window": 1},
    {"window": 2, "sinks": True},
    {"window": 7, "softcap": 1.5},
    {"window": 64, "softcap": 50.0, "sinks": True},
    {"window": 10_000},
    {"chunk": 1, "sinks": True},
    {"chunk": 5},
    {"chunk": 16, "window": 7, "softcap": 0.5, "sinks": True},
    {"sinks": True},
    {"softcap": 1.0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_options_of_layers_by_hand(options: dict[str, Any]) -> None:
    tree = forest(len(str(options)), num_groups=2)
    assert_equal_attention(tree, "tiles", torch.float64, 1e-10, **options)
    assert_equal_attention(tree, "flex", torch.float64, 1e-10, **options)
    # float32 rounding of sums of a hundred terms
    assert_equal_attention(tree, "tiles", torch.float32, 3e-5, **options)


@given(
    rows=ROWS.filter(lambda rows: any(rows)),
    window=st.none() | st.integers(1, 8),
    chunk=st.none() | st.integers(1, 8),
    softcap=st.none() | st.floats(0.25, 60),
    sinks=st.booleans(),
)
def test_options_of_layers_on_small_trees(rows: list[list[int]], **options: Any) -> None:
    assert_equal_attention(tree_of(rows), "dense", torch.float64, 1e-11, **options)
    assert_equal_attention(tree_of(rows), "tiles", torch.float32, 2e-5, **options)


@pytest.mark.spec("tree.sinks-and-caps")
def test_gradients_of_all_options_by_differences() -> None:
    tree = tree_of([[1, 2, 3, 4], [1, 2, 5], [6, 7]])
    plan = plan_tree_attention(tree.parents, tree.ends)
    sinks = torch.tensor([0.5, -1.0], dtype=torch.float64, requires_grad=True)

    def attention(*inputs: torch.Tensor) -> torch.Tensor:
        *heads, sinks = inputs
        options = {"window": 3, "chunk": 2, "softcap": 1.5}
        return tree_attention(*heads, plan, sinks=sinks, **options)

    heads = tensors(tree.num_nodes, size=3, heads=(2, 1))
    assert torch.autograd.gradcheck(attention, (*heads, sinks))


@pytest.mark.spec("tree.reach")
def test_tiles_do_not_visit_blocks_beyond_the_window() -> None:
    """What lies far above is NaN, which any product with it would spread."""
    tree = tree_of([list(range(400)), [*range(300), *range(500, 560)]])
    plan = plan_tree_attention(tree.parents, tree.ends)
    for reach, first in (({"window": 20}, 300), ({"chunk": 100}, 300)):
        heads = [x.detach() for x in tensors(tree.num_nodes, torch.float32)]
        wanted = tree_attention(*heads, plan, **reach)
        assert bool((tree.positions[first:] >= 300).all())
        for x in heads[1:]:
            x[:, :, :180] = torch.nan  # not all of the nearest 200, as blocks and tiles are whole
        got = tree_attention(*heads, plan, **reach)
        assert torch.equal(got[:, :, first:], wanted[:, :, first:])


@pytest.mark.parametrize("kind", ["tiles", "dense", "flex"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_padding_has_no_part_in_the_gradient_of_sinks(kind: str) -> None:
    tree = forest(1, num_groups=1)
    padded = FLEX_BLOCK * -(-tree.num_nodes // FLEX_BLOCK)
    found = []
    for size in (tree.num_nodes, padded):
        used = kind if size % FLEX_BLOCK == 0 else "dense"
        plan = plan_tree_attention(*pad_trees(tree.parents, tree.ends, size), kind=used)
        heads = [x.detach()[:, :, :size].float() for x in tensors(padded)]
        sinks = torch.zeros(HEADS, requires_grad=True)
        out = tree_attention(*heads, plan, sinks=sinks, window=4)
        found.append(torch.autograd.grad(out[:, :, : tree.num_nodes].square().sum(), sinks)[0])
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)  # float32 sums of the nodes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window: expected a positive int or None, got 0"),
        ({"window": -3}, "window: expected a positive int or None, got -3"),
        ({"window": 2.0}, r"window: expected a positive int or None, got 2\.0"),
        ({"chunk": 0}, "chunk: expected a positive int or None, got 0"),
        ({"softcap": 0.0}, r"softcap: expected a positive and finite number or None, got 0\.0"),
        (
            {"softcap": float("nan")},
            "softcap: expected a positive and finite number or None, got nan",
        ),
        ({"sinks": torch.zeros(3)}, r"sinks: expected \(4,\) floats on cpu, got \(3,\)"),
        ({"sinks": torch.zeros(4, 1)}, r"sinks: expected \(4,\) floats on cpu, got \(4, 1\)"),
        ({"sinks": torch.zeros(4, dtype=torch.int64)}, r"got \(4,\) torch.int64"),
        ({"sinks": torch.zeros(4, device="meta")}, "got .* on meta"),
    ],
    ids=str,
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    tree = tree_of([[1, 2], [1, 3]])
    plan = plan_tree_attention(tree.parents, tree.ends)
    heads = [x.detach() for x in tensors(tree.num_nodes)]
    with pytest.raises(ValueError, match=f"tree_attention: .*{message}"):
        tree_attention(*heads, plan, **options)


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
    tree: PrefixTree, inputs: list[torch.Tensor], kind: str, **options: Any
) -> list[torch.Tensor]:
    """Return attention and gradients."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    plan = plan_tree_attention(tree.parents, tree.ends, kind=kind)
    sinks = inputs[3] if len(inputs) > 3 else None
    out = tree_attention(*inputs[:3], plan, sinks=sinks, **options)
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


@pytest.mark.parametrize(("size", "heads", "threads", "length"), SHAPES)
def test_tiles_match_a_dense_mask(
    size: int,
    heads: tuple[int, int],
    threads: int,
    length: int,
    simd_level: str,
) -> None:
    torch.set_num_threads(threads)
    tree = forest(length, num_groups=2, size=length)
    low = tensors(tree.num_nodes, torch.float32, size, heads)
    scale = None if size > 1 else 3.0  # scores far apart
    got = results(tree, low, "tiles", scale=scale)
    exact = results(tree, [x.double() for x in low], "dense", scale=scale)
    for one, two in zip(got, exact, strict=True):
        bound = 1e-5 * (1 + two.abs().max())  # float32 rounding of sums of a thousand terms
        assert (one - two).abs().max() <= bound


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(
    ("size", "heads", "threads", "length"), [SHAPES[0], (24, (4, 2), 5, 150), (80, (2, 1), 4, 200)]
)
def test_options_of_layers_in_tiles_match_a_dense_mask(
    size: int,
    heads: tuple[int, int],
    threads: int,
    length: int,
    options: dict[str, Any],
) -> None:
    torch.set_num_threads(threads)
    tree = forest(length, num_groups=2, size=length)
    low = tensors(tree.num_nodes, torch.float32, size, heads)
    options = dict(options)
    if options.pop("sinks", False):
        low.append(torch.linspace(-3, 3, heads[0]))
    got = results(tree, low, "tiles", **options)
    exact = results(tree, [x.double() for x in low], "dense", **options)
    for one, two in zip(got, exact, strict=True):
        bound = 1e-5 * (1 + two.abs().max())  # float32 rounding of sums of a thousand terms
        assert (one - two).abs().max() <= bound


def test_caps_and_sinks_at_every_simd_level(simd_level: str) -> None:
    tree = forest(7, num_groups=1, size=150)
    query, key, value = tensors(tree.num_nodes, torch.float32)
    low = [30 * query, key, value, torch.linspace(-3, 30, HEADS)]
    for softcap in (0.5, 3.0, 50.0):
        options = {"softcap": softcap, "window": 50}
        got = results(tree, low, "tiles", **options)
        exact = results(tree, [x.double() for x in low], "dense", **options)
        for one, two in zip(got, exact, strict=True):
            # float32 rounding of scores up to 50: 50 * 2^-24 of a weight, a thousand of them
            bound = 3e-5 * (1 + two.abs().max())
            assert (one - two).abs().max() <= bound, (simd_level, softcap)


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


def test_tiles_take_strided_heads_and_do_not_depend_on_the_number_of_threads() -> None:
    tree = forest(3, size=200)
    heads = [x.detach() for x in tensors(tree.num_nodes, torch.float32)]
    wanted = results(tree, heads, "tiles")
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in heads]
    last = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in heads]
    torch.set_num_threads(KEY_HEADS)
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
@pytest.mark.parametrize("kind", ["tiles", "dense"])
def test_what_is_no_tree(kind: str, parents: list[int], ends: list[int], message: str) -> None:
    tree = (torch.tensor(x, dtype=torch.int32) for x in (parents, ends))
    with pytest.raises(ValueError, match=message):
        plan_tree_attention(*tree, kind=kind)


@pytest.mark.parametrize("options", [{}, {"window": 7, "softcap": 2.0, "sinks": True}], ids=str)
def test_bfloat16_is_close(options: dict[str, Any]) -> None:
    tree = forest(0)
    exact = tensors(tree.num_nodes)
    plan = plan_tree_attention(tree.parents, tree.ends)
    low = [x.detach().bfloat16().requires_grad_() for x in exact]
    options = dict(options)
    if options.pop("sinks", False):
        low.append(torch.linspace(-2, 1, HEADS, dtype=torch.bfloat16).requires_grad_())
        options["sinks"] = low[3]
    out = tree_attention(*low[:3], plan, **options)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    if "sinks" in options:
        options["sinks"] = low[3].detach().double()
    wanted = tree_attention(*[x.detach().double() for x in low[:3]], plan, **options)
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
    assert out.dtype == wanted.dtype and exact.dtype == torch.float64
    # In torch 2.10 FlexAttention multiplies otherwise under autocast.
    torch.testing.assert_close(out, wanted, atol=3e-2 if kind == "flex" else 0, rtol=0)


@pytest.mark.spec("tree.block-mask")
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("reach", [{}, {"window": 60}, {"chunk": 150}], ids=str)
def test_flex_blocks_match_the_node_ends(seed: int, reach: dict[str, int]) -> None:
    tree = forest(seed, num_groups=4, size=200)
    size = padded_size(tree.num_nodes, "flex")
    assert size % FLEX_BLOCK == 0
    parents, ends = pad_trees(tree.parents, tree.ends, size)
    numbers = torch.arange(size)
    seen = (numbers[None] <= numbers[:, None]) & (numbers[:, None] < ends[None])
    if reach:
        above = parents.tolist()
        depths = torch.tensor([len(path_of(above, node)) - 1 for node in range(size)])
        window, chunk = reach.get("window", size), reach.get("chunk", size)
        seen &= depths[:, None] - depths[None] < window
        seen &= depths[:, None] // chunk == depths[None] // chunk
    per_block = seen.view(size // FLEX_BLOCK, FLEX_BLOCK, -1, FLEX_BLOCK)
    mask = flex_block_mask(ends, **reach)
    full, partial = (torch.zeros(len(per_block), len(per_block)) for _ in range(2))
    for counts, indices, target in (
        (mask.kv_num_blocks, mask.kv_indices, partial),
        (mask.full_kv_num_blocks, mask.full_kv_indices, full),
    ):
        for row, count in enumerate(counts[0, 0].tolist()):
            target[row, indices[0, 0, row, :count].long()] = 1
    # Blocks are recognised as full from bounds alone, which depths of forks may hide.
    seen_by_all = per_block.all(3).all(1)
    assert torch.equal(full.bool(), seen_by_all) or (reach and bool((seen_by_all >= full).all()))
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


MODELS = (  # query heads, key heads, head size
    (4, 2, 16),
    (4, 4, 16),
    (8, 2, 16),
    (4, 2, 32),
    (2, 1, 64),
    (6, 2, 16),
    (6, 3, 16),
    (6, 6, 32),
    (8, 8, 16),
    (2, 2, 16),
)
LENGTHS = (256, 512, 384, 1024, 640, 768)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """FlexAttention compiled as on a GPU, by a backend that counts graphs and runs them as is."""
    from torch.nn.attention import flex_attention as torch_flex

    made: list[object] = []

    def count(graph: torch.fx.GraphModule, _inputs: object) -> object:
        made.append(graph)
        return graph.forward

    monkeypatch.setattr(attention, "COMPILED_DEVICES", ("cpu",))
    monkeypatch.setattr(attention, "FLEX_BACKEND", count)
    monkeypatch.setattr(attention, "_compiled_flex", {})
    # torch refuses gradients of FlexAttention on a CPU: they are computed for GPUs alone.
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    torch._dynamo.reset()
    return made


def attend(shape: tuple[int, int, int], size: int, *, trained: bool, **options: Any) -> Tensor:
    heads, groups, width = shape
    generator = torch.Generator().manual_seed(size)
    sizes = ((1, heads, size, width), *[(1, groups, size, width)] * 2)
    inputs = [torch.randn(s, generator=generator).requires_grad_(trained) for s in sizes]
    numbers = torch.arange(size, dtype=torch.int32)
    plans = (numbers - 1, torch.full_like(numbers, size))  # a path
    with torch.set_grad_enabled(trained):
        out = tree_attention(*inputs, plan_tree_attention(*plans, kind="flex"), **options)
        if size == LENGTHS[0]:
            wanted = tree_attention(*inputs, plan_tree_attention(*plans, kind="dense"), **options)
            torch.testing.assert_close(out, wanted, atol=2e-5, rtol=2e-5)  # other orders of sums
    return out


@pytest.mark.filterwarnings("error")
@pytest.mark.spec("tree.flex-graphs")
@pytest.mark.parametrize("num_models", [4, pytest.param(len(MODELS), marks=pytest.mark.slow)])
def test_models_of_any_length_need_three_graphs_per_kind_of_mask(
    graphs: list[object], num_models: int
) -> None:
    for number, shape in enumerate(MODELS[:num_models]):
        for trained in (False, True):
            for size in LENGTHS if number == 0 else LENGTHS[:3]:
                for options in ({}, {"window": 100}, {"window": 7}):  # windows share a graph
                    attend(shape, size, trained=trained, **options)
        assert len(graphs) == 3 * 2 * (number + 1)  # kinds: all of the path, and a window


@pytest.mark.spec("tree.flex-graphs")
def test_attention_that_would_run_uncompiled_is_an_error(graphs: list[object]) -> None:
    from torch._dynamo.exc import FailOnRecompileLimitHit

    with torch._dynamo.config.patch(recompile_limit=1):
        attend(MODELS[0], 256, trained=False)
        with pytest.raises(FailOnRecompileLimitHit):
            attend(MODELS[0], 512, trained=False)


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_flex_attention_with_options_on_a_gpu(options: dict[str, Any]) -> None:
    tree = forest(3, num_groups=20, size=200)
    size = padded_size(tree.num_nodes, "flex")
    trees = pad_trees(tree.parents, tree.ends, size)
    exact = [x.detach() for x in tensors(size, torch.float32, 64)]
    options = dict(options)
    if options.pop("sinks", False):
        exact.append(torch.linspace(-3, 3, HEADS))
    results = []
    for kind, dtype in (("dense", torch.float64), ("dense", torch.bfloat16), ("flex", None)):
        inputs = [x.to("cuda", dtype or torch.bfloat16).requires_grad_() for x in exact]
        plan = plan_tree_attention(*trees, device="cuda", kind=kind)
        sinks = inputs[3] if len(inputs) > 3 else None
        out = tree_attention(*inputs[:3], plan, sinks=sinks, **options)
        results.append([out, *torch.autograd.grad(out.float().square().sum(), inputs)])
    for truth, dense, flex in zip(*results, strict=True):
        noise = (dense - truth).norm()
        assert (flex - truth).norm() <= 2 * noise + 1e-3  # as accurate as dense bfloat16


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
    assert node_pairs(tree.ends.numpy()) == int(ancestor_mask(tree.ends).sum())


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8)), "query: expected"),
        (((2, 2, 3, 8), (2, 2, 3, 8), (2, 2, 3, 8)), "query: expected"),
        (((1, 2, 3, 8), (1, 2, 3, 4), (1, 2, 3, 4)), "key and value: expected"),
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
    for kind, message in (("other", "expected one of"), ("flex", "multiple of 128")):
        with pytest.raises(ValueError, match=message):
            plan_tree_attention(tree.parents, tree.ends, kind=kind)
