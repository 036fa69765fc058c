"""Plain-Python reference of merging steps. N rows, one per step."""

from __future__ import annotations

from collections.abc import Sequence

NOWHERE = 2**63 - 1  # no position: nothing was replaced


def merge_plan(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    trajectory_ids: Sequence[int],
    loss_masks: Sequence[Sequence[int]] | None,
    max_drift: int,
) -> tuple[list[int], list[bool], list[int]]:
    """Return per row: overlap with the merged row before it, whether it joins that row, limit.

    The limit is the position in its merged row from which later steps replaced tokens.
    """
    overlaps = [0] * len(prompts)
    joins = [False] * len(prompts)
    limits = [NOWHERE] * len(prompts)
    merged: list[int] = []
    mask: list[int] = []
    head = 0
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        if loss_masks is None:
            response_mask = [1] * len(response)
        else:
            response_mask = list(loss_masks[row])
        if row > 0 and trajectory_ids[row] == trajectory_ids[row - 1]:
            overlaps[row] = _common_prefix(merged, prompt)
            dropped = len(merged) - overlaps[row]
            # By the mask alone: a merged row does not record where its last response begins, and
            # merging it again must not join more.
            joins[row] = dropped == 0 or (
                dropped <= max_drift and _last_stretch(mask) < overlaps[row]
            )
        if joins[row]:
            overlap = overlaps[row]
            if overlap < len(merged):
                # Tokens of all rows merged so far, as a drift may reach into an earlier response.
                limits[head:row] = [min(limit, overlap) for limit in limits[head:row]]
            merged = merged[:overlap] + list(prompt[overlap:]) + list(response)
            mask = mask[:overlap] + [0] * (len(prompt) - overlap) + response_mask
        else:
            head = row
            merged = list(prompt) + list(response)
            mask = [0] * len(prompt) + response_mask
    return overlaps, joins, limits


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    for i, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return i
    return min(len(a), len(b))


def _last_stretch(mask: Sequence[int]) -> int:
    """Return the start of the last stretch of ones; past the end if there is none."""
    last = len(mask)
    while last > 0 and mask[last - 1] == 0:
        last -= 1
    first = last
    while first > 0 and mask[first - 1] != 0:
        first -= 1
    if last > 0:
        return first
    return len(mask) + 1
