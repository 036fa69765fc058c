"""The datums of each optimizer step, in the trajectory store that `skyrl-fast view` shows.

    RUNS/<training run>/trajectories/step_000001.jsonl

A datum is a trajectory of one step: its tokens up to the first target with a weight or an advantage
are the prompt, the targets from there on the response. Datums of one prompt are a group. Rewards
are not known here, where only advantages arrive. Of a run, the newest steps are kept.

Design: docs/design/015-trajectory-store-and-viewer.md.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from skyrl_fast.batch import batch_from_trajectories
from skyrl_fast.rollout.stop_reason import STOP
from skyrl_fast.rollout.tokenization import decode
from skyrl_fast.rollout.trajectory import Step, Trajectory
from skyrl_fast.tinker.wire import Datum, ForwardBackward, LossOutputs
from skyrl_fast.train.model.loading import load_tokenizer
from skyrl_fast.trajectory_store.reader import FOLDER
from skyrl_fast.trajectory_store.trained import TrainedRows
from skyrl_fast.trajectory_store.writer import StoreError, TrajectoryWriter

log = logging.getLogger(__name__)

SIGNALS = ("advantages", "weights")  # inputs that say how much a target counts
NAME_LENGTH = 8  # hexadecimal digits of a prompt's name
MAX_RUN_BYTES = 1 << 30  # of a run's record


@dataclass(frozen=True, slots=True)
class RecordedDatum:
    """A datum as it was trained; N positions.

    Args:
        logprobs: (N,) float32, the model's at the targets.
    """

    datum: Datum
    loss: str
    logprobs: np.ndarray

    def signal(self) -> np.ndarray:
        """Return (N,) float32, the advantage or weight of each position; 1 where it has neither."""
        for name in SIGNALS:
            if name in self.datum.inputs:
                return _first_column(self.datum.inputs[name]).astype(np.float32)
        return np.ones(len(self.datum.tokens), np.float32)

    def num_bytes(self) -> int:
        """Return the size of its arrays."""
        arrays = [self.datum.tokens, self.logprobs, *self.datum.inputs.values()]
        return sum(array.nbytes for array in arrays)


@dataclass(slots=True)
class _Pending:
    """The datums since the last step, the newest ones that fit."""

    max_bytes: int
    datums: deque[RecordedDatum] = field(default_factory=deque)
    num_bytes: int = 0

    def add(self, one: RecordedDatum) -> None:
        self.datums.append(one)
        self.num_bytes += one.num_bytes()
        while self.num_bytes > self.max_bytes and len(self.datums) > 1:
            self.num_bytes -= self.datums.popleft().num_bytes()


class DatumRecorder:
    """Writes the store of each training run, in a thread of its own.

    Args:
        runs: folder of all training runs.
        tokenizer: folder or hub name.
        max_bytes: of a run's record, and of the datums that wait for a step.
    """

    def __init__(self, runs: Path, tokenizer: str, *, max_bytes: int = MAX_RUN_BYTES) -> None:
        self._runs = runs
        self._tokenizer_name = tokenizer
        self._max_bytes = max_bytes
        self._pending: dict[str, _Pending] = {}
        self._writers: dict[str, TrajectoryWriter] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tinker-record")
        self._has_failed = False

    @cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(self._tokenizer_name)

    def add(self, run: str, call: ForwardBackward, outputs: LossOutputs) -> None:
        """Remember the datums of a call until the next optimizer step."""
        if call.forward_only:
            return
        pending = self._pending.setdefault(run, _Pending(self._max_bytes))
        for datum, logprobs in zip(call.datums, outputs.logprobs, strict=True):
            pending.add(RecordedDatum(datum, call.loss, _first_column(logprobs)))

    def step(self, run: str, number: int) -> None:
        """Write what was trained since the last step, as this step, from 1."""
        pending = self._pending.pop(run, None)
        if pending is not None:
            self._thread.submit(partial(self._write, run, number, list(pending.datums)))

    def forget(self, run: str) -> None:
        """Drop what no step has trained, of a model that is unloaded."""
        self._pending.pop(run, None)
        self._thread.submit(partial(self._writers.pop, run, None))

    def close(self) -> None:
        """Return when everything is on the disk."""
        self._thread.shutdown()

    def _write(self, run: str, number: int, pending: Sequence[RecordedDatum]) -> None:
        try:
            if run not in self._writers:
                folder = self._runs / run / FOLDER
                self._writers[run] = TrajectoryWriter(
                    folder, self._tokenizer, last_step=number - 1, max_bytes=self._max_bytes
                )
            trajectories, rows = _as_trained(pending, number, self._tokenizer)
            self._writers[run].write(number, "train", trajectories, trained=[rows])
        except (OSError, StoreError, ValueError) as error:
            # Training is worth more than its record.
            if not self._has_failed:
                log.warning("datums of %s are not recorded: %s", run, error)
            self._has_failed = True


def _as_trained(
    pending: Sequence[RecordedDatum], number: int, tokenizer: Any
) -> tuple[list[Trajectory], TrainedRows]:
    """Return trajectories of one step each, those of one prompt next to each other, and rows."""
    with_places = [(one, _first_trained(one.signal())) for one in pending]
    named = [(_name(one.datum.tokens[: first + 1]), one, first) for one, first in with_places]
    named.sort(key=lambda item: item[0])
    has_logprobs = all("logprobs" in one.datum.inputs for one in pending)
    counts: Counter[str] = Counter()
    trajectories = []
    for name, one, first in named:
        step = _step(one, first, number, tokenizer, has_logprobs=has_logprobs)
        trajectory = Trajectory(name, counts[name], [step], env_class=one.loss)
        trajectories.append(trajectory)
        counts[name] += 1
    advantages = np.concatenate([one.signal()[first:] for _, one, first in named])
    logprobs = np.concatenate([one.logprobs[first:] for _, one, first in named])
    batch = batch_from_trajectories(trajectories)
    batch = batch.with_(advantages=torch.from_numpy(advantages))
    return trajectories, TrainedRows(trajectories, batch, torch.from_numpy(logprobs))


def _step(
    one: RecordedDatum, first: int, number: int, tokenizer: Any, *, has_logprobs: bool
) -> Step:
    inputs = one.datum.inputs
    response = _first_column(inputs["target_tokens"])[first:].tolist()
    sampled = inputs["logprobs"][first:].tolist() if has_logprobs else None
    return Step(
        prompt_token_ids=one.datum.tokens[: first + 1].tolist(),
        response_ids=response,
        loss_mask=_loss_mask(one.signal()[first:]),
        rollout_logprobs=sampled,
        reward=0.0,
        stop_reason=STOP,
        policy_version=number - 1,
        text=decode(tokenizer, response),
        observation="",
        llm_seconds=0.0,
        env_seconds=0.0,
    )


def _loss_mask(signal: np.ndarray) -> list[int]:
    """Return which targets count: all if each advantage is 0, as of a group of equal rewards."""
    counts = signal != 0
    if not counts.any():
        counts = np.ones_like(counts)
    return list(map(int, counts))


def _first_trained(signal: np.ndarray) -> int:
    """Return the first position that counts; 0 if none does."""
    return int(np.argmax(signal != 0))


def _first_column(values: np.ndarray) -> np.ndarray:
    """Return (N,) values of (N,) or (N, K): of several targets the first."""
    return values if values.ndim == 1 else values[:, 0]


def _name(prompt: np.ndarray) -> str:
    return hashlib.sha256(prompt.tobytes()).hexdigest()[:NAME_LENGTH]
