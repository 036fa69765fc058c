"""Comparison of a GPU's kernels with the torch reference, at the first use of each op.

No machine that builds this package needs to have a GPU, so no kernel is trusted on one before its
results on that device have been compared. The cases are small and ragged: forward and backward.

Design: docs/design/016-gpu.md
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from skyrl_fast import _C
from skyrl_fast.ops import _backend

Tensors = dict[str, torch.Tensor]
# float32 sums of logits of magnitude 15, and ratios up to 3: the tests' bounds are 5e-6 to 3e-5. A
# wrong index, mask, sign or dtype is off by far more.
TOLERANCE = {"rtol": 1e-4, "atol": 3e-5}
# Two units in the last place of 16-bit gradients.
GRADIENT_RTOL = {torch.bfloat16: 2**-6, torch.float16: 2**-9}
LARGE_VOCAB = 151_936  # rows that a cluster of blocks shares
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KernelCase:
    """A call of an op whose result is compared.

    Args:
        name: what is special about it.
        inputs: tensors on the CPU; masked cells are NaN where the op promises not to read them.
        call: runs the op with the inputs and a backend; results and gradients by name.
        widens: the reference gets floating-point inputs as float64.
        atol: absolute tolerance, where an op's products are rounded before its kernel reads them.
    """

    op: str
    name: str
    inputs: Tensors
    call: Callable[[Tensors, str], Mapping[str, torch.Tensor]]
    widens: bool = True
    atol: float = TOLERANCE["atol"]

    def expected(self, device: torch.device) -> Mapping[str, torch.Tensor]:
        """Return the results of the reference."""
        inputs = {}
        for name, value in self.inputs.items():
            inputs[name] = value.to(device)
        # A reference in float64 has no rounding error that would have to be allowed for.
        if self.widens:
            for name, value in inputs.items():
                if value.is_floating_point():
                    inputs[name] = value.double()
        return self.call(inputs, "torch")

    def compare(
        self, device: torch.device, backend: str, expected: Mapping[str, torch.Tensor]
    ) -> float:
        """Return the largest error as a multiple of the tolerance; above 1: AssertionError."""
        inputs = {}
        for name, value in self.inputs.items():
            inputs[name] = value.to(device)
        results = self.call(inputs, backend)
        errors = []
        for name, want in expected.items():
            errors.append(_error(name, results[name], want, self.atol))
        return max(errors)


LogitCase = tuple[str, torch.dtype, int]  # name, dtype and vocabulary
# Every dtype; odd sizes, so that rows begin at any alignment; a row that a cluster of blocks
# shares.
LOGIT_CASES: Sequence[LogitCase] = (
    ("float32, 33", torch.float32, 33),
    ("float32, 9,001", torch.float32, 9001),
    ("float16, 1,003", torch.float16, 1003),
    ("bfloat16, 1,000", torch.bfloat16, 1000),
    ("bfloat16, 151,936", torch.bfloat16, LARGE_VOCAB),
)


def cases(op: str, logits: Sequence[LogitCase] | None = None) -> Iterator[KernelCase]:
    """Yield the cases of an op; those on logits have these dtypes, or those of `LOGIT_CASES`."""
    if logits is None:
        logits = LOGIT_CASES
    if op in _CASES_ON_LOGITS:
        yield from _CASES_ON_LOGITS[op](logits)
    else:
        yield from _CASES[op]()


def run_cases(
    op: str, device: torch.device, backend: str, logits: Sequence[LogitCase] | None = None
) -> str:
    """Return "", or what differs in the first case that does."""
    for case in cases(op, logits):
        expected = case.expected(device)  # its failure says nothing about the kernel
        try:
            case.compare(device, backend, expected)
        except torch.OutOfMemoryError:
            raise  # which says nothing about the kernel
        except Exception as error:  # a kernel that fails is as untrusted as one that differs
            text = " ".join(str(error).split())
            return f"{case.name}: {text[:300]}"
    return ""


def check_first_use(op: str, device: torch.device, backend: str) -> str:
    """Return "" for a backend to trust, else the reason; from the cache folder if it is known."""
    path = record_path(op, device, backend)
    try:
        reason = str(json.loads(path.read_text())["reason"])
    # Not compared yet, or the file of another version.
    except (OSError, ValueError, KeyError):
        started = time.perf_counter()
        # Not in this thread, which may be in autocast, inference mode, vmap or a trace.
        with ThreadPoolExecutor(1) as thread:
            reason = thread.submit(_run_trusted, op, device, backend).result()
        _record(path, {"reason": reason, "seconds": time.perf_counter() - started})
    if reason:
        warnings.warn(
            f"{op}: the {backend} kernel differs from torch on {_device_name(device)} and is not "
            f"used; another backend is, which may be slower. {reason}. Please send in the table of "
            "`skyrl-fast doctor --gpu`.",
            RuntimeWarning,
            stacklevel=2,
        )
    return reason


def _run_trusted(op: str, device: torch.device, backend: str) -> str:
    with _backend.trust_kernels(), _backend.current_device_of(torch.empty(0, device=device)):
        return run_cases(op, device, backend)


def measure_cases(
    device: torch.device,
    backend: str,
    *,
    logits: Sequence[LogitCase] | None = None,
    rounds: int = 5,
) -> Iterator[dict[str, Any]]:
    """Yield each case with its error, or failure, and the time next to torch's."""
    # The cases are small: a time is mostly that of launches, and no benchmark.
    with _backend.trust_kernels(), _backend.current_device_of(torch.empty(0, device=device)):
        for op in BACKENDS_ON_GPU:
            if backend not in BACKENDS_ON_GPU[op]:
                continue
            for case in cases(op, logits):
                row: dict[str, Any] = {"op": op, "case": case.name, "backend": backend}
                try:
                    row["error"] = case.compare(device, backend, case.expected(device))
                    row |= {"ms": _milliseconds(case, device, backend, rounds)}
                    row |= {"torch_ms": _milliseconds(case, device, "torch", rounds)}
                except Exception as error:  # one case must not end the table
                    row["failure"] = " ".join(str(error).split())[:200]
                yield row


