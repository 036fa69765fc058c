"""Which implementation runs an op, how many threads it gets, and where its outputs come from.

Design: docs/design/001-build.md.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import re
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from skyrl_fast import _C
from skyrl_fast.ops.comparison import comparison

# In order of preference.
BACKENDS = ("native", "triton", "torch")
# Checked once, without importing it: torch.compile before 2.13 cannot trace find_spec.
HAS_TRITON = importlib.util.find_spec("triton") is not None
# Of one thread: while it compares kernels, others must not use them yet.
_trusting = threading.local()
# One thread compares; others that call the same op wait for its answer.
_first_use_lock = threading.Lock()
# By op, device and backend: "", or why its kernels are not used.
first_use_reasons: dict[tuple[str, torch.device, str], str] = {}
FIRST_DRIVERS = {12: 525, 13: 580}  # by the runtime's major version
HUGE_PAGE_MIN_BYTES = 2 << 20  # smaller blocks come from memory that malloc has already mapped


def select(
    op: str,
    *tensors: torch.Tensor | None,
    backend: str | None = None,
    available: Sequence[str] = ("native", "torch"),
    available_on_gpu: Sequence[str] = ("torch",),
    transforms: Sequence[str] = (),
) -> str:
    """Return the backend that runs `op` on these tensors.

    By default, CPU tensors run natively; CUDA tensors natively where the kernels are compiled
    in for their device, else by Triton; all others by plain torch. On a GPU a backend whose results
    differ from torch's at its first use (`first_use.py`) is passed over. A backend given by name is
    used, or the error says why it cannot be.

    Args:
        available: the backends that the op has on the CPU.
        available_on_gpu: those it has on a GPU; "native" counts where `runs_native` is true.
        transforms: the transforms of torch.func ("grad", "vmap") that its kernels can run under.

    Raises:
        ValueError: tensors on different devices, an unknown backend, or one that cannot run here.
        RuntimeError: a forward-mode derivative of a kernel, which has none, or a transform of
            torch.func.
    """
    given = []
    for t in tensors:
        if isinstance(t, torch.Tensor):
            given.append(t)
    devices = check_device(op, *given)
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"{op}: backend: expected one of {BACKENDS} or None, got {backend!r}")
    if devices:
        device = devices.pop()
    else:
        device = None
    # Ops on lists have no tensor to ask; their kernels are the CPU's.
    if device is None:
        kind = "cpu"
    else:
        kind = device_kind(device)
    usable = _usable(kind, device, available, available_on_gpu)
    if backend is None:
        wanted = [b for b in BACKENDS if b in usable]
    else:
        wanted = [backend]
    if wanted[0] not in usable:
        raise ValueError(f"{op}: backend {backend!r} cannot run on {kind}; usable: {usable}")
    # A kernel that differed from torch gives way to the next backend; asked for by name, there is
    # none.
    if kind == "cuda" and device is not None:
        while wanted and wanted[0] != "torch" and not is_trusted(op, device, wanted[0]):
            wanted = wanted[1:]
        if not wanted:
            raise ValueError(
                f"{op}: expected a backend with torch's results on {device}, got {backend!r}, "
                "whose first use there differed from them; see `skyrl-fast doctor --gpu`"
            )
    chosen = wanted[0]
    # While a graph is traced, tensors are wrapped by the compiler, not by a transform.
    if chosen != "torch" and not torch.compiler.is_compiling():
        if "torch" in usable:
            instead = "; use backend='torch'"
        else:
            instead = ""
        # A kernel reads values alone: a tangent or a transform would be lost without an error.
        if any(map(_is_dual, given)):
            raise RuntimeError(f"{op}: no forward-mode derivative{instead}")
        for transform in map(_transform_of, given):
            if transform is not None and transform not in transforms:
                raise RuntimeError(f"{op}: torch.func.{transform} is not supported{instead}")
    return chosen


def check_device(op: str, *tensors: torch.Tensor) -> set[torch.device]:
    """Refuse tensors on several devices; return the device as a set, empty without tensors."""
    devices = {t.device for t in tensors}
    if len(devices) > 1:
        raise ValueError(
            f"{op}: expected all tensors on one device, got {sorted(map(str, devices))}"
        )
    return devices


def break_graph(op: str, what: str) -> None:
    """Split torch.compile's graph: `what` depends on values. With fullgraph=True: an error."""
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(
            msg=f"{op} cannot be part of a full graph: {what} depends on values"
        )


def _transform_of(tensor: torch.Tensor) -> str | None:
    """Return the innermost transform of torch.func that the tensor is inside of."""
    # A tensor inside vmap that needs a gradient counts as "grad": the kernels' autograd functions
    # have no rule for vmap.
    functorch = torch._C._functorch
    if not functorch.is_functorch_wrapped_tensor(tensor):
        return None
    is_vmap = functorch.is_batchedtensor(tensor)
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    needs_gradient = tensor.requires_grad and torch.is_grad_enabled()
    if is_vmap and not needs_gradient:
        return "vmap"
    return "grad"


