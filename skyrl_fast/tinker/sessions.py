"""Sessions of clients: their models, their samplers, and when they end.

A session lives as long as its client sends heartbeats. Ended, its adapters leave the model; what it
saved stays. Names are those that the SDK expects: `{session}:train:{number}` of a model,
`{session}:sample:{number}` of a sampler.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from skyrl_fast.tinker.checkpoints import TinkerPath
from skyrl_fast.tinker.futures import AcceptedCalls, OrderedCalls
from skyrl_fast.tinker.sampling import Snapshot
from skyrl_fast.tinker.training import AdapterForm, TrainedAdapter
from skyrl_fast.tinker.wire import RefusedCallError

SESSION_SECONDS = 300.0  # without a heartbeat; clients send one every ten
OLDEST_SDK = (0, 28)
NEWEST_SDK = (0, 38)
_VERSION = re.compile(r"(\d+)\.(\d+)")


class UnknownSessionError(Exception):
    """A session that has ended, or that this server never had."""


@dataclass(slots=True)
class ServedModel:
    """A model of a training client.

    Args:
        base_model: the name that the client gave.
        adapter: None: not created yet, or that failed.
        last_request: in ISO 8601.
        inflight: the snapshot that its inflight samplers share; None: none yet.
    """

    model_id: str
    session_id: str
    base_model: str
    calls: OrderedCalls
    last_request: str
    form: AdapterForm | None = None
    adapter: TrainedAdapter | None = None
    user_metadata: dict[str, Any] = field(default_factory=dict)
    inflight: Snapshot | None = None

    def get_adapter(self) -> TrainedAdapter:
        if self.adapter is None:
            raise RefusedCallError(f"model {self.model_id} was not created; see its first call")
        return self.adapter


@dataclass(slots=True)
class SamplingSession:
    """A sampler.

    Args:
        snapshot: None: the base model, or the model's inflight snapshot.
        saved_at: of the snapshot's checkpoint, which must not be replaced by another.
        model: that of an inflight sampler.
        accepted: futures by the calls' numbers.
    """

    name: str
    session_id: str
    base_model: str
    snapshot: Snapshot | None = None
    path: TinkerPath | None = None
    saved_at: str = ""
    model: ServedModel | None = None
    accepted: AcceptedCalls = field(default_factory=AcceptedCalls)

    def current_snapshot(self) -> Snapshot | None:
        return self.snapshot if self.model is None else self.model.inflight


@dataclass(slots=True)
class ClientSession:
    """A session and what belongs to it."""

    name: str
    heard_at: float
    created_at: str
    sdk_version: str
    models: dict[str, ServedModel] = field(default_factory=dict)
    samplers: dict[str, SamplingSession] = field(default_factory=dict)


class ClientSessions:
    """The sessions of a server.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._sessions: dict[str, ClientSession] = {}

    def open(self, sdk_version: str, created_at: str) -> ClientSession:
        """Return a new session; RefusedCallError if the client's SDK is not a supported one."""
        check_sdk(sdk_version)
        name = secrets.token_hex(8)
        session = ClientSession(name, self._clock(), created_at, sdk_version)
        self._sessions[name] = session
        return session

    def find(self, name: Any) -> ClientSession:
        session = self._sessions.get(name)
        if session is None:
            raise UnknownSessionError(str(name))
        return session

    def hear(self, name: Any) -> None:
        self.find(name).heard_at = self._clock()

    def remove(self, name: str) -> ClientSession | None:
        return self._sessions.pop(name, None)

    def silent(self) -> list[str]:
        """Return the sessions whose client has not been heard of for long."""
        now = self._clock()
        return [s.name for s in self._sessions.values() if now - s.heard_at > SESSION_SECONDS]

    def names(self) -> list[str]:
        return [*self._sessions]

    def model(self, model_id: Any) -> ServedModel:
        """Return a model; RefusedCallError if its session has ended, or it was unloaded."""
        session = self._sessions.get(str(model_id).partition(":")[0])
        model = None if session is None else session.models.get(str(model_id))
        if model is None:
            raise RefusedCallError(
                f"there is no model {model_id!r:.100}: it was unloaded, its session has ended, or "
                "the server was started again. Create a training client again, from a checkpoint "
                "if there is one: create_training_client_from_state_with_optimizer"
            )
        return model

    def open_sampler(self, session: str, number: int, base_model: str) -> SamplingSession:
        """Return a session's sampler of this number, a new one unless the call was sent again."""
        name = f"{session}:sample:{number}"
        samplers = self.find(session).samplers
        if name not in samplers:
            samplers[name] = SamplingSession(name, session, base_model)
        return samplers[name]

    def sampler(self, name: Any) -> SamplingSession:
        """Return a sampler; RefusedCallError if its session has ended."""
        session = self._sessions.get(str(name).partition(":")[0])
        sampler = None if session is None else session.samplers.get(str(name))
        if sampler is None:
            raise RefusedCallError(
                f"there is no sampler {name!r:.100}: its session has ended, or the server was "
                "started again. Create a sampling client again"
            )
        return sampler


def check_sdk(version: str) -> None:
    """Raise RefusedCallError unless this is a version of the SDK that the server is for.

    Example:
        >>> check_sdk("0.38.0")
    """
    match = _VERSION.match(version)
    number = tuple(map(int, match.groups())) if match else None
    if number is None or not OLDEST_SDK <= number <= NEWEST_SDK:
        oldest = ".".join(map(str, OLDEST_SDK))
        newest = ".".join(map(str, NEWEST_SDK))
        major, minor = NEWEST_SDK
        raise RefusedCallError(
            f"this server is for the Tinker SDK {oldest} to {newest}, got {version!r:.40}: "
            f"pip install 'tinker>={oldest},<{major}.{minor + 1}'"
        )
