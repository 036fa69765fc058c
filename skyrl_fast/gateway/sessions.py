"""Sessions of the gateway alone: opened and ended over HTTP, and stored when they end.

`POST /v1/sessions` with the gateway's key returns the key of a new session; agents call with it.
`POST /v1/sessions/end` with the session's key gives the reward, and stores what was recorded.

Design: docs/design/021-gateway.md.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from skyrl_fast.gateway.agents.outcome import OutcomeError, outcome_of
from skyrl_fast.gateway.messages import ApiError, Outcome
from skyrl_fast.gateway.policy import ServedPolicy
from skyrl_fast.gateway.recording import RecordedSession, Recording
from skyrl_fast.gateway.request_body import Fields, check_fields
from skyrl_fast.gateway.server import Gateway, JsonAnswer, json_body, key_of
from skyrl_fast.gateway.session import Session
from skyrl_fast.gateway.transcript import Transcript
from skyrl_fast.rollout.activity import Activity
from skyrl_fast.rollout.stop_reason import TIMEOUT
from skyrl_fast.rollout.trajectory import Trajectory
from skyrl_fast.trajectory_store.writer import StoreError

log = logging.getLogger(__name__)

ENV_CLASS = "gateway"  # environment class of recorded trajectories


class SessionRequest(Fields):
    """A request for a session: its group (sessions of one task), and where the task is from."""

    uid: str | None = None
    data_source: str | None = None


@dataclass(eq=False, slots=True)
class _Open:
    key: str
    session: Session
    trajectory: Trajectory
    began: float
    deadline: asyncio.TimerHandle
    transcript: Transcript = field(default_factory=Transcript)


class Sessions:
    """The open sessions, and the routes by which they are opened and ended.

    Args:
        gateway: not started.
        recording: gets each session that ends with an answer.
        key: by which sessions are opened.
        seconds: after which a session is ended.
    """

    def __init__(
        self,
        gateway: Gateway,
        policy: ServedPolicy,
        recording: Recording,
        *,
        key: str,
        seconds: float,
    ) -> None:
        self._gateway = gateway
        self._policy = policy
        self._recording = recording
        self._key = key
        self._seconds = seconds
        self._open: dict[Session, _Open] = {}
        self._repetitions: Counter[str] = Counter(recording.repetitions)
        self._names = map("session-{}".format, count(1))  # names of groups without one
        self._ending: set[asyncio.Task[Any]] = set()
        gateway.routes += [
            Route("/v1/sessions", self._handle_open, methods=["POST"]),
            Route("/v1/sessions/end", self._handle_end, methods=["POST"]),
        ]
        gateway.on_answer = self._said

    @property
    def url(self) -> str:
        """Base URL, with `/v1`."""
        return f"{self._gateway.url}/v1"

    def open(self, *, uid: str | None = None, data_source: str | None = None) -> _Open:
        """Return a new session with its key, in the group `uid` or in a new one."""
        if uid is None:
            uid = next(name for name in self._names if name not in self._repetitions)
        trajectory = Trajectory(
            uid=uid,
            repetition_id=self._repetitions[uid],
            env_class=ENV_CLASS,
            data_source=data_source,
        )
        self._repetitions[uid] += 1
        entry = Activity(uid, trajectory.repetition_id)
        session = Session(self._policy, trajectory, entry, policy_version=0)
        late = asyncio.get_running_loop().call_later(self._seconds, self._expire, session)
        key = self._gateway.open(session)
        opened = _Open(key, session, trajectory, time.perf_counter(), late)
        self._open[session] = opened
        return opened

    async def end(
        self, session: Session, outcome: Outcome, *, stop_reason: str | None = None
    ) -> Trajectory:
        """End and store a session; return what was recorded. No stop reason: the last answer's.

        Raises:
            ApiError: a reward for a call that does not exist; the session stays open.
            StoreError: it cannot be written.
        """
        opened = self._open[session]
        trajectory = opened.trajectory
        if trajectory.steps:
            trajectory.stop_reason = session.finish(outcome)
            if stop_reason is not None:
                trajectory.stop_reason = stop_reason
            trajectory.steps[-1].stop_reason = trajectory.stop_reason
        del self._open[session]
        opened.deadline.cancel()
        await self._gateway.end(opened.key)
        trajectory.seconds = time.perf_counter() - opened.began
        if trajectory.steps:
            await self._recording.add(RecordedSession(trajectory, opened.transcript.records))
        return trajectory

    async def close(self) -> None:
        """End and store all open sessions; StoreError if they cannot be written."""
        await asyncio.gather(*self._ending)
        await asyncio.gather(*(self._late(session) for session in list(self._open)))
        await self._recording.flush()

    async def _late(self, session: Session) -> None:
        try:
            await self.end(session, Outcome(), stop_reason=TIMEOUT)
        except (StoreError, OSError) as error:  # it is written with the next one
            log.warning("%s", error)

    def _expire(self, session: Session) -> None:
        ending = asyncio.create_task(self._late(session))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    def _said(self, session: Session, call: Any, answer: Any) -> None:
        opened = self._open.get(session)
        if opened is not None and call.model == self._policy.model:
            opened.transcript.add(call, answer)

    # --- requests

    async def _handle_open(self, request: Request) -> Response:
        async def handle() -> Response:
            if not secrets.compare_digest(key_of(request).encode(), self._key.encode()):
                self._gateway.faults["gateway_wrong_keys"] += 1
                raise ApiError(401, "Incorrect API key provided", code="invalid_api_key")
            fields = check_fields(SessionRequest, await json_body(request) or {})
            opened = self.open(uid=fields.uid, data_source=fields.data_source)
            return JsonAnswer(
                {
                    "object": "session",
                    "api_key": opened.key,
                    "base_url": self.url,
                    "model": self._policy.model,
                    "uid": opened.trajectory.uid,
                    "repetition_id": opened.trajectory.repetition_id,
                }
            )

        return await self._gateway.answer(request, handle)

    async def _handle_end(self, request: Request) -> Response:
        async def handle() -> Response:
            session = self._gateway.session_of(request)
            try:
                outcome = outcome_of(await json_body(request))
            except OutcomeError as error:
                raise ApiError(400, str(error)) from None
            if session not in self._open:
                raise ApiError(403, "the trajectory of this key has ended")
            try:
                trajectory = await self.end(session, outcome)
            except (StoreError, OSError) as error:
                raise ApiError(500, str(error)) from error
            return JsonAnswer(
                {
                    "object": "session",
                    "uid": trajectory.uid,
                    "repetition_id": trajectory.repetition_id,
                    "calls": len(trajectory.steps),
                    "stored": bool(trajectory.steps),
                    "metrics": trajectory.env_metrics,
                }
            )

        return await self._gateway.answer(request, handle)
