"""Updates of the running engine's weights, and the check that they took effect."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from skyrl_fast.rollout.engine.weights.digest import dtype_name
from skyrl_fast.rollout.engine.weights.probe_limits import (
    LIMITS,
    STALE_SHARE,
    ProbeDifference,
    ProbeLimits,
)
from skyrl_fast.rollout.engine.weights.receipt import WeightSyncError
from skyrl_fast.rollout.engine.weights.transfer import (
    Weights,
    WeightTransfer,
    by_file,
    handed_over,
)

if TYPE_CHECKING:
    from skyrl_fast.rollout.engine.protocol import Engine

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WeightSyncReport:
    """Times and results of one verified update.

    Args:
        update_seconds: for passing and loading the weights.
        verify_seconds: for the logprobs of the probe on both sides.
        difference: of |engine - trainer| over the probe's tokens.
        max_change: largest change of an engine logprob by this update.
        num_bytes: of the weights that the engine read.
    """

    update_seconds: float
    verify_seconds: float
    difference: ProbeDifference
    max_change: float
    num_bytes: int = 0


# Of each probe sequence: logprobs of all tokens but the first, and the logits' standard deviation.
Logprobs = Sequence[tuple[Sequence[float], float]]


class WeightSync:
    """Update an engine's weights, and compare its logprobs with the trainer's on a probe.

    It keeps the engine's logprobs of the last sync, so that an engine that ignores updates is
    detected even if one update is smaller than rounding.

    Example:
        sync = WeightSync(engine, probe=[[1, 2, 3, 4]], trainer_logprobs=policy_logprobs)
        await sync.verify()                      # the engine loaded what the trainer has
        report = await sync.update(policy.state_dict())
    """

    def __init__(
        self,
        engine: Engine,
        *,
        probe: Sequence[Sequence[int]],
        trainer_logprobs: Callable[[list[list[int]]], Logprobs],
        replayed_logprobs: Callable[[list[list[int]], list[np.ndarray]], Logprobs] | None = None,
        dtype: torch.dtype = torch.float32,
        limits: ProbeLimits | None = None,
    ) -> None:
        """Check and store the arguments.

        Args:
            engine: the running engine.
            probe: token sequences of two or more tokens; a few, of tens of tokens, are enough.
            trainer_logprobs: maps the probe to, for each sequence, len - 1 logprobs, of each token
                but the first given those before, at temperature 1, and the standard deviation of
                the logits that they come from.
            replayed_logprobs: the same with the engine's routes of the probe, for a mixture of
                experts; used instead of `trainer_logprobs`. Rounding moves a token near a tie to
                other experts, which is no sign of different weights.
            dtype: in which the engine is to compute.
            limits: of |engine - trainer|; None: those of the dtype.

        Raises:
            ValueError: the probe is empty, or a sequence has fewer than two tokens.
        """
        self._engine = engine
        self._probe = [[int(token) for token in sequence] for sequence in probe]
        if not self._probe or min(len(sequence) for sequence in self._probe) < 2:
            raise ValueError(
                "WeightSync: probe: wanted sequences of at least 2 tokens, got lengths "
                f"{[len(sequence) for sequence in self._probe]}"
            )
        self._trainer_logprobs = trainer_logprobs
        self._replayed_logprobs = replayed_logprobs
        self._dtype = dtype
        self._limits = LIMITS[dtype] if limits is None else limits
        self._engine_before: list[list[float]] | None = None
        self._trainer_before: list[list[float]] | None = None

    async def update(
        self, weights: Weights, *, transfer: WeightTransfer | None = None
    ) -> WeightSyncReport:
        """Load the weights into the engine, then `verify`.

        Args:
            weights: Hugging Face names and tensors of any device and dtype; shared (tied) tensors
                under each of their names, or once.
            transfer: hands them over; None: by a file.

        Raises:
            WeightSyncError: the engine could not load them, or its logprobs show that it did not.
        """
        started = time.perf_counter()
        dtype = self._engine.weights_dtype
        async with handed_over(transfer or by_file(), weights, dtype) as call:
            await self._engine.load_weights(call)
        seconds = time.perf_counter() - started
        return await self.verify(update_seconds=seconds, num_bytes=call.num_bytes)

    async def verify(self, *, update_seconds: float = 0.0, num_bytes: int = 0) -> WeightSyncReport:
        """Compare logprobs now; WeightSyncError names the largest difference and likely causes.

        Args:
            update_seconds, num_bytes: for the report.
        """
        started = time.perf_counter()
        self._refuse_other_dtype()
        engine, trainer_values = await self._both()
        trainer = [[float(x) for x in values] for values, _ in trainer_values]
        logit_std = sum(float(std) for _, std in trainer_values) / len(self._probe)
        _check_lengths(self._probe, trainer)
        difference = ProbeDifference.of(_distances(engine, trainer), logit_std)
        before = self._engine_before
        change = max(_distances(engine, before)) if before is not None else 0.0
        seconds = time.perf_counter() - started
        report = WeightSyncReport(update_seconds, seconds, difference, change, num_bytes)
        self._refuse_mismatch(engine, trainer, difference)
        self._refuse_standstill(trainer, report)
        if before is None or change > 0.0:  # else the trainer's changes add up until they count
            self._engine_before, self._trainer_before = engine, trainer
        return report

    async def _both(self) -> tuple[list[list[float]], Logprobs]:
        """Return the logprobs of the probe by the engine, and by the trainer."""
        if self._replayed_logprobs is None:
            engine = await asyncio.gather(*map(self._engine.prompt_logprobs, self._probe))
            return list(engine), self._trainer_logprobs(self._probe)
        answers = await asyncio.gather(*map(self._engine.prompt_routes, self._probe))
        routes = [routes for _, routes in answers]
        return [values for values, _ in answers], self._replayed_logprobs(self._probe, routes)

    def _refuse_other_dtype(self) -> None:
        got = self._engine.compute_dtype
        if got is not None and got != self._dtype:
            raise WeightSyncError(
                f"the engine computes in {dtype_name(got)}, wanted {dtype_name(self._dtype)}: "
                "start it with that dtype, or set generator.inference_engine.model_dtype"
            )

    def _refuse_mismatch(
        self,
        engine: list[list[float]],
        trainer: list[list[float]],
        difference: ProbeDifference,
    ) -> None:
        if self._limits.allow(difference):
            return
        sequence, position = max(
            ((i, t) for i, values in enumerate(engine) for t in range(len(values))),
            key=lambda at: _distance(engine[at[0]][at[1]], trainer[at[0]][at[1]]),
        )
        text = (
            f"the engine's logprobs differ from the trainer's by up to {difference.maximum:.3g} "
            f"({self._limits.describe(difference)}). Worst at token "
            f"{position + 1} of probe sequence {sequence} (id "
            f"{self._probe[sequence][position + 1]}): engine {engine[sequence][position]:.6f}, "
            f"trainer {trainer[sequence][position]:.6f}. "
        )
        raise WeightSyncError(text + _likely_causes(engine, self._engine_before))

    def _refuse_standstill(self, trainer: list[list[float]], report: WeightSyncReport) -> None:
        if self._trainer_before is None or report.max_change > 0.0:
            return
        distances = _distances(trainer, self._trainer_before)
        moved = ProbeDifference.of(distances, report.difference.logit_std)
        if not self._limits.allow(moved, share=STALE_SHARE):
            raise WeightSyncError(
                "the engine's logprobs did not change in an update that changed the "
                f"trainer's by up to {moved.maximum:.3g}: the engine still runs the old weights. "
                + _likely_causes([], None)
            )


def _likely_causes(engine: list[list[float]], before: list[list[float]] | None) -> str:
    """Return causes, the likeliest first: unchanged logprobs mean that no weights were loaded."""
    causes = [
        "this model type's weights cannot be reloaded in this vLLM (its kernel keeps its own "
        "copy): take weight_sync_backend=file if it is reload, else restart the engine from a "
        "saved checkpoint",
        "the state dict lacks parameters, or its names differ from the checkpoint's",
        "the engine and the trainer compute in different dtypes: set the same dtype or a tolerance",
        "the trainer's logprob callback uses another temperature, position ids or attention mask",
        "dropout is on: put the policy into eval mode in the callback",
    ]
    standstill = before is None or max(_distances(engine, before)) == 0.0
    if not standstill:
        causes.append(causes.pop(0))
        return "The engine's logprobs did change. Likely causes: " + "; ".join(causes)
    return "Likely causes: " + "; ".join(causes)


def _distance(a: float, b: float) -> float:
    """Return |a - b|; infinite if either is NaN, 0 if both are the same infinity."""
    if a == b:
        return 0.0
    difference = abs(a - b)
    return math.inf if math.isnan(difference) else difference


def _distances(a: list[list[float]], b: list[list[float]]) -> list[float]:
    return [
        _distance(x, y)
        for left, right in zip(a, b, strict=True)
        for x, y in zip(left, right, strict=True)
    ]


def _check_lengths(probe: list[list[int]], trainer: list[list[float]]) -> None:
    wanted = [len(sequence) - 1 for sequence in probe]
    got = [len(values) for values in trainer]
    if wanted != got:
        raise ValueError(
            f"WeightSync: trainer_logprobs: wanted {wanted} values per probe sequence, got {got}"
        )
