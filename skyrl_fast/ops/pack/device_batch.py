"""Padding a batch on a GPU: ragged rows are copied once, as one block of flat arrays.

Shapes: N rows, T padded sequence length, R padded response length. The block holds the elements of
every field (ids in int32, half the size of padded int64 rows, and without padding) and the
offsets of prompts and responses; one launch writes all padded fields from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from skyrl_fast.ops import _backend, _ragged

ALIGNMENT = 16  # bytes; of each array in the block
# FieldKind of csrc/pack/pack_cuda.h.
VALUES, MASK, JOINED, LAST = 0, 1, 2, 3

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Part:
    """One flat array of the block."""

    name: str
    dtype: torch.dtype
    count: int
    begin: int  # byte

    def of(self, block: Tensor) -> Tensor:
        """Return the array in a block of bytes."""
        end = self.begin + self.count * self.dtype.itemsize
        return block[self.begin : end].view(self.dtype)


def block_parts(counts: dict[str, tuple[torch.dtype, int]]) -> tuple[dict[str, Part], int]:
    """Return the place of each array in the block, and the block's size in bytes.

    Example:
        >>> parts, size = block_parts({"ids": (torch.int32, 3), "rewards": (torch.float32, 1)})
        >>> parts["rewards"].begin, size
        (16, 32)
    """
    parts: dict[str, Part] = {}
    begin = 0
    for name, (dtype, count) in counts.items():
        parts[name] = Part(name, dtype, count, begin)
        num_bytes = count * dtype.itemsize
        begin += -(-num_bytes // ALIGNMENT) * ALIGNMENT
    return parts, begin


def convert(
    op: str,
    fields: dict[str, _ragged.Field],
    width: int,
    columns: int,
    pad_token_id: int,
    vocab_size: int | None,
    pad_size: int,
    device: torch.device,
) -> list[Tensor | None]:
    """Return sequences, attention mask, response mask, rewards, loss masks and log-probabilities.

    All on `device`, with `pad_size` unwritten rows after the N. Does not synchronize.
    """
    prompts, responses = fields["prompts"], fields["responses"]
    num_rows = len(prompts.lengths)
    float_names = [n for n in ("rewards", "row_rewards", "loss_masks", "logprobs") if n in fields]
    counts = {name: (torch.int32, int(fields[name].lengths.sum())) for name in _IDS}
    counts |= {name: (torch.float32, int(fields[name].lengths.sum())) for name in float_names}
    counts |= {f"{name}_cu": (torch.int64, num_rows + 1) for name in _IDS}
    parts, num_bytes = block_parts(counts)
    block = _backend.allocate_pinned((num_bytes,), torch.uint8)
    high = _ragged.INT64_MAX if vocab_size is None else vocab_size - 1
    copies: list[tuple[Any, ...]] = []
    for name in (*_IDS, *float_names):
        bounds = (0, high) if name in _IDS else ()
        starts = _ragged.offsets(fields[name].lengths)[:-1]
        copies += _ragged.copy_jobs(fields[name], parts[name].of(block), starts, *bounds)
    _ragged.fill(op, copies)
    for name, field in (("prompts_cu", prompts), ("responses_cu", responses)):
        parts[name].of(block).copy_(_ragged.offsets(field.lengths))
    device_block = block.to(device, non_blocking=True)
    flat = {name: part.of(device_block) for name, part in parts.items()}
    prompt_cu, response_cu = flat["prompts_cu"], flat["responses_cu"]

    def empty(dtype: torch.dtype, cells: int) -> Tensor:
        return torch.empty((num_rows + pad_size, cells), dtype=dtype, device=device)

    sequences, attention = empty(torch.int64, width), empty(torch.int64, width)
    response_mask = empty(torch.int64, columns)
    both = (prompt_cu, response_cu)
    jobs: list[tuple[Any, ...]] = [
        (JOINED, flat["prompts"], flat["responses"], *both, sequences[:num_rows], pad_token_id),
        (MASK, None, None, *both, attention[:num_rows], 0),
        (MASK, None, None, response_cu, None, response_mask[:num_rows], 0),
    ]
    out: dict[str, Tensor | None] = {"logprobs": None}
    for name in float_names:
        cells = empty(torch.float32, columns)
        kind = LAST if name == "row_rewards" else VALUES
        jobs.append((kind, flat[name], None, response_cu, None, cells[:num_rows], 0))
        out["rewards" if name == "row_rewards" else name] = cells
    _backend.run_kernel("expand_rows", False, sequences, jobs)
    response_side = (out["rewards"], out["loss_masks"], out["logprobs"])
    return [sequences, attention, response_mask, *response_side]


_IDS = ("prompts", "responses")
