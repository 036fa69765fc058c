"""`StepBatch`, the training batch: ragged rows, one per step.

N rows, S tokens (prompts and responses), A response tokens, G groups, J trajectories, T and R the
padded widths, L layers, K experts per token, B kept tokens.

Design: docs/design/006-step-batch.md.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from skyrl_fast.batch.columns import columns_of_output, offsets, rewards_on_last_tokens
from skyrl_fast.batch.file import read_batch_file, write_batch_file
from skyrl_fast.batch.merge import (
    merge_kept_ids,
    merge_routes,
    merge_token_rewards,
    merge_values,
)
from skyrl_fast.batch.padded import PaddedBatch, pad_routes, pad_to_tensors
from skyrl_fast.batch.segments import segment_sums
from skyrl_fast.batch.split import mini_batch_boundaries
from skyrl_fast.ops import _backend
from skyrl_fast.ops._offsets import check_offsets
from skyrl_fast.ops.merge.steps import (
    MAX_DRIFT_TOKENS,
    check_drift,
    copy_segments,
    merge_flat_steps,
)

Per = Literal["token", "response", "row", "expert", "kept"]
OFFSETS: dict[Per, str] = {
    "token": "cu_seqlens",
    "response": "cu_responses",
    "expert": "cu_experts",
    "kept": "cu_kept",
}
# Columns with an entry per token, response token, row, recorded route or recorded kept token.
COLUMNS: dict[str, tuple[Per, torch.dtype | None]] = {
    "tokens": ("token", torch.int32),
    "loss_mask": ("response", torch.uint8),
    "rewards": ("response", torch.float32),
    "row_rewards": ("row", torch.float32),
    "group_ids": ("row", torch.int32),
    "trajectory_ids": ("row", torch.int32),
    "is_last_step": ("row", torch.bool),
    "policy_version": ("row", torch.int32),
    "anchor_ids": ("row", torch.int32),
    "context_numbers": ("row", torch.int32),
    "reward_parts": ("row", None),
    "is_placeholder": ("row", torch.bool),
    "is_alone": ("row", torch.bool),
    "step_numbers": ("row", torch.int32),
    "owners": ("response", torch.int32),
    "is_summary": ("response", torch.uint8),
    "rollout_logprobs": ("response", torch.float32),
    "old_logprobs": ("response", torch.float32),
    "ref_logprobs": ("response", torch.float32),
    "teacher_logprobs": ("response", torch.float32),
    "teacher_ids": ("response", None),
    "teacher_top_logprobs": ("response", None),
    "advantages": ("response", torch.float32),
    "values": ("response", torch.float32),
    "returns": ("response", torch.float32),
    "token_weights": ("response", torch.float32),
    "cross_entropy_weights": ("response", torch.float32),
    "expert_indices": ("expert", None),
    "num_kept": ("response", torch.int32),
    "kept_ids": ("kept", torch.int32),
}


@dataclass(frozen=True, slots=True, eq=False)
class StepBatch:
    """Rows of a training batch as flat arrays. A row is one step: prompt, then response.

    Args:
        tokens: (S,) int32; row i is `tokens[cu_seqlens[i] : cu_seqlens[i + 1]]`.
        cu_seqlens: (N + 1,) int32 (int64 where S needs it).
        cu_responses: (N + 1,) int32, offsets into the arrays per response token.
        loss_mask: (A,) uint8, 1 = trained.
        rewards: (A,) float32 per response token; a reward per row is on its last token.
        row_rewards: (N,) float32, each row's sum, also if the response is empty.
        group_ids: (N,) int32, 0 to G - 1: the row's prompt.
        trajectory_ids: (N,) int32, 0 to J - 1.
        is_last_step: (N,) bool.
        policy_version: (N,) int32, version of the policy that sampled the row.
        uids: names of the G groups.
        stop_reasons: N, or None.
        rollout_logprobs, old_logprobs, ref_logprobs, advantages: (A,) float32, or None.
        teacher_logprobs: (A,) float32, NaN in rows without a teacher; or None.
        teacher_ids: (A, K) int32, the teacher's most likely tokens in each place; or None.
        teacher_top_logprobs: (A, K) float32, -inf where it has none; None with them.
        values, returns: (A,) float32, the critic's value before each trained token, and its
            target; or None.
        token_weights: (A,) float32 of the off-policy correction, 0 on dropped tokens, or None.
        cross_entropy_weights: (A,) float32, of each token in the cross-entropy, or None: zeros.
        anchor_ids: (N,) int32, equal where rows acted in the same state, or None.
        context_numbers: (N,) int32, the context of the row's last step in its trajectory, or None.
        reward_parts: (N, K) float32, named parts of the reward of the row's trajectory, or None.
        is_placeholder: (N,) bool, rows of trajectories that failed or have no step, or None: none.
        is_alone: (N,) bool, rows of the only trajectory that is left of its group, which has no
            baseline, or None: none.
        step_numbers: (N,) int32, `Step.number` of the row's last step, or None.
        owners: (A,) int32, `Step.number` of the step that sampled the token, -1 where none did, or
            None.
        is_summary: (A,) uint8, 1 = token of a call that summarised, or None: none.
        expert_indices: (E, L, K) integers, recorded routes of all rows, or None.
        cu_experts: (N + 1,) int32, offsets into `expert_indices`; None with it.
        num_kept: (A,) int32, number of tokens that each response token was sampled from; 0: the
            vocabulary. None: that of all.
        kept_ids: (B,) int32, those tokens of all response tokens, ascending for each; None with it.
        cu_kept: (N + 1,) int32, offsets of the rows' kept tokens; None with it.
        reward_per_row: the generator returned one reward per row, not per response token.

    Raises:
        TypeError, ValueError: a column that is not a tensor, or of another dtype or size.
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
    teacher_logprobs: torch.Tensor | None = None
    teacher_ids: torch.Tensor | None = None
    teacher_top_logprobs: torch.Tensor | None = None
    advantages: torch.Tensor | None = None
    values: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    token_weights: torch.Tensor | None = None
    cross_entropy_weights: torch.Tensor | None = None
    anchor_ids: torch.Tensor | None = None
    context_numbers: torch.Tensor | None = None
    reward_parts: torch.Tensor | None = None
    is_placeholder: torch.Tensor | None = None
    is_alone: torch.Tensor | None = None
    step_numbers: torch.Tensor | None = None
    owners: torch.Tensor | None = None
    is_summary: torch.Tensor | None = None
    expert_indices: torch.Tensor | None = None
    cu_experts: torch.Tensor | None = None
    num_kept: torch.Tensor | None = None
    kept_ids: torch.Tensor | None = None
    cu_kept: torch.Tensor | None = None
    reward_per_row: bool = False

    def __post_init__(self) -> None:
        num_rows = self.cu_seqlens.shape[0] - 1
        sizes = {
            "token": self.tokens.shape[0],
            "response": self.loss_mask.shape[0],
            "row": num_rows,
            "expert": 0 if self.expert_indices is None else self.expert_indices.shape[0],
            "kept": 0 if self.kept_ids is None else self.kept_ids.shape[0],
        }
        if num_rows < 0 or self.cu_responses.shape != self.cu_seqlens.shape:
            raise ValueError(
                f"StepBatch: cu_responses: expected shape {tuple(self.cu_seqlens.shape)} like "
                f"cu_seqlens, got {tuple(self.cu_responses.shape)}"
            )
        for name, (per, dtype) in COLUMNS.items():
            value = getattr(self, name)
            if value is None and name in OPTIONAL:
                continue
            if not isinstance(value, torch.Tensor):
                kind = type(value).__name__
                raise TypeError(f"StepBatch: {name}: expected a tensor, got {kind}")
            if dtype is not None and value.dtype != dtype:
                raise ValueError(f"StepBatch: {name}: expected {dtype}, got {value.dtype}")
            size = sizes[per]
            is_flat = dtype is None or value.dim() == 1
            if value.shape[:1] != (size,) or not is_flat:
                raise ValueError(
                    f"StepBatch: {name}: expected shape ({size},), got {tuple(value.shape)}"
                )
        if self.stop_reasons is not None and len(self.stop_reasons) != num_rows:
            raise ValueError(
                f"StepBatch: stop_reasons: expected one entry per row ({num_rows}), "
                f"got {len(self.stop_reasons)}"
            )

    @property
    def num_rows(self) -> int:
        return self.cu_seqlens.shape[0] - 1

    @property
    def num_tokens(self) -> int:
        return self.tokens.shape[0]

    @property
    def num_groups(self) -> int:
        return len(self.uids)

    @property
    def num_trajectories(self) -> int:
        if self.num_rows:
            return int(self.trajectory_ids.max()) + 1
        return 0

    @property
    def lengths(self) -> torch.Tensor:
        """(N,) tokens of each row."""
        return self.cu_seqlens.diff()

    @property
    def response_lengths(self) -> torch.Tensor:
        """(N,) response tokens of each row."""
        return self.cu_responses.diff()

    @property
    def summary_rows(self) -> torch.Tensor:
        """(N,) bool, rows with a token of a summary; of rows of steps, the summaries."""
        if self.is_summary is None:
            return torch.zeros(self.num_rows, dtype=torch.bool)
        counts = segment_sums(self.is_summary.numpy(), self.cu_responses.numpy(), np.int64)
        return torch.from_numpy(counts > 0)

    @property
    def row_uids(self) -> list[str]:
        """N, the prompt's name of each row."""
        return [self.uids[group] for group in self.group_ids.tolist()]

    @property
    def trained_mask(self) -> torch.Tensor:
        """(A,) bool, tokens of any term of the loss: of the policy loss or the cross-entropy."""
        if self.cross_entropy_weights is None:
            return self.loss_mask != 0
        return (self.loss_mask != 0) | (self.cross_entropy_weights != 0)

    def columns(self, per: Per) -> dict[str, torch.Tensor]:
        """Return the batch's columns of one kind, e.g. those per response token."""
        found = {}
        for name, (kind, _) in COLUMNS.items():
            column = getattr(self, name)
            if kind == per and column is not None:
                found[name] = column
        return found

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
                trajectory.
            uids: N prompt names; None: the instance ids of `trajectory_ids`.
            num_prompts, step_wise: as for `validate_generator_output`, which is called.
            merge: "fork" or "realign": merge the steps, see `merged`. "fork" reads only the lists
                that the merged rows need. None: a row per step.
            max_drift_tokens: for "realign".

        Raises:
            ValueError: as `validate_generator_output`; a token id that is negative or needs more
                than 31 bits; a loss mask other than 0 or 1; neither `uids` nor `trajectory_ids`.
        """
        if merge is not None:
            check_drift("StepBatch", merge, max_drift_tokens)
        has_kept_ids = output.get("rollout_kept_ids") is not None
        merge_lists = merge == "fork" and not has_kept_ids
        columns = columns_of_output(
            output,
            uids=uids,
            num_prompts=num_prompts,
            step_wise=step_wise,
            merge=merge_lists,
        )
        batch = cls(**columns)
        if merge is None or merge_lists:
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
            pad_mode: their content, "repeat" or "cheap", as in `ops.pack.padding_rows.pad_batch`.

        Raises:
            ValueError: a negative `pad_size`, padding rows for an empty batch, or a reward of an
                empty response, which no token can hold.
        """
        tensors = pad_to_tensors(
            self.tokens,
            self.cu_seqlens,
            {
                "rewards": self.rewards,
                "loss_mask": self.loss_mask,
                "rollout_logprobs": self.rollout_logprobs,
            },
            self.cu_responses,
            row_rewards=self.row_rewards,
            pad_token_id=pad_token_id,
            pad_size=pad_size,
            pad_mode=pad_mode,
        )
        routes, mask = pad_routes(self.expert_indices, self.cu_experts, self.lengths, pad_size)
        return PaddedBatch(
            sequences=tensors["sequences"],
            attention_mask=tensors["attention_mask"],
            response_mask=tensors["response_mask"],
            rewards=tensors["rewards"],
            loss_mask=tensors["loss_mask"],
            rollout_logprobs=tensors.get("rollout_logprobs"),
            rollout_expert_indices=routes,
            router_padding_mask=mask,
            uids=self.row_uids + [f"pad{i}" for i in range(pad_size)],
            is_last_step=self.is_last_step.tolist() + [True] * pad_size,
            pad_size=pad_size,
        )

    def merged(
        self,
        *,
        drift: str = "fork",
        max_drift_tokens: int = MAX_DRIFT_TOKENS,
        rewards: str | None = None,
    ) -> StepBatch:
        """Return the batch with consecutive steps of a trajectory merged where contexts only grew.

        A merged row has the first step's prompt; its response is the rest of the last step's
        prompt and response. Tokens that no step sampled are untrained: mask, log-probability and
        reward 0. Group, trajectory, last-step flag and stop reason are the last step's,
        `policy_version` is the oldest. Recorded routes of experts are kept; later steps add those
        of their new tokens. For which steps are merged, see `ops.merge.steps.merge_steps`.

        Args:
            drift, max_drift_tokens: as for `ops.merge.steps.merge_steps`.
            rewards: "token": every token keeps its reward, so that a row's sum is its steps' sum.
                "last": a row has its last step's reward, on its last token. None: "last" if the
                generator returned a reward per row, else "token".

        Raises:
            ValueError: the batch has advantages or weights, which are per step; unknown `drift` or
                `rewards`; fewer routes than an earlier step recorded.
        """
        op = "StepBatch.merged"
        for name in ("advantages", "token_weights", "teacher_logprobs"):
            if getattr(self, name) is not None:
                raise ValueError(f"{op}: {name}: expected None, as they are computed after merging")
        if rewards not in (None, "token", "last"):
            raise ValueError(f"{op}: rewards: expected 'token', 'last' or None, got {rewards!r}")
        plan = merge_flat_steps(
            self.tokens,
            self.cu_seqlens,
            self.cu_responses,
            self.trajectory_ids,
            loss_mask=self.loss_mask,
            drift=drift,
            max_drift_tokens=max_drift_tokens,
        )
        if not plan.joins.any():
            return self.with_()
        ends = torch.from_numpy(plan.ends)
        cu_seqlens = offsets(self.lengths[ends])
        num_tokens = int(cu_seqlens[-1])
        tokens = _backend.empty((num_tokens,), torch.int32)
        starts = self.cu_seqlens[ends].numpy()
        targets = cu_seqlens[:-1].numpy()
        lengths = self.lengths[ends].numpy()
        copy_segments(op, self.tokens, starts, tokens, targets, lengths)
        cu_responses = offsets(torch.from_numpy(plan.merged_response_lengths))
        changes: dict[str, Any] = {
            name: merge_values(op, values, self.cu_responses, plan, cu_responses)
            for name in (
                "loss_mask",
                "rollout_logprobs",
                "old_logprobs",
                "ref_logprobs",
                "num_kept",
                "cross_entropy_weights",
                "is_summary",
            )
            if (values := getattr(self, name)) is not None
        }
        if self.owners is not None:  # merging fills with 0, which is a step's number
            numbers = self.owners + 1
            merged = merge_values(op, numbers, self.cu_responses, plan, cu_responses)
            changes["owners"] = merged - 1
        of_last_steps = (
            "context_numbers",
            "reward_parts",
            "is_placeholder",
            "is_alone",
            "step_numbers",
        )
        for name in of_last_steps:
            if (values := getattr(self, name)) is not None:
                changes[name] = values[ends]
        if (rewards or ("last" if self.reward_per_row else "token")) == "last":
            changes["row_rewards"] = self.row_rewards[ends]
            changes["rewards"] = rewards_on_last_tokens(self.row_rewards[ends], cu_responses)
        else:
            changes["rewards"], changes["row_rewards"] = merge_token_rewards(
                op,
                self.rewards,
                self.row_rewards,
                self.cu_responses,
                plan,
                cu_responses,
                reward_per_row=self.reward_per_row,
            )
            changes["reward_per_row"] = False
        if self.stop_reasons is not None:
            last_steps = plan.ends.tolist()
            changes["stop_reasons"] = tuple(self.stop_reasons[step] for step in last_steps)
        if self.expert_indices is not None and self.cu_experts is not None:
            changes["expert_indices"], changes["cu_experts"] = merge_routes(
                op, self.expert_indices, self.cu_experts, plan
            )
        if self.num_kept is not None and self.kept_ids is not None:
            changes["kept_ids"], changes["cu_kept"] = merge_kept_ids(
                op, self.num_kept, self.kept_ids, self.cu_responses, plan
            )
        of_steps = self.policy_version.numpy()
        versions = np.minimum.reduceat(of_steps, plan.heads)
        return self.with_(
            tokens=tokens,
            cu_seqlens=cu_seqlens,
            cu_responses=cu_responses,
            group_ids=self.group_ids[ends],
            trajectory_ids=self.trajectory_ids[ends],
            is_last_step=self.is_last_step[ends],
            policy_version=torch.from_numpy(versions),
            **changes,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the batch atomically to one safetensors file, names as JSON in its header."""
        tensors = {}
        others = {}
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if isinstance(value, torch.Tensor):
                tensors[f.name] = value
            elif value is not None:
                others[f.name] = value
        write_batch_file(path, tensors, others)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> StepBatch:
        """Load what `save` wrote; executes no code from the file.

        Raises:
            ValueError: the file is not a batch, or its columns are inconsistent.
        """
        names = set()
        for f in dataclasses.fields(cls):
            names.add(f.name)
        batch = cls(**read_batch_file(path, names))
        for per, name in OFFSETS.items():
            # Here, not in each batch: on a GPU reading offsets would wait for the device.
            for values in list(batch.columns(per).values())[:1]:
                cu = getattr(batch, name)
                num_rows = batch.num_rows
                check_offsets("StepBatch.load", name, cu, total=len(values), num_rows=num_rows)
        return batch

    def with_(self, **changes: Any) -> StepBatch:
        """Return a copy with changed fields, e.g. `batch.with_(advantages=advantages(batch))`."""
        return dataclasses.replace(self, **changes)

    def to(self, device: torch.device | str) -> StepBatch:
        """Return the batch on a device; copies to a GPU are asynchronous."""
        target = torch.device(device)
        values = {}
        for f in dataclasses.fields(self):
            values[f.name] = getattr(self, f.name)
        moved: dict[str, Any] = {}
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                moved[name] = _backend.to_device(value, target)
        return dataclasses.replace(self, **moved)

    def rows(self, index: slice | Sequence[int] | np.ndarray | torch.Tensor) -> StepBatch:
        """Return these rows, in this order; groups and trajectories are numbered from 0.

        A slice of step 1 shares memory; other indices need a batch on the CPU. Compute whatever
        depends on complete trajectories or groups (advantages) before.

        Args:
            index: a slice, row numbers, or (N,) bool.
        """
        if isinstance(index, slice):
            start, stop, step = index.indices(self.num_rows)
            if step == 1:
                return self._row_range(start, max(start, stop))
            index = range(start, stop, step)
        return self._row_choice(row_numbers(index, self.num_rows))

    def _row_range(self, start: int, stop: int) -> StepBatch:
        changes: dict[str, Any] = {}
        for name, values in self.columns("row").items():
            changes[name] = values[start:stop]
        for per, name_of_offsets in OFFSETS.items():
            cu = getattr(self, name_of_offsets)
            if cu is None:
                continue
            first = int(cu[start])
            last = int(cu[stop])
            for name, values in self.columns(per).items():
                changes[name] = values[first:last]
            of_range = cu[start : stop + 1]
            changes[name_of_offsets] = of_range - first
        if self.stop_reasons is not None:
            changes["stop_reasons"] = self.stop_reasons[start:stop]
        return self._renumber(changes)

    def _row_choice(self, rows: torch.Tensor) -> StepBatch:
        changes: dict[str, Any] = {}
        for n, v in self.columns("row").items():
            changes[n] = v[rows]
        for per, name_of_offsets in OFFSETS.items():
            cu = getattr(self, name_of_offsets)
            if cu is None:
                continue
            starts = cu[rows].tolist()
            ends = cu[rows + 1].tolist()
            for name, values in self.columns(per).items():
                # Slicing NumPy takes a tenth of the time of slicing torch, and each row is a slice.
                array = values.numpy()
                pieces = []
                for a, b in zip(starts, ends, strict=True):
                    pieces.append(array[a:b])
                if pieces:
                    changes[name] = torch.from_numpy(np.concatenate(pieces))
                else:
                    changes[name] = values[:0]
            lengths = cu[rows + 1] - cu[rows]
            sums = lengths.cumsum(0).to(cu.dtype)
            changes[name_of_offsets] = torch.cat([cu[:1], sums])
        if self.stop_reasons is not None:
            reasons = [self.stop_reasons[row] for row in rows.tolist()]
            changes["stop_reasons"] = tuple(reasons)
        return self._renumber(changes)

    def _renumber(self, changes: dict[str, Any]) -> StepBatch:
        """Return the batch with these changes, and groups and trajectories renumbered from 0."""
        groups, group_ids = torch.unique(changes["group_ids"], return_inverse=True)
        _, trajectory_ids = torch.unique(changes["trajectory_ids"], return_inverse=True)
        changes["group_ids"] = group_ids.to(torch.int32)
        changes["trajectory_ids"] = trajectory_ids.to(torch.int32)
        uids = [self.uids[group] for group in groups.tolist()]
        changes["uids"] = tuple(uids)
        return self.with_(**changes)

    def mini_batches(self, mini_batch_size: int) -> list[StepBatch]:
        """Return consecutive mini-batches of `mini_batch_size` prompts each.

        Raises:
            ValueError: rows of a prompt are not adjacent, or the size does not divide the prompts.
        """
        boundaries = mini_batch_boundaries(self.group_ids, mini_batch_size)
        if boundaries == [(0, self.num_rows)]:
            return [self]
        return [self.rows(slice(*rows)) for rows in boundaries]


# Columns that a batch may lack.
_MAY_BE_NONE = {field.name for field in dataclasses.fields(StepBatch) if field.default is None}
OPTIONAL = _MAY_BE_NONE & COLUMNS.keys()


def row_numbers(index: Sequence[int] | np.ndarray | torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return the row numbers of an index of `StepBatch.rows`: numbers, or (N,) bool."""
    rows = torch.as_tensor(index, device="cpu")
    if rows.dtype == torch.bool:
        if rows.shape != (num_rows,):
            raise ValueError(
                f"StepBatch.rows: a bool index: expected shape ({num_rows},), "
                f"got {tuple(rows.shape)}"
            )
        return rows.nonzero()[:, 0]
    rows = rows.to(torch.int64).reshape(-1)
    if not rows.numel():
        return rows
    first = int(rows.min())
    last = int(rows.max())
    if first < 0 or last >= num_rows:
        raise ValueError(
            f"StepBatch.rows: row numbers: expected 0 to {num_rows - 1}, got {first} to {last}"
        )
    return rows
