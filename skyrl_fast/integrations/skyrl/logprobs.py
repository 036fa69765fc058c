"""SkyRL's log-probabilities of tokens. Shapes: ... rows in any arrangement, V vocabulary."""

from __future__ import annotations

import inspect

import torch

from skyrl_fast.integrations.skyrl.replacement import ORIGINALS, replaces, require
from skyrl_fast.ops import _backend
from skyrl_fast.ops.logprob.selected import ON_GPU, selected_logprob

NAME = "logprobs_from_logits"


@replaces(NAME)
def logprobs_from_logits(
    logits: torch.Tensor, labels: torch.Tensor, inplace_backward: bool = True
) -> torch.Tensor:
    """Return each label's log-probability, as SkyRL's function of that name.

    Sums run in float32 with a float64 flush, in one pass; the result is rounded to the logits'
    dtype, as SkyRL's is (on a GPU with flash-attn SkyRL's is float32, and so is this one). It
    differs from SkyRL's by the rounding of its sums.

    Args:
        logits: (B, S, V) float32, bfloat16 or float16. On a device without kernels (a GPU without
            compiled ones and without Triton) the call is passed to SkyRL.
        labels: (B, S) integers.
        inplace_backward: whether the gradient may overwrite the logits; as in SkyRL, only on a GPU.

    Example:
        >>> logprobs_from_logits(torch.zeros(1, 1, 2), torch.tensor([[1]]))
        tensor([[-0.6931]])
    """
    require(logits.numel() > 0 and logits.ndim > 1, "no rows")
    require(logits.shape[:-1] == labels.shape, "labels of unsupported shape")
    require(logits.dtype in (torch.float32, torch.bfloat16, torch.float16), "unsupported dtype")
    require(labels.dtype == torch.int64, "labels of unsupported dtype")
    on_gpu = _backend.on_gpu(logits)
    chosen = _backend.select("selected_logprob", logits, available_on_gpu=ON_GPU)
    require(chosen != "torch", "a device without kernels")
    inplace = inplace_backward and on_gpu
    out = selected_logprob(logits, labels, inplace_backward=inplace)
    assert isinstance(out, torch.Tensor)
    if on_gpu and _uses_flash_attention():
        return out
    return out.to(logits.dtype)


def _uses_flash_attention() -> bool:
    original = ORIGINALS.function(NAME)
    if original is None:
        module = {}
    else:
        module = inspect.unwrap(original).__globals__
    return bool(module.get("FLASH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE"))
