"""The service of a model: sessions of clients, and the parts that answer their calls.

Training runs in one thread, sampling in the engine, and this in the event loop; `app` has the
paths.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from skyrl_fast.tinker.checkpoint_calls import CheckpointCalls
from skyrl_fast.tinker.checkpoints import CheckpointStore
from skyrl_fast.tinker.futures import Futures
from skyrl_fast.tinker.models import NO_HEAD, ModelCalls
from skyrl_fast.tinker.recording import DatumRecorder
from skyrl_fast.tinker.sampling import SnapshotSampler
from skyrl_fast.tinker.sampling_calls import SamplingCalls
from skyrl_fast.tinker.sessions import ClientSessions
from skyrl_fast.tinker.shared import Json, ServedBase, SharedState
from skyrl_fast.tinker.snapshots import Snapshots
from skyrl_fast.tinker.training import AdapterTrainer
from skyrl_fast.tinker.training_calls import TrainingCalls

log = logging.getLogger(__name__)

TICK_SECONDS = 5.0  # between two looks at silent sessions and old answers


class TinkerService:
    """Sessions of clients; `models`, `training`, `sampling` and `checkpoints` answer their calls.

    Args:
        recorder: keeps what was trained, for the viewer; None: nothing is kept.
        clock: returns seconds.
    """

    def __init__(
        self,
        base: ServedBase,
        trainer: AdapterTrainer,
        sampler: SnapshotSampler,
        store: CheckpointStore,
        *,
        recorder: DatumRecorder | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.base = base
        self.futures = Futures(secrets.token_hex(4), clock)
        self.sessions = ClientSessions(clock)
        shared = SharedState(
            base=base,
            trainer=trainer,
            store=store,
            sessions=self.sessions,
            futures=self.futures,
            snapshots=Snapshots(store),
            recorder=recorder,
            thread=ThreadPoolExecutor(1, thread_name_prefix="tinker-train"),
        )
        self.models = ModelCalls(shared)
        self.training = TrainingCalls(shared)
        self.sampling = SamplingCalls(shared, sampler)
        self.checkpoints = CheckpointCalls(shared)
        self._shared = shared
        self._sampler = sampler
        self._warnings = [NO_HEAD]

    async def start(self) -> None:
        """Start the sampler."""
        await self._sampler.start()

    async def stop_sampler(self) -> None:
        await self._sampler.close()

    async def run(self) -> None:
        """End silent sessions and drop old answers, until it is cancelled."""
        while True:
            await asyncio.sleep(TICK_SECONDS)
            await self.tick()

    async def tick(self) -> None:
        for name in self.sessions.silent():
            log.warning("session %s: no heartbeat: its models are unloaded", name)
            await self.end_session(name)
        self.futures.drop_old()

    async def close(self) -> None:
        for name in self.sessions.names():
            await self.end_session(name)
        self.sampling.cancel_all()
        self._shared.thread.shutdown()
        if self._shared.recorder is not None:
            self._shared.recorder.close()

    def create_session(self, body: Json) -> Json:
        session = self.sessions.open(str(body.get("sdk_version", "")), self._shared.store.now())
        return {"type": "create_session", "session_id": session.name}

    def next_warning(self) -> str | None:
        """Return what the first client of this server is told, and no later one."""
        if not self._warnings:
            return None
        warning = self._warnings.pop()
        log.warning("%s", warning)
        return warning

    def heartbeat(self, body: Json) -> Json:
        self.sessions.hear(body.get("session_id"))
        return {"type": "session_heartbeat"}

    async def end_session(self, name: str) -> None:
        """Unload a session's models, and forget its samplers; what it saved under a name stays."""
        session = self.sessions.remove(name)
        if session is None:
            return
        for model in session.models.values():
            await self.models.unload(model)
        for sampler in session.samplers.values():
            self.sampling.forget(sampler)

    def capabilities(self) -> Json:
        common = {
            "max_context_length": self.base.max_length,
            "trainable": True,
            "sampleable": True,
        }
        return {"supported_models": [{"model_name": name, **common} for name in self.base.names]}
