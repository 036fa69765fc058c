"""Plan of micro-batches: rows as sequences or as prefix trees.

N rows of a batch, n sequences padded on the right to length L, M trained tokens.

Where a step's prompt exactly extends the step before (contexts that only grow), both rows share one
sequence, the longest: a causal model computes the same hidden states for the shared prefix, so loss
and gradient are those of separate rows, for about half the tokens. Where a rotary embedding depends
on the longest row, rows on different sides of its limit share neither a sequence nor a pass.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import astuple
from typing import Any

import numpy as np
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from skyrl_fast.batch import StepBatch
from skyrl_fast.ops.passes.plan import PassLayout, PassPlan
from skyrl_fast.train.model.forward_pass import MicroBatch as MicroBatch
from skyrl_fast.train.model.forward_pass import NodeTree
from skyrl_fast.train.model.forward_pass import response_positions as response_positions
from skyrl_fast.train.model.rope_limits import DYNAMIC, RopeLimit
from skyrl_fast.train.model.row_layout import LayoutCosts

# Plans by the tokens they are of, as long as these exist, and by what they depend on besides: old
# log-probabilities, reference, critic, update and its epochs often visit the same rows.
PASS_PLANS = WeakTensorKeyDictionary()


class MicroBatches:
    """The micro-batches of a batch; each is written when it is reached, so that one is in memory.

    Args:
        replay: whether the plan has the batch's routes.
        numbers: of the passes; -1: an idle one, without a trained token. None: all.
    """

    def __init__(
        self, batch: StepBatch, plan: PassPlan, replay: bool, numbers: np.ndarray | None = None
    ) -> None:
        self._batch = batch
        self._plan = plan
        self._replay = replay
        if numbers is None:
            self._numbers = np.arange(len(plan))
        else:
            self._numbers = numbers
        self._kept = None
        if batch.num_kept is not None:
            assert batch.kept_ids is not None and batch.cu_kept is not None
            self._kept = (batch.num_kept, batch.kept_ids, batch.cu_kept.to(torch.int64))

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[MicroBatch]:
        return map(self._micro_batch, self._numbers.tolist())

    @property
    def batch(self) -> StepBatch:
        """The batch whose rows the passes visit."""
        return self._batch

    @property
    def num_tokens(self) -> np.ndarray:
        """int64 tokens of each, padding included."""
        tokens = np.ones(len(self), dtype=np.int64)
        tokens[~self._is_idle] = self._plan.num_tokens[self._numbers[~self._is_idle]]
        return tokens

    def choose(self, places: Sequence[int] | np.ndarray) -> MicroBatches:
        """Return the micro-batches at some places; an idle one for each -1."""
        places = np.asarray(places, dtype=np.int64)
        numbers = np.where(places < 0, -1, self._numbers[places])
        return MicroBatches(self._batch, self._plan, self._replay, numbers)

    def alone(self) -> tuple[MicroBatches, torch.Tensor]:
        """Return the same passes of a batch of their rows alone, and which rows these are.

        Returns:
            The micro-batches, and (n,) int64 the numbers that their rows have here, ascending.
        """
        layouts = self._layouts()
        rows = np.zeros(0, dtype=np.int64)
        if layouts:
            # Each row is in one pass.
            rows = np.sort(np.concatenate([layout.rows for layout in layouts]))
        moved = []
        for layout in layouts:
            moved.append(layout.with_rows(np.searchsorted(rows, layout.rows)))
        numbers = torch.from_numpy(rows)
        batch = self._batch.rows(numbers)
        return _from_layouts(batch, moved, self._replay, self._is_idle), numbers

    def __reduce__(self) -> tuple[Any, ...]:
        return _from_layouts, (self._batch, self._layouts(), self._replay, self._is_idle)

    @property
    def _is_idle(self) -> np.ndarray:
        idle: np.ndarray = self._numbers < 0
        return idle

    def _layouts(self) -> list[PassLayout]:
        """Return those of the passes that are not idle."""
        return [self._plan.layout(number) for number in self._numbers[~self._is_idle].tolist()]

    def _micro_batch(self, number: int) -> MicroBatch:
        batch = self._batch
        if number < 0:
            return _idle(batch, self._replay)
        routes = batch.expert_indices if self._replay else None
        fields: dict[str, Any] = self._plan.arrays(
            number, batch.tokens, routes=routes, kept=self._kept
        )
        tree = None
        if "parents" in fields:
            tree = NodeTree(*(fields.pop(name) for name in ("parents", "ends", "positions")))
        return MicroBatch(**fields, tree=tree)


def plan_micro_batches(
    batch: StepBatch,
    token_budget: int,
    *,
    rows: np.ndarray | None = None,
    keep_trajectories: bool = False,
    router_replay: bool = False,
    tree: bool = False,
    costs: LayoutCosts | None = None,
    limits: Sequence[RopeLimit] = (),
    refused_tokens: Sequence[int] = (),
) -> MicroBatches:
    """Return the forward passes that compute the logprob of every trained token of the rows.

    Args:
        token_budget: most padded tokens (n * L) of a micro-batch; a longer one is separate.
        rows: (N,) bool, rows to visit; None: all with a trained token.
        keep_trajectories: a trajectory's rows stay together (losses that look at all of them).
        router_replay: add the recorded routes. Rows share a token only where their records agree,
            as they do in contexts that only grow.
        tree: lay out the rows of a pass as a prefix tree: the budget counts its nodes. Else as
            sequences, which rows of a trajectory share where contexts only grew.
        costs: with `tree`, groups that take less time as sequences are laid out as these; None: all
            are trees.
        limits: of the model's rotary embedding; models that trees support have none.
        refused_tokens: ids that stand for images or sounds, which rows do not have.

    Raises:
        ValueError: a trained row has an empty prompt, so nothing predicts its first token; router
            replay of a batch without routes; rows that a limit does not allow; or a refused token
            that was not sampled.
    """
    replay = router_replay and batch.expert_indices is not None
    routes = batch.expert_indices if replay else None
    arrays: dict[str, Any] = {
        "cu_seqlens": batch.cu_seqlens,
        "cu_responses": batch.cu_responses,
        "trained": batch.trained_mask,
        "group_ids": batch.group_ids,
        "trajectory_ids": batch.trajectory_ids,
        "rows": torch.ones(batch.num_rows, dtype=torch.bool),
    }
    if rows is not None:
        arrays["rows"] = torch.from_numpy(rows)
    options: dict[str, Any] = {
        "token_budget": token_budget,
        "keep_trajectories": keep_trajectories,
        "tree": tree,
        "costs": None if costs is None else astuple(costs),
        "length_limits": tuple(limit.length for limit in limits),
        "longest_row": min((one.length for one in limits if one.kind == DYNAMIC), default=0),
    }
    plans = PASS_PLANS.setdefault(batch.tokens, {})
    # Masks are made again for each use, so that their content counts. Tokens may be changed in
    # place, which raises their version.
    key = (batch.tokens._version, _digest(arrays), id(routes), *options.values(), *refused_tokens)
    if key not in plans:
        if replay:
            options |= {"routes": routes, "cu_routes": batch.cu_experts}
        _refuse_tokens(batch, refused_tokens)
        # The routes stay alive with the plan: their id is part of its key.
        plans[key] = (PassPlan(batch.tokens, **arrays, **options), routes)
    plan = plans[key][0]
    if router_replay and not replay and len(plan):  # placeholder rows have no routes
        raise ValueError(
            "plan_micro_batches: the batch has no routes to replay: set "
            "generator.inference_engine.enable_return_routed_experts=true"
        )
    return MicroBatches(batch, plan, replay)


def _from_layouts(
    batch: StepBatch, layouts: Sequence[PassLayout], replay: bool, is_idle: np.ndarray
) -> MicroBatches:
    """Return micro-batches with these layouts, in this order, next to idle ones."""
    routes: dict[str, Any] = {}
    if replay:
        routes = {"routes": batch.expert_indices, "cu_routes": batch.cu_experts}
    plan = PassPlan.from_layouts(
        batch.tokens,
        batch.cu_seqlens,
        batch.cu_responses,
        batch.trained_mask,
        layouts,
        **routes,
    )
    numbers = np.where(is_idle, -1, np.cumsum(~is_idle) - 1)
    return MicroBatches(batch, plan, replay, numbers)


def _refuse_tokens(batch: StepBatch, refused: Sequence[int]) -> None:
    """Raise ValueError if a trained row has one of these ids that its trajectory did not sample."""
    if not refused:  # most models: no pass over the tokens
        return
    found = torch.isin(batch.tokens, torch.tensor(refused, dtype=batch.tokens.dtype))
    if not found.any():
        return
    rows = torch.repeat_interleave(batch.lengths.long())
    starts = (batch.cu_seqlens[1:] - batch.response_lengths)[rows]
    response = torch.arange(len(rows)) >= starts
    sampled = torch.zeros_like(found)
    sampled[response] = batch.loss_mask != 0
    # Later prompts of a trajectory repeat what it sampled.
    trajectories = batch.trajectory_ids[rows]
    found &= ~torch.isin(trajectories, trajectories[found & sampled])
    found &= torch.isin(rows, rows[response][batch.trained_mask])
    if found.any():
        place = int(found.nonzero()[0])
        raise ValueError(
            f"row {int(rows[place])}: expected text, got token {int(batch.tokens[place])}, which "
            "stands for an image or a sound, in its prompt; not supported"
        )


def _digest(arrays: dict[str, torch.Tensor]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays.values():
        digest.update(array.contiguous().numpy().data)
    return digest.digest()


def _idle(batch: StepBatch, replay: bool) -> MicroBatch:
    """Return a micro-batch of one untrained token, with routes if the batch's are replayed."""
    nothing = torch.zeros(0, dtype=torch.int64)
    routes = batch.expert_indices if replay else None
    if routes is None:
        expert_indices = None
    else:
        expert_indices = routes.new_zeros((1, 1, *routes.shape[1:]))
    if routes is None:
        router_padding_mask = None
    else:
        router_padding_mask = torch.ones((1, 1), dtype=torch.bool)
    return MicroBatch(
        input_ids=torch.zeros((1, 1), dtype=torch.int64),
        hidden_index=nothing,
        target_ids=nothing,
        response_index=nothing,
        rows=nothing,
        expert_indices=expert_indices,
        router_padding_mask=router_padding_mask,
    )
