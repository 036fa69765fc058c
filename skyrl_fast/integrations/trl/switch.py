"""Installing and uninstalling the replacements of TRL's functions. V vocabulary."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch

from skyrl_fast.integrations.calls import Counts, Report, Row, print_at_exit
from skyrl_fast.integrations.source import (
    UNKNOWN_SOURCE,
    fingerprint_with_calls,
    modules_that_bind,
)
from skyrl_fast.integrations.trl.fused_head import FusedHead
from skyrl_fast.ops.logprob.selected import has_kernel_rows, selected_logprob

PACKAGE = "trl"
FUSED_HEAD = "ChunkedLogProbFunction"
LOG_SOFTMAX = "selective_log_softmax"
GRPO_LOSS = "GRPOTrainer._compute_loss"
# Fingerprints of the functions that the replacements stand in for, with those that they call, by
# the first version of TRL.
KNOWN_HEADS = {"274953e0178a8b54": "1.16.0"}
KNOWN_LOG_SOFTMAX = {"1e35ed45e405518c": "1.16.0"}
COUNTS = {FUSED_HEAD: Counts(), LOG_SOFTMAX: Counts(), GRPO_LOSS: Counts()}
_restore: list[Callable[[], object]] = []
_report: Report | None = None
_log_softmax: Callable[..., torch.Tensor] | None = None  # TRL's own
_on_gpu = False


class TrlFastWarning(UserWarning):
    """Little or nothing of this TRL is replaced; the message says what and why."""


def install(*, on_gpu: bool = False) -> Report:
    """Replace TRL's functions in this process, before or after trainers are created.

    GRPO, RLOO, DPO, KTO and SFT trainers compute log-probabilities from hidden states by one
    function of TRL's fused LM head, which `linear_logprob` replaces, and on a CPU score the tokens
    with a label only. Experimental trainers that use `selective_log_softmax` get
    `selected_logprob`. A line about the calls is printed when the process ends.

    Args:
        on_gpu: also compute on GPUs, where the replacement has not been measured against TRL's
            Triton kernels.

    Raises:
        ImportError: TRL is not installed.

    Warns:
        TrlFastWarning: a function of this TRL is not known, and is not replaced.
    """
    global _report, _on_gpu
    uninstall()
    import trl.trainer.utils as home

    _on_gpu = on_gpu
    why = "a trainer of this package has it: skyrl_fast.integrations.trl.GRPOTrainer"
    loss = Row(GRPO_LOSS, "kept", why, COUNTS[GRPO_LOSS])
    functions = (_replace_head(home, on_gpu=on_gpu), _replace_log_softmax(home), loss)
    _report = Report(f"TRL {metadata.version('trl')}", functions)
    if functions[0].state != "replaced":
        warnings.warn(
            f"{_report.host}: {FUSED_HEAD}, which its trainers use, is not replaced: "
            f"{functions[0].why}. Training runs on TRL's own code",
            TrlFastWarning,
            stacklevel=2,
        )
    print_at_exit(_last_line)
    return _report


def uninstall() -> None:
    """Restore TRL's own functions, and forget the counts."""
    global _report, _log_softmax
    while _restore:
        _restore.pop()()
    for counts in COUNTS.values():
        counts.calls = 0
        counts.handed_back = 0
        counts.last_reason = ""
    _report = _log_softmax = None


def report() -> Report:
    """Return what is replaced, with the calls so far; RuntimeError if nothing is installed."""
    if _report is None:
        raise RuntimeError("skyrl_fast.integrations.trl: nothing is installed; call install()")
    return _report


def _last_line() -> str:
    if _report is None:
        return ""
    return _report.summary()


def _replace_head(home: Any, *, on_gpu: bool) -> Row:
    name = "_" + FUSED_HEAD
    original = getattr(home, name, None)
    if original is None or not hasattr(home, "_use_triton"):
        return Row(FUSED_HEAD, "absent", "this version has no fused LM head")
    sources = fingerprint_with_calls([original.forward, home.add_fused_lm_head], PACKAGE)
    if sources not in KNOWN_HEADS:
        return Row(FUSED_HEAD, "kept", UNKNOWN_SOURCE)
    head = FusedHead(original, COUNTS[FUSED_HEAD], on_gpu=on_gpu)
    _set(home, name, head)
    # Whether only tokens with a label are scored: TRL's answer is no on a CPU.
    _set(home, "_use_triton", lambda device: True)
    return Row(FUSED_HEAD, "replaced", counts=COUNTS[FUSED_HEAD])


def _replace_log_softmax(home: Any) -> Row:
    global _log_softmax
    original = getattr(home, LOG_SOFTMAX, None)
    if original is None:
        return Row(LOG_SOFTMAX, "absent")
    if fingerprint_with_calls([original], PACKAGE) not in KNOWN_LOG_SOFTMAX:
        return Row(LOG_SOFTMAX, "kept", UNKNOWN_SOURCE)
    _log_softmax = original
    for module in modules_that_bind("trl", LOG_SOFTMAX, original):
        _set(module, LOG_SOFTMAX, selective_log_softmax)
    why = "used by experimental trainers only"
    return Row(LOG_SOFTMAX, "replaced", why, COUNTS[LOG_SOFTMAX])


def _set(module: Any, name: str, value: Any) -> None:
    before = getattr(module, name)
    setattr(module, name, value)
    _restore.append(lambda: setattr(module, name, before))


def selective_log_softmax(
    logits: torch.Tensor,
    index: torch.Tensor,
    temperature: float = 1.0,
    row_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the log-probabilities of `index`, as TRL's function of that name.

    The result has the dtype of the logits, as in TRL. TRL's own function gets several indices per
    row (an additional dimension), logits whose strides `selected_logprob` does not take, and
    tensors on GPUs, unless installed with `on_gpu`, and on other devices.

    Args:
        logits: (..., V). index: (...), integers. temperature: divides the logits.
        row_mask: (...), rows with 0 are not read; their result is 0.

    Raises:
        ValueError: shapes do not match, or the temperature is not above 0.

    Example:
        >>> selective_log_softmax(torch.zeros(1, 2), torch.tensor([1]))
        tensor([-0.6931])
    """
    counts = COUNTS[LOG_SOFTMAX]
    counts.calls += 1
    reason = ""
    if index.ndim == logits.ndim:
        reason = "several indices per row"
    elif logits.device.type != "cpu" and not (_on_gpu and logits.is_cuda):
        reason = f"tensors on {logits.device.type}: see install(on_gpu=True)"
    elif not has_kernel_rows(logits):
        reason = f"logits with strides {logits.stride()}"
    if reason:
        counts.hand_back(reason)
        if _log_softmax is not None:
            return _log_softmax(logits, index, temperature=temperature, row_mask=row_mask)
        from trl.trainer.utils import selective_log_softmax as original

        result: torch.Tensor = original(logits, index, temperature=temperature, row_mask=row_mask)
        return result
    out = selected_logprob(logits, index, loss_mask=row_mask, temperature=temperature)
    assert isinstance(out, torch.Tensor)
    return out.to(logits.dtype)
