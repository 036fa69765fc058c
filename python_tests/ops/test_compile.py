"""torch.compile of the ops: sizes and temperatures that change, and what no graph can hold."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from _losses import batch

from skyrl_fast import (
    group_advantage,
    linear_logprob,
    masked_logprob_loss,
    policy_loss,
    selected_logprob,
)

G = torch.Generator().manual_seed(5)


@pytest.fixture(autouse=True)
def fresh_graphs() -> None:
    torch._dynamo.reset()


def logits_and_targets(rows: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.randn(rows, vocab, generator=G).requires_grad_()
    return logits, torch.randint(0, vocab, (rows,), generator=G)


def graphs_of(function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> int:
    """Return how many graphs these calls compiled; values and gradients must be those of eager."""
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for x, *others in calls:
        want, got = function(x, *others), compiled(x, *others)
        torch.testing.assert_close(got, want)
        grads = [torch.autograd.grad(value.sum(), x)[0] for value in (want, got)]
        torch.testing.assert_close(grads[1], grads[0])
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.spec("tensors.compile")
def test_sizes_that_change_share_a_graph() -> None:
    pairs = [logits_and_targets(*shape) for shape in ((5, 7), (9, 7), (4, 11))]
    assert graphs_of(lambda x, t: selected_logprob(x, t, temperature=0.7), pairs) == 1

    def fused(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        old = torch.zeros(x.shape[0])
        return masked_logprob_loss(x, t, old, old + 0.5, old + 1).loss

    assert graphs_of(fused, pairs) == 1
    batches = [batch(shape) for shape in ((3, 20), (5, 9))]
    cells = [
        (d["logprobs"].requires_grad_(), d["old"], d["advantages"], d["mask"]) for d in batches
    ]
    assert graphs_of(lambda *cells: policy_loss(*cells).loss, cells) == 1


@pytest.mark.parametrize("op", ["selected_logprob", "masked_logprob_loss"])
def test_each_temperature_is_compiled_once_and_none_is_stale(op: str) -> None:
    def value(x: torch.Tensor, t: torch.Tensor, temperature: float) -> torch.Tensor:
        if op == "selected_logprob":
            return selected_logprob(x, t, temperature=temperature)
        old = torch.zeros(x.shape[0])
        return masked_logprob_loss(x, t, old, old + 0.5, temperature=temperature).loss

    data = logits_and_targets(5, 7)
    calls = [(*data, temperature) for temperature in (0.5, 0.7, 1.0, 0.5, 1.0, 0.7, 0.5)]
    assert graphs_of(value, calls) == 3


NO_GRAPH: dict[str, Callable[[], torch.Tensor]] = {
    "linear_logprob cannot be part of a full graph": lambda: linear_logprob(
        torch.ones(3, 2), torch.eye(4, 2), torch.tensor([0, 1, 2]), on_logits=lambda *_: None
    ),
    "group_advantage cannot be part of a full graph": lambda: group_advantage(
        torch.arange(4.0), torch.tensor([0, 0, 1, 1])
    ),
    "which tokens clip_cov and kl_cov select depends on values": lambda: (
        policy_loss(
            *(torch.full((2, 3), value) for value in (-1.0, -1.1, 0.5, 1.0)), loss="kl_cov"
        ).loss
    ),
}


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
@pytest.mark.parametrize("message", NO_GRAPH)
def test_what_a_graph_cannot_hold_is_an_error_or_a_break(message: str) -> None:
    call = NO_GRAPH[message]
    with pytest.raises(torch._dynamo.exc.Unsupported, match=f"Message: .*{message}"):
        torch.compile(call, fullgraph=True, backend="aot_eager")()
    assert torch.equal(torch.compile(call, backend="aot_eager")(), call())


def linear_inputs(rows: int, dtype: torch.dtype) -> dict[str, Any]:
    sizes = {"hidden": (rows, 2, 8), "weight": (33, 8), "bias": (33,)}
    leaves = {
        name: torch.randn(size, generator=G).to(dtype).requires_grad_()
        for name, size in sizes.items()
    }
    targets = torch.randint(0, 33, (rows, 2), generator=G)
    mask = torch.rand(rows, 2, generator=G) < 0.6
    return {**leaves, "targets": targets.masked_fill(~mask, -100), "mask": mask}


def linear_results(function: Any, data: dict[str, Any]) -> list[torch.Tensor]:
    """Return values and gradients."""
    leaves = [data[name] for name in ("hidden", "weight", "bias")]
    values = function(*data.values())
    total = sum((value * (k + 1)).square().sum() for k, value in enumerate(values))
    return [*values, *torch.autograd.grad(total, leaves, allow_unused=True)]


# Each value of each argument is in the default run.
PAIRED = [("all", None, 32), ("mask", 3, 16), ("nothing", None, 16), ("ignore_index", 3, 32)]
LINEAR = [
    pytest.param(
        select, chunk, {32: torch.float32, 16: torch.bfloat16}[bits],
        marks=() if (select, chunk, bits) in PAIRED else pytest.mark.slow,
    )
    for select in ("all", "mask", "nothing", "ignore_index")
    for chunk in (None, 3)
    for bits in (32, 16)
]  # fmt: skip


@pytest.mark.parametrize(("select", "chunk_rows", "dtype"), LINEAR)
def test_linear_logprob_is_one_operator_of_the_graph(
    select: str, chunk_rows: int | None, dtype: torch.dtype
) -> None:
    def values(hidden: Any, weight: Any, bias: Any, targets: Any, mask: Any) -> Any:
        options: dict[str, Any] = {"chunk_rows": chunk_rows, "soft_cap": 3.0, "logit_scale": 0.5}
        if select == "mask":
            options["loss_mask"] = mask
        elif select == "nothing":
            options["loss_mask"] = mask & False
        elif select == "ignore_index":
            options["ignore_index"] = -100
        else:
            targets = targets.clamp(min=0)
        return linear_logprob(
            hidden, weight, targets, bias=bias, return_entropy=True, temperature=0.7, **options
        )

    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(values, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (5, 9, 4):
        data = linear_inputs(rows, dtype)
        want, got = linear_results(values, data), linear_results(compiled, data)
        for name, a, b in zip(("p", "e", "dh", "dw", "db"), want, got, strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b), name
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("autocast", [False, True])
def test_linear_logprob_with_inductor(autocast: bool) -> None:
    def values(hidden: Any, weight: Any, bias: Any, targets: Any, mask: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = linear_logprob(hidden.tanh(), weight, targets, loss_mask=mask)
        return (out.exp(),)

    data = linear_inputs(7, torch.float32)
    data["bias"] = torch.zeros(33).requires_grad_()  # unused
    want = linear_results(values, data)
    got = linear_results(torch.compile(values, fullgraph=True), data)
    assert want.pop() is None and got.pop() is None
    for a, b in zip(want, got, strict=True):
        torch.testing.assert_close(b, a, rtol=2e-2 if autocast else 1e-5, atol=1e-5)


def test_linear_operator_passes_torchs_checks() -> None:
    data = linear_inputs(5, torch.float32)
    targets = data["targets"].clamp(min=0)
    for mask, chunk, entropy in ((data["mask"], 3, True), (None, None, False)):
        leaves = (data["hidden"], data["weight"], data["bias"])
        arguments = (*leaves, targets, mask, 0.7, 1.0, None, entropy, chunk, False)
        torch.library.opcheck(torch.ops.skyrl_fast.linear_logprob.default, arguments)


def test_compiled_linear_logprob_names_a_target_out_of_range() -> None:
    data = linear_inputs(5, torch.float32)
    call = torch.compile(linear_logprob, fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match=r"linear_logprob: target_ids: expected ids in \[0, 33\)"):
        call(data["hidden"], data["weight"], data["targets"].fill_(33))
