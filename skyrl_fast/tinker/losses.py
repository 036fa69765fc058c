"""The losses of `forward_backward`: sums over tokens, in the SDK's names.

M target tokens of a pass, A of a request. p the policy's log-probabilities, q those of the sampler,
a the advantages. Nothing is averaged: the client normalises.

| loss | of a token |
|---|---|
| cross_entropy | -w p |
| importance_sampling | -exp(p - q) a |
| ppo | -min(r a, clip(r) a), r = exp(p - q) |
| cispo | -sg(clip(r)) a p |
| dro | -(p a - beta / 2 (p - q)^2) |
| gspo | -min(s a, clip(s) a), s = exp(mean of p - q over the marked tokens of the datum), with the gradient of each token's p |
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from skyrl_fast.tinker.wire import Datum, RefusedCallError

CLIP_LOW = 0.8
CLIP_HIGH = 1.2
BETA = 0.05
CLIP_NAMES = ("clip_low_threshold", "clip_high_threshold")
REFUSED = {
    "stable_reinforce": "its formula is not published: pass loss_fn='importance_sampling', which "
    "recipes take as loss_fn=importance_sampling",
    "custom": "losses are not run on the server: forward_backward_custom with a function computes "
    "them in the client",
}


@dataclass(frozen=True, slots=True)
class LossInputs:
    """What a loss reads, of the target tokens of one pass.

    Args:
        values: (M,) or (M, K) tensors by the SDK's names; thresholds and beta as 0-d tensors where
            they are one number for all.
        datums: (M,) int64, the datum of each token, from 0.
    """

    values: Mapping[str, torch.Tensor]
    datums: torch.Tensor


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """A loss of the SDK.

    Args:
        compute: returns (M,) or (M, K) losses, whose sum is differentiated.
        inputs: names of the arrays that a datum must have, besides `target_tokens`.
        optional: names of those that it may have, with the value where it does not.
        options: names in `loss_fn_config`, with their defaults.
    """

    compute: Callable[[torch.Tensor, LossInputs], torch.Tensor]
    inputs: tuple[str, ...]
    optional: Mapping[str, float]
    options: Mapping[str, float]


def _cross_entropy(logprobs: torch.Tensor, given: LossInputs) -> torch.Tensor:
    return -logprobs * given.values["weights"]


def _importance_sampling(logprobs: torch.Tensor, given: LossInputs) -> torch.Tensor:
    return -_ratio(logprobs, given) * given.values["advantages"]


def _ppo(logprobs: torch.Tensor, given: LossInputs) -> torch.Tensor:
    return _clipped(_ratio(logprobs, given), given)


def _cispo(logprobs: torch.Tensor, given: LossInputs) -> torch.Tensor:
    weight = _clip(_ratio(logprobs.detach(), given), given)
    return -weight * given.values["advantages"] * logprobs


def _dro(logprobs: torch.Tensor, given: LossInputs) -> torch.Tensor:
    distance = (logprobs - given.values["logprobs"]).square()
    gain = logprobs * given.values["advantages"]
    return -(gain - 0.5 * given.values["beta"] * distance)


def _gspo(logprobs: torch.Tensor, given: LossInputs) -> torch.Tensor:
    detached = logprobs.detach()
    marked = (given.values["sequence_ratio_mask"] != 0).to(logprobs.dtype)
    datums = given.datums.to(logprobs.device)
    num_datums = int(datums.max()) + 1 if len(datums) else 0
    sums = logprobs.new_zeros(num_datums)
    differences = (detached - given.values["logprobs"]) * marked
    totals = sums.index_add(0, datums, differences)
    counts = sums.index_add(0, datums, marked)
    means = totals / counts.clamp(min=1)
    ratio = torch.exp(means[datums] + logprobs - detached)
    return _clipped(ratio, given)


def _ratio(logprobs: torch.Tensor, given: LossInputs) -> torch.Tensor:
    return torch.exp(logprobs - given.values["logprobs"])


def _clip(ratio: torch.Tensor, given: LossInputs) -> torch.Tensor:
    low, high = (given.values[name] for name in CLIP_NAMES)
    return torch.minimum(torch.maximum(ratio, low), high)


def _clipped(ratio: torch.Tensor, given: LossInputs) -> torch.Tensor:
    advantages = given.values["advantages"]
    return -torch.minimum(ratio * advantages, _clip(ratio, given) * advantages)


_SAMPLED = ("logprobs", "advantages")
_CLIP = dict(zip(CLIP_NAMES, (CLIP_LOW, CLIP_HIGH), strict=True))

TOKEN_LOSSES = {
    "cross_entropy": TokenLoss(_cross_entropy, (), {"weights": 1.0}, {}),
    "importance_sampling": TokenLoss(_importance_sampling, _SAMPLED, {}, {}),
    "ppo": TokenLoss(_ppo, _SAMPLED, _CLIP, _CLIP),
    "cispo": TokenLoss(_cispo, _SAMPLED, _CLIP, _CLIP),
    "dro": TokenLoss(_dro, _SAMPLED, {}, {"beta": BETA}),
    "gspo": TokenLoss(_gspo, (*_SAMPLED, "sequence_ratio_mask"), _CLIP, _CLIP),
}


def find_loss(name: str) -> TokenLoss:
    """Return the loss of this name; RefusedCallError, with what to use, if it is not served."""
    loss = TOKEN_LOSSES.get(name)
    if loss is None:
        why = REFUSED.get(name, "expected one of " + ", ".join(TOKEN_LOSSES))
        raise RefusedCallError(f"loss_fn: {name} is not served: {why}")
    return loss


def read_options(
    name: str, loss: TokenLoss, options: Mapping[str, float | str]
) -> dict[str, float]:
    """Return the options of a loss with its defaults.

    Raises:
        RefusedCallError: an unknown option, one that is no finite number, or an empty range.
    """
    values = dict(loss.options)
    for key, value in options.items():
        if key not in loss.options:
            known = ", ".join(loss.options) or "none"
            raise RefusedCallError(f"loss_fn_config of {name}: expected {known}, got {key}")
        if isinstance(value, str) or not np.isfinite(value):
            raise RefusedCallError(
                f"loss_fn_config of {name}: {key}: expected a finite number, got {value}"
            )
        values[key] = float(value)
    if loss.options.keys() >= set(CLIP_NAMES):
        low, high = (values[key] for key in CLIP_NAMES)
        if low > high:
            raise RefusedCallError(
                f"loss_fn_config of {name}: expected clip_low_threshold <= clip_high_threshold, "
                f"got {low} and {high}"
            )
    return values


def gather_inputs(
    name: str, loss: TokenLoss, datums: Sequence[Datum], options: Mapping[str, float | str]
) -> dict[str, torch.Tensor]:
    """Return what the loss reads of all datums, by name.

    Returns:
        (A,) or (A, K) tensors, the datums one after the other, and 0-d tensors of options.

    Raises:
        RefusedCallError: an array is missing, unknown, of another shape than the targets, or not
            finite; or an option is wrong.
    """
    numbers = read_options(name, loss, options)
    known = {"target_tokens", *loss.inputs, *loss.optional}
    for place, datum in enumerate(datums):
        _check_inputs(name, loss, datum, known, f"data[{place}]")
    values = {key: torch.tensor(one, dtype=torch.float64) for key, one in numbers.items()}
    for key in (*loss.inputs, *loss.optional):
        default = numbers.get(key, loss.optional.get(key, 0.0))
        if key in values and not any(key in datum.inputs for datum in datums):
            continue
        values[key] = torch.cat([_values(datum, key, default) for datum in datums])
    return values


def _values(datum: Datum, key: str, default: float) -> torch.Tensor:
    targets = datum.inputs["target_tokens"]
    array = datum.inputs.get(key)
    if array is None:
        return torch.full(targets.shape, default, dtype=torch.float32)
    return torch.tensor(array, dtype=torch.float32)


def _check_inputs(name: str, loss: TokenLoss, datum: Datum, known: set[str], where: str) -> None:
    targets = datum.inputs["target_tokens"]
    if missing := [key for key in loss.inputs if key not in datum.inputs]:
        raise RefusedCallError(f"{where}: {name} needs {', '.join(missing)}")
    if unknown := sorted(datum.inputs.keys() - known):
        raise RefusedCallError(
            f"{where}: {name} reads {', '.join(sorted(known))}, got {', '.join(unknown)}, which "
            "would have no effect"
        )
    for key, array in datum.inputs.items():
        if array.shape != targets.shape:
            raise RefusedCallError(
                f"{where}.{key}: expected shape {targets.shape}, that of target_tokens, got "
                f"{array.shape}"
            )
        if not np.isfinite(array).all():
            place = int(np.argmin(np.isfinite(array).reshape(-1)))
            value = array.reshape(-1)[place]
            raise RefusedCallError(f"{where}.{key}: expected finite numbers, got {value}")
