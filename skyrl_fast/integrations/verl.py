"""verl with this package's advantages, log-probabilities, and packing of padded batches.

verl's trainer lives in a Ray actor, and imports plugins there. So its command needs no change:

    python -m verl.trainer.main_ppo algorithm.adv_estimator=skyrl_fast_grpo ...
    VERL_USE_EXTERNAL_MODULES=skyrl_fast.integrations.verl python -m verl.trainer.main_ppo ...

The first registers the estimators, by the entry point of this package; the second also replaces
verl's functions (`install`). In your own process, call `register()` and `install()`.

N rows, W padded width, R response width, S real tokens, V vocabulary.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

import numpy as np
import torch

from skyrl_fast.config.loading import environment_setting
from skyrl_fast.integrations.calls import Counts, Report, Row, print_at_exit
from skyrl_fast.integrations.on_import import ImportWatch
from skyrl_fast.integrations.source import (
    UNKNOWN_SOURCE,
    fingerprint_with_calls,
    modules_that_bind,
)
from skyrl_fast.ops.advantage.group import group_advantage
from skyrl_fast.ops.logprob.selected import has_kernel_rows, selected_logprob
from skyrl_fast.ops.pack.varlen import padded_to_varlen, varlen_to_padded

ESTIMATORS = ("grpo", "rloo", "maxrl")
PREFIX = "skyrl_fast_"
CORE = "verl.trainer.ppo.core_algos"
# verl's functions by the modules that define them; other modules bind them when they are imported.
FUNCTIONS = {
    "logprobs_from_logits": "verl.utils.torch_functional",
    "unpad_input": "verl.utils.attention_utils",
    "pad_input": "verl.utils.attention_utils",
}
PACKAGE = "verl"
# Fingerprints of verl's functions with those they call, by the first version that has them.
KNOWN = {
    "logprobs_from_logits": {"1d266597cdfcf1f3": "0.9.0"},
    "unpad_input": {"4f0721a1fdf4c281": "0.9.1"},
    "pad_input": {"e1e4b4ab5c596d74": "0.9.1"},
}
VARIABLE = "VERL_USE_EXTERNAL_MODULES"
BLOCK_CELL_BYTES = 64  # cells smaller than this are written faster by index than found to be blocks
_counts = {name: Counts() for name in (*(PREFIX + name for name in ESTIMATORS), *FUNCTIONS)}
originals: dict[str, Callable[..., Any]] = {}
_unknown: set[str] = set()  # functions that are kept, since their source is not known
_watches: dict[str, ImportWatch] = {}
_on_gpu = False


class VerlFastWarning(UserWarning):
    """A function of this verl is not replaced; the message says which and why."""


Pair = tuple[torch.Tensor, torch.Tensor]


def register() -> list[str]:
    """Add the estimators to verl's registry as `skyrl_fast_grpo`, `_rloo`, `_maxrl`; return names.

    Raises:
        ImportError: verl is not installed.
    """
    from verl.trainer.ppo.core_algos import register_adv_est

    for name in ESTIMATORS:
        register_adv_est(PREFIX + name)(_FUNCTIONS[name])
    print_at_exit(_last_line)
    return [PREFIX + name for name in ESTIMATORS]


def register_on_import() -> None:
    """Register as soon as verl's module of estimators has been imported; import nothing now."""
    _watch("register", {CORE}, lambda name: register())


def install(*, on_gpu: bool = False) -> Report:
    """Replace verl's `logprobs_from_logits`, `unpad_input` and `pad_input`, now or when imported.

    Args:
        on_gpu: also for tensors on GPUs, where verl's functions use flash-attn's kernels, with
            which these have not been compared there.

    Returns:
        What is replaced. It runs in the process that calls it: for verl's workers, set
        VERL_USE_EXTERNAL_MODULES.

    Warns:
        VerlFastWarning: the source of one of verl's functions is unknown; it is kept. The warning
            comes when the function's module is imported.
    """
    global _on_gpu
    _on_gpu = on_gpu
    _watch("install", set(FUNCTIONS.values()), _replace)
    print_at_exit(_last_line)
    return report()


