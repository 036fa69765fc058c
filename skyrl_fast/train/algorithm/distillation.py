"""Distillation: a teacher's log-probabilities of the policy's rows, and the KL to it.

N rows, A response tokens, M tokens of a pass, K most likely tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from skyrl_fast.batch import StepBatch
from skyrl_fast.batch.segments import segment_sums
from skyrl_fast.rollout.teachers import Teacher, Teachers
from skyrl_fast.rollout.trajectory import Trajectory
from skyrl_fast.system.tasks import gather_or_cancel
from skyrl_fast.train.metrics.rewards import metric_name

# Of the probability that K tokens leave to the others: below it, rounding of float32 decides.
LEAST_REST = 1e-6


@dataclass(slots=True)
class _Scored:
    """A sequence that a teacher scores, and the rows that are its beginnings."""

    teacher: Teacher
    tokens: np.ndarray
    rows: list[int]


async def with_teacher_logprobs(
    batch: StepBatch,
    trajectories: Sequence[Trajectory],
    teachers: Teachers,
    *,
    top_k: int = 0,
    vocab_size: int | None = None,
) -> tuple[StepBatch, dict[str, float]]:
    """Return the batch with the teachers' log-probabilities, NaN where a row has none; metrics.

    Contexts mostly grow: of rows that begin another one of their trajectory nothing is asked.

    Args:
        batch: N rows with groups.
        trajectories: that the rows are of, by which sources are known.
        top_k: K, of most likely tokens that the teachers return.
        vocab_size: the policy's. A teacher may have more ids, which fill up its matrices: they are
            none of the K tokens. None: it has none.
    """
    scored = _sequences_to_score(batch, sources_of_rows(batch, trajectories), teachers)
    answers = await gather_or_cancel(one.teacher.score(one.tokens.tolist()) for one in scored)
    size = batch.loss_mask.shape[0]
    logprobs = torch.full((size,), torch.nan)
    ids = torch.zeros((size, top_k), dtype=torch.int32)
    top_logprobs = torch.full((size, top_k), -torch.inf)
    for one, answer in zip(scored, answers, strict=True):
        for row in one.rows:
            cells, predicted = _places(batch, row)
            logprobs[cells] = torch.from_numpy(answer.logprobs[predicted])
            ids[cells] = torch.from_numpy(answer.top_ids[predicted])
            top_logprobs[cells] = torch.from_numpy(answer.top_logprobs[predicted])
    if vocab_size is not None:
        is_unknown = ids >= vocab_size
        top_logprobs = top_logprobs.masked_fill(is_unknown, -torch.inf)
        ids = ids.masked_fill(is_unknown, 0)
    num_tokens = sum(len(one.tokens) for one in scored)
    metrics = {"distillation/teacher_tokens": float(num_tokens)}
    batch = batch.with_(teacher_logprobs=logprobs)
    if not top_k:
        return batch, metrics
    live = (batch.loss_mask != 0) & ~logprobs.isnan()
    if live.any():
        metrics["distillation/teacher_top_mass"] = float(top_logprobs[live].exp().sum(-1).mean())
    return batch.with_(teacher_ids=ids, teacher_top_logprobs=top_logprobs), metrics


def sources_of_rows(batch: StepBatch, trajectories: Sequence[Trajectory]) -> list[str | None]:
    """Return the data source of each row."""
    of_uid = {one.uid: one.data_source for one in trajectories}
    return [of_uid[uid] for uid in batch.row_uids]


def _places(batch: StepBatch, row: int) -> tuple[slice, slice]:
    """Return where a row's response is in (A,), and in the scores of a sequence it begins."""
    start = int(batch.cu_responses[row])
    end = int(batch.cu_responses[row + 1])
    length = int(batch.lengths[row])
    # Scores are of all tokens but the first.
    return slice(start, end), slice(length - (end - start) - 1, length - 1)