def gpus() -> list[torch.device]:
    result: list[torch.device] = []
    for i in range(torch.cuda.device_count()):
        result.append(torch.device("cuda", i))
    return result


def usable_backends(device: torch.device) -> list[str]:
    """Return the backends with kernels that could run on the GPU."""
    has = {"native": _backend.runs_native(device), "triton": _backend.HAS_TRITON}
    return [backend for backend, is_here in has.items() if is_here]


def records(device: torch.device) -> dict[tuple[str, str], str]:
    """Return what is known about the device: the reason, or "", by op and backend."""
    known = {}
    for op, backends in BACKENDS_ON_GPU.items():
        for backend in backends:
            try:
                content = json.loads(record_path(op, device, backend).read_text())
            except (OSError, ValueError):
                continue
            known[op, backend] = str(content["reason"])
    return known


def record_path(op: str, device: torch.device, backend: str) -> Path:
    """Return the file of a result: another device, driver, torch or build has another."""
    name = f"{_fingerprint(_device_name(device))}-{op}-{backend}.json"
    return _backend.cache_folder() / "first_use" / name


@functools.cache
def _fingerprint(device: str) -> str:
    digest = hashlib.sha256(f"{device} {torch.__version__} {torch.version.cuda}".encode())
    folder = Path(__file__).parent
    # Triton's kernels are compiled from the sources, on the user's machine.
    sources = (Path(_C.__file__), *sorted(folder.rglob("*.py")))
    for path in sources:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _device_name(device: torch.device) -> str:
    if device.type != "cuda":
        return str(device)
    properties = torch.cuda.get_device_properties(device)
    identity = getattr(properties, "uuid", device.index)
    return f"{properties.name}, sm_{properties.major}{properties.minor}, {identity}"


