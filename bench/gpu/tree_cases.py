"""Training steps over agent rows on a GPU: prefix trees compared with other layouts.

The model has the shape of Qwen2.5-1.5B with random weights, computing in bfloat16; full
lengths. "packed" rows use FlexAttention, like trees; "packed, varlen" uses torch's flash attention
of variable lengths, which does not support trees.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import torch

from bench._agents import HISTORIES
from bench._tree_steps import (
    CONTENDERS,
    LARGE,
    SMALL,
    batch_of,
    gradient,
    planned,
    policy,
    step,
)
from bench.baselines.padded_rows import varlen_attention
from bench.gpu.case import OURS, Case, within

BUDGET = 32_768  # tokens of a forward pass
TOLERANCE = 0.15  # of gradients by their norm: bfloat16 through 28 layers in other orders of sums


def tree_cases(
    device: str, *, large: bool, only: str, shapes: Sequence[str], divisor: int
) -> Iterator[Case]:
    """One group per shape and history of agents; "packed" is the reference of the others.

    Args:
        device: of the model.
        large: a model whose times say something.
        only: part of the names of the groups to run.
        shapes: of the agents, of `SHAPES`.
        divisor: of the lengths, above 1 for a smoke test.
    """
    sizes, what = (LARGE, "Qwen2.5-1.5B's shape, bfloat16") if large else (SMALL, "a small model")
    groups = {
        f"prefix tree: agents {shape} {history}, {what}": (shape, history)
        for shape in shapes
        for history in HISTORIES
    }
    groups = {group: names for group, names in groups.items() if only in group}
    if not groups:
        return
    model = policy(sizes, device, torch.bfloat16 if large else torch.float32, BUDGET)

    def run(contender: str) -> tuple[float, int]:
        if contender == "packed, varlen":
            with varlen_attention():
                return step("packed", model, batch)
        return step(contender, model, batch)

    wanted: dict[str, tuple[float, torch.Tensor]] = {}  # of the present group

    def error(contender: str) -> float:
        if group not in wanted:
            wanted.clear()
            wanted[group] = run("packed")[0], gradient(model)
        (loss, _), (wanted_loss, wanted_grad) = run(contender), wanted[group]
        within(abs(loss - wanted_loss) / abs(wanted_loss), TOLERANCE)
        return within(float((gradient(model) - wanted_grad).norm() / wanted_grad.norm()), TOLERANCE)

    def forget() -> None:
        model.model.zero_grad(set_to_none=True)

    for group, (shape, history) in groups.items():
        batch = batch_of(shape, history, divisor)
        contenders = list(CONTENDERS)
        if device == "cuda":
            contenders.insert(contenders.index("packed") + 1, "packed, varlen")
        for contender in contenders:
            plan = "packed" if contender == "packed, varlen" else contender
            tokens = sum(m.input_ids.numel() for m in planned(plan, batch, model)[1])
            call: Callable[[], object] = functools.partial(run, contender)
            check = functools.partial(error, contender)
            yield Case(group, contender, call, 0.0, forget, check, details={"tokens": tokens})
        planning = functools.partial(planned, OURS, batch, model)
        yield Case(group, f"{OURS}, planning only", planning, 0.0)