def uninstall() -> None:
    watch = _watches.pop("install", None)
    if watch is not None:
        watch.stop()
    for name, original in originals.items():
        _rebind(name, globals()[name], original)
    originals.clear()
    _unknown.clear()


def report() -> Report:
    rows = []
    for name, counts in _counts.items():
        if name not in FUNCTIONS:
            state = "replaced" if _is_registered(name) else "kept"
            why = "an estimator"
        elif name in originals:
            state = "replaced"
            why = ""
        elif name in _unknown:
            state = "kept"
            why = UNKNOWN_SOURCE
        else:
            waiting = "install" in _watches
            state = "kept"
            why = "its module is not imported yet" if waiting else "not installed"
        rows.append(Row(name, state, why, counts))
    try:
        version = metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        version = "(not installed)"
    return Report(f"verl {version}", tuple(rows))


def _is_registered(name: str) -> bool:
    registry = getattr(sys.modules.get(CORE), "ADV_ESTIMATOR_REGISTRY", {})
    return name in registry


def _last_line() -> str:
    found = report()
    if found.names("replaced"):
        return found.summary()
    return ""


def _watch(name: str, modules: set[str], callback: Callable[[str], Any]) -> None:
    if name not in _watches:
        _watches[name] = ImportWatch(modules, callback)
        _watches[name].start()


def _replace(module_name: str) -> None:
    for name, home in FUNCTIONS.items():
        if home == module_name:
            original = getattr(sys.modules[home], name, None)
        else:
            original = None
        if original is None or name in originals:
            continue
        source = fingerprint_with_calls([original], PACKAGE, skip=FUNCTIONS)
        if source in KNOWN[name]:
            originals[name] = original
            _rebind(name, original, globals()[name])
        else:
            _unknown.add(name)
            message = f"verl's {name} is not replaced: {UNKNOWN_SOURCE}"
            warnings.warn(message, VerlFastWarning, stacklevel=2)


def _rebind(name: str, old: Callable[..., Any], new: Callable[..., Any]) -> None:
    for module in modules_that_bind(PACKAGE, name, old):
        setattr(module, name, new)


def _count_calls(function: Callable[..., Any]) -> Callable[..., Any]:
    """Count the calls, and pass what is not computed here to verl's function, if it is replaced."""
    name = function.__name__
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        counts = _counts[name]
        original = originals.get(name)
        counts.calls += 1
        reason = ""
        try:
            values = signature.bind(*args, **kwargs).arguments
            kinds = set()
            for x in values.values():
                if isinstance(x, torch.Tensor):
                    kinds.add(x.device.type)
            if not kinds <= ({"cpu", "cuda"} if _on_gpu else {"cpu"}):
                reason = f"tensors on {', '.join(sorted(kinds))}: see install(on_gpu=True)"
            elif "logits" in values and not has_kernel_rows(values["logits"]):
                reason = f"logits with strides {values['logits'].stride()}"
        except TypeError as error:
            reason = str(error)
        if original is not None and reason:
            counts.hand_back(reason)
            return original(*args, **kwargs)
        return function(*args, **kwargs)

    return call


def _estimator(estimator: str) -> Callable[..., Pair]:
    def advantage(
        token_level_rewards: torch.Tensor,
        response_mask: torch.Tensor,
        index: Sequence[str] | np.ndarray,
        epsilon: float = 1e-6,
        norm_adv_by_std_in_grpo: bool = True,
        config: Any = None,
        **_: Any,
    ) -> Pair:
        """Return advantages and returns, one tensor: `group_advantage`, float64 statistics.

        Rewards and mask are (N, R).
        """
        _counts[PREFIX + estimator].calls += 1
        if epsilon != 1e-6:
            raise ValueError(f"{PREFIX}{estimator}: epsilon: expected 1e-6, got {epsilon}")
        plain = estimator == "grpo" and not norm_adv_by_std_in_grpo
        out = group_advantage(
            token_level_rewards,
            [str(name) for name in index],
            response_mask=response_mask.to(torch.float32),
            estimator="dr_grpo" if plain else estimator,
        )
        return out, out

    return advantage


