"""Datums as rows of a batch, which share their common prefixes in a forward pass.

A datum of N input tokens has N hidden states, and at each a target, or K of them. Its row is the
input and one more token, all but the first of which are "response": so the row's response tokens
are the datum's positions, in any layout of the rows. Which token a position predicts is the
target's to say: `with_targets` replaces the row's own next tokens.

A target positions of a request, M of a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from skyrl_fast.batch import StepBatch
from skyrl_fast.batch.columns import offsets
from skyrl_fast.tinker.wire import Datum, RefusedCallError
from skyrl_fast.train.model.forward_pass import MicroBatch

INTEGERS = "iu"  # kinds of numpy's dtypes
MAX_TARGETS = 1024  # per position; an answer has as many log-probabilities


def check_datums(datums: Sequence[Datum], *, vocab_size: int, max_length: int) -> None:
    """Raise RefusedCallError, which names the datum, unless all can be computed.

    Args:
        max_length: the most input tokens of a datum.
    """
    if not datums:
        raise RefusedCallError("data: expected at least one datum, got none")
    for place, datum in enumerate(datums):
        where = f"data[{place}]"
        length = len(datum.tokens)
        if not 1 <= length <= max_length:
            raise RefusedCallError(
                f"{where}.model_input: expected 1 to {max_length} tokens, got {length}"
            )
        _check_ids(datum.tokens, vocab_size, f"{where}.model_input")
        targets = datum.inputs.get("target_tokens")
        if targets is None:
            raise RefusedCallError(f"{where}: expected target_tokens, got none")
        if targets.dtype.kind not in INTEGERS:
            raise RefusedCallError(f"{where}.target_tokens: expected integers, got {targets.dtype}")
        is_matrix = targets.ndim == 2 and 1 <= targets.shape[1] <= MAX_TARGETS
        if targets.shape[:1] != (length,) or not (targets.ndim == 1 or is_matrix):
            raise RefusedCallError(
                f"{where}.target_tokens: expected shape ({length},) or ({length}, K) with K from 1 "
                f"to {MAX_TARGETS}, as the model input has {length} tokens, got {targets.shape}"
            )
        _check_ids(targets, vocab_size, f"{where}.target_tokens")


def _check_ids(ids: np.ndarray, vocab_size: int, where: str) -> None:
    outside = (ids < 0) | (ids >= vocab_size)
    if outside.any():
        raise RefusedCallError(
            f"{where}: expected token ids from 0 to {vocab_size - 1}, got {ids[outside][0]}"
        )


def batch_of_datums(datums: Sequence[Datum]) -> StepBatch:
    """Return a batch with a row for each datum, all in one group: one prefix tree."""
    lengths = torch.tensor([len(datum.tokens) for datum in datums])
    tokens = np.concatenate([_row(datum) for datum in datums])
    num_rows = len(datums)
    num_targets = int(lengths.sum())
    zeros = torch.zeros(num_rows, dtype=torch.int32)
    return StepBatch(
        tokens=torch.from_numpy(tokens),
        cu_seqlens=offsets(lengths + 1),
        cu_responses=offsets(lengths),
        loss_mask=torch.ones(num_targets, dtype=torch.uint8),
        rewards=torch.zeros(num_targets),
        row_rewards=torch.zeros(num_rows),
        group_ids=zeros,
        trajectory_ids=torch.arange(num_rows, dtype=torch.int32),
        is_last_step=torch.ones(num_rows, dtype=torch.bool),
        policy_version=zeros,
        uids=("request",),
    )


def _row(datum: Datum) -> np.ndarray:
    # The last token is never run: it is only there for the last position to predict something.
    return np.append(datum.tokens, datum.tokens[-1]).astype(np.int32)


def with_targets(micro: MicroBatch, targets: torch.Tensor, vocab_size: int) -> MicroBatch:
    """Return the pass with other targets: each pair of hidden state and target once.

    Args:
        targets: (M,) int64.
    """
    copies = micro.copies
    if copies is None:
        copies = torch.arange(len(targets))
    pairs = copies * vocab_size + targets
    distinct, places = torch.unique(pairs, return_inverse=True)
    return replace(
        micro,
        hidden_index=micro.hidden_index[distinct // vocab_size],
        target_ids=distinct % vocab_size,
        copies=places,
    )
