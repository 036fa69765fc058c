"""Router replay: a transformers mixture of experts repeats the routes of the sampler.

T tokens of a forward pass, L layers, K experts per token, E experts of a layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

SCORES = ("softmax", "sigmoid")
# Rounding difference between a router's weights and ours, by dtype; a larger difference means that
# the formula is another one.
RULE_TOLERANCE = 1e-4
LOW_PRECISION_TOLERANCE = 1e-2
LAYER_NUMBER = re.compile(r"\.layers\.(\d+)\.")


class RouterReplay:
    """Makes a model's routers choose recorded experts, weighted by the routers' own gates.

    Outside `routes` the model is unchanged. Inside, a token with a recorded route goes to the
    recorded experts; their weights are the router's current scores of them, normalised as in the
    model, so gradients reach the router. Tokens without a route are routed freely.

    Works for blocks of transformers 5 with `experts` and a `gate` or `router` that returns
    (logits, weights, experts): Qwen2/3-MoE, OLMoE, Mixtral, DeepSeek-V3, GLM-4-MoE, GPT-OSS and
    others. The formula of the weights (softmax or sigmoid; normalised over the K chosen or not;
    scaled) is found by comparison with the router's own weights in the first forward pass.

    Source: rollout routing replay (R3), https://arxiv.org/abs/2510.11370.

    Example:
        replay = RouterReplay(model)
        with replay.routes(expert_indices, router_padding_mask):
            logits = model(input_ids).logits
        logits.sum().backward()

    Raises:
        ValueError: the model has no such blocks.
    """

    def __init__(self, model: Any) -> None:
        self._active: _Routes | None = None
        self._rules: dict[int, _GateRule] = {}
        self._routers = _find_routers(model)
        for place, (_, _, router) in enumerate(self._routers):
            router.register_forward_hook(self._hook(place))

    @contextmanager
    def routes(self, expert_indices: Tensor, router_padding_mask: Tensor) -> Iterator[None]:
        """Replay these routes in the forward passes inside the context.

        Args:
            expert_indices: (..., L, K) integers, one entry per token of the forward pass. L is the
                number of the model's layers, or of those with experts.
            router_padding_mask: (...) bool, True where a token has no route.

        Raises:
            ValueError: shapes that do not match each other or the model, an expert index out of
                range, or an expert that is repeated for a token.
        """
        before = self._active
        self._active = self._checked(expert_indices, router_padding_mask)
        try:
            yield
        finally:
            self._active = before

    def checkpoint_contexts(self) -> tuple[Any, Any]:
        """Return the contexts of gradient checkpointing (`context_fn` of torch's checkpoint)."""
        # The backward pass recomputes layers after `routes` has exited: with the same routes.
        return nullcontext(), _SameRoutes(self, self._active)

    def _checked(self, expert_indices: Tensor, router_padding_mask: Tensor) -> _Routes:
        if expert_indices.shape[:-2] != router_padding_mask.shape:
            raise ValueError(
                "RouterReplay: expert_indices: expected shape (*router_padding_mask.shape, L, K), "
                f"got {tuple(expert_indices.shape)} and {tuple(router_padding_mask.shape)}"
            )
        columns = self._columns(expert_indices.shape[-2])
        routes = expert_indices.flatten(0, -3)[:, columns].long()
        recorded = ~router_padding_mask.flatten()
        names = routes[recorded]
        if names.numel():
            num_experts = min(count for _, count, _ in self._routers)
            lowest = int(names.min())
            highest = int(names.max())
            if lowest < 0 or highest >= num_experts:
                raise ValueError(
                    f"RouterReplay: expert_indices: expected 0 to {num_experts - 1}, got "
                    f"{lowest} to {highest}: routes of another model?"
                )
            # An engine that recorded nothing leaves zeros.
            if names.shape[-1] > 1 and bool((names[..., 0] == names[..., 1]).any()):
                raise ValueError(
                    "RouterReplay: expert_indices must name different experts for a token, got one "
                    "twice: the engine recorded no routes there"
                )
        return _Routes(routes, recorded[:, None])

    def _columns(self, num_layers: int) -> list[int]:
        numbers = [number for number, _, _ in self._routers]
        # vLLM counts all layers, other engines only those with experts.
        if num_layers == len(self._routers):
            return list(range(num_layers))
        if max(numbers) >= num_layers:
            raise ValueError(
                f"RouterReplay: expert_indices must have a layer for each of the model's "
                f"{len(numbers)} routers, or for its {max(numbers) + 1} or more layers, got "
                f"{num_layers}"
            )
        return numbers

    def _hook(self, place: int) -> Any:
        def replayed(router: Any, args: Any, output: Any) -> Any:
            # In the first pass, whether it replays or not: its output is the router's own.
            if place not in self._rules:
                self._rules[place] = _gate_rule(router, output)
            if self._active is None:
                return None
            logits, weights, experts = output
            routes = self._active.experts[:, place].to(experts.device)
            recorded = self._active.recorded.to(experts.device)
            if routes.shape != experts.shape:
                raise ValueError(
                    f"RouterReplay: expert_indices must have {experts.shape[0]} tokens with "
                    f"{experts.shape[1]} experts each, as this forward pass, got "
                    f"{routes.shape[0]} with {routes.shape[1]}"
                )
            experts = torch.where(recorded, routes, experts)
            gates = self._rules[place].weights(logits, experts).to(weights.dtype)
            return logits, torch.where(recorded, gates, weights), experts

        return replayed


@dataclass(frozen=True, slots=True)
class _Routes:
    experts: Tensor  # (T, routers, K) int64
    recorded: Tensor  # (T, 1) bool


class _SameRoutes:
    """A re-entrant context with the routes of an earlier forward pass."""

    def __init__(self, replay: RouterReplay, routes: _Routes | None) -> None:
        self._replay = replay
        self._routes = routes
        self._before: list[_Routes | None] = []

    def __enter__(self) -> None:
        self._before.append(self._replay._active)
        self._replay._active = self._routes

    def __exit__(self, *error: object) -> None:
        self._replay._active = self._before.pop()


@dataclass(frozen=True, slots=True)
class _GateRule:
    """A router's formula for the weights of its chosen experts."""

    score: str
    normalised: bool
    scale: float

    def weights(self, logits: Tensor, experts: Tensor) -> Tensor:
        """Return (T, K) weights of the experts, from (T, E) logits; differentiable."""
        if self.score == "softmax":
            scores = logits.float().softmax(-1)
        else:
            scores = logits.float().sigmoid()
        weights = scores.gather(-1, experts)
        if self.normalised:
            # Scores of experts that the router would no longer choose can all be 0.
            tiny = torch.finfo(weights.dtype).tiny
            weights = weights / weights.sum(-1, keepdim=True).clamp_min(tiny)
        if self.scale == 1.0:
            return weights
        return weights * self.scale


def _gate_rule(router: Any, output: Any) -> _GateRule:
    """Return the formula that reproduces the router's weights; ValueError if none does."""
    name = type(router).__name__
    if not (isinstance(output, tuple) and len(output) == 3 and output[0].dim() == 2):
        raise ValueError(
            f"RouterReplay: {name} is not supported: wanted a router that returns (logits, "
            "weights, experts)"
        )
    logits, weights, experts = (value.detach() for value in output)
    normalised = getattr(router, "norm_topk_prob", None)
    scale = float(getattr(router, "routed_scaling_factor", 1.0))
    rules = []
    for score, choice in product(
        SCORES, (True, False) if normalised is None else (bool(normalised),)
    ):
        rules.append(_GateRule(score, choice, scale))
    errors = [_largest_difference(rule, logits, weights, experts) for rule in rules]
    best = min(range(len(rules)), key=errors.__getitem__)
    low = weights.dtype in (torch.bfloat16, torch.float16)
    if not errors[best] <= (LOW_PRECISION_TOLERANCE if low else RULE_TOLERANCE) * max(1.0, scale):
        raise ValueError(
            f"RouterReplay: {name} is not supported: its weights are neither the softmax nor the "
            f"sigmoid of its logits (nearest: off by {errors[best]:.3g})"
        )
    return rules[best]


def _largest_difference(rule: _GateRule, logits: Tensor, weights: Tensor, experts: Tensor) -> float:
    if weights.shape != experts.shape:
        return float("inf")
    difference = rule.weights(logits, experts).to(weights.dtype) - weights
    if difference.numel():
        return float(difference.abs().max())
    return 0.0


def _find_routers(model: Any) -> list[tuple[int, int, Any]]:
    """Return (layer, number of experts, router) for each block with experts, in order."""
    found: list[tuple[int, int, Any]] = []
    for name, block in model.named_modules():
        if not hasattr(block, "experts"):
            continue
        router = getattr(block, "gate", None) or getattr(block, "router", None)
        weight = getattr(router, "weight", None)
        if router is None or weight is None or type(router) is torch.nn.Linear:
            raise ValueError(
                f"RouterReplay: {name} ({type(block).__name__}) is not supported: wanted a block "
                "with `experts` and a router module `gate` or `router` that chooses them, as in "
                "transformers 5"
            )
        number = LAYER_NUMBER.search(f".{name}.")
        found.append((int(number[1]) if number else len(found), int(weight.shape[0]), router))
    if not found:
        raise ValueError(
            f"RouterReplay: {type(model).__name__} is no mixture of experts: no module has experts"
        )
    return found