def _is_dual(tensor: torch.Tensor) -> bool:
    """Return whether it carries a forward-mode tangent, which a kernel would ignore."""
    return torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None


def _usable(
    kind: str, device: torch.device | None, on_cpu: Sequence[str], on_gpu: Sequence[str]
) -> tuple[str, ...]:
    if kind == "cpu" or device is None:
        interpreted = "triton" in on_gpu and triton_is_interpreted()
        if interpreted:
            return (*on_cpu, "triton")
        return tuple(on_cpu)
    if kind == "cuda":
        is_available = {"native": runs_native(device), "triton": HAS_TRITON, "torch": True}
        return tuple(b for b in on_gpu if is_available[b])
    return ("torch",)


def runs_native(device: torch.device) -> bool:
    """Return whether the compiled CUDA kernels run on a GPU; each GPU is asked once."""
    if _C.cuda_archs is None or not driver_runs_kernels():
        return False
    if device.index is None:
        index = torch.cuda.current_device()
    else:
        index = device.index
    return has_code(_C.cuda_archs, device_capability(index))


def driver_fault() -> str:
    """Return why this driver cannot run the compiled CUDA kernels; "" if it can, or is missing."""
    if _C.cuda_archs is None or not hasattr(_C, "cuda_versions"):
        return ""
    return fault_of_versions(*_C.cuda_versions())


