"""What the parts of the service share: the model, its trainer, the store, the calls of clients."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from skyrl_fast.tinker.checkpoints import CheckpointStore
from skyrl_fast.tinker.futures import CallAnswer, CallFuture, Futures
from skyrl_fast.tinker.recording import DatumRecorder
from skyrl_fast.tinker.sessions import ClientSessions, ServedModel
from skyrl_fast.tinker.snapshots import Snapshots
from skyrl_fast.tinker.training import AdapterTrainer
from skyrl_fast.tinker.values import whole_number
from skyrl_fast.tinker.wire import RefusedCallError

T = TypeVar("T")
Json = dict[str, Any]

ADAMW = {"type": "adamw"}


@dataclass(frozen=True, slots=True)
class ServedBase:
    """The model that is served.

    Args:
        names: by which clients ask for it, the first one in messages.
        tokenizer: folder or hub name.
        arch: name of the model's class.
        max_length: the most tokens of a sequence.
        strict: whether adapters are refused that lack what a client asked for.
    """

    names: tuple[str, ...]
    tokenizer: str
    arch: str
    max_length: int
    strict: bool = False

    def check_served(self, name: str) -> None:
        """Raise RefusedCallError for another base model than the served one."""
        if name not in (*self.names, self.tokenizer):
            known = ", ".join(self.names)
            raise RefusedCallError(
                f"base_model: this server has {known}, got {name!r:.200}: start one with it, or "
                "give this model its name, too, with --name"
            )


@dataclass(frozen=True, slots=True)
class SharedState:
    """What every part of the service works on.

    Args:
        trainer: used in `thread` only.
        recorder: keeps what was trained, for the viewer; None: nothing is kept.
    """

    base: ServedBase
    trainer: AdapterTrainer
    store: CheckpointStore
    sessions: ClientSessions
    futures: Futures
    snapshots: Snapshots
    recorder: DatumRecorder | None
    thread: ThreadPoolExecutor

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Return the result of a call of the trainer, after those before it."""
        return await asyncio.get_running_loop().run_in_executor(self.thread, work)

    def submit(
        self, body: Json, work: Callable[[ServedModel], CallAnswer], digest: bytes | None = None
    ) -> CallFuture:
        """Return the future of a model's call, which runs in its turn.

        Args:
            digest: of the call's content; None: of its body.
        """
        model = self.sessions.model(body.get("model_id"))
        model.last_request = self.store.now()
        run = partial(self.in_thread, partial(work, model))
        seq_id = body.get("seq_id")
        if seq_id is not None:
            seq_id = whole_number("seq_id", seq_id, 0, None)
        return model.calls.submit(seq_id, digest or digest_of(body), run)


def digest_of(body: Json) -> bytes:
    """Return what two requests share only if they are the same call."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).digest()
