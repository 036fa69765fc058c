"""Weights that an engine reads from the trainer's memory: in place, checked, and else by a file."""

from typing import Any

import pytest
import torch
from _weights import Worker

from skyrl_fast.rollout.engine.weights.receipt import WeightSyncError, check_receipts, read_receipts
from skyrl_fast.rollout.engine.weights.transports.memory import SharedMemory

pytestmark = pytest.mark.spec("async.weight-transfer")


class TwoHeads(torch.nn.Module):
    """Tied weights, an odd size, an empty one, and a buffer of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.arange(15.0).view(3, 5))
        self.tied = self.w
        self.narrow = torch.nn.Parameter(torch.ones(7, dtype=torch.bfloat16))
        self.empty = torch.nn.Parameter(torch.zeros(0, 4))
        self.register_buffer("count", torch.tensor([1, 2, 3]))

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.detach() for name, value in self.state_dict(keep_vars=True).items()}


def load(memory: SharedMemory, weights: Any, dtype: torch.dtype | None = None) -> tuple[str, Any]:
    """Load as an engine does; return the call's method, and what the engine's model has."""
    worker = Worker()
    with memory(weights, dtype) as call:
        answers = [getattr(worker, call.method)(*call.arguments)]
        check_receipts(read_receipts(answers), call.sent.digests)
        return call.method, {name: value.clone() for name, value in worker.model.loaded.items()}


def test_an_engine_reads_the_trainers_own_memory() -> None:
    model, memory = TwoHeads(), SharedMemory()
    parameters = list(model.parameters())
    before = {name: value.clone() for name, value in model.weights().items()}
    memory.adopt([*parameters, model.count])
    assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]
    assert model.w is model.tied
    for _ in range(2):
        method, loaded = load(memory, model.weights())
        assert method == "load_weights_memory"
        assert loaded.keys() == before.keys() - {"tied"}
        for name, value in loaded.items():
            assert torch.equal(value, before[name]) and value.dtype == before[name].dtype
        with torch.no_grad():  # as an optimizer does
            model.w.add_(1)
            before["w"].add_(1)
        memory.adopt(model.parameters())  # they stay where they are


def test_a_loader_cannot_change_the_trainers_weights() -> None:
    model, memory = TwoHeads(), SharedMemory()
    memory.adopt(model.parameters())
    before = model.w.detach().clone()
    worker = Worker()
    with memory({"w": model.w.detach()}) as call:
        getattr(worker, call.method)(*call.arguments)
        worker.model.loaded["w"].zero_()
        assert torch.equal(model.w, before)


@pytest.mark.parametrize("case", ["another dtype", "not adopted", "made for the update"])
def test_other_weights_go_by_a_file(case: str) -> None:
    model, memory = TwoHeads(), SharedMemory()
    if case != "not adopted":
        memory.adopt([*model.parameters(), model.count])
    weights = model.weights()
    dtype = torch.bfloat16 if case == "another dtype" else None
    if case == "made for the update":
        weights["narrow"] = weights["narrow"] * 2
    method, loaded = load(memory, weights, dtype)
    assert method == "load_weights_file"
    for name, value in loaded.items():
        expected = weights[name]
        if dtype is not None and expected.is_floating_point():
            expected = expected.to(dtype)
        assert torch.equal(value, expected) and value.dtype == expected.dtype


def test_no_weights_are_an_error() -> None:
    with (
        pytest.raises(WeightSyncError, match="there are no weights to hand over"),
        SharedMemory()({}),
    ):
        pass


def test_a_change_while_the_engine_loads_is_an_error() -> None:
    model, memory = TwoHeads(), SharedMemory()
    memory.adopt([*model.parameters(), model.count])
    worker = Worker()
    with memory(model.weights()) as call:
        with torch.no_grad():
            model.w.add_(1)
        answers = [getattr(worker, call.method)(*call.arguments)]
        with pytest.raises(WeightSyncError, match=r"other values than the trainer's: w \("):
            check_receipts(read_receipts(answers), call.sent.digests)
