"""Digests of tensors: equal on both ends of a transfer if and only if every bit arrived."""

from __future__ import annotations

import torch

_WORD = 8  # bytes of an int64
_CHUNK = 1 << 16  # words; the products of a chunk stay in the cache of a core
_FACTOR = 0x1E3779B97F4A7C15  # odd: multiplying by it modulo 2**64 loses no bits


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return dtype, shape and a 64-bit sum of the words, each times its odd place.

    Not cryptographic. Runs on the tensor's device, where one pass costs a read of its bytes; the
    result is that of the CPU.

    Example:
        >>> tensor_digest(torch.tensor([1, 2]))
        'int64[2]:0000000000000007'
    """
    data = tensor.detach().contiguous().flatten().view(torch.uint8)
    if rest := -data.numel() % _WORD:
        data = torch.cat([data, data.new_zeros(rest)])
    words = data.view(torch.int64)
    places = torch.arange(1, 2 * min(_CHUNK, words.numel()) + 1, 2, device=data.device)
    total = words.new_zeros(())
    for chunk in words.split(_CHUNK):  # int64 wraps around
        total = total * _FACTOR + (chunk * places[: chunk.numel()]).sum()
    return f"{dtype_name(tensor.dtype)}{list(tensor.shape)}:{total.item() % (1 << 64):016x}"


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name as in settings, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")
