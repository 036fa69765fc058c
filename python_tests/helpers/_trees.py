"""Rows with common prefixes: as lists, as trees, and as batches of agents' steps."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from skyrl_fast.batch import StepBatch
from skyrl_fast.ops.prefix_tree.tree import PrefixTree, build_prefix_tree

ROWS = st.lists(st.lists(st.integers(0, 2), max_size=7), max_size=9)


def flat(rows: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    cu = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    return torch.tensor([t for row in rows for t in row], dtype=torch.int32), torch.from_numpy(cu)


def tree_of(rows: Sequence[Sequence[int]], groups: Any = None, **options: Any) -> PrefixTree:
    return build_prefix_tree(*flat(rows), groups, **options)


def size_of(rows: Sequence[Sequence[int]]) -> int:
    """Return the number of distinct prefixes."""
    return len({tuple(row[: end + 1]) for row in rows for end in range(len(row))})


def forest(seed: int, num_groups: int = 3, size: int = 40) -> PrefixTree:
    """Return the tree of rows that fork repeatedly; some are prefixes of others, some unrelated."""
    rng = np.random.default_rng(seed)
    rows, groups = [], []
    for group in range(num_groups):
        own: list[list[int]] = [[]]
        for _ in range(int(rng.integers(1, 9))):
            base = own[int(rng.integers(len(own)))]
            cut = int(rng.integers(0, len(base) + 1))
            own.append(base[:cut] + rng.integers(0, 50, int(rng.integers(1, size))).tolist())
        rows += own
        groups += [group] * len(own)
    return tree_of(rows, groups)


def agent_batch(
    seed: int,
    *,
    num_groups: int = 3,
    samples: int = 4,
    turns: int = 3,
    stripped: float = 0.5,
    vocabulary: int = 12,
) -> StepBatch:
    """Return the steps of random agents, with random advantages, masks and rollout logprobs.

    A turn's prompt is the turn before with an observation; with probability `stripped` the first
    tokens of each answer are gone from it, as thoughts are. Some trajectories are copies of others,
    some answers share a prefix, one group has a single row, and some rows are prefixes of others.
    """
    rng = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []

    def words(low: int, high: int) -> list[int]:
        return rng.integers(4, 4 + vocabulary, int(rng.integers(low, high))).tolist()

    for group in range(num_groups):
        prompt = words(1, 9)
        others: list[list[dict[str, Any]]] = []
        for sample in range(samples if group else 1):
            own: list[dict[str, Any]] = []
            if others and rng.random() < 0.2:
                own = [dict(step) for step in others[int(rng.integers(len(others)))]]
            history = prompt
            for _ in range(0 if own else int(rng.integers(1, 1 + turns)) if group else 1):
                answer = [*([5, 6] if rng.random() < 0.5 else []), *words(1, 7)]
                own.append({"prompt_token_ids": history, "response_ids": answer})
                kept = answer[1 + len(answer) // 2 :] if rng.random() < stripped else answer
                history = history + kept + words(0, 4)
            for step in own:
                step["trajectory_ids"] = (f"p{group}", sample)
            others.append(own)
            rows += own
    return batch_of_rows(rows, rng)


def batch_of_rows(rows: Sequence[dict[str, Any]], rng: np.random.Generator) -> StepBatch:
    """Return a batch of these rows; all other fields are random."""
    ids = [row["trajectory_ids"] for row in rows]
    output: dict[str, Any] = {name: [row[name] for row in rows] for name in rows[0]}
    lengths = [len(row["response_ids"]) for row in rows]
    output["loss_masks"] = [(rng.random(n) < 0.8).astype(int).tolist() for n in lengths]
    output["rollout_logprobs"] = [(-rng.random(n) * 3).tolist() for n in lengths]
    output["rewards"] = [float(rng.integers(2)) for _ in rows]
    output["is_last_step"] = [a != b for a, b in zip(ids, [*ids[1:], None], strict=True)]
    batch = StepBatch.from_generator_output(output, step_wise=True)
    values = torch.from_numpy(rng.standard_normal(batch.loss_mask.shape[0])).float()
    return batch.with_(advantages=values, old_logprobs=batch.rollout_logprobs)
