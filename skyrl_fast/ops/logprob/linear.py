"""Log-probabilities from hidden states. M trained rows, V vocab, H hidden.

Design: docs/design/004-logprob.md.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from skyrl_fast.ops import _backend
from skyrl_fast.ops._derivatives import first_derivative_only
from skyrl_fast.ops.logprob import linear_op, reference
from skyrl_fast.ops.logprob.kept import KeptSets, check_kept, kept_sets
from skyrl_fast.ops.logprob.linear_rows import (
    OP,
    OnLogits,
    Options,
    backward_rows,
    default_chunk_rows,
    forward_rows,
    spread,
)
from skyrl_fast.ops.logprob.selected import (
    KERNEL_DTYPES,
    MAX_TEMPERATURE,
    MIN_TEMPERATURE,
    ON_GPU,
    as_uint8,
    check_selection,
    check_targets,
)

# A row of the head that is gathered, and whose gradient is scattered, costs as much as a logit and
# its gradients in this many rows: by bytes per element, measured on a CPU with 16-bit matrix units.
ROWS_PER_GATHERED = {4: 100, 2: 800}
MIN_VOCAB_PER_ID = 16  # a larger set is a product with the full head


def linear_logprob(
    hidden: torch.Tensor,
    lm_head_weight: torch.Tensor,
    target_ids: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    loss_mask: torch.Tensor | None = None,
    ignore_index: int | None = None,
    logit_scale: float = 1.0,
    soft_cap: float | None = None,
    temperature: float = 1.0,
    kept_ids: torch.Tensor | None = None,
    cu_kept: torch.Tensor | None = None,
    return_entropy: bool = False,
    on_logits: OnLogits | None = None,
    saved_logits_bytes: int | None = None,
    chunk_rows: int | None = None,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probability of one token per row, from hidden states.

    The logits are `z = logit_scale * (hidden @ lm_head_weight.T + bias)`, with a soft cap
    `soft_cap * tanh(z / soft_cap)`, divided by the temperature. Under autocast the operands are
    converted as those of `torch.nn.functional.linear`.

    Rows of mask 0 are dropped before the product. The others are processed in chunks, so that at
    most one chunk of logits is in memory: chunks of rows in the forward; in the backward, where the
    log-sum-exps are known, of all rows and a part of the vocabulary, so that only hidden's gradient
    is a sum over chunks, in float32. The backward recomputes the logits and turns them into their
    gradient in place: four products in total. Logits of at most `saved_logits_bytes` are one chunk,
    which is saved for the backward: three products, and no sums over chunks.

    Rows of small kept sets (top_p, say) are multiplied with the rows of the head that any of them
    kept, where that is less work; on a GPU their sizes are read, which synchronizes.

    With `torch.compile(fullgraph=True)` it is one operator of the graph; its backward recomputes
    the logits. Kept sets, on_logits, float64 and backend="torch" split the graph.

    Args:
        hidden: (..., H) float32, bfloat16, float16 or float64.
        lm_head_weight: (V, H) of the same dtype.
        target_ids: (...) integers; in [0, V) where the mask is 1.
        bias: (V,) of the same dtype, or None.
        loss_mask: (...) bool or number, or None: all ones.
        ignore_index: target of rows that are treated as if their mask were 0, such as -100.
        logit_scale: multiplies the product; positive.
        soft_cap: largest absolute logit, as of Gemma 2; positive.
        temperature: divides the logits; from 1e-6 to 1e30.
        kept_ids, cu_kept: as in `selected_logprob`.
        return_entropy: also return the entropy of softmax(logits / temperature), in nats.
        on_logits: called for each chunk of the forward pass, for metrics, with the number of its
            first row among those of mask 1, (rows, V) values and a divisor: softmax(values /
            divisor) are the probabilities. The values are overwritten later. Kernels only.
        saved_logits_bytes: the most logits to save for the backward (with a soft cap, their
            gradient takes as much again). None: 1 GB on a CPU, none on a GPU.
        chunk_rows: rows per chunk, which is saved if it holds all rows; the backward's chunks have
            the same size. None: all rows up to `saved_logits_bytes`, else 128 MB of logits (on a
            GPU: 512 MB), at least 64 rows.
        backend: "native", "torch" (which holds the logits of all rows of mask 1), or None.

    Returns:
        (...) float32 (float64 for float64), 0 where the mask is 0; with `return_entropy` a pair.

    Raises:
        ValueError: shapes or dtypes that do not match, a target out of range where the mask is 1,
            temperature, logit_scale, soft_cap or chunk_rows not positive, kept sets as in
            `selected_logprob`, on_logits with kept sets, float64 or backend="torch".
        RuntimeError: a second or a forward-mode derivative, which only backend="torch" has.

    Example:
        >>> linear_logprob(torch.zeros(1, 2), torch.zeros(4, 2), torch.tensor([3]))
        tensor([-1.3863])
    """
    # Autocast does not know this op.
    hidden, lm_head_weight, bias = _autocast(hidden, lm_head_weight, bias)
    _check_linear(hidden, lm_head_weight, bias, target_ids, loss_mask, temperature, chunk_rows)
    _check_scaling(temperature, logit_scale, soft_cap)
    kept = kept_sets(OP, kept_ids, cu_kept, target_ids)
    operands = [x for x in (hidden, lm_head_weight, bias) if x is not None]
    inputs = (*operands, target_ids)
    chosen = _backend.select(OP, *inputs, kept_ids, backend=backend, available_on_gpu=ON_GPU)
    if loss_mask is not None and _backend.device_kind(loss_mask.device) != "cpu":
        _backend.check_device(OP, *inputs, loss_mask)  # a mask on the CPU saves a synchronization
    if ignore_index is not None:
        wanted = target_ids != ignore_index
        if loss_mask is None:
            loss_mask = wanted
        else:
            loss_mask = (loss_mask != 0).to(wanted.device) & wanted
    native = chosen != "torch" and hidden.dtype in KERNEL_DTYPES
    if torch.compiler.is_compiling() and native and kept is None and on_logits is None:
        return linear_op.call(
            hidden,
            lm_head_weight,
            bias,
            target_ids,
            loss_mask,
            temperature,
            logit_scale,
            soft_cap,
            return_entropy,
            chunk_rows,
            chosen == "triton",
        )
    _backend.break_graph(OP, "what kept_ids, on_logits, float64 or backend='torch' compute")
    if on_logits is not None and (kept is not None or not native):
        raise ValueError(
            f"{OP}: on_logits needs a kernel and no kept sets, got backend {chosen!r}, "
            f"{hidden.dtype}, {'no ' if kept is None else ''}kept sets"
        )
    shape = target_ids.shape
    hidden = hidden.reshape(-1, hidden.shape[-1])
    targets = target_ids.reshape(-1).to(torch.int64)
    # Kernels on a GPU check nothing, as reading would wait: a wrong target gives NaN.
    if chosen == "torch" or not _backend.on_gpu(hidden):
        keep = as_uint8(loss_mask)
        check_targets(OP, targets, keep, lm_head_weight.shape[0])
        check_kept(OP, kept, targets, keep, lm_head_weight.shape[0])
    rows = None
    if loss_mask is not None:
        # Before the product with the head, so that masked rows cost nothing.
        rows = (loss_mask.reshape(-1) != 0).nonzero().squeeze(1)
        if rows.device != hidden.device:
            rows = rows.to(hidden.device, non_blocking=True)
        # Outside of the autograd function: indexing returns the gradient to these rows.
        hidden = hidden[rows]
        targets = targets[rows]
        if kept is not None:
            kept = kept.of_rows(rows)
    if native:
        on_gpu = _backend.on_gpu(hidden)
        if not (torch.is_grad_enabled() and any(x.requires_grad for x in operands)):
            saved_logits_bytes = None  # there is no backward
        chunk = chunk_rows or default_chunk_rows(
            lm_head_weight, len(hidden), on_gpu=on_gpu, saved_logits_bytes=saved_logits_bytes
        )
        options = Options(
            temperature, logit_scale, soft_cap, return_entropy, chunk, chosen == "triton", on_logits
        )
        if kept is None:
            logprob, entropy = _LinearLogprob.apply(
                hidden, lm_head_weight, bias, targets, None, options
            )
        else:
            logprob, entropy = _with_sets(hidden, lm_head_weight, bias, targets, kept, options)
    else:
        logprob, entropy = reference.linear_logprob(
            hidden, lm_head_weight, targets, None, temperature, kept, bias, logit_scale, soft_cap
        )
    logprob = spread(logprob, rows, shape)
    if return_entropy:
        return (logprob, spread(entropy, rows, shape))
    return logprob


