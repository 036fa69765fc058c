"""Log-probabilities of several tokens per row. Shapes: ... rows in any arrangement, K ids, V vocab.

Design: docs/design/004-logprob.md.
"""

from __future__ import annotations

import torch

from skyrl_fast.ops import _backend
from skyrl_fast.ops.logprob import autograd as autograd  # registers the operator
from skyrl_fast.ops.logprob import reference
from skyrl_fast.ops.logprob.selected import (
    KERNEL_DTYPES,
    ON_GPU,
    as_uint8,
    check_logits,
    check_selection,
    check_targets,
    kernel_rows,
    selected_logprob,
)

OP = "gathered_logprob"


def gathered_logprob(
    logits: torch.Tensor,
    target_ids: torch.Tensor,
    *,
    loss_mask: torch.Tensor | None = None,
    temperature: float = 1.0,
    backend: str | None = None,
) -> torch.Tensor:
    """Return the log-probabilities of K tokens per row of logits.

    Each row is read once, so K tokens take about as long as one; the forward allocates nothing of
    the logits' size. The backward adds the gradients of an id that is there several times. On a GPU
    the kernel of `selected_logprob` normalises each row, by its largest logit.

    A logit of -inf has probability 0. A row that holds NaN or +inf, or only -inf, gives NaN, as
    torch's log_softmax does. On a GPU a target out of range is an error of the device.

    Args:
        logits: (..., V) float32, bfloat16, float16 or float64; the last dimension contiguous, the
            leading ones with strides that two nested loops can traverse (almost all are).
        target_ids: (..., K) integers, in [0, V) where the mask is 1, anything (-100, say)
            elsewhere; an id may be there several times.
        loss_mask: (...) bool or number, or None: all ones. Rows of mask 0 are never read on a CPU;
            their log-probabilities and gradient are 0.
        temperature: divides the logits; from 1e-6 to 1e30.
        backend: "native", "triton" (GPUs), "torch", or None to choose.

    Returns:
        (..., K) float32 (float64 for float64 logits).

    Raises:
        ValueError: shapes that do not match, a target out of range where the mask is 1, a
            temperature out of range, logits of another dtype or not contiguous in the last
            dimension.
        RuntimeError: a second or a forward-mode derivative, which only backend="torch" has.

    Example:
        >>> gathered_logprob(torch.tensor([[0.0, 0.0, 50.0]]), torch.tensor([[2, 0]]))
        tensor([[  0., -50.]])
    """
    check_logits(OP, logits)
    if not isinstance(target_ids, torch.Tensor):
        raise TypeError(
            f"{OP}: target_ids: expected a torch tensor, got {type(target_ids).__name__}"
        )
    if target_ids.dim() != logits.dim() or target_ids.shape[:-1] != logits.shape[:-1]:
        raise ValueError(
            f"{OP}: target_ids: expected shape {tuple(logits.shape[:-1])} and K, got "
            f"{tuple(target_ids.shape)}"
        )
    if target_ids.shape[-1] == 0:
        return logits.new_zeros(target_ids.shape, dtype=_result_dtype(logits))
    check_selection(OP, logits, "logits", target_ids[..., 0], loss_mask, temperature)
    ids = target_ids.reshape(-1, target_ids.shape[-1]).to(torch.int64).contiguous()
    keep = as_uint8(loss_mask)
    inputs = (logits, target_ids, loss_mask)
    chosen = _backend.select(
        OP, *inputs, backend=backend, available_on_gpu=ON_GPU, transforms=("vmap",)
    )
    has_kernel = chosen != "torch" and logits.dtype in KERNEL_DTYPES
    if has_kernel and chosen == "native" and not _backend.on_gpu(logits):
        rows = kernel_rows(OP, logits)
        logprob, _ = torch.ops.skyrl_fast.gathered_logprob(rows, ids, keep, temperature)
        return logprob.view(target_ids.shape)
    if _backend.device_kind(target_ids.device) == "cpu":
        check_all_targets(ids, keep, logits.shape[-1])
    rows = logits.reshape(-1, logits.shape[-1])
    if has_kernel:
        values = _by_largest(rows, ids, keep, temperature, chosen)
    else:
        values = reference.gathered_logprob(rows, ids, keep, temperature)
    return values.view(target_ids.shape)


def check_all_targets(ids: torch.Tensor, keep: torch.Tensor | None, vocab: int) -> None:
    """Check (M, K) ids; the message names the row of the first wrong one."""
    for place in range(ids.shape[1]):
        check_targets(OP, ids[:, place], keep, vocab)


def _by_largest(
    rows: torch.Tensor,
    ids: torch.Tensor,
    keep: torch.Tensor | None,
    temperature: float,
    backend: str,
) -> torch.Tensor:
    """Return (M, K) log-probabilities from that of the largest logit of each row."""
    if keep is not None:
        ids = ids.masked_fill((keep == 0)[:, None], 0)  # what is there may be anything
    largest = rows.detach().argmax(dim=-1, keepdim=True)
    logprob = selected_logprob(
        rows, largest[:, 0], loss_mask=keep, temperature=temperature, backend=backend
    )
    assert isinstance(logprob, torch.Tensor)
    differences = (rows.gather(-1, ids).float() - rows.gather(-1, largest).float()) / temperature
    if keep is not None:
        # Not a product: what a masked row holds may be NaN.
        differences = differences.masked_fill((keep == 0)[:, None], 0.0)
    return logprob[:, None] + differences


def _result_dtype(logits: torch.Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32