def _record(path: Path, content: Mapping[str, Any]) -> None:
    # Processes that compare at once each rename a complete file.
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(content))
        partial.replace(path)
    except OSError as error:  # a folder that cannot be written: compared again by each process
        _LOG.info("%s cannot be written: %s", path, error)


def _error(name: str, got: torch.Tensor, want: torch.Tensor, atol: float) -> float:
    close: dict[str, Any] = TOLERANCE | {"atol": atol}
    close["rtol"] = max(close["rtol"], GRADIENT_RTOL.get(got.dtype, 0))
    # Integers are copied, not computed.
    if not got.is_floating_point():
        close = {"rtol": 0, "atol": 0}
    got = got.detach().cpu().double()
    want = want.detach().cpu().double()
    torch.testing.assert_close(got, want, **close, equal_nan=True, msg=lambda m: f"{name}: {m}")
    if got.numel() == 0 or not close["atol"]:
        return 0.0
    bound = close["atol"] + close["rtol"] * want.abs()
    return float(((got - want).abs() / bound).nan_to_num().max())


def _milliseconds(case: KernelCase, device: torch.device, backend: str, rounds: int) -> float:
    inputs = {}
    for name, value in case.inputs.items():
        inputs[name] = value.to(device)
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        case.call(inputs, backend)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return sorted(times)[rounds // 2] * 1e3


def _random_logits(rows: int, vocab: int, dtype: torch.dtype) -> Tensors:
    # Not torch's global one: a comparison must not change the caller's random numbers.
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(rows, vocab, generator=generator) * 4).to(dtype)
    targets = torch.randint(0, vocab, (rows,), generator=generator)
    logits[1] = torch.nan  # masked
    mask = torch.ones(rows, dtype=torch.uint8)
    mask[1] = 0
    return {"logits": logits, "target_ids": targets, "loss_mask": mask}


KEPT = 7  # sampled ids of a row, for sets


def _selected_cases(logits: Sequence[LogitCase]) -> Iterator[KernelCase]:
    op = "selected_logprob"
    for name, dtype, vocab in logits:
        if vocab == LARGE_VOCAB:
            rows = 3
        else:
            rows = 5
        yield KernelCase(op, name, _random_logits(rows, vocab, dtype), _call_selected)
    # As where logits are shifted against their targets: `logits[:, :-1]`.
    strided = {}
    for name, value in _random_logits(6, 101, torch.bfloat16).items():
        strided[name] = value.view(2, 3, *value.shape[1:])
    yield KernelCase(op, "rows in two strides", strided, _call_selected_strided)
    kept = _random_logits(5, 1003, torch.float32)
    first = kept["target_ids"].clamp(max=1003 - KEPT)
    ids = first[:, None] + torch.arange(KEPT)
    kept["kept_ids"] = ids.reshape(-1).to(torch.int32)
    kept["cu_kept"] = torch.arange(0, 5 * KEPT + 1, KEPT)
    yield KernelCase(op, "kept sets", kept, _call_selected)


def _call_selected(inputs: Tensors, backend: str) -> Tensors:
    from skyrl_fast.ops.logprob.selected import selected_logprob

    others: dict[str, Any] = dict(inputs)
    leaf = others.pop("logits").clone().requires_grad_()
    # Not the leaf itself: its memory is overwritten by the gradient.
    logprob, entropy = selected_logprob(
        leaf * 1,
        **others,
        temperature=0.7,
        return_entropy=True,
        inplace_backward=backend != "torch",
        backend=backend,
    )
    # Weights of both signs, another for each row: the gradient of another row shows.
    weight = torch.linspace(-1, 1.5, logprob.numel(), dtype=logprob.dtype, device=logprob.device)
    weight = weight.view(logprob.shape)
    ((logprob + 0.3 * entropy) * weight).sum().backward()
    return _results(backend, leaf, inputs["loss_mask"], logprob=logprob, entropy=entropy)