def fault_of_versions(runtime: int, driver: int) -> str:
    """Return why a driver cannot run kernels of a CUDA runtime; "" if it can, or is missing."""
    # A driver runs all runtimes of its major version, and those of older ones.
    if driver == 0 or driver // 1000 >= runtime // 1000:
        return ""
    least = FIRST_DRIVERS.get(runtime // 1000)
    wanted = f"a driver for CUDA {runtime // 1000}" + (f" ({least} or newer)" if least else "")
    return (
        f"the CUDA kernels were compiled with CUDA {cuda_name(runtime)} and need {wanted}; this "
        f"one is for CUDA {cuda_name(driver)}"
    )


def cuda_name(version: int) -> str:
    """Return a version as NVIDIA writes it.

    Example:
        >>> cuda_name(12080)
        '12.8'
    """
    return f"{version // 1000}.{version % 1000 // 10}"


@functools.cache
def driver_runs_kernels() -> bool:
    fault = driver_fault()
    if fault:
        warnings.warn(
            f"skyrl_fast: {fault}. They are not used: Triton's are, or torch. Update the driver, "
            "or build from source with an nvcc of its version",
            RuntimeWarning,
            stacklevel=2,
        )
    return not fault


driver_runs_kernels._dynamo_marked_constant = True  # type: ignore[attr-defined]


def is_trusted(op: str, device: torch.device, backend: str) -> bool:
    """Return whether an op's kernels had the reference's results on this GPU, once per build."""
    # The comparison calls the op itself, and the lock below is held for it: it would wait for its
    # own answer.
    if getattr(_trusting, "active", False):
        return True
    if device.type == "cuda" and device.index is None:
        index = torch.cuda.current_device()
    else:
        index = None
    if index is not None:
        device = torch.device("cuda", index)
    key = (op, device, backend)
    if key not in first_use_reasons:
        # While a CUDA graph is captured nothing can be compared: what is not known is not used.
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return False
        with _first_use_lock:
            # Another thread may have compared while this one waited for the lock.
            if key not in first_use_reasons:
                first_use_reasons[key] = comparison.compare(op, device, backend)
    return not first_use_reasons[key]


@contextmanager
def trust_kernels() -> Iterator[None]:
    """Let this thread use kernels that have not been compared: to compare them."""
    before = getattr(_trusting, "active", False)
    _trusting.active = True
    try:
        yield
    finally:
        _trusting.active = before


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "skyrl_fast"


# What torch.compiler.assume_constant_result sets, without its import of the compiler: graphs hold
# the answer, and no question to the device.
runs_native._dynamo_marked_constant = True  # type: ignore[attr-defined]
is_trusted._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def device_capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def has_code(architectures: str, capability: tuple[int, int]) -> bool:
    """Return whether one of CMake's architectures runs on a device of this compute capability."""
    # "80-real" is machine code for 8.0 and later 8.x, "90a-real" for 9.0 alone. Without "-real"
    # there is also PTX, which the driver compiles for later devices. Other names ("native") count
    # as code.
    for name in architectures.split(","):
        parsed = re.fullmatch(r"(\d+)(\d)([af]?)(-real|-virtual)?", name)
        if parsed is None:
            return True
        major, minor, feature, kind = parsed.groups()
        oldest = (int(major), int(minor))
        if feature == "a":
            runs = capability == oldest
        elif feature == "f" or kind == "-real":
            runs = capability[0] == oldest[0] and capability >= oldest
        else:
            runs = capability >= oldest
        if runs:
            return True
    return False


def triton_is_interpreted() -> bool:
    """Return whether Triton's kernels run on the CPU, as Python (TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET") == "1" and HAS_TRITON


# The only places that ask: tests replace them, to run the code of GPUs on other tensors.
def device_kind(device: torch.device) -> str:
    return device.type


def on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


def cuda_stream(tensor: torch.Tensor) -> int:
    return torch.cuda.current_stream(tensor.device).cuda_stream


def current_device_of(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Return a context in which the tensor's GPU is the current one; kernels are launched there."""
    # torch's, as it does not create a CUDA context (0.5 GB) on the previous device when it leaves.
    if tensor.is_cuda:
        return torch.cuda.device(tensor.device)
    return nullcontext()


def allocate_pinned(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)


def to_gpu(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the tensor on a GPU; a CPU tensor is copied from pinned memory, asynchronously."""
    if tensor.device == device and on_gpu(tensor):
        return tensor
    # A copy from pageable memory would make the caller wait, `non_blocking` or not. torch reuses
    # the pinned block only after the copy has run.
    return allocate_pinned(tensor.shape, tensor.dtype).copy_(tensor).to(device, non_blocking=True)


def to_device_of(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the tensor on the device of `like`; copies to a GPU are asynchronous."""
    return to_device(tensor, like.device)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the tensor on a device; copies from the CPU to a GPU are asynchronous."""
    if tensor.device == device:
        return tensor
    is_upload = tensor.device.type == "cpu" and device_kind(device) == "cuda"
    if is_upload:
        return to_gpu(tensor, device)
    return tensor.to(device)


def read_numbers(values: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Return 0-dimensional tensors of one device as floats: the host waits for it once."""
    if not values:
        return {}
    numbers = torch.stack([value.detach().double() for value in values.values()]).tolist()
    return dict(zip(values, numbers, strict=True))


def launch_argument(tensor: torch.Tensor) -> int:
    """Return the last argument of a kernel on the tensor's device: a stream or a thread count."""
    if on_gpu(tensor):
        return cuda_stream(tensor)
    return num_threads()


def run_kernel(name: str, use_triton: bool, tensor: torch.Tensor, *arguments: Any) -> None:
    """Call the Triton kernel of that name, or the native one, on the tensor's device."""
    if use_triton:
        # A kernel gets a pointer to the memory, where a lazy negation has not happened yet. The
        # native ones check this themselves; for operators torch resolves it before the call.
        if any(isinstance(value, torch.Tensor) and value.is_neg() for value in arguments):
            raise ValueError(f"{name}: tensors must not have the negative bit; call .resolve_neg()")
        # On use: without a GPU nothing needs Triton.
        from skyrl_fast.ops import _triton as triton_ops

        kernel = getattr(triton_ops, name)
    else:
        kernel = getattr(_C, f"{name}_cuda" if on_gpu(tensor) else name)
        arguments = (*arguments, launch_argument(tensor))
    with current_device_of(tensor):
        kernel(*arguments)


def num_threads() -> int:
    # Torch's own setting: `torch.set_num_threads` limits the kernels, too.
    return torch.get_num_threads()


def empty(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Return an uninitialised tensor; large CPU blocks are recycled and use huge pages."""
    # A block returns to the pool when the last tensor on it is freed (see `set_page_pool_limit`).
    num_bytes = math.prod(shape) * dtype.itemsize
    if torch.device(device).type != "cpu" or num_bytes < HUGE_PAGE_MIN_BYTES:
        return torch.empty(shape, dtype=dtype, device=device)
    # torch raises an error here, too; the extension could not take the number.
    if num_bytes > sys.maxsize:
        raise MemoryError(f"cannot allocate {num_bytes} bytes for a tensor of shape {tuple(shape)}")
    # Not set yet. Not at import, which reads no files.
    if _C.page_pool_limit() < 0:
        set_page_pool_limit(main_memory() // 8)
    return torch.frombuffer(_C.PageBlock(num_bytes), dtype=dtype, count=math.prod(shape)).view(
        *shape
    )


def set_page_pool_limit(num_bytes: int) -> None:
    """Set the cap in bytes on memory cached for reuse by op outputs; 0 disables the cache.

    Mapping fresh pages costs more than filling them. The default cap is an eighth of the memory of
    the machine or its container.
    """
    if num_bytes < 0:
        raise ValueError(f"set_page_pool_limit: num_bytes: expected at least 0, got {num_bytes}")
    _C.set_page_pool_limit(num_bytes)


def main_memory(control_groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes of the machine's main memory, or of the process's container."""
    try:
        limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    except (ValueError, OSError, AttributeError):
        # 8 GiB where the system does not say.
        limits = [1 << 33]
    # Control groups of version 2, then 1.
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            limits.append(int((control_groups / name).read_text(encoding="ascii")))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return min(limits)