def _sequences_to_score(
    batch: StepBatch, sources: Sequence[str | None], teachers: Teachers
) -> list[_Scored]:
    """Return the sequences by which all rows with a trained token and a teacher are scored."""
    cu = batch.cu_responses.numpy()
    live = segment_sums(batch.loss_mask.numpy() != 0, cu, np.int64) > 0
    starts = batch.cu_seqlens.tolist()
    tokens = batch.tokens.numpy()
    found: list[_Scored] = []
    of_trajectory: dict[int, list[_Scored]] = {}
    # The longest first, so that a row comes after those that it may begin.
    for row in np.argsort(-batch.lengths.numpy(), kind="stable").tolist():
        teacher = teachers.of(sources[row])
        if not live[row] or teacher is None:
            continue
        own = tokens[starts[row] : starts[row + 1]]
        others = of_trajectory.setdefault(int(batch.trajectory_ids[row]), [])
        longer = next((one for one in others if _begins(own, one.tokens)), None)
        if longer is None:
            longer = _Scored(teacher, own, [])
            others.append(longer)
            found.append(longer)
        longer.rows.append(row)
    return found


def _begins(one: np.ndarray, other: np.ndarray) -> bool:
    return bool(np.array_equal(one, other[: len(one)]))


def sampled_kl(logprobs: torch.Tensor, of_teacher: torch.Tensor) -> torch.Tensor:
    """Return (M,) `d^2 / 2` of the difference d of policy and teacher, of the sampled tokens.

    Its gradient, `d` times that of the log-probability, is on average that of KL(policy, teacher).

    Args:
        logprobs: (M,) the policy's.
        of_teacher: (M,) the teacher's.
    """
    return (logprobs - of_teacher).square() / 2


def top_k_kl(logprobs: torch.Tensor, of_teacher: torch.Tensor, *, direction: str) -> torch.Tensor:
    """Return (M,) the KL of K + 1 categories: the teacher's K tokens, and all others together.

    It is never negative, and a lower bound of the KL over the vocabulary. Without the others, a
    policy could lower the sum by giving less probability to all K.

    Args:
        logprobs: (M, K) the policy's, of the teacher's most likely tokens.
        of_teacher: (M, K) the teacher's; -inf where it has none.
        direction: "reverse", KL(policy, teacher), or "forward", KL(teacher, policy).
    """
    is_token = of_teacher > -torch.inf
    own = logprobs.masked_fill(~is_token, 0.0)
    other = of_teacher.masked_fill(~is_token, 0.0)
    own_rest = _rest(own, is_token)
    other_rest = _rest(other, is_token)
    if direction == "reverse":
        terms = own.exp() * (own - other)
        of_rest = own_rest.exp() * (own_rest - other_rest)
    else:
        terms = other.exp() * (other - own)
        of_rest = other_rest.exp() * (other_rest - own_rest)
    return (terms * is_token).sum(-1) + of_rest


def _rest(logprobs: torch.Tensor, is_token: torch.Tensor) -> torch.Tensor:
    """Return (M,) log of the probability of all other tokens, at least log of `LEAST_REST`."""
    mass = (logprobs.exp() * is_token).sum(-1)
    return (1 - mass).clamp(min=LEAST_REST).log()


def distillation_metrics(
    batch: StepBatch, trajectories: Sequence[Trajectory], logprobs: torch.Tensor
) -> dict[str, float]:
    """Return the mean of log policy - log teacher over trained tokens, and that of each source.

    It estimates KL(policy, teacher) per token, and may be below 0 over few tokens.

    Args:
        batch: with the teachers' log-probabilities.
        logprobs: (A,) the policy's, NaN where none were computed.
    """
    assert batch.teacher_logprobs is not None
    differences = logprobs - batch.teacher_logprobs
    known = (batch.loss_mask != 0) & ~differences.isnan()
    if not known.any():
        return {}
    metrics = {"distillation/kl": float(differences[known].double().mean())}
    sources = sources_of_rows(batch, trajectories)
    rows_of_source: dict[str, list[int]] = {}
    for row, source in enumerate(sources):
        if source:
            rows_of_source.setdefault(metric_name(source), []).append(row)
    if len(rows_of_source) < 2:
        return metrics
    row_of_token = torch.repeat_interleave(batch.response_lengths.long())
    for name, rows in rows_of_source.items():
        own = known & torch.isin(row_of_token, torch.tensor(rows))
        if own.any():
            metrics[f"distillation/{name}/kl"] = float(differences[own].double().mean())
    return metrics
