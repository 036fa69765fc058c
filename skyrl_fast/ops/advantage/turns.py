"""Turn-level advantages. N rows (turns), R padded cells, A ragged cells, J trajectories.

Design: docs/design/011-turn-and-token-advantages.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from skyrl_fast import _C
from skyrl_fast.ops import _backend
from skyrl_fast.ops._rows import (
    Rows,
    check_discount,
    check_finite,
    check_row_ids,
    check_rows,
    check_trajectories,
)
from skyrl_fast.ops.advantage import reference

Ids = Sequence[str] | Sequence[int] | torch.Tensor
BASELINES = {"turn": 0, "episode": 1}


def turn_level_returns(
    rewards: torch.Tensor,
    *,
    is_last_step: torch.Tensor | Sequence[bool] | None = None,
    response_mask: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    gamma: float = 1.0,
    backend: str | None = None,
) -> torch.Tensor:
    """Return the discounted return of each turn, broadcast over the turn's tokens.

    G_k = r_k + gamma * G_(k+1), with r_k the sum of row k's rewards, for every row, not only the
    last step. Sums are float64, in a fixed order.

    Args:
        rewards: float; (N,) one per row, (N, R) per padded response token, or, with `cu_seqlens`,
            (A,) per response token; one per row where A = N. Padded cells hold 0.
        is_last_step: (N,) bool, True at each trajectory's final row; its rows are adjacent and in
            time order. None: every row is a separate trajectory.
        response_mask: bool, uint8, int64 or float32, (N, R) or (A,): the shape of the result, which
            is multiplied by it. None: all ones, in the shape of `rewards`.
        cu_seqlens: (N + 1,) int32 offsets of the rows' cells, for ragged (A,) data.
        gamma: discount of one turn, from 0 to 1.
        backend: "native", "torch", or None to choose.

    Returns:
        float32 in the shape of `response_mask` (of `rewards` where there is none).

    Raises:
        ValueError: shapes that do not match, a discount out of range, a last row that is no last
            step, or a row whose rewards are NaN or infinite.

    Example:
        >>> turn_level_returns(torch.tensor([1.0, 0.0, 4.0]), is_last_step=[False, False, True],
        ...                    gamma=0.5)
        tensor([2., 2., 4.])
    """
    op = "turn_level_returns"
    check_discount(op, "gamma", gamma)
    rows = check_rows(op, rewards, None, is_last_step, response_mask, cu_seqlens)
    if _backend.select(op, rows.rewards, backend=backend) == "torch":
        return _torch(
            rows, None, lambda sums, last: reference.turn_level_returns(sums, last, gamma)
        )
    out = rows.empty()
    threads = _backend.num_threads()
    _C.turn_level_returns(rows.num_rows, rows.rewards, *rows.layout, gamma, out, threads)
    return out


def turn_group_advantage(
    rewards: torch.Tensor,
    group_ids: Ids,
    *,
    is_last_step: torch.Tensor | Sequence[bool] | None = None,
    response_mask: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    gamma: float = 1.0,
    baseline: str = "turn",
    scale_by_std: bool = False,
    backend: str | None = None,
) -> torch.Tensor:
    """Return each turn's return minus a baseline from the other trajectories of its group.

    With G as in `turn_level_returns`, turn k of trajectory i in a group of n trajectories gets
    A_(i,k) = G_(i,k) - 1 / (n - 1) * sum over j != i of B_j, where B_j is
    "turn": G_(j,k), or 0 where trajectory j was over before its turn k;
    "episode": G_(j,0), the full return, for every k.
    A group of one gets 0.

    Neither depends on which trajectories are still running. The policy decides when to stop, so
    the trajectories that reach turn k are a selected sample. Subtracting the mean over these m
    trajectories scales the weight of a turn by (m - 1) / m, to 0 where one is left: late turns
    weigh less than in the policy gradient, which is a bias and not noise. Here a trajectory that
    has ended counts as one that continues with rewards of 0, which is exact, and all n - 1 others
    take part at every turn. The baseline is a function of the *other* trajectories only. These
    were sampled independently, so its product with the score of the turn has mean 0, and the
    estimate keeps its mean, the gradient: sum over k of E[grad log pi(a_k | s_k) G_k].

    "turn" suits rewards along the way, "episode" a reward at the end only: with gamma 1 it is then
    RLOO (Ahmadian et al. 2024, arXiv:2402.14740) on all rows.

    Args:
        rewards, is_last_step, response_mask, cu_seqlens, gamma, backend: as `turn_level_returns`.
        group_ids: N strings or ints, the prompt of each row. Equal within a trajectory; rows of a
            group need not be adjacent.
        baseline: "turn" or "episode".
        scale_by_std: divide by (the root mean square of the group's advantages + 1e-6): one scale
            for all turns of a group, which keeps their relative weights. It weights the groups,
            as in GRPO; False for an unbiased gradient.

    Returns:
        float32 in the shape of `response_mask` (of `rewards` where there is none).

    Raises:
        ValueError: as `turn_level_returns`; two groups in one trajectory; an unknown baseline.

    Example:
        Two trajectories: two turns with rewards 1 and 2, and one turn with reward 2.

        >>> turn_group_advantage(torch.tensor([1.0, 2.0, 2.0]), ["a", "a", "a"],
        ...                      is_last_step=[False, True, True])
        tensor([ 1.,  2., -1.])
    """
    op = "turn_group_advantage"
    check_discount(op, "gamma", gamma)
    if baseline not in BASELINES:
        raise ValueError(f"{op}: baseline: expected one of {sorted(BASELINES)}, got {baseline!r}")
    ids = check_row_ids(op, "group_ids", group_ids)
    rows = check_rows(op, rewards, ids.numel(), is_last_step, response_mask, cu_seqlens)
    if _backend.select(op, rows.rewards, backend=backend) == "torch":
        return _torch(
            rows,
            ids,
            lambda sums, last: reference.turn_group_advantage(
                sums, ids.cpu(), last, gamma, baseline, scale_by_std
            ),
        )
    out = rows.empty()
    options: tuple[Any, ...] = (
        gamma,
        BASELINES[baseline],
        scale_by_std,
        out,
        _backend.num_threads(),
    )
    _C.turn_group_advantage(rows.rewards, ids, *rows.layout, *options)
    return out


def gigpo_advantage(
    rewards: torch.Tensor,
    group_ids: Ids,
    anchor_ids: Ids,
    *,
    is_last_step: torch.Tensor | Sequence[bool] | None = None,
    response_mask: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    gamma: float = 1.0,
    step_advantage_w: float = 1.0,
    scale_by_std: bool = True,
    backend: str | None = None,
) -> torch.Tensor:
    """Return GiGPO's advantage: of the episode in its group, plus of the step in its state.

    Feng et al. 2025, arXiv:2505.10978. The rows of a group with the same state (`anchor_ids`) form
    an anchor group, regardless of turn and trajectory: they are different actions in one state.
    A = A_episode + step_advantage_w * A_step, with
    A_episode = (R - mean) / (std + 1e-6), R the undiscounted sum of all rewards of the trajectory,
    over the trajectories of the group, each counted once (group of one: R / (1 + 1e-6));
    A_step = (G - mean) / (std + 1e-6), G as in `turn_level_returns`, over the rows of the anchor
    group (0 for a state seen once).
    Deviations are unbiased; `scale_by_std=False` omits both divisions.

    Args:
        rewards, is_last_step, response_mask, cu_seqlens, gamma, backend: as `turn_level_returns`.
        group_ids: N strings or ints, the prompt of each row. Equal within a trajectory; rows of a
            group need not be adjacent.
        anchor_ids: N strings or ints, the state in which each row acted. Equal ids in different
            groups are different states.
        step_advantage_w: the paper's omega, at least 0.

    Returns:
        float32 in the shape of `response_mask` (of `rewards` where there is none).

    Raises:
        ValueError: as `turn_level_returns`; two groups in one trajectory; a weight out of range.

    Example:
        Two trajectories of one turn from the same state.

        >>> gigpo_advantage(torch.tensor([1.0, 0.0]), ["a", "a"], ["door", "door"],
        ...                 scale_by_std=False)
        tensor([ 1., -1.])
    """
    op = "gigpo_advantage"
    check_discount(op, "gamma", gamma)
    if not (math.isfinite(step_advantage_w) and step_advantage_w >= 0):
        raise ValueError(f"{op}: step_advantage_w: expected at least 0, got {step_advantage_w}")
    ids = check_row_ids(op, "group_ids", group_ids)
    anchors = check_row_ids(op, "anchor_ids", anchor_ids)
    if anchors.shape != ids.shape:
        raise ValueError(
            f"{op}: anchor_ids: expected one id per row ({ids.numel()}), got {anchors.numel()}"
        )
    rows = check_rows(op, rewards, ids.numel(), is_last_step, response_mask, cu_seqlens)
    if _backend.select(op, rows.rewards, backend=backend) == "torch":
        return _torch(
            rows,
            ids,
            lambda sums, last: reference.gigpo_advantage(
                sums, ids.cpu(), anchors.cpu(), last, gamma, step_advantage_w, scale_by_std
            ),
        )
    out = rows.empty()
    threads = _backend.num_threads()
    options: tuple[Any, ...] = (gamma, step_advantage_w, scale_by_std, out, threads)
    _C.gigpo_advantage(rows.rewards, ids, anchors, *rows.layout, *options)
    return out


def _torch(
    rows: Rows,
    ids: torch.Tensor | None,
    compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    check_trajectories(rows, ids)
    values = rows.row_sums()
    check_finite(rows, values)
    if rows.num_rows:
        # Row by row in Python: on a GPU each one would wait for the device.
        values = compute(values.cpu(), rows.last_or_all().cpu())
    return rows.spread(values.to(rows.rewards.device, torch.float32))
