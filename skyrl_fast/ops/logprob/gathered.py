"""Log-probabilities of several tokens per row. Shapes: ... rows in any arrangement, K ids, V vocab.

Design: docs/design/004-logprob.md.
"""

from __future__ import annotations

import torch

from skyrl_fast.ops import _backend
from skyrl_fast.ops.logprob import reference
from skyrl_fast.ops.logprob.selected import (
    KERNEL_DTYPES,
    ON_GPU,
    check_logits,
    check_selection,
    check_targets,
    selected_logprob,
)

OP = "gathered_logprob"


def gathered_logprob(
    logits: torch.Tensor,
    target_ids: torch.Tensor,
    *,
    temperature: float = 1.0,
    backend: str | None = None,
) -> torch.Tensor:
    """Return the log-probabilities of K tokens per row of logits.

    The kernel of `selected_logprob` normalises each row once, by its largest logit; the others
    follow from their differences to that one. So K tokens take about as long as one.

    A logit of -inf has probability 0. A row that holds NaN or +inf, or only -inf, gives NaN, as
    torch's log_softmax does. On a GPU a target out of range is an error of the device.

    Args:
        logits: (..., V) float32, bfloat16, float16 or float64; the last dimension contiguous.
        target_ids: (..., K) integers in [0, V); an id may be there several times.
        temperature: divides the logits; from 1e-6 to 1e30.
        backend: "native", "triton" (GPUs), "torch", or None to choose.

    Returns:
        (..., K) float32 (float64 for float64 logits).

    Raises:
        ValueError: shapes that do not match, a target out of range, a temperature out of range,
            logits of another dtype or not contiguous in the last dimension.

    Example:
        >>> gathered_logprob(torch.tensor([[0.0, 0.0, 50.0]]), torch.tensor([[2, 0]]))
        tensor([[  0., -50.]])
    """
    check_logits(OP, logits)
    if not isinstance(target_ids, torch.Tensor):
        raise TypeError(f"{OP}: target_ids must be a torch tensor, got {type(target_ids).__name__}")
    if target_ids.dim() != logits.dim() or target_ids.shape[:-1] != logits.shape[:-1]:
        raise ValueError(
            f"{OP}: target_ids must be of shape {tuple(logits.shape[:-1])} and K, got "
            f"{tuple(target_ids.shape)}"
        )
    if target_ids.shape[-1] == 0:
        return logits.new_zeros(target_ids.shape, dtype=_result_dtype(logits))
    check_selection(OP, logits, "logits", target_ids[..., 0], None, temperature)
    if _backend.device_kind(target_ids.device) == "cpu":
        check_targets(OP, target_ids.reshape(-1), None, logits.shape[-1])
    ids = target_ids.to(torch.int64)
    chosen = _backend.select(
        OP, logits, target_ids, backend=backend, available_on_gpu=ON_GPU, transforms=("vmap",)
    )
    if chosen == "torch" or logits.dtype not in KERNEL_DTYPES:
        return reference.gathered_logprob(logits, ids, temperature)
    largest = logits.detach().argmax(dim=-1, keepdim=True)
    logprob = selected_logprob(logits, largest[..., 0], temperature=temperature, backend=chosen)
    assert isinstance(logprob, torch.Tensor)
    differences = logits.gather(-1, ids).float() - logits.gather(-1, largest).float()
    return logprob[..., None] + differences / temperature


def _result_dtype(logits: torch.Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32