def _autocast(
    *operands: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    if isinstance(operands[0], torch.Tensor):
        kind = operands[0].device.type
    else:
        kind = "cpu"
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
        return operands  # type: ignore[return-value]
    dtype = torch.get_autocast_dtype(kind)
    return tuple(  # type: ignore[return-value]
        # Torch's autocast leaves float64 alone, too.
        x.to(dtype) if isinstance(x, torch.Tensor) and x.dtype != torch.float64 else x
        for x in operands
    )


def _with_sets(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    kept: KeptSets,
    options: Options,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities and entropies; rows of small sets read their part of the head."""
    sizes = kept.sizes
    is_small = (sizes > 0) & (sizes * MIN_VOCAB_PER_ID <= weight.shape[0])
    small = is_small.nonzero().squeeze(1)
    part = kept.of_rows(small)
    # Clamped: ids are not checked on a GPU. A wrong one is in no row's set, which makes its row
    # NaN.
    ids = part.ids[part.pairs()[1]].clamp(0, weight.shape[0] - 1).unique()
    # Copying these rows of the head must cost less than the products that it saves.
    gathered = ids.numel() * ROWS_PER_GATHERED[weight.element_size()]
    if gathered >= small.numel() * (weight.shape[0] - ids.numel()):
        return _LinearLogprob.apply(hidden, weight, bias, targets, kept, options)
    found = _over_ids(hidden[small], weight, bias, targets[small], part, ids, options)
    large = (~is_small).nonzero().squeeze(1)
    if large.numel() == 0:
        return found
    others = _LinearLogprob.apply(
        hidden[large], weight, bias, targets[large], kept.of_rows(large), options
    )
    # Back into the order of the rows.
    # Their gradients join here, too: autograd adds those of the head.
    order = torch.cat([small, large]).argsort()
    logprob, entropy = (torch.cat(pair) for pair in zip(found, others, strict=True))
    return logprob[order], entropy[order] if options.return_entropy else entropy


def _over_ids(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    kept: KeptSets,
    ids: torch.Tensor,
    options: Options,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same for a head of the rows `ids`, (U,) ascending, which hold all sets."""

    def place_of(values: torch.Tensor) -> torch.Tensor:
        """Return places in `ids`; -1 where a value is not there (on a GPU: not checked before)."""
        place = torch.searchsorted(ids, values).clamp(max=ids.numel() - 1)
        return torch.where(ids[place] == values, place, -1)

    sizes = kept.sizes
    end = sizes.cumsum(0)
    local = place_of(kept.ids[kept.pairs()[1]]).int()
    sets = KeptSets(local, torch.stack([end - sizes, end], 1))
    rows = max(options.chunk_rows * weight.shape[0] // ids.numel(), 1)  # a chunk of the same size
    head = []
    for x in (weight, bias):
        head.append(None if x is None else x.index_select(0, ids))
    options = replace(options, chunk_rows=rows)
    return _LinearLogprob.apply(hidden, *head, place_of(targets.int()), sets, options)


def _check_linear(
    hidden: torch.Tensor,
    lm_head_weight: torch.Tensor,
    bias: torch.Tensor | None,
    target_ids: torch.Tensor,
    loss_mask: torch.Tensor | None,
    temperature: float,
    chunk_rows: int | None,
) -> None:
    for name, tensor in (("hidden", hidden), ("lm_head_weight", lm_head_weight)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{OP}: {name}: expected a torch tensor, got {type(tensor).__name__}")
    if hidden.dim() < 1 or lm_head_weight.dim() != 2 or lm_head_weight.shape[0] < 1:
        raise ValueError(
            f"{OP}: hidden: expected (..., H) and lm_head_weight (V, H) with V >= 1, got "
            f"{tuple(hidden.shape)} and {tuple(lm_head_weight.shape)}"
        )
    if hidden.shape[-1] != lm_head_weight.shape[1] or hidden.dtype != lm_head_weight.dtype:
        raise ValueError(
            f"{OP}: lm_head_weight: expected (V, {hidden.shape[-1]}) {hidden.dtype} like "
            f"hidden, got {tuple(lm_head_weight.shape)} {lm_head_weight.dtype}"
        )
    if bias is not None and not isinstance(bias, torch.Tensor):
        raise TypeError(f"{OP}: bias: expected a torch tensor or None, got {type(bias).__name__}")
    vocab = lm_head_weight.shape[0]
    if bias is not None and (bias.shape != (vocab,) or bias.dtype != hidden.dtype):
        raise ValueError(
            f"{OP}: bias: expected ({vocab},) {hidden.dtype}, got {tuple(bias.shape)} {bias.dtype}"
        )
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"{OP}: chunk_rows: expected at least 1, got {chunk_rows}")
    check_selection(OP, hidden, "hidden", target_ids, loss_mask, temperature)


def _check_scaling(temperature: float, logit_scale: float, soft_cap: float | None) -> None:
    for name, value in (("logit_scale", logit_scale), ("soft_cap", soft_cap)):
        if value is None and name == "soft_cap":
            continue
        # What the kernels divide by must be in the range of a temperature.
        if not (value and value > 0 and MIN_TEMPERATURE <= temperature / value <= MAX_TEMPERATURE):
            raise ValueError(
                f"{OP}: {name}: expected a positive number, with temperature / {name} from "
                f"{MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}, got {value} at temperature "
                f"{temperature}"
            )


class _LinearLogprob(torch.autograd.Function):
    """linear_logprob of trained rows only: hidden (M, H), targets (M,)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        kept: KeptSets | None,
        options: Options,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprob, entropy, lse, logits = forward_rows(hidden, weight, bias, targets, kept, options)
        ctx.save_for_backward(hidden, weight, bias, targets, entropy, lse)
        ctx.kept = kept
        ctx.options = options
        ctx.set_materialize_grads(False)  # an entropy that only metrics use needs no gradient
        # Its logits are at hand: saved, they spare the backward a product.
        is_only_chunk = len(hidden) <= options.chunk_rows
        if is_only_chunk and any(ctx.needs_input_grad):
            ctx.only_chunk = logits
        else:
            ctx.only_chunk = None
        return logprob, entropy

    @staticmethod
    @first_derivative_only(OP)
    def backward(
        ctx: Any, grad_logprob: torch.Tensor | None, grad_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        logits, ctx.only_chunk = ctx.only_chunk, None  # a second backward recomputes it
        hidden, weight, bias, targets, entropy, lse = ctx.saved_tensors
        gradients = backward_rows(
            hidden,
            weight,
            bias,
            targets,
            entropy,
            lse,
            ctx.kept,
            ctx.options,
            logits,
            grad_logprob,
            grad_entropy,
            wanted=ctx.needs_input_grad[:3],
        )
        return *gradients, None, None, None
