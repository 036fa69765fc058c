"""Samplers and their calls, and models by name for the chat APIs."""

from __future__ import annotations

import asyncio

from skyrl_fast.gateway.messages import ApiError
from skyrl_fast.tinker.checkpoints import TinkerPath
from skyrl_fast.tinker.futures import SAMPLING, CallAnswer, CallFuture
from skyrl_fast.tinker.sampling import (
    SampleCall,
    Snapshot,
    SnapshotSampler,
    read_sample_call,
)
from skyrl_fast.tinker.sessions import SamplingSession
from skyrl_fast.tinker.shared import Json, SharedState, digest_of
from skyrl_fast.tinker.snapshots import is_ephemeral
from skyrl_fast.tinker.values import whole_number
from skyrl_fast.tinker.wire import RefusedCallError, Samples, write_samples


def sampler_number(body: Json) -> int:
    """Return the number that a client gave a sampler."""
    return int(body.get("sampling_session_seq_id") or 0)


class SamplingCalls:
    """What the server does for samplers; each of their calls is a task."""

    def __init__(self, shared: SharedState, sampler: SnapshotSampler) -> None:
        self._shared = shared
        self._sampler = sampler
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def cancel_all(self) -> None:
        for task in list(self._tasks.values()):
            task.cancel()

    def create_sampling_session(self, body: Json) -> Json:
        sessions = self._shared.sessions
        session = sessions.find(body.get("session_id"))
        number = sampler_number(body)
        path = body.get("model_path")
        if path is None:
            base_model = str(body.get("base_model"))
            self._shared.base.check_served(base_model)
            sampler = sessions.open_sampler(session.name, number, base_model)
        else:
            parsed = TinkerPath.parse(str(path))
            saved = self._shared.store.find(parsed)
            sampler = sessions.open_sampler(session.name, number, saved.base_model)
            sampler.path = parsed
            sampler.saved_at = saved.time
            sampler.snapshot = self._shared.snapshots.get(parsed, saved)
        return {"type": "create_sampling_session", "sampling_session_id": sampler.name}

    def sample(self, body: Json) -> CallFuture:
        sampler = self._sampler_of(body)
        seq_id = body.get("seq_id")
        digest = digest_of(body)
        if seq_id is not None:
            seq_id = whole_number("seq_id", seq_id, 0, None)
            known = sampler.accepted.find(seq_id, digest)
            if known is not None:
                return known
        future = self._shared.futures.new(SAMPLING, digest)
        count = body.get("num_samples", 1)
        ids = [f"{future.request_id}-{n}" for n in range(count if isinstance(count, int) else 1)]
        future.extra["sample_sequence_ids"] = ids
        if seq_id is not None:
            sampler.accepted.add(seq_id, future)
        task = asyncio.create_task(self._answer_sample(sampler, body, future))
        self._tasks[future.request_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(future.request_id, None))
        return future

    def _sampler_of(self, body: Json) -> SamplingSession:
        if body.get("sampling_session_id") is not None:
            return self._shared.sessions.sampler(body["sampling_session_id"])
        sampler = SamplingSession("", "", self._shared.base.names[0])
        if body.get("model_path") is None:
            self._shared.base.check_served(str(body.get("base_model")))
            return sampler
        sampler.path = TinkerPath.parse(str(body["model_path"]))
        saved = self._shared.store.find(sampler.path)
        sampler.saved_at = saved.time
        sampler.snapshot = self._shared.snapshots.get(sampler.path, saved)
        return sampler

    async def _answer_sample(
        self, sampler: SamplingSession, body: Json, future: CallFuture
    ) -> None:
        try:
            call = read_sample_call(
                body,
                vocab_size=self._shared.trainer.vocab_size,
                max_length=self._shared.base.max_length,
            )
            self._check_saved(sampler)
            snapshot = sampler.current_snapshot()
            samples = await self.sample_from(call, snapshot, sampler.name)
            answer = CallAnswer.of_message(write_samples(samples))
        except asyncio.CancelledError:
            error = RefusedCallError("the sample was cancelled, or its session has ended")
            self._shared.futures.finish(future, CallAnswer.of_failure(error))
            raise
        except Exception as error:
            answer = CallAnswer.of_failure(error)
        self._shared.futures.finish(future, answer)

    async def sample_from(
        self, call: SampleCall, snapshot: Snapshot | None, client: str = ""
    ) -> Samples:
        """Return answers of the base model or of a snapshot.

        Args:
            client: calls of equal names share cached keys and values.
        """
        weights = "base" if snapshot is None else snapshot.name
        return await self._sampler.sample(call, snapshot, f"{weights}-{client}")

    def find_snapshot(self, name: str) -> Snapshot | None:
        """Return the snapshot of a `tinker://` path; None for a name of the base model.

        Raises:
            ApiError: there is none, with status 404.
        """
        if name in (*self._shared.base.names, self._shared.base.tokenizer):
            return None
        try:
            return self._shared.snapshots.open(TinkerPath.parse(name))
        except RefusedCallError as error:
            names = ", ".join(self._shared.base.names)
            raise ApiError(
                404,
                f"The model `{name:.200}` does not exist here; known: {names}, and what clients "
                f"have saved, as GET /v1/models lists it. {error}",
                code="model_not_found",
            ) from None

    def model_names(self) -> list[str]:
        """Return the names of the base model, and the paths of what clients have saved."""
        saved = [path for path, _ in self._shared.store.list() if not is_ephemeral(path)]
        return [*self._shared.base.names, *map(str, saved)]

    def _check_saved(self, sampler: SamplingSession) -> None:
        """Raise RefusedCallError if a sampler's checkpoint was deleted or replaced."""
        if sampler.path is None or is_ephemeral(sampler.path):
            return
        if self._shared.store.read(sampler.path).time != sampler.saved_at:
            raise RefusedCallError(
                f"{sampler.path} was saved again since this sampling client was created: create "
                "another one"
            )

    def cancel(self, request_id: str) -> None:
        if (task := self._tasks.get(request_id)) is not None:
            task.cancel()

    def get_sampler(self, name: str) -> Json:
        sampler = self._shared.sessions.sampler(name)
        path = None if sampler.path is None else str(sampler.path)
        return {"sampler_id": name, "base_model": sampler.base_model, "model_path": path}

    def forget(self, sampler: SamplingSession) -> None:
        """Cancel the calls of a sampler, and delete a snapshot that has no name."""
        for future in sampler.accepted:
            self.cancel(future.request_id)
        if sampler.path is not None and is_ephemeral(sampler.path):
            self._shared.store.delete(sampler.path)
        self._shared.snapshots.forget_ephemeral(sampler.snapshot)
