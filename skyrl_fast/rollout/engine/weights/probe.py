"""The probe: an engine's log-probabilities of a few sequences, compared with the trainer's.

Receipts say what the engine's loader took; the probe shows that the kernels compute with it. How
far rounding may move log-probabilities of the same weights stands in `LIMITS`.

Design: docs/design/007-rollout-and-weight-sync.md.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from skyrl_fast.rollout.engine.weights.receipt import WeightSyncError, dtype_name
from skyrl_fast.system.torch_threads import end_torch_threads

if TYPE_CHECKING:
    from skyrl_fast.rollout.engine.protocol import Engine

QUANTILE = 0.9
OTHER_MODEL = "this vLLM computes another model of this type than transformers does"
CANNOT_RELOAD = (
    "this model type's weights cannot be reloaded in this vLLM (its kernel keeps its own copy): "
    "take weight_sync_backend=file if it is reload, else restart the engine from a saved checkpoint"
)
CAUSES = (
    "the engine and the trainer compute in different dtypes: set the same dtype or a tolerance",
    "the trainer's logprob callback uses another temperature, position ids or attention mask",
    "dropout is on: put the policy into eval mode in the callback",
)
DIVERGED_LOGPROB = -1_000.0  # nats; the tails of trained models end at about -100
DIVERGED = (
    "Training has diverged: no usable model has log-probabilities beyond -1,000 nats. Lower "
    "trainer.policy.optimizer_config.lr, and continue from a checkpoint before the divergence"
)
# A change of the trainer's logprobs by this share of the limits is no accident: the engine's, which
# are the same in every bit for the same weights, must change, too.
STALE_SHARE = 0.02
MIN_LOGIT_STD = 0.01  # the log-softmax rounds even if all logits are equal


@dataclass(frozen=True, slots=True)
class ProbeDifference:
    """Distances between two lists of log-probabilities of the same tokens.

    Args:
        maximum, mean, quantile: statistics of the tokens; the quantile is that of 90 %.
        logit_std: standard deviation of a token's logits, their unit.
    """

    maximum: float
    mean: float
    quantile: float
    logit_std: float

    @classmethod
    def of(cls, distances: Sequence[float] | np.ndarray, logit_std: float) -> ProbeDifference:
        """Return the statistics of these distances, of which there is at least one."""
        ascending = np.sort(distances)
        at = math.ceil(QUANTILE * (len(ascending) - 1))  # interpolation has no answer for inf
        return cls(float(ascending[-1]), float(ascending.mean()), float(ascending[at]), logit_std)


@dataclass(frozen=True, slots=True)
class ProbeLimits:
    """The largest differences that rounding explains; None: any.

    Args:
        mean, quantile: limits of all tokens, as a share of the logits' standard deviation.
    """

    maximum: float | None = None
    mean: float | None = None
    quantile: float | None = None

    def allow(self, difference: ProbeDifference, *, share: float = 1.0) -> bool:
        """Return whether the difference is at most this share of the limits; NaN is not."""
        return all(got <= share * limit for _, got, limit in self._compare(difference))

    def describe(self, difference: ProbeDifference) -> str:
        return ", ".join(
            f"{name} {got:.3g}, allowed {limit:.3g}"
            for name, got, limit in self._compare(difference)
        )

    def _compare(self, difference: ProbeDifference) -> list[tuple[str, float, float]]:
        unit = max(difference.logit_std, MIN_LOGIT_STD)
        rows = [
            ("maximum", difference.maximum, self.maximum, 1.0),
            ("mean", difference.mean, self.mean, unit),
            ("90 % quantile", difference.quantile, self.quantile, unit),
        ]
        result: list[tuple[str, float, float]] = []
        for name, got, limit, scale in rows:
            if limit is not None:
                result.append((name, got, limit * scale))
        return result


# In float32 the engine is 1e-6 to 1e-5 away from the trainer, whatever the model. With 8 or 11 bits
# of mantissa the error grows with logits and depth, and its maximum with the vocabulary's tail;
# its mean stays below 0.03 standard deviations of the logits (docs/design/007).
_HALF = ProbeLimits(mean=0.05, quantile=0.1)
LIMITS = {torch.float32: ProbeLimits(maximum=1e-3), torch.bfloat16: _HALF, torch.float16: _HALF}


@dataclass(frozen=True, slots=True)
class WeightSyncReport:
    """Times and results of one verified update.

    Args:
        update_seconds: time to pass and load the weights.
        verify_seconds: time of the logprobs of the probe on both sides.
        difference: |engine - trainer| over the probe's tokens.
        max_change: largest change of an engine logprob by this update.
        num_bytes: bytes of the weights that the engine read.
    """

    update_seconds: float
    verify_seconds: float
    difference: ProbeDifference
    max_change: float
    num_bytes: int = 0


# For each probe sequence: logprobs of all tokens but the first, and the logits' standard deviation.
Logprobs = Sequence[tuple[Sequence[float], float]]


class WeightProbe:
    """Compare an engine's logprobs with the trainer's.

    It keeps the engine's logprobs of the last time, so that an engine that ignores updates is
    detected even if one update is smaller than rounding.

    Args:
        probe: token sequences of two or more tokens; a few, of tens of tokens, are enough.
        trainer_logprobs: maps the probe to, for each sequence, len - 1 logprobs, of each token
            but the first given those before, at temperature 1, and the standard deviation of
            the logits that they come from.
        replayed_logprobs: the same with the engine's routes of the probe, for a mixture of
            experts; used instead of `trainer_logprobs`. Rounding moves a token near a tie to
            other experts, which is no sign of different weights.
        dtype: the dtype in which the engine is to compute.
        limits: limits of |engine - trainer|; None: those of the dtype.
        policy: name of the policy, or `REFERENCE`; None: the run has one policy.

    Raises:
        ValueError: the probe is empty, or a sequence has fewer than two tokens.

    Example:
        probe = WeightProbe(engine, probe=[[1, 2, 3, 4]], trainer_logprobs=policy_logprobs)
        await probe.verify()                      # the engine loaded what the trainer has
        await engine.load_weights(call)
        report = await probe.verify()
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
        policy: str | None = None,
    ) -> None:
        self.engine = engine
        self.sequences = [[int(token) for token in sequence] for sequence in probe]
        lengths = [len(sequence) for sequence in self.sequences]
        if not lengths or min(lengths) < 2:
            raise ValueError(
                f"WeightProbe: probe: expected sequences of at least 2 tokens, got {lengths} tokens"
            )
        self._trainer_logprobs = trainer_logprobs
        self._replayed_logprobs = replayed_logprobs
        self.dtype = dtype
        self._policy = policy
        # Samples of the engine's requests.
        self._options: dict[str, Any] = {} if policy is None else {"policy": policy}
        if limits is None:
            self.limits = LIMITS[dtype]
        else:
            self.limits = limits
        # Logprobs of all tokens of the probe; None: not verified yet.
        self._engine_before: np.ndarray | None = None
        self._trainer_before: np.ndarray | None = None

    async def ask_trainer(self) -> Logprobs | None:
        """Return the trainer's logprobs, computed in a thread while the engine loads the weights.

        None where they need the engine's routes.
        """
        if self._replayed_logprobs is not None:
            return None
        return await asyncio.to_thread(self._compute_trainer_logprobs)

    async def verify(
        self,
        trainer_logprobs: Logprobs | None = None,
        *,
        update_seconds: float = 0.0,
        num_bytes: int = 0,
    ) -> WeightSyncReport:
        """Compare logprobs now, those of the trainer from `ask_trainer` if it was asked.

        Raises:
            WeightSyncError: they differ, or did not change; the message names the largest
                difference and likely causes.
        """
        started = time.perf_counter()
        self._refuse_other_dtype()
        engine_rows, answers = await self._ask_both(trainer_logprobs)
        engine = self._concatenate("engine", engine_rows)
        trainer = self._concatenate("trainer_logprobs", [values for values, _ in answers])
        logit_std = sum(float(std) for _, std in answers) / len(self.sequences)
        distances = _measure_distances(engine, trainer)
        difference = ProbeDifference.of(distances, logit_std)
        before = self._engine_before
        if before is None:
            change = 0.0
        else:
            change = float(_measure_distances(engine, before).max())
        seconds = time.perf_counter() - started
        report = WeightSyncReport(update_seconds, seconds, difference, change, num_bytes)
        if not self.limits.allow(difference):
            worst = int(distances.argmax())
            raise WeightSyncError(self._describe_mismatch(engine, trainer, worst, report))
        self._refuse_standstill(trainer, report)
        if before is None or change > 0.0:  # else the trainer's changes add up until they count
            self._engine_before = engine
            self._trainer_before = trainer
        return report

    def _compute_trainer_logprobs(self) -> Logprobs:
        try:
            return self._trainer_logprobs(self.sequences)
        finally:
            end_torch_threads()

    async def _ask_both(self, trainer: Logprobs | None) -> tuple[list[list[float]], Logprobs]:
        if self._replayed_logprobs is None:
            ask = partial(self.engine.prompt_logprobs, **self._options)
            engine = await asyncio.gather(*map(ask, self.sequences))
            return engine, self._trainer_logprobs(self.sequences) if trainer is None else trainer
        ask_routes = partial(self.engine.prompt_routes, **self._options)
        answers = await asyncio.gather(*map(ask_routes, self.sequences))
        routes = [routes for _, routes in answers]
        return [values for values, _ in answers], self._replayed_logprobs(self.sequences, routes)

    def _concatenate(self, source: str, logprobs: Sequence[Sequence[float]]) -> np.ndarray:
        expected = [len(sequence) - 1 for sequence in self.sequences]
        got = [len(values) for values in logprobs]
        if expected != got:
            raise ValueError(
                f"WeightProbe: {source}: expected {expected} values per probe sequence, got {got}"
            )
        return np.concatenate([np.asarray(values, np.float64) for values in logprobs])

    def _refuse_other_dtype(self) -> None:
        got = self.engine.compute_dtype
        if got is not None and got != self.dtype:
            raise WeightSyncError(
                f"the engine computes in {dtype_name(got)}, expected {dtype_name(self.dtype)}: "
                "start it with that dtype, or set generator.inference_engine.model_dtype"
            )

    def _describe_mismatch(
        self, engine: np.ndarray, trainer: np.ndarray, worst: int, report: WeightSyncReport
    ) -> str:
        tokens = [
            (number, position, sequence[position])
            for number, sequence in enumerate(self.sequences)
            for position in range(1, len(sequence))
        ]
        sequence, position, token = tokens[worst]
        if self._policy is None:
            of_policy = ""
        else:
            of_policy = f" of policy {self._policy}"
        at_start = self._engine_before is None and not report.update_seconds
        text = (
            f"{'before any update ' * at_start}"
            f"the engine's logprobs{of_policy} differ from the trainer's by up to "
            f"{report.difference.maximum:.3g} ({self.limits.describe(report.difference)}). Worst "
            f"at token {position} of probe sequence {sequence} (id {token}): engine "
            f"{engine[worst]:.6f}, trainer {trainer[worst]:.6f}. "
        )
        if at_start:
            return f"{text}Likely causes: {'; '.join((OTHER_MODEL, *CAUSES))}"
        if not trainer.min() >= DIVERGED_LOGPROB:  # NaN is no number of a model either
            return text + DIVERGED
        return text + _describe_causes(stands_still=report.max_change == 0.0)

    def _refuse_standstill(self, trainer: np.ndarray, report: WeightSyncReport) -> None:
        if self._trainer_before is None or report.max_change > 0.0:
            return
        distances = _measure_distances(trainer, self._trainer_before)
        moved = ProbeDifference.of(distances, report.difference.logit_std)
        if not self.limits.allow(moved, share=STALE_SHARE):
            raise WeightSyncError(
                "the engine's logprobs did not change in an update that changed the "
                f"trainer's by up to {moved.maximum:.3g}: the engine still runs the old weights. "
                + _describe_causes(stands_still=True)
            )


