"""Receipts: what an engine's process says of the weights that it loaded, and their check.

An update at a learning rate of 1e-6 moves log-probabilities by less than bfloat16 rounds, so they
cannot show that one layer of it is missing. Digests can: they are taken of the bits of each tensor
on both ends of a transfer.

Design: docs/design/007-rollout-and-weight-sync.md.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch

from skyrl_fast.errors import RunError

MAX_NAMES = 8  # named in an error
RECEIVED = "received"  # in place of a digest that another worker takes
FLOATS = ("float32", "bfloat16", "float16")  # dtypes in which an engine computes
_WORD = 8  # bytes of an int64
_CHUNK = 1 << 16  # words; the products of a chunk stay in the cache of a core
_SLAB = 128  # chunks whose products a GPU holds at a time: 64 MiB
_FACTOR = 0x1E3779B97F4A7C15  # odd: multiplying by it modulo 2**64 loses no bits


class WeightSyncError(RunError):
    """The engine does not hold the trainer's weights."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """What one worker loaded.

    Args:
        digests: of each tensor that the model's loader took, by its Hugging Face name; `RECEIVED`
            where another worker, which read the same memory, has the digest.
        unloaded: the engine's parameters that got no new value.
    """

    digests: dict[str, str]
    unloaded: list[str]
    dtype: str


@dataclass(frozen=True, slots=True)
class SentWeights:
    """What the trainer sends; complete when an engine has received all of it.

    Args:
        frozen: modules that are not sent, as training leaves them as they were.
    """

    digests: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    frozen: set[str] = field(default_factory=set)

    @property
    def num_bytes(self) -> int:
        return sum(self.sizes.values())

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Record a tensor, in the dtype in which it is sent; again, if it is sent again."""
        self.digests[name] = tensor_digest(tensor)
        self.sizes[name] = tensor.nbytes


def record_digests(
    weights: Iterable[tuple[str, torch.Tensor]],
    digests: dict[str, str],
    rank: int = 0,
    num_sharing: int = 1,
    *,
    digest_of: Callable[[torch.Tensor], str] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights, and add the digests of those that were taken.

    Of workers that read the same memory each takes the digests of its share, by `rank`; the others
    are `RECEIVED`. Without `digest_of` it is `tensor_digest`.
    """
    digest_of = tensor_digest if digest_of is None else digest_of
    for number, (name, tensor) in enumerate(weights):
        is_own = number % num_sharing == rank % num_sharing
        if is_own:
            digests[name] = digest_of(tensor)
        else:
            digests[name] = RECEIVED
        yield name, tensor


def read_receipts(answers: Any) -> list[Receipt]:
    """Return the workers' receipts; raise TypeError, KeyError or the like for other answers."""
    if not isinstance(answers, list):
        raise TypeError(f"expected a list, got {type(answers).__name__}")
    result: list[Receipt] = []
    for answer in answers:
        result.append(
            Receipt(
                digests={str(name): str(digest) for name, digest in answer["digests"].items()},
                unloaded=[str(name) for name in answer["unloaded"]],
                dtype=str(answer["dtype"]),
            )
        )
    return result


def check_receipts(
    receipts: Sequence[Receipt], sent: Mapping[str, str], frozen: Collection[str] = ()
) -> torch.dtype:
    """Return the engine's dtype.

    Args:
        frozen: modules whose parameters may have got none; the engine's model may have them
            elsewhere.

    Raises:
        WeightSyncError: a worker has not loaded exactly these tensors, or a parameter got none.
    """
    allowed = {part.rpartition(".")[2] for part in frozen}
    allowed -= {part for name in sent for part in name.split(".")}
    if not receipts:
        raise WeightSyncError("no worker of the engine confirmed the new weights")
    for receipt in receipts:
        got = receipt.digests
        _refuse("the engine did not receive", [name for name in sent if name not in got])
        _refuse("the engine loaded unknown tensors", [name for name in got if name not in sent])
        _refuse(
            "the engine loaded other values than the trainer's",
            [
                f"{name} (expected {sent[name]}, got {got[name]})"
                for name in sent
                if got[name] not in (sent[name], RECEIVED)
            ],
        )
        _refuse(
            "the engine's parameters got no new values",
            [name for name in receipt.unloaded if allowed.isdisjoint(name.split("."))],
            hint=". The state dict must contain every parameter under its Hugging Face name",
        )
    _refuse(
        "no worker of the engine took the digests of",
        [name for name in sent if all(r.digests[name] == RECEIVED for r in receipts)],
    )
    dtype = find_common_dtype(receipt.dtype for receipt in receipts)
    if dtype is None:
        raise WeightSyncError("the engine's workers do not name one dtype")
    return dtype


def _refuse(what: str, names: Iterable[str], *, hint: str = "") -> None:
    ordered = sorted(names)
    if ordered:
        if len(ordered) > MAX_NAMES:
            more = f" and {len(ordered) - MAX_NAMES} more"
        else:
            more = ""
        raise WeightSyncError(f"{what}: {', '.join(ordered[:MAX_NAMES])}{more}{hint}")


def find_common_dtype(names: Iterable[Any]) -> torch.dtype | None:
    """Return the dtype that all workers name; None: they name several, or something else."""
    distinct = set(names)
    if len(distinct) == 1:
        name = distinct.pop()
    else:
        name = None
    if name in FLOATS:
        dtype = getattr(torch, name)
    else:
        dtype = None
    assert dtype is None or isinstance(dtype, torch.dtype)
    return dtype


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return dtype, shape and a 64-bit sum of the words, each times its odd place.

    Not cryptographic. Runs on the tensor's device, where one pass costs a read of its bytes; the
    result is the same on all.

    Example:
        >>> tensor_digest(torch.tensor([1, 2]))
        'int64[2]:0000000000000007'
    """
    data = tensor.detach().contiguous().flatten().view(torch.uint8)
    if rest := -data.numel() % _WORD:
        data = torch.cat([data, data.new_zeros(rest)])
    words = data.view(torch.int64)
    sums = chunk_sums_on_cpu(words) if words.device.type == "cpu" else chunk_sums(words)
    total = 0
    for chunk in sums:
        total = (total * _FACTOR + chunk) % (1 << 64)
    return f"{dtype_name(tensor.dtype)}{list(tensor.shape)}:{total:016x}"


@cache  # with other work on the cores, torch's threads take milliseconds to make it
def odd_places(device: torch.device) -> torch.Tensor:
    return torch.arange(1, 2 * _CHUNK, 2, device=device)


def chunk_sums_on_cpu(words: torch.Tensor) -> Iterator[int]:
    # torch would divide each chunk among threads, for which it then waits: with other work on the
    # cores, 537 MB take 1.4 s in place of 0.1.
    places = odd_places(words.device).numpy()
    for chunk in words.split(_CHUNK):
        yield int(np.dot(chunk.numpy(), places[: chunk.numel()]))


def chunk_sums(words: torch.Tensor) -> list[int]:
    """Return the sums of all chunks, by two launches per slab and one transfer."""
    places = odd_places(words.device)
    whole = words.numel() // _CHUNK * _CHUNK
    if whole:
        slabs = words[:whole].view(-1, _CHUNK).split(_SLAB)
    else:
        slabs = ()
    sums = [(chunks * places).sum(1) for chunks in slabs]  # int64 wraps around
    rest = words[whole:]
    if rest.numel() or not sums:
        sums.append((rest * places[: rest.numel()]).sum().view(1))
    return torch.cat(sums).tolist()


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