def _call_selected_strided(inputs: Tensors, backend: str) -> Tensors:
    from skyrl_fast.ops.logprob.selected import selected_logprob

    leaf = inputs["logits"].clone().requires_grad_()
    logprob = selected_logprob(
        leaf[:, :-1],
        inputs["target_ids"][:, :-1],
        loss_mask=inputs["loss_mask"][:, :-1],
        backend=backend,
    )
    assert isinstance(logprob, torch.Tensor)
    weight = torch.arange(1, logprob.numel() + 1, device=logprob.device)
    (logprob * weight.view_as(logprob)).sum().backward()
    return _results(backend, leaf, inputs["loss_mask"], logprob=logprob)


def _results(
    backend: str, leaf: torch.Tensor, mask: torch.Tensor, **values: torch.Tensor
) -> Tensors:
    # The reference's gradient of a masked row may be NaN where its inputs are; a kernel's is 0.
    assert leaf.grad is not None
    gradient = leaf.grad
    if backend == "torch":
        num_new = leaf.dim() - mask.dim()
        is_masked = (mask == 0).view(*mask.shape, *[1] * num_new)
        gradient = torch.where(is_masked & gradient.isnan(), 0, gradient)
    results = {name: value.detach() for name, value in values.items()}
    results["gradient"] = gradient
    return results


def _linear_cases() -> Iterator[KernelCase]:
    generator = torch.Generator().manual_seed(3)
    for dtype in (torch.float32, torch.bfloat16):
        inputs = _random_logits(5, 257, torch.float32)
        hidden = torch.randn(5, 16, generator=generator).to(dtype)
        weight = torch.randn(257, 16, generator=generator).to(dtype)
        inputs |= {"logits": hidden, "lm_head_weight": weight}
        name = f"{str(dtype).removeprefix('torch.')}, 257"
        # Logits of magnitude 16 are rounded to 16 bits, or computed in TF32 where torch may.
        yield KernelCase("linear_logprob", name, inputs, _call_linear, atol=0.1)


def _call_linear(inputs: Tensors, backend: str) -> Tensors:
    from skyrl_fast.ops.logprob.linear import linear_logprob

    hidden = inputs["logits"].clone().requires_grad_()
    weight = inputs["lm_head_weight"].clone().requires_grad_()
    logprob = linear_logprob(
        hidden,
        weight,
        inputs["target_ids"],
        loss_mask=inputs["loss_mask"],
        chunk_rows=2,
        backend=backend,
    )
    assert isinstance(logprob, torch.Tensor)
    (logprob * torch.arange(1, 6, device=logprob.device)).sum().backward()
    assert hidden.grad is not None and weight.grad is not None
    gradients = {"hidden's gradient": hidden.grad, "weight's gradient": weight.grad}
    return {"logprob": logprob.detach(), **gradients}


def _cells(count: int, seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)

    def noise() -> torch.Tensor:
        # Not of torch's default dtype, which a caller may have changed.
        return torch.randn(count, generator=generator, dtype=torch.float32)

    current = -torch.rand(count, generator=generator, dtype=torch.float32) * 3
    return {
        "logprobs": current,
        "old_logprobs": current + noise() * 0.3,
        "rollout_logprobs": current + noise() * 0.3,
        "ref_logprobs": current + noise() * 0.3,
        "advantages": noise(),
    }


def _masked_loss_cases(logits: Sequence[LogitCase]) -> Iterator[KernelCase]:
    from skyrl_fast.ops.logprob.masked_loss import TOKEN_LOSSES

    for number, loss in enumerate(TOKEN_LOSSES):
        name, dtype, vocab = logits[number % len(logits)]
        # The large vocabulary once: how a row is held does not depend on the loss.
        if vocab == LARGE_VOCAB and number >= len(logits):
            vocab = 64
        inputs = _random_logits(5, vocab, dtype)
        cells = _cells(5, number)
        cells.pop("logprobs")
        for value in cells.values():
            # Values of the masked row, which kernels do not read.
            value[1] = torch.nan
        inputs |= cells | {"row_weights": torch.linspace(0.5, 1.5, 5, dtype=torch.float32)}
        call = functools.partial(_call_masked_loss, loss=loss)
        yield KernelCase("masked_logprob_loss", f"{loss}, {name}", inputs, call)


