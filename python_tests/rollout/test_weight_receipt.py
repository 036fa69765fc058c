"""Receipts of loaded weights: exact where log-probabilities round."""

from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from skyrl_fast.rollout.engine.weights.receipt import (
    Receipt,
    WeightSyncError,
    check_receipts,
    chunk_sums,
    chunk_sums_on_cpu,
    odd_places,
    read_receipts,
    record_digests,
    tensor_digest,
)
from skyrl_fast.rollout.engine.weights.transports.file import send_by_file

pytestmark = pytest.mark.spec("sync.receipts")


@pytest.mark.parametrize(
    ("values", "dtype", "wanted"),
    [
        ([1, 2], torch.int64, "int64[2]:0000000000000007"),  # 1 * 1 + 3 * 2
        ([], torch.float32, "float32[0]:0000000000000000"),
        (1.5, torch.float32, "float32[]:000000003fc00000"),  # its bits
        ([[1.0, 0.0, 0.0]], torch.bfloat16, "bfloat16[1, 3]:0000000000003f80"),
    ],
)
def test_digests_by_hand(values: object, dtype: torch.dtype, wanted: str) -> None:
    assert tensor_digest(torch.tensor(values, dtype=dtype)) == wanted


@pytest.mark.parametrize("size", [1, 7, 65_536 * 2, 65_536 * 4 + 3])
def test_every_bit_and_place_changes_the_digest(size: int) -> None:
    weights = torch.randn(size, generator=torch.Generator().manual_seed(0))
    before = tensor_digest(weights)
    for at in {0, size // 2, size - 1}:
        for bit in (0, 15, 31):
            changed = weights.clone()
            changed.view(torch.int32)[at] ^= -(2**31) if bit == 31 else 1 << bit
            assert tensor_digest(changed) != before
    if size > 1:
        assert tensor_digest(weights.flip(0)) != before
    assert tensor_digest(weights.clone()) == before
    assert tensor_digest(torch.stack([weights, weights])[:, :1].t()) == tensor_digest(
        weights[:1].repeat(1, 2)
    )  # strides do not count


class CountOps(TorchDispatchMode):
    """Counts the calls of torch's functions, those that only make views excepted."""

    VIEWS = ("view", "split", "slice", "detach", "alias", "expand", "unsafe_split")

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function.overloadpacket.__name__
        if name not in self.VIEWS:
            self.names.append(name)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("size", [1, 70_000, 65_536 * 3, 65_536 * 300 + 5])
def test_a_gpu_sums_as_a_cpu_in_two_launches_per_slab(size: int) -> None:
    """300 chunks are three slabs of 64 MiB; launches were four per chunk."""
    words = torch.randint(-(2**63), 2**63 - 1, (size,))
    expected = [x % 2**64 for x in chunk_sums_on_cpu(words)]
    odd_places(words.device)  # made once per device
    with CountOps() as counted:
        sums = chunk_sums(words)
    assert [x % 2**64 for x in sums] == expected
    slabs = -(-(size // 65_536) // 128) + (size % 65_536 > 0)
    launches = [name for name in counted.names if name in ("mul", "sum")]
    assert len(launches) == 2 * slabs <= 8
    assert len(counted.names) <= 2 * slabs + 2 + slabs  # joined and read once


WEIGHTS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, 3), "norm": torch.ones(3)}
SENT = {name: tensor_digest(tensor) for name, tensor in WEIGHTS.items()}
RECEIPT = Receipt(digests=SENT, unloaded=[], dtype="bfloat16")


def test_what_the_loader_took_is_recorded_and_confirmed() -> None:
    digests: dict[str, str] = {}
    taken = record_digests(WEIGHTS.items(), digests)
    assert next(taken)[0] == "a"
    assert list(digests) == ["a"]  # not what it was offered
    list(taken)
    receipt = replace(RECEIPT, digests=digests)
    assert read_receipts([asdict(receipt)]) == [receipt]
    assert check_receipts([receipt, receipt], SENT) == torch.bfloat16


@pytest.mark.spec("sync.ipc-digests")
def test_workers_that_read_the_same_memory_divide_its_digests() -> None:
    taken: list[torch.Tensor] = []

    def count(tensor: torch.Tensor) -> str:
        taken.append(tensor)
        return tensor_digest(tensor)

    receipts = []
    for rank in range(2):
        digests: dict[str, str] = {}
        list(record_digests(WEIGHTS.items(), digests, rank, 2, digest_of=count))
        receipts.append(replace(RECEIPT, digests=digests))
    assert len(taken) == len(WEIGHTS)
    assert check_receipts(receipts, SENT) == torch.bfloat16
    with pytest.raises(WeightSyncError, match="no worker of the engine took the digests of: b"):
        check_receipts(receipts[:1], SENT)
    wrong = replace(receipts[1], digests=receipts[1].digests | {"b": "other"})
    with pytest.raises(WeightSyncError, match="other values than the trainer's: b"):
        check_receipts([receipts[0], wrong], SENT)
    missing = replace(receipts[1], digests={"b": SENT["b"]})
    with pytest.raises(WeightSyncError, match="did not receive: a, norm"):
        check_receipts([receipts[0], missing], SENT)


def test_a_file_has_the_digests_of_what_was_written() -> None:
    with send_by_file(WEIGHTS) as call:
        assert call.sent.digests == SENT
        assert call.sent.num_bytes == 24 + 24 + 12


def with_digests(**change: str | None) -> Receipt:
    changed = {**SENT, **change}
    return replace(RECEIPT, digests={k: v for k, v in changed.items() if v is not None})


@pytest.mark.parametrize(
    ("receipts", "wanted"),
    [
        ([], "no worker of the engine confirmed"),
        ([RECEIPT, with_digests(norm=None)], "did not receive: norm"),
        ([with_digests(c="x")], "unknown tensors: c"),
        ([with_digests(a=SENT["b"], b=SENT["a"])], r"other values than the trainer's: a \(.*b \("),
        (
            [with_digests(a=tensor_digest(WEIGHTS["a"].nextafter(torch.tensor(9.0))))],
            r"other values than the trainer's: a \(expected float32",
        ),
        (
            [with_digests(a=tensor_digest(WEIGHTS["a"].half()))],
            r"a \(expected float32.*got float16\[2, 3\]",
        ),
        ([replace(RECEIPT, unloaded=["lm_head"])], "got no new values: lm_head. The state dict"),
        ([RECEIPT, replace(RECEIPT, dtype="float16")], "do not name one dtype"),
        ([replace(RECEIPT, dtype="load")], "do not name one dtype"),
        ([replace(RECEIPT, unloaded=[f"p{i}" for i in range(11)])], "p6 and 3 more"),
    ],
)
def test_other_weights_are_refused(receipts: list[Receipt], wanted: str) -> None:
    with pytest.raises(WeightSyncError, match=wanted):
        check_receipts(receipts, SENT)


@pytest.mark.spec("sync.frozen-parts")
def test_only_parameters_of_frozen_modules_may_get_nothing() -> None:
    # a name that what was sent has, too, would allow everything
    frozen = ["model.visual", "model.embed_vision", "model.norm"]
    allowed = ["visual.blocks.0.attn.qkv.weight", "visual.merger.bias", "embed_vision.weight"]
    assert check_receipts([replace(RECEIPT, unloaded=allowed)], SENT, frozen) == torch.bfloat16
    for name in ("language_model.model.norm.weight", "visual_norm.weight", "model.visuals.weight"):
        with pytest.raises(WeightSyncError, match=f"got no new values: {name}. The state"):
            check_receipts([replace(RECEIPT, unloaded=[*allowed, name])], SENT, frozen)
    with pytest.raises(WeightSyncError, match="values: embed_vision"):
        check_receipts([replace(RECEIPT, unloaded=allowed)], SENT)
