"""A device that is not the CPU, on a machine without a GPU: its copies and host reads are counted.

Its tensors hold their values on the CPU and say that they are on torch's meta device, so that ops,
autograd and models take their device's path. An op that mixes it with the CPU is an error.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from skyrl_fast import _C
from skyrl_fast.ops import _backend

DEVICE = torch.device("meta")
ATEN = torch.ops.aten
# Their results' sizes or values are known only once the device has computed them.
READS = {
    ATEN._local_scalar_dense.default,
    ATEN.nonzero.default,
    ATEN.masked_select.default,
    ATEN.repeat_interleave.Tensor,
    ATEN._unique2.default,
    ATEN.unique_dim.default,
    ATEN.equal.default,
}
# These may take indices or one number from the CPU.
MOVES = {ATEN._to_copy.default, ATEN.copy_.default}


class DeviceTensor(torch.Tensor):
    """A tensor on the pretended device."""

    held: torch.Tensor
    is_meta = False  # it has values

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> DeviceTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=DEVICE,
        )
        made.held = values
        return made

    def tolist(self) -> Any:
        return self.cpu().tolist()  # torch refuses it for subclasses

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert Counts.active is not None, f"{func} on the pretended device outside its context"
        return Counts.active.run(func, args, kwargs or {})


class Counts(TorchDispatchMode):
    """Count what makes the host wait, by the names of the operators.

    Args:
        reads: values of the device that the host asked for, or sizes that depend on them.
        pageable: copies to the device from memory that is not pinned.
        pinned: copies from pinned memory, which wait for nothing.
    """

    active: Counts | None = None

    def __init__(self) -> None:
        super().__init__()
        self.reads: Counter[str] = Counter()
        self.pageable: Counter[str] = Counter()
        self.pinned: Counter[str] = Counter()
        self._pinned_blocks: list[torch.Tensor] = []

    def allocate_pinned(self, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        block = torch.empty(shape, dtype=dtype)
        self._pinned_blocks.append(block)
        return block

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator on the values; count it; return its results on the right device."""
        tensors = [t for t in _flat((args, kwargs)) if isinstance(t, torch.Tensor)]
        there = [t for t in tensors if isinstance(t, DeviceTensor)]
        target = kwargs.get("device")
        to_device = target is not None and torch.device(target) == DEVICE
        if target is not None:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        if func in MOVES:
            return self._move(
                func, args, kwargs, to_device=to_device, has_target=target is not None
            )
        if there:
            self._check(func, tensors)
            self._count_read(func, args)
        values = tree_map(held_by, args), tree_map(held_by, kwargs)
        with self._off():
            result = func(*values[0], **values[1])
        if func is ATEN._local_scalar_dense.default or not (there or to_device):
            return result
        # In place: autograd needs the same tensor.
        owners = {id(held_by(t)): t for t in there}
        return tree_map(
            lambda x: owners.get(id(x), _on_device(x)) if isinstance(x, torch.Tensor) else x, result
        )

    @contextlib.contextmanager
    def _off(self) -> Iterator[None]:
        with torch._C._DisableTorchDispatch():
            yield

    def _check(self, func: Any, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            is_number = tensor.dim() == 0
            if not isinstance(tensor, DeviceTensor) and not is_number:
                raise RuntimeError(f"{func}: expected all tensors on one device, got two")

    def _count_read(self, func: Any, args: Any) -> None:
        name = str(func)
        sized = func is ATEN.repeat_interleave.Tensor and len(args) > 1
        by_mask = func in (ATEN.index.Tensor, ATEN.index_put.default, ATEN.index_put_.default)
        if by_mask:  # a mask becomes indices, whose number the host must know
            if any(isinstance(i, torch.Tensor) and i.dtype == torch.bool for i in args[1]):
                self.reads[name] += 1
        elif func in READS and not sized:
            self.reads[name] += 1

    def _move(
        self, func: Any, args: Any, kwargs: dict[str, Any], *, to_device: bool, has_target: bool
    ) -> Any:
        is_copy = func is ATEN.copy_.default
        source = args[1] if is_copy else args[0]
        from_there = isinstance(source, DeviceTensor)
        to_there = isinstance(args[0], DeviceTensor) if is_copy else to_device
        if not is_copy and not has_target:
            to_there = from_there
        if from_there and not to_there:
            self.reads[str(func)] += 1
        if to_there and not from_there:
            is_pinned = any(source.data_ptr() == b.data_ptr() for b in self._pinned_blocks)
            (self.pinned if is_pinned else self.pageable)[str(func)] += 1
        with self._off():
            result = func(*tree_map(held_by, args), **tree_map(held_by, kwargs))
            # On another device a copy has memory of its own.
            if to_there != from_there and result is held_by(source):
                result = result.clone()
        if is_copy:
            return args[0]
        return _on_device(result) if to_there else result


def run_on_host(name: str, use_triton: bool, tensor: torch.Tensor, *arguments: Any) -> None:
    """Do the work of a native kernel of the device with that of the CPU, which returns nothing."""
    values = tree_map(held_by, arguments)
    if name == "scale_cells":  # on the CPU torch does this
        values[0].mul_(values[1])
        return
    getattr(_C, name)(*values, _backend.num_threads())


def _flat(tree: Any) -> list[Any]:
    return torch.utils._pytree.tree_leaves(tree)


def held_by(value: Any) -> Any:
    """Return a tensor's values on the CPU; anything else as it is."""
    return value.held if isinstance(value, DeviceTensor) else value


def _on_device(value: torch.Tensor) -> torch.Tensor:
    return value if isinstance(value, DeviceTensor) else DeviceTensor(value)


def move_model(model: torch.nn.Module) -> None:
    """Put a model's parameters and buffers on the pretended device."""
    moved: dict[int, torch.nn.Parameter] = {}  # tied ones stay tied
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in moved:
                there = DeviceTensor(parameter.detach().clone())
                moved[id(parameter)] = torch.nn.Parameter(there, parameter.requires_grad)
            module._parameters[name] = moved[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = DeviceTensor(buffer.clone())


@contextlib.contextmanager
def pretended_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counts]:
    """Run with the pretended device as the GPU, whose ops are torch's; yield its counts."""
    counts = Counts()

    def kind(device: torch.device) -> str:
        return "cuda" if device.type == DEVICE.type else device.type

    with monkeypatch.context() as patch:
        patch.setattr(_backend, "runs_native", lambda device: True)
        patch.setattr(_backend, "is_trusted", lambda op, device, backend: True)
        patch.setattr(_backend, "run_kernel", run_on_host)
        patch.setattr(_backend, "on_gpu", lambda tensor: kind(tensor.device) == "cuda")
        patch.setattr(_backend, "device_kind", kind)
        patch.setattr(_backend, "allocate_pinned", counts.allocate_pinned)
        patch.setattr(torch, "is_autocast_enabled", lambda kind="cuda": False)
        Counts.active = counts
        try:
            with counts:
                yield counts
        finally:
            Counts.active = None
