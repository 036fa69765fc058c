"""The table of advantage estimators, and the registration of a user's estimator.

N rows (steps), A response tokens of all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

import skyrl_fast
from skyrl_fast.registry import Function, Registry, call_function, check_result

if TYPE_CHECKING:  # the settings name estimators, and are checked before torch is imported
    import torch

Level = Literal["outcome", "turn", "context", "token"]
LEVELS = ("outcome", "turn", "context", "token")


@dataclass(frozen=True, slots=True)
class EstimatorInputs:
    """The inputs of an estimator; rows of a trajectory are adjacent and in order.

    For estimators of level "context" a row is that of a context's last call, with the sum of the
    context's rewards.

    Args:
        rewards: (N,) float32, each row's reward; the outcome is that of a trajectory's last row.
        token_rewards: (A,) float32. For estimators of level "token", the reward of a row without
            tokens is added to the trajectory's previous token.
        group_ids, trajectory_ids: (N,) ints, the prompt and the trajectory of each row.
        is_last_step: (N,) bool, the last row of each trajectory.
        loss_mask: (A,), nonzero on trained tokens.
        cu_seqlens: (N + 1,) int32 offsets of the rows' tokens.
        anchor_ids: (N,) ints, equal where rows acted in the same state; None unless
            `needs_anchors`.
        values: (A,) float32, the critic's; None without a critic.
        reward_parts: (N, K) float32, the parts of the trajectory's reward that `gdpo_weights`
            names, on each of its rows; None with another estimator than gdpo.
    """

    rewards: torch.Tensor
    token_rewards: torch.Tensor
    group_ids: torch.Tensor
    trajectory_ids: torch.Tensor
    is_last_step: torch.Tensor
    loss_mask: torch.Tensor
    cu_seqlens: torch.Tensor
    anchor_ids: torch.Tensor | None = None
    values: torch.Tensor | None = None
    reward_parts: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class EstimatorOutput:
    """The result of an estimator; a bare tensor counts as `advantages`.

    Args:
        advantages: (N,) float, one for all tokens of a row, or (A,), one per token.
        returns: (A,) float, the critic's targets; None without a critic.
    """

    advantages: torch.Tensor
    returns: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class EstimatorSpec:
    """The properties of one estimator.

    Args:
        name: in `advantages` and `trainer.algorithm.advantage_estimator`.
        level: the unit of an advantage. "outcome": the trajectory, by its last row's reward;
            "turn": each turn, so rows must be turns; "context": all calls of a context; "token":
            each token, from the rewards of all rows.
        function: gets `EstimatorInputs` and the settings; returns `EstimatorOutput` or a tensor.
        settings: keyword argument -> key of `trainer.algorithm` that it is read from.
        needs_anchors: reads `anchor_ids`.
        needs_values: reads `values` and returns `returns`, which requires a critic.
        needs_parts: reads `reward_parts`.
        always_normalized: already normalises over the batch.
        needs_others: 0 in a group of one.
        compares_group: the baseline is that of the prompt's group, so a group of one has none.
    """

    name: str
    level: Level
    function: Callable[..., EstimatorOutput | torch.Tensor]
    settings: Mapping[str, str] = field(default_factory=dict)
    needs_anchors: bool = False
    needs_values: bool = False
    needs_parts: bool = False
    always_normalized: bool = False
    needs_others: bool = False
    compares_group: bool = False


def _on_rows(op: str, *columns: str) -> Callable[..., torch.Tensor]:
    """Return an estimator that calls an op with these columns of its inputs.

    Args:
        op: its name in `skyrl_fast`, which imports it at the first call.
    """

    def call(inputs: EstimatorInputs, **settings: Any) -> torch.Tensor:
        function: Callable[..., torch.Tensor] = getattr(skyrl_fast, op)
        values = (getattr(inputs, name) for name in columns)
        return function(*values, is_last_step=inputs.is_last_step, **settings)

    return call


_group = _on_rows("group_advantage", "rewards", "group_ids")


def _grpo(inputs: EstimatorInputs, *, scale_by_std: bool = True) -> torch.Tensor:
    # Without the division by the deviation, GRPO's advantage is Dr. GRPO's.
    return _group(inputs, estimator="grpo" if scale_by_std else "dr_grpo")


def _gdpo(inputs: EstimatorInputs, *, weights: Mapping[str, float]) -> torch.Tensor:
    assert inputs.reward_parts is not None
    return skyrl_fast.gdpo_advantage(
        inputs.reward_parts,
        inputs.group_ids,
        weights=list(weights.values()),
        is_last_step=inputs.is_last_step,
    )


def _tokens(inputs: EstimatorInputs) -> dict[str, Any]:
    names = ("is_last_step", "loss_mask", "cu_seqlens")
    return {name: getattr(inputs, name) for name in names}


def _gae(inputs: EstimatorInputs, **settings: Any) -> EstimatorOutput:
    assert inputs.values is not None
    # Normalised as by SkyRL, whatever `advantage_batch_normalize` is.
    options = _tokens(inputs) | settings
    advantages, returns = skyrl_fast.gae(
        inputs.token_rewards, inputs.values, normalize=True, **options
    )
    return EstimatorOutput(advantages, returns)


def _reinforce_plus_plus(inputs: EstimatorInputs, **settings: Any) -> torch.Tensor:
    options = _tokens(inputs) | settings
    return skyrl_fast.reinforce_plus_plus(inputs.token_rewards, **options)


_GAMMA = {"gamma": "gamma"}
ADVANTAGE_ESTIMATORS: dict[str, EstimatorSpec] = {
    spec.name: spec
    for spec in (
        EstimatorSpec(
            "grpo", "outcome", _grpo, {"scale_by_std": "grpo_norm_by_std"}, compares_group=True
        ),
        *(
            EstimatorSpec(
                name,
                "outcome",
                partial(_group, estimator=name),
                # The others give a group of one its score.
                needs_others=name == "rloo",
                compares_group=True,
            )
            for name in ("dr_grpo", "rloo", "maxrl")
        ),
        EstimatorSpec(
            "gdpo",
            "outcome",
            _gdpo,
            {"weights": "gdpo_weights"},
            needs_parts=True,
            always_normalized=True,
            needs_others=True,
            compares_group=True,
        ),
        EstimatorSpec(
            "turn_level_returns", "turn", _on_rows("turn_level_returns", "rewards"), _GAMMA
        ),
        EstimatorSpec(
            "turn_level_group",
            "turn",
            _on_rows("turn_group_advantage", "rewards", "group_ids"),
            _GAMMA | {"baseline": "turn_level_baseline"},
            needs_others=True,
            compares_group=True,
        ),
        EstimatorSpec(
            "context_level_group",
            "context",
            _on_rows("turn_group_advantage", "rewards", "group_ids"),
            _GAMMA | {"baseline": "turn_level_baseline"},
            needs_others=True,
            compares_group=True,
        ),
        EstimatorSpec(
            "gigpo",
            "turn",
            _on_rows("gigpo_advantage", "rewards", "group_ids", "anchor_ids"),
            _GAMMA | {"step_advantage_w": "step_advantage_w", "scale_by_std": "grpo_norm_by_std"},
            needs_anchors=True,
            compares_group=True,
        ),
        EstimatorSpec(
            "gae",
            "token",
            _gae,
            _GAMMA | {"lambd": "lambd"},
            needs_values=True,
            always_normalized=True,
        ),
        EstimatorSpec("reinforce++", "token", _reinforce_plus_plus, _GAMMA, always_normalized=True),
    )
}

_registry: Registry[EstimatorSpec, EstimatorSpec] = Registry(
    "advantage estimator",
    ADVANTAGE_ESTIMATORS,
    lambda name, function: EstimatorSpec(name, "outcome", function),
)


@overload
def register_advantage_estimator(
    function: Callable[..., EstimatorOutput | torch.Tensor],
    *,
    name: str | None = None,
    level: Level = "outcome",
    needs_anchors: bool = False,
    needs_values: bool = False,
) -> str: ...


@overload
def register_advantage_estimator(
    function: str,
    *,
    level: Level = "outcome",
    needs_anchors: bool = False,
    needs_values: bool = False,
) -> Callable[[Function], Function]: ...


def register_advantage_estimator(
    function: Callable[..., EstimatorOutput | torch.Tensor] | str,
    *,
    name: str | None = None,
    level: Level = "outcome",
    needs_anchors: bool = False,
    needs_values: bool = False,
) -> str | Callable[[Function], Function]:
    """Register a function as an estimator; return its name for `advantage_estimator`.

    Called with a name, it is a decorator that returns the function.

    Args:
        function: gets `EstimatorInputs` and, as keyword arguments, `advantage_estimator_kwargs`;
            returns (N,) or (A,) advantages, or `EstimatorOutput`.
        name: None: the function's name.
        level, needs_anchors, needs_values: see `EstimatorSpec`.

    Returns:
        `module:function` where the function can be imported, else the name.

    Raises:
        ValueError: an unknown level, or the name of a built-in estimator.

    Example:
        @register_advantage_estimator("outcome_only")
        def outcome_only(inputs):
            return inputs.rewards
    """
    if level not in LEVELS:
        raise ValueError(
            f"register_advantage_estimator: level: expected one of {LEVELS}, got {level!r}"
        )

    def make(name: str, function: Callable[..., Any]) -> EstimatorSpec:
        return EstimatorSpec(
            name, level, function, needs_anchors=needs_anchors, needs_values=needs_values
        )

    return _registry.register(function, name, make)


def find_advantage_estimator(name: str) -> EstimatorSpec:
    """Return the estimator of a name, or of a function by `module:function`."""
    return _registry.find(name)


def estimate(
    spec: EstimatorSpec, inputs: EstimatorInputs, settings: Mapping[str, Any]
) -> EstimatorOutput:
    """Return the advantages, (N,) or (A,), with their type and shape checked.

    Raises:
        ValueError, TypeError: those of the built-in op; a wrong result of a user's function.
        RuntimeError: a user's function raised.
    """
    import torch

    # The ops check their own arguments; `call_function` would turn their errors into those of a
    # user's function.
    if ADVANTAGE_ESTIMATORS.get(spec.name) is spec:
        output = spec.function(inputs, **settings)
        if isinstance(output, torch.Tensor):
            return EstimatorOutput(output)
        return output
    op = f"advantages: {spec.name}"
    output = call_function(op, spec.function, inputs, settings, EstimatorOutput)
    per_row = tuple(inputs.rewards.shape)
    per_token = tuple(inputs.token_rewards.shape)
    check_result(op, "advantages", output.advantages, per_row, per_token)
    _check_finite(op, output.advantages, inputs.loss_mask)
    if spec.needs_values and output.returns is None:
        raise TypeError(f"{op}: returns: expected shape {per_token} (needs_values), got None")
    if output.returns is not None:
        check_result(op, "returns", output.returns, per_token)
    return output


def _check_finite(op: str, advantages: torch.Tensor, loss_mask: torch.Tensor) -> None:
    """Raise ValueError for advantages, (N,) or (A,), of which a trained one is not finite."""
    import torch

    is_wrong = ~torch.isfinite(advantages)
    if advantages.shape == loss_mask.shape:
        is_wrong &= loss_mask != 0  # masked cells may hold any value
    if is_wrong.any():
        index = int(is_wrong.nonzero()[0])
        raise ValueError(
            f"{op}: expected finite advantages, got {advantages[index]:g} at index {index}"
        )