_FUNCTIONS = {name: _estimator(name) for name in ESTIMATORS}


@_count_calls
def logprobs_from_logits(
    logits: torch.Tensor, labels: torch.Tensor, inplace_backward: bool = True
) -> torch.Tensor:
    """Return each label's log-probability in float32, as verl's function of that name.

    Args:
        logits: (..., V). labels: (...), integers.
        inplace_backward: on a GPU the gradient may overwrite the logits, as with verl's kernel.

    Example:
        >>> logprobs_from_logits(torch.zeros(1, 2), torch.tensor([1]))
        tensor([-0.6931])
    """
    out = selected_logprob(
        logits, labels, inplace_backward=inplace_backward and logits.device.type == "cuda"
    )
    assert isinstance(out, torch.Tensor)
    return out


@_count_calls
def unpad_input(
    hidden_states: torch.Tensor, attention_mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """Return the real tokens packed, as flash-attn's and verl's function of that name.

    Args:
        hidden_states: (N, W, ...). attention_mask: (N, W), 1 on real tokens. Rows whose real tokens
            are one block are packed natively, any others by index.

    Returns:
        values (S, ...), indices (S,) int64 into the N * W positions, cu_seqlens (N + 1,) int32, the
        maximum length, lengths (N,) int32.

    Example:
        >>> unpad_input(torch.tensor([[0, 5], [6, 7]]), torch.tensor([[0, 1], [1, 1]]))[0]
        tensor([5, 6, 7])
    """
    try:
        varlen = padded_to_varlen(hidden_states, attention_mask, side="both")
    except ValueError:  # a mask with holes
        lengths = attention_mask.sum(dim=-1, dtype=torch.int32)
        cu_seqlens = _offsets(lengths)
        indices = attention_mask.reshape(-1).nonzero()[:, 0]
        values = hidden_states.flatten(0, 1).index_select(0, indices)
    else:
        values = varlen.values
        cu_seqlens = varlen.cu_seqlens
        lengths = cu_seqlens.diff()
        indices = _cells(varlen.starts, lengths, varlen.position_ids, attention_mask.shape[1])
    if len(lengths):
        longest = int(lengths.max())
    else:
        longest = 0
    return values, indices, cu_seqlens, longest, lengths


@_count_calls
def pad_input(
    hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int
) -> torch.Tensor:
    """Return the padded tensor, zeros on padding, as verl's function of that name.

    Args:
        hidden_states: (S, ...). indices: (S,), from `unpad_input`. batch, seqlen: N, W.

    Example:
        >>> pad_input(torch.tensor([5, 6, 7]), torch.tensor([1, 2, 3]), 2, 2)
        tensor([[0, 5],
                [6, 7]])
    """
    cell_bytes = hidden_states[:1].numel() * hidden_states.element_size()
    if cell_bytes >= BLOCK_CELL_BYTES:
        lengths = torch.bincount(indices // seqlen, minlength=batch)
        cu_seqlens = _offsets(lengths)
        first = torch.cat([indices % seqlen, indices.new_zeros(1)])[cu_seqlens[:-1].long()]
        starts = first * (lengths > 0)
        position_ids = torch.arange(len(indices), device=indices.device)
        position_ids -= cu_seqlens[:-1].long().repeat_interleave(lengths)
        if torch.equal(indices, _cells(starts, lengths, position_ids, seqlen)):
            return varlen_to_padded(
                hidden_states, cu_seqlens, width=seqlen, starts=starts, side="both"
            )
    cells = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    return cells.index_copy_(0, indices, hidden_states).unflatten(0, (batch, seqlen))


def _offsets(lengths: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


def _cells(
    starts: torch.Tensor, lengths: torch.Tensor, position_ids: torch.Tensor, width: int
) -> torch.Tensor:
    """Return (S,) int64: the positions of the rows' blocks in the (N, W) cells."""
    first = torch.arange(len(starts), device="cpu") * width + starts.cpu()
    return first.to(lengths.device).repeat_interleave(lengths.long()) + position_ids


if __name__ in environment_setting(VARIABLE).split(","):  # verl imports this module to be extended
    register_on_import()
    install()