def _call_masked_loss(inputs: Tensors, backend: str, *, loss: str) -> Tensors:
    from skyrl_fast.ops.logprob.masked_loss import masked_logprob_loss

    others: dict[str, Any] = dict(inputs)
    leaf = others.pop("logits").clone().requires_grad_()
    penalty: dict[str, Any] = {"kl_estimator": "k3", "kl_coef": 0.3}
    out = masked_logprob_loss(
        leaf * 1,
        **others,
        **penalty,
        loss=loss,
        return_entropy=True,
        temperature=0.9,
        inplace_backward=backend != "torch",
        backend=backend,
    )
    (out.loss * 0.5).backward()
    assert out.logprobs is not None and out.entropy is not None
    values = {"logprobs": out.logprobs, "cell_entropy": out.entropy}
    return _results(backend, leaf, inputs["loss_mask"], **values, **out.metrics)


ROW_LENGTHS = (1, 31, 33, 0, 700)  # cells of ragged rows, more than one block in all


def _policy_loss_cases() -> Iterator[KernelCase]:
    from skyrl_fast.ops.policy_loss.losses import POLICY_LOSSES

    for number, loss in enumerate(POLICY_LOSSES):
        cells = _cells(sum(ROW_LENGTHS), number)
        mask = torch.arange(sum(ROW_LENGTHS)) % 5 != 2
        for value in cells.values():
            value[~mask] = torch.nan
        weights = torch.linspace(0.5, 1.5, len(ROW_LENGTHS), dtype=torch.float32)
        cells |= {"loss_mask": mask, "row_weights": weights}
        sums = torch.tensor([0, *ROW_LENGTHS]).cumsum(0)
        offsets = sums.to(torch.int32)
        ragged = cells | {"cu_seqlens": offsets}
        call = functools.partial(_call_policy_loss, loss=loss)
        yield KernelCase("policy_loss", f"{loss}, ragged", ragged, call)
        if number == 0:
            padded = {"row_weights": cells.pop("row_weights")}
            for name, value in cells.items():
                padded[name] = value.view(5, -1)
            yield KernelCase("policy_loss", f"{loss}, padded", padded, call)


def _call_policy_loss(inputs: Tensors, backend: str, *, loss: str) -> Tensors:
    from skyrl_fast.ops.policy_loss.loss import policy_loss

    others: dict[str, Any] = dict(inputs)
    leaf = others.pop("logprobs").clone().requires_grad_()
    penalty: dict[str, Any] = {"kl_estimator": "k2", "kl_coef": 0.3}
    # The same tokens of clip_cov for both backends.
    generator = torch.Generator(leaf.device).manual_seed(0)
    out = policy_loss(leaf, **others, **penalty, loss=loss, generator=generator, backend=backend)
    (out.loss * 0.5).backward()
    return _results(backend, leaf, inputs["loss_mask"], total=out.loss, **out.metrics)


def _kl_cases() -> Iterator[KernelCase]:
    from skyrl_fast.ops.policy_loss.loss import KL_ESTIMATORS

    for estimator in KL_ESTIMATORS:
        cells = _cells(600, 1)
        mask = torch.arange(600) % 7 != 3
        inputs = {}
        for name in ("logprobs", "ref_logprobs"):
            inputs[name] = cells[name]
        for value in inputs.values():
            value[~mask] = torch.nan
        call = functools.partial(_call_kl, estimator=estimator)
        yield KernelCase("kl_penalty", estimator, inputs | {"loss_mask": mask}, call)


def _call_kl(inputs: Tensors, backend: str, *, estimator: str) -> Tensors:
    from skyrl_fast.ops.policy_loss.loss import kl_penalty

    leaf = inputs["logprobs"].clone().requires_grad_()
    out = kl_penalty(
        leaf,
        inputs["ref_logprobs"],
        loss_mask=inputs["loss_mask"],
        estimator=estimator,
        backend=backend,
    )
    weight = torch.linspace(-1, 1.5, out.numel(), dtype=out.dtype, device=out.device)
    (out * weight).sum().backward()
    return _results(backend, leaf, inputs["loss_mask"], penalty=out)


