"""The batch that training works on: ragged rows, one per step.

N rows, S tokens (prompts and responses), A response tokens, G groups, J trajectories, T and R the
padded widths, L layers, K experts per token.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from skyrl_fast.batch.columns import columns_of_output
from skyrl_fast.batch.fields import OP, check_fields
from skyrl_fast.batch.file import read_batch_file, write_batch_file
from skyrl_fast.batch.merge import merged_columns
from skyrl_fast.batch.padded import PaddedBatch, padded_batch
from skyrl_fast.batch.row_choice import (
    padding_batch,
    row_choice,
    row_numbers,
    row_range,
    with_padding_rows,
)
from skyrl_fast.batch.split import mini_batch_boundaries, split_micro_batches
from skyrl_fast.ops.merge import MAX_DRIFT_TOKENS, check_drift


@dataclass(frozen=True, slots=True, eq=False)
class StepBatch:
    """Rows of a training batch as flat arrays. Row i is one step: prompt, then response.

    Args:
        tokens: (S,) int32; row i is `tokens[cu_seqlens[i] : cu_seqlens[i + 1]]`.
        cu_seqlens: (N + 1,) int32 (int64 where S needs it).
        cu_responses: (N + 1,) int32, offsets into the arrays per response token.
        loss_mask: (A,) uint8, 1 = trained.
        rewards: (A,) float32 per response token; a reward per row lies on its last token.
        row_rewards: (N,) float32, each row's sum, also where the response is empty.
        group_ids: (N,) int32, 0 to G - 1: the row's prompt.
        trajectory_ids: (N,) int32, 0 to J - 1.
        is_last_step: (N,) bool.
        policy_version: (N,) int32, weight updates behind the policy that sampled the row.
        uids: names of the G groups.
        stop_reasons: N, or None.
        rollout_logprobs, old_logprobs, ref_logprobs, advantages: (A,) float32, or None.
        values, returns: (A,) float32, of a critic before each trained token, and what it should
            have said; or None.
        token_weights: (A,) float32 of the off-policy correction, 0 on what it drops, or None.
        row_weights: (N,) float32, what a token of the row weighs in the loss, or None.
        anchor_ids: (N,) int32, equal where rows acted in the same state, or None.
        expert_indices: (E, L, K) integers of the captured routes of all rows, or None.
        cu_experts: (N + 1,) int32, offsets into `expert_indices`; None with it.
        num_padding_rows: how many rows at the end only fill up; nothing counts them.
        reward_per_row: the generator gave one reward per row, not one per response token.
    """

    tokens: torch.Tensor
    cu_seqlens: torch.Tensor
    cu_responses: torch.Tensor
    loss_mask: torch.Tensor
    rewards: torch.Tensor
    row_rewards: torch.Tensor
    group_ids: torch.Tensor
    trajectory_ids: torch.Tensor
    is_last_step: torch.Tensor
    policy_version: torch.Tensor
    uids: tuple[str, ...]
    stop_reasons: tuple[str, ...] | None = None
    rollout_logprobs: torch.Tensor | None = None
    old_logprobs: torch.Tensor | None = None
    ref_logprobs: torch.Tensor | None = None
    advantages: torch.Tensor | None = None
    values: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    token_weights: torch.Tensor | None = None
    row_weights: torch.Tensor | None = None
    anchor_ids: torch.Tensor | None = None
    expert_indices: torch.Tensor | None = None
    cu_experts: torch.Tensor | None = None
    num_padding_rows: int = 0
    reward_per_row: bool = False

    def __post_init__(self) -> None:  # noqa: D105
        check_fields(self)

    @property
    def num_rows(self) -> int:
        """N, padding rows included."""
        return self.cu_seqlens.shape[0] - 1

    @property
    def num_real_rows(self) -> int:
        """N without the padding rows."""
        return self.num_rows - self.num_padding_rows

    @property
    def num_tokens(self) -> int:
        """S."""
        return self.tokens.shape[0]

    @property
    def num_groups(self) -> int:
        """G."""
        return len(self.uids)

    @property
    def num_trajectories(self) -> int:
        """J, those of padding rows included."""
        return int(self.trajectory_ids[-1]) + 1 if self.num_rows else 0

    @property
    def lengths(self) -> torch.Tensor:
        """(N,) tokens of each row."""
        return self.cu_seqlens.diff()

    @property
    def response_lengths(self) -> torch.Tensor:
        """(N,) response tokens of each row."""
        return self.cu_responses.diff()

    @property
    def row_uids(self) -> list[str]:
        """N, the prompt's name of each row."""
        return [self.uids[group] for group in self.group_ids.tolist()]

    @classmethod
    def from_generator_output(
        cls,
        output: Mapping[str, Any],
        *,
        uids: Sequence[str] | Sequence[int] | None = None,
        num_prompts: int | None = None,
        step_wise: bool | None = None,
        merge: str | None = None,
        max_drift_tokens: int = MAX_DRIFT_TOKENS,
    ) -> StepBatch:
        """Return the checked rows of a generator output as a batch.

        Args:
            output: see `GeneratorOutput`. Without `is_last_step`, or with None, every row is a
                trajectory of its own.
            uids: N prompt names; None: the instance ids of `trajectory_ids`.
            num_prompts, step_wise: as for `validate_generator_output`, which is called.
            merge: "fork" or "realign": join the steps, see `merged`. "fork" reads only the lists
                that the merged rows need. None: a row per step.
            max_drift_tokens: for "realign".

        Raises:
            ValueError: what `validate_generator_output` raises; a token id that is negative or
                needs more than 31 bits; a loss mask that is not 0 or 1; neither `uids` nor
                `trajectory_ids`.
        """
        if merge is not None:
            check_drift(OP, merge, max_drift_tokens)
        columns = columns_of_output(
            output,
            uids=uids,
            num_prompts=num_prompts,
            step_wise=step_wise,
            merge=merge == "fork",
        )
        batch = cls(**columns)
        if merge != "realign":
            return batch
        return batch.merged(drift=merge, max_drift_tokens=max_drift_tokens)

    def padded(
        self,
        pad_token_id: int,
        *,
        pad_size: int = 0,
        pad_mode: str = "repeat",
    ) -> PaddedBatch:
        """Return SkyRL's seven padded tensors; nothing is truncated.

        Args:
            pad_token_id: fills `sequences` left of each row.
            pad_size: padding rows to add, already in place.
            pad_mode: what they hold, "repeat" or "cheap", as in `ops.padding_rows.pad_batch`.

        Raises:
            ValueError: a negative `pad_size`, padding rows for an empty batch, or a reward of an
                empty response, which no token can hold.
        """
        return padded_batch(self, pad_token_id, pad_size, pad_mode)

    def merged(
        self,
        *,
        drift: str = "fork",
        max_drift_tokens: int = MAX_DRIFT_TOKENS,
        rewards: str | None = None,
    ) -> StepBatch:
        """Return the batch with consecutive steps of a trajectory joined where contexts only grew.

        A merged row has the first step's prompt; its response is the rest of the last step's
        prompt and response. Tokens that no step of it sampled are untrained: mask, log-probability
        and reward 0. Group, trajectory, last-step flag and stop reason are the last step's,
        `policy_version` is the oldest. Routes of experts that were recorded stay, later steps add
        what goes beyond them. Which steps are joined: see `ops.merge.merge_steps`.

        Args:
            drift, max_drift_tokens: as for `ops.merge.merge_steps`.
            rewards: "token": every token keeps its reward, so that a row's sum is its steps' sum.
                "last": a row has its last step's reward, on its last token. None: "last" where
                the generator gave a reward per row, else "token".

        Raises:
            ValueError: a batch with advantages or weights, which belong to the steps; an
                unknown `drift` or `rewards`; fewer routes than were recorded before.
        """
        columns = merged_columns(self, drift, max_drift_tokens, rewards)
        return dataclasses.replace(self, **columns)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the batch to one safetensors file, the names as JSON in its header. Atomic."""
        tensors, facts = {}, {}
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if isinstance(value, torch.Tensor):
                tensors[f.name] = value
            elif value is not None:
                facts[f.name] = value
        write_batch_file(path, tensors, facts)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> StepBatch:
        """Read what `save` wrote; runs no code from the file.

        Raises:
            ValueError: a file that is no batch, or whose parts disagree.
        """
        names = {f.name for f in dataclasses.fields(cls)}
        return cls(**read_batch_file(path, names))

    def with_(self, **changes: Any) -> StepBatch:
        """Return a copy with other fields, e.g. `batch.with_(advantages=advantages(batch))`."""
        return dataclasses.replace(self, **changes)

    def to(self, device: torch.device | str) -> StepBatch:
        """Return the batch with all tensors on `device`."""
        moved = {
            f.name: getattr(self, f.name).to(device, non_blocking=True)
            for f in dataclasses.fields(self)
            if isinstance(getattr(self, f.name), torch.Tensor)
        }
        return dataclasses.replace(self, **moved)

    def rows(self, index: slice | Sequence[int] | np.ndarray | torch.Tensor) -> StepBatch:
        """Return these rows, in this order; groups and trajectories are numbered anew.

        A slice of step 1 shares memory; other choices need a batch on the CPU. Whatever looks at
        whole trajectories or groups (advantages, row weights) must be there before they are split.

        Args:
            index: a slice, row numbers, or (N,) bool.
        """
        if isinstance(index, slice):
            start, stop, step = index.indices(self.num_rows)
            if step == 1:
                return row_range(self, start, max(start, stop))
            index = range(start, stop, step)
        return row_choice(self, row_numbers(self, index))

    def mini_batches(self, mini_batch_size: int) -> list[StepBatch]:
        """Return consecutive parts of exactly `mini_batch_size` prompts each; no padding rows.

        Raises:
            ValueError: rows of a prompt that are not adjacent, or a size that does not divide.
        """
        real = self.group_ids[: self.num_real_rows]
        return [self.rows(slice(*b)) for b in mini_batch_boundaries(real, mini_batch_size)]

    def micro_batches(
        self,
        token_budget: int,
        *,
        num_ranks: int = 1,
        rank: int = 0,
        keep_trajectories: bool = False,
    ) -> list[StepBatch]:
        """Return this rank's part of the real rows, in balanced parts within a token budget.

        Every rank gets the same number of micro-batches and computes the same split by itself.
        Where there are fewer rows than micro-batches, one padding row fills the empty one.

        Args:
            token_budget: most tokens in a micro-batch. A row (or, kept whole, a trajectory) that
                alone is longer has a micro-batch of its own.
            num_ranks: data-parallel size.
            rank: whose part.
            keep_trajectories: never split a trajectory.

        Raises:
            ValueError: a budget or number of ranks below 1, or a rank out of range.
        """
        if not 0 <= rank < num_ranks:
            raise ValueError(
                f"micro_batches: rank must be from 0 to num_ranks - 1 = {num_ranks - 1}, got {rank}"
            )
        num_rows = self.num_real_rows
        lengths = self.lengths[:num_rows].numpy()
        units = self.trajectory_ids[:num_rows].numpy() if keep_trajectories else None
        parts = split_micro_batches(lengths, token_budget, num_ranks=num_ranks, units=units)[rank]
        if len(parts) == 1 and len(parts[0]) == self.num_rows:
            return [self]
        return [self.rows(p) if len(p) else padding_batch(self) for p in parts]

    def with_padding_rows(self, pad_size: int) -> StepBatch:
        """Return the batch with rows added that cost almost nothing: one token, no response.

        Each is a trajectory in a group of its own, `pad0`, `pad1`, ...

        Raises:
            ValueError: a negative `pad_size`.
        """
        if pad_size < 0:
            raise ValueError(f"with_padding_rows: pad_size must be at least 0, got {pad_size}")
        return self if pad_size == 0 else with_padding_rows(self, pad_size)
