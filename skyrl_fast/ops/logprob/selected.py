"""Log-probabilities of selected tokens. Shapes: ... rows in any arrangement, M rows, V vocab.

Design: docs/design/004-logprob.md.
"""

from __future__ import annotations

import torch

from skyrl_fast.ops import _backend
from skyrl_fast.ops.logprob import autograd as autograd  # registers the operator
from skyrl_fast.ops.logprob import reference
from skyrl_fast.ops.logprob.kept import check_kept, kept_sets

OP = "selected_logprob"
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ON_GPU = ("native", "triton", "torch")
# Below, a logit over the temperature has no fraction left in float32; above, 1 / temperature has
# too few bits.
MIN_TEMPERATURE = 1e-6
MAX_TEMPERATURE = 1e30


def selected_logprob(
    logits: torch.Tensor,
    target_ids: torch.Tensor,
    *,
    loss_mask: torch.Tensor | None = None,
    temperature: float = 1.0,
    kept_ids: torch.Tensor | None = None,
    cu_kept: torch.Tensor | None = None,
    return_entropy: bool = False,
    inplace_backward: bool = False,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probability of one selected token per row of logits, and the entropy.

    One pass over the logits with a running maximum (Milakov and Gimelshein 2018,
    arXiv:1805.02867); the forward allocates nothing of the logits' size. The result is
    float32 (float64 for float64 logits).

    On a GPU nothing synchronizes: a target out of range gives NaN, not an error.

    A logit of -inf has probability 0. A row that holds NaN or +inf, or only -inf, gives
    NaN, as torch's log_softmax does. Rows whose incoming gradient is 0 get the gradient 0.

    Args:
        logits: (..., V) float32, bfloat16, float16 or float64; the last dimension contiguous, the
            leading ones with strides that two nested loops can traverse (almost all are).
        target_ids: (...) integers, the token of each row; in [0, V) where the mask is 1, anything
            (-100, say) elsewhere.
        loss_mask: (...) bool or number, or None: all ones. Rows of mask 0 are never read; their
            log-probability, entropy and gradient are 0.
        temperature: divides the logits; from 1e-6 to 1e30.
        kept_ids, cu_kept: (K,) int32 ids and (M + 1,) int64 offsets, the ids that truncated
            sampling (top_p, top_k, min_p) kept in each of the M rows, masked ones too, in the
            flattened order of `target_ids`. The row is normalised over them alone: the others have
            probability and gradient 0. A row's ids ascend strictly and contain its target (rows of
            mask 0: anything); no ids: the full vocabulary. On a GPU a set that breaks this gives
            NaN.
        return_entropy: also return the entropy of softmax(logits / temperature), in nats.
        inplace_backward: the backward writes the gradient over the logits, which saves a tensor
            of their size; a later use of the logits in another backward raises an autograd error.
            A function compiled by torch.compile still allocates the gradient.
        backend: "native", "triton" (GPUs), "torch", or None to choose.

    Returns:
        (...) float32; with `return_entropy` a pair of them.

    Raises:
        ValueError: shapes that do not match, a target out of range where the mask is 1, a
            temperature out of range, logits of another dtype or not contiguous in the last
            dimension, offsets that do not fit the rows, or (on a CPU, in a row of mask 1) kept ids
            out of range, not ascending, or without the target.
        RuntimeError: a second or a forward-mode derivative, which only backend="torch" has.

    Example:
        >>> selected_logprob(torch.tensor([[0.0, 0.0], [0.0, 50.0]]), torch.tensor([1, 1]))
        tensor([-0.6931,  0.0000])
    """
    check_logits(OP, logits)
    check_selection(OP, logits, "logits", target_ids, loss_mask, temperature)
    shape = target_ids.shape
    targets = target_ids.reshape(-1).to(torch.int64).contiguous()
    keep = as_uint8(loss_mask)
    kept = kept_sets(OP, kept_ids, cu_kept, target_ids)
    inputs = (logits, target_ids, loss_mask, kept_ids)
    chosen = _backend.select(
        OP, *inputs, backend=backend, available_on_gpu=ON_GPU, transforms=("vmap",)
    )
    # float64 is for checks of gradients; the kernels compute in float32.
    if chosen != "torch" and logits.dtype in KERNEL_DTYPES:
        rows = kernel_rows(OP, logits)
        if inplace_backward:
            check_no_overlap(OP, rows)
        logprob, entropy, _ = torch.ops.skyrl_fast.selected_logprob(
            rows,
            targets,
            keep,
            temperature,
            return_entropy,
            inplace_backward,
            chosen == "triton",
            *(kept or (None, None)),
        )
    else:
        check_targets(OP, targets, keep, logits.shape[-1])
        check_kept(OP, kept, targets, keep, logits.shape[-1])
        rows = logits.reshape(-1, logits.shape[-1])
        logprob, entropy = reference.selected_logprob(rows, targets, keep, temperature, kept)
    if return_entropy:
        return logprob.view(shape), entropy.view(shape)
    return logprob.view(shape)


def check_logits(op: str, logits: torch.Tensor) -> None:
    if not isinstance(logits, torch.Tensor):
        raise TypeError(f"{op}: logits: expected a torch tensor, got {type(logits).__name__}")
    if logits.dim() < 1 or logits.shape[-1] < 1:
        raise ValueError(f"{op}: logits: expected (..., V) with V >= 1, got {tuple(logits.shape)}")
    if logits.stride(-1) != 1 and logits.shape[-1] != 1:
        raise ValueError(
            f"{op}: logits: expected a contiguous last dimension, got stride {logits.stride(-1)}"
        )


def check_selection(
    op: str,
    scores: torch.Tensor,
    name: str,
    target_ids: torch.Tensor,
    loss_mask: torch.Tensor | None,
    temperature: float,
) -> None:
    """Check the arguments shared by ops on logits (..., V) and hidden states (..., H): `scores`."""
    if scores.dtype not in (*KERNEL_DTYPES, torch.float64):
        raise ValueError(
            f"{op}: {name}: expected float32, bfloat16, float16 or float64, got {scores.dtype}"
        )
    for argument, tensor in (("target_ids", target_ids), ("loss_mask", loss_mask)):
        if tensor is None and argument == "loss_mask":
            continue
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"{op}: {argument}: expected a torch tensor, got {type(tensor).__name__}"
            )
        if tensor.shape != scores.shape[:-1]:
            raise ValueError(
                f"{op}: {argument}: expected shape {tuple(scores.shape[:-1])}, got "
                f"{tuple(tensor.shape)}"
            )
    if target_ids.is_floating_point() or target_ids.is_complex() or target_ids.dtype == torch.bool:
        raise ValueError(f"{op}: target_ids: expected integers, got {target_ids.dtype}")
    if not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
        raise ValueError(
            f"{op}: temperature: expected a positive and finite number, from {MIN_TEMPERATURE:g} "
            "to "
            f"{MAX_TEMPERATURE:g}, got {temperature}"
        )


def as_uint8(mask: torch.Tensor | None) -> torch.Tensor | None:
    """Return a mask of any dtype as (M,) uint8, 1 where it is not 0."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        keep = mask.detach()
    else:
        keep = mask.detach() != 0
    # A view: a bool is a byte of 0 or 1.
    return keep.reshape(-1).contiguous().view(torch.uint8)


