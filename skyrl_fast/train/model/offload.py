"""Tensors that leave their device for main memory, and come back in place.

Design: docs/design/020-several-gpus.md.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

SMALL_PART = 1 << 20


class OffloadedStorages:
    """The storages of tensors; each is emptied and filled in place, so that all views stay valid.

    So do tied weights, FSDP2's flat shards, and an optimizer's state. Computing with an emptied one
    raises torch's RuntimeError.

    Args:
        tensors: on the device; of several views of one storage, it is moved once. The memory of
            a file or of NumPy, which is no device's, stays.
        is_constant: whether their values never change, so that they are copied to main memory once.
        small_part: bytes of a pinned copy that may be rounded up.
    """

    def __init__(
        self,
        tensors: Iterable[torch.Tensor],
        *,
        is_constant: bool = False,
        small_part: int = SMALL_PART,
    ) -> None:
        self._is_constant = is_constant
        self._small_part = small_part
        self._bytes: dict[int, torch.Tensor] = {}  # by storage
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if not storage.resizable():
                continue
            all_bytes = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            self._bytes.setdefault(storage._cdata, all_bytes)
        self._sizes = {key: one.numel() for key, one in self._bytes.items()}
        self.copies: dict[int, list[torch.Tensor]] = {}  # in parts
        self.is_loaded = True

    @property
    def num_bytes(self) -> int:
        return sum(self._sizes.values())

    def offload(self) -> None:
        """Copy them to main memory, and free the device's."""
        if not self.is_loaded:
            return
        is_first = not self.copies
        for key, one in self._bytes.items():
            if is_first:
                self.copies[key] = self._allocate(one)
            if is_first or not self._is_constant:
                for copy, part in zip(self.copies[key], self._parts(one), strict=True):
                    copy.copy_(part)
        on_gpu = any(one.device.type == "cuda" for one in self._bytes.values())
        if on_gpu:
            torch.cuda.synchronize()  # FSDP2 reads its shards on streams of its own
        for one in self._bytes.values():
            one.untyped_storage().resize_(0)
        if on_gpu:
            torch.cuda.empty_cache()
        self.is_loaded = False

    def load(self) -> None:
        """Get the device's memory again, and fill it."""
        if self.is_loaded:
            return
        for key, one in self._bytes.items():
            one.untyped_storage().resize_(self._sizes[key])
            for part, copy in zip(self._parts(one), self.copies[key], strict=True):
                part.copy_(copy)
        self.is_loaded = True

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a new tensor in main memory with the values of one of them, loaded or not."""
        key = tensor.untyped_storage()._cdata
        if self.is_loaded or key not in self.copies:
            return tensor.to("cpu", copy=True)
        values = torch.cat(self.copies[key]).view(tensor.dtype)
        return values.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def _allocate(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        pinned = tensor.device.type == "cuda"
        result = []
        for part in self._parts(tensor):
            result.append(torch.empty(part.shape, dtype=part.dtype, pin_memory=pinned))
        return result

    def _parts(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the parts of a copy: torch rounds pinned memory up to a power of 2."""
        sizes = []
        rest = tensor.numel()
        while rest > self._small_part:
            sizes.append(1 << (rest.bit_length() - 1))
            rest -= sizes[-1]
        return tensor.split([*sizes, rest])
