"""Refuse models whose forward passes are random: the sampler's are not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from skyrl_fast.train.model.lm_head import PROBE_TOKENS, backbone

RANDOM_PASSES = 16  # passes of the check that nothing is random: a layer is seldom dropped


def refuse_random_passes(
    model: Any, autocast: Callable[[], contextlib.AbstractContextManager[Any]]
) -> None:
    """Raise ValueError for a model in training mode whose passes differ."""
    if not any(module.training for module in model.modules()):
        return
    base = backbone(model)
    device = next(model.parameters()).device

    def random_state() -> torch.Tensor:
        if device.type == "cuda":
            return torch.cuda.get_rng_state(device)
        return torch.get_rng_state()

    def hidden() -> Any:
        return getattr(base(**probe_inputs(model)), "last_hidden_state", None)

    with keep_random_state(device), torch.no_grad(), autocast():
        before = random_state()
        first = hidden()
        if first is None or torch.equal(before, random_state()):  # no random number was drawn
            return
        is_random = any(not torch.equal(first, hidden()) for _ in range(RANDOM_PASSES))
    if is_random:
        numbers = model.config.get_text_config().to_dict().items()
        names = []
        for n, v in numbers:
            if isinstance(v, float) and v and ("drop" in n or "jitter" in n):
                names.append(n)
        if names:
            hint = f": set {', '.join(names)} to 0 in its config.json"
        else:
            hint = ""
        raise ValueError(
            f"{type(model).__name__} is random in training mode, which gradient checkpointing "
            f"needs, and the sampler is not{hint}, or trainer.gradient_checkpointing=false"
        )


def keep_random_state(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def probe_inputs(model: Any) -> dict[str, Any]:
    vocabulary = backbone(model).config.get_text_config().vocab_size
    ids = torch.arange(PROBE_TOKENS, device=next(model.parameters()).device)[None] % vocabulary
    return {"input_ids": ids, "use_cache": False}