def check_targets(op: str, targets: torch.Tensor, keep: torch.Tensor | None, vocab: int) -> None:
    bad = (targets < 0) | (targets >= vocab)
    if keep is not None:
        bad = bad & (keep != 0)
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        raise ValueError(
            f"{op}: target_ids: expected ids in [0, {vocab}) where the mask is 1, got "
            f"{int(targets[row])} in row {row}"
        )


def kernel_rows(op: str, logits: torch.Tensor) -> torch.Tensor:
    """Return logits as (rows, V) or (outer, inner, V), without a copy."""
    if logits.dim() == 1:
        return logits.unsqueeze(0)
    sizes: list[int] = []
    strides: list[int] = []
    for size, stride in zip(logits.shape[:-1], logits.stride()[:-1], strict=True):
        # Dimensions that one stride can traverse become one.
        if sizes and (size == 1 or sizes[-1] == 1 or strides[-1] == stride * size):
            # A dimension of size 1 may have any stride.
            if size != 1:
                strides[-1] = stride
            sizes[-1] *= size
        else:
            sizes.append(size)
            strides.append(stride)
    if len(sizes) > 2:
        raise ValueError(
            f"{op}: logits: expected rows that two nested strides can traverse, got shape "
            f"{tuple(logits.shape)} with strides {logits.stride()}; call .contiguous() first"
        )
    return logits.view(*sizes, logits.shape[-1])


def has_kernel_rows(logits: torch.Tensor) -> bool:
    """Return whether `selected_logprob` takes logits of these strides."""
    try:
        check_logits(OP, logits)
        kernel_rows(OP, logits)
    except ValueError:
        return False
    return True


def check_no_overlap(op: str, rows: torch.Tensor) -> None:
    """Check that rows of logits may be written in place: each loop steps past the one inside it."""
    extent = rows.shape[-1]
    loops = list(zip(rows.stride()[:-1], rows.shape[:-1], strict=True))
    if len(loops) == 2 and loops[1][0] < loops[0][0]:  # torch.compile cannot sort symbolic sizes
        loops.reverse()
    for stride, size in loops:
        if size <= 1:
            continue
        if stride < extent:
            raise ValueError(
                f"{op}: rows of logits must not overlap to be written in place, got shape "
                f"{tuple(rows.shape)} with strides {rows.stride()}"
            )
        extent += stride * (size - 1)