class PolicyProbes:
    """The probes of one engine's policies, one after the other; the worst report counts."""

    def __init__(self, probes: Sequence[WeightProbe]) -> None:
        self._probes = probes

    async def ask_trainer(self) -> list[Logprobs | None]:
        return [await probe.ask_trainer() for probe in self._probes]

    async def verify(
        self,
        trainer_logprobs: Sequence[Logprobs | None] | None = None,
        *,
        update_seconds: float = 0.0,
        num_bytes: int = 0,
    ) -> WeightSyncReport:
        known = trainer_logprobs or [None] * len(self._probes)
        reports = [
            await probe.verify(values, update_seconds=update_seconds, num_bytes=num_bytes)
            for probe, values in zip(self._probes, known, strict=True)
        ]
        seconds = sum(report.verify_seconds for report in reports)
        worst = max(reports, key=lambda report: report.difference.maximum)
        return replace(worst, verify_seconds=seconds)


Probe = WeightProbe | PolicyProbes


def _describe_causes(*, stands_still: bool) -> str:
    """Return causes, the likeliest first: unchanged logprobs mean that no weights were loaded."""
    causes = "the state dict lacks parameters, or its names differ from the checkpoint's", *CAUSES
    if stands_still:
        return "Likely causes: " + "; ".join((CANNOT_RELOAD, *causes))
    return "The engine's logprobs did change. Likely causes: " + "; ".join((*causes, CANNOT_RELOAD))


def _measure_distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return |a - b|; infinite where either is NaN, 0 where both are the same infinity."""
    with np.errstate(invalid="ignore"):  # inf - inf
        distances = np.abs(a - b)
    return np.where(a == b, 0.0, np.where(np.isnan(distances), math.inf, distances))