def _advantage_cases() -> Iterator[KernelCase]:
    from skyrl_fast.ops.advantage.group import ESTIMATORS

    rewards = torch.tensor([9.0, 1, 0, 9, 0.5, 3, 3, 9, -1], dtype=torch.float32)
    numbers = torch.arange(9 * 70).view(9, 70)
    mask = (numbers % 4 != 1).to(torch.uint8)
    for estimator in ESTIMATORS:
        call = functools.partial(_call_advantage, estimator=estimator)
        inputs = {"rewards": rewards, "response_mask": mask}
        yield KernelCase("group_advantage", estimator, inputs, call, widens=False)


def _call_advantage(inputs: Tensors, backend: str, *, estimator: str) -> Tensors:
    from skyrl_fast.ops.advantage.group import group_advantage

    last = torch.tensor([False, True, True, False, True, True, True, False, True])
    groups = torch.tensor([5, 5, 5, 2, 2, 2, 9, 5, 5])
    given: dict[str, Any] = {**inputs}
    out = group_advantage(
        **given, group_ids=groups, is_last_step=last, estimator=estimator, backend=backend
    )
    return {"advantages": out}


def _pack_cases(op: str) -> Iterator[KernelCase]:
    shapes: tuple[tuple[torch.dtype, tuple[int, ...]], ...] = (
        (torch.int64, ()),
        (torch.float32, (3,)),
        (torch.bfloat16, ()),
        (torch.uint8, ()),
    )
    for dtype, rest in shapes:
        shape = (5, 40, *rest)
        padded = torch.arange(math.prod(shape)).view(shape)
        # Values that fit a byte, and differ from cell to cell.
        inputs = {"padded": (padded % 251).to(dtype)}
        kind = str(dtype).removeprefix("torch.")
        name = f"{kind}, {len(shape)} dimensions"
        yield KernelCase(op, name, inputs, _call_pack, widens=False)


def _call_pack(inputs: Tensors, backend: str) -> Tensors:
    from skyrl_fast.ops.pack.varlen import padded_to_varlen, varlen_to_padded

    lengths = torch.tensor([1, 31, 0, 33, 40])
    leaf = inputs["padded"].clone()
    leaf.requires_grad_(leaf.is_floating_point())
    packed = padded_to_varlen(leaf, lengths=lengths, backend=backend)
    back = varlen_to_padded(
        packed.values, packed.cu_seqlens, width=41, pad_value=3, backend=backend
    )
    results = {"values": packed.values, "positions": packed.position_ids, "padded": back}
    if leaf.requires_grad:
        # Another weight for each column: a gradient in a wrong cell shows.
        weight = torch.arange(41, device=back.device)
        weight = weight.view(1, 41, *[1] * (back.dim() - 2))
        (back * weight).sum().backward()
        assert leaf.grad is not None
        results["gradient"] = leaf.grad
    return results


_CASES_ON_LOGITS: dict[str, Callable[[Sequence[LogitCase]], Iterator[KernelCase]]] = {
    "selected_logprob": _selected_cases,
    "masked_logprob_loss": _masked_loss_cases,
}
_CASES: dict[str, Callable[[], Iterator[KernelCase]]] = {
    "linear_logprob": _linear_cases,
    "policy_loss": _policy_loss_cases,
    "kl_penalty": _kl_cases,
    "group_advantage": _advantage_cases,
    "padded_to_varlen": functools.partial(_pack_cases, "padded_to_varlen"),
    "varlen_to_padded": functools.partial(_pack_cases, "varlen_to_padded"),
}
_NATIVE_ONLY = ("group_advantage", "padded_to_varlen", "varlen_to_padded")
BACKENDS_ON_GPU: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((*_CASES_ON_LOGITS, *_CASES), ("native", "triton")),
    **dict.fromkeys(_NATIVE_ONLY, ("native",)),
}
