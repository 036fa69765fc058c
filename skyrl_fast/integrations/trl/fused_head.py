"""TRL's fused LM head, by `linear_logprob`. S scored tokens, H hidden, V vocabulary.

TRL's trainers compute log-probabilities by an autograd function, `ChunkedLogProbFunction`, on
hidden states. `FusedHead.apply` has its arguments and results.
"""

from __future__ import annotations

from typing import Any

import torch

from skyrl_fast.integrations.calls import Counts
from skyrl_fast.ops.logprob.linear import linear_logprob
from skyrl_fast.ops.logprob.selected import KERNEL_DTYPES, selected_logprob

OPTIONAL = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")  # TRL's order of the results
Outputs = tuple[torch.Tensor | None, ...]


class FusedHead:
    """Stands in for TRL's autograd function, and passes to it what it does not compute.

    Args:
        on_gpu: whether tensors on a GPU are computed here.
    """

    def __init__(self, original: Any, counts: Counts, *, on_gpu: bool) -> None:
        self.original = original
        self._counts = counts
        self._on_gpu = on_gpu

    def apply(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = OPTIONAL,
    ) -> Outputs:
        """Return (S,) float32 log-probabilities, and the requested ones of `OPTIONAL` or None.

        Args:
            hidden: (S, H). weight: (V, H). bias: (V,). targets: (S,).
            temperature, final_logit_softcapping, logit_scale: as of `linear_logprob`.
            chunk_size: used by TRL's own function only.
        """
        self._counts.calls += 1
        reason = self._refusal(hidden, weight, final_logit_softcapping, logit_scale, outputs)
        if reason:
            self._counts.hand_back(reason)
            options = (final_logit_softcapping, logit_scale, outputs)
            result: Outputs = self.original.apply(
                hidden, weight, bias, targets, temperature, chunk_size, *options
            )
            return result
        if not torch.is_autocast_enabled(hidden.device.type):  # else linear_logprob converts
            weight = weight.to(hidden.dtype)
            if bias is not None:
                bias = bias.to(hidden.dtype)
        metrics = _Metrics(targets, outputs)
        if metrics.wanted:
            on_logits = metrics.add
        else:
            on_logits = None
        logprobs, entropy = linear_logprob(
            hidden,
            weight,
            targets,
            bias=bias,
            logit_scale=logit_scale,
            soft_cap=final_logit_softcapping,
            temperature=temperature,
            return_entropy=True,
            on_logits=on_logits,
        )
        made = {"entropy": entropy if "entropy" in outputs else None} | metrics.result(logprobs)
        return logprobs, *(made.get(name) for name in OPTIONAL)

    def _refusal(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        soft_cap: float | None,
        scale: float,
        outputs: tuple[str, ...],
    ) -> str:
        if type(weight) not in (torch.Tensor, torch.nn.Parameter):
            return f"the head is a {type(weight).__name__}"
        if hidden.dtype not in KERNEL_DTYPES:
            return f"{hidden.dtype} hidden states"
        if hidden.device.type != "cpu" and not (self._on_gpu and hidden.is_cuda):
            return f"tensors on {hidden.device.type}: see install(on_gpu=True)"
        if scale <= 0 or (soft_cap is not None and soft_cap <= 0):
            return f"a logit scale of {scale} or a soft cap of {soft_cap}"
        if soft_cap is not None and "is_top1" in outputs:
            return "is_top1 with a soft cap, whose rounding makes ties"
        return ""


class _Metrics:
    """Results without a gradient, from chunks of logits."""

    def __init__(self, targets: torch.Tensor, outputs: tuple[str, ...]) -> None:
        self.wanted = [name for name in OPTIONAL[1:] if name in outputs]
        self._targets = targets
        self._found: dict[str, list[torch.Tensor]] = {name: [] for name in self.wanted}

    def add(self, start: int, values: torch.Tensor, divisor: float) -> None:
        targets = self._targets[start : start + len(values)]
        for name in self.wanted:
            if name == "is_top1":
                found = values.argmax(-1) == targets  # the first of equal ones, as TRL's
            elif name == "mean_logits":
                found = values.mean(-1, dtype=torch.float32) / divisor
            else:  # the logprob of doubled logits: 2 z_target - logsumexp(2 z)
                doubled = selected_logprob(values, targets, temperature=divisor / 2)
                assert isinstance(doubled, torch.Tensor)
                found = doubled
            self._found[name].append(found)

    def result(self, logprobs: torch.Tensor) -> dict[str, torch.Tensor]:
        made = {}
        for name, parts in self._found.items():
            if parts:
                made[name] = torch.cat(parts)
            else:
                made[name] = logprobs.detach().new_zeros(0)
            if name == "log_sum_sq_probs":  # logsumexp(2 z) - 2 logsumexp(z)
                made[name] = 2 * logprobs.detach() - made[name]
            if name == "is_top1":
                made[name] = made[name].bool()
        return made
