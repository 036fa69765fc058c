"""Counts of calls in Ray's workers, which the driver reads before they end.

Ray ends its workers with the driver, `ray.shutdown` or `ray.kill`, without running their exit
handlers. Therefore a thread of each worker stores its counts in Ray's key-value store soon after
they change.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from skyrl_fast.integrations.calls import Counts

logger = logging.getLogger(__name__)
NAMESPACE = "skyrl_fast_calls"
INTERVAL_S = 0.5  # between a call and its entry in the store

_started = False


def start_publishing(counts: Callable[[], Mapping[str, Counts]]) -> None:
    """Store the counts of this worker in Ray's key-value store whenever they have changed."""
    global _started
    if _started:
        return
    _started = True
    publish = _Publisher(counts)
    atexit.register(publish)

    def run() -> None:
        while True:
            time.sleep(INTERVAL_S)
            publish()

    threading.Thread(target=run, name="skyrl_fast_calls", daemon=True).start()


class _Publisher:
    def __init__(self, counts: Callable[[], Mapping[str, Counts]]) -> None:
        self._counts = counts
        self._stored = ""

    def __call__(self) -> None:
        """Store the counts if they have changed; an error is logged."""
        called = {}
        for name, one in self._counts().items():
            if one.calls:
                called[name] = asdict(one)
        value = json.dumps(called)
        if not called or value == self._stored:
            return
        try:
            context, store = _ray()
            if store is not None:
                node = context.get_node_id()
                key = f"{context.get_job_id()}:{node}:{os.getpid()}"
                store._internal_kv_put(key, value, overwrite=True, namespace=NAMESPACE)
                self._stored = value
        except Exception as error:  # counting must not disturb a worker
            logger.debug("counts of calls are not stored: %s: %s", type(error).__name__, error)


def collect() -> tuple[int, dict[str, Counts]]:
    """Return the number of this job's Ray workers that called functions here, and their calls.

    Waits until calls that have returned are stored. Without Ray: (0, {}).
    """
    context, store = _ray()
    if store is None:
        return 0, {}
    time.sleep(2 * INTERVAL_S)
    keys = store._internal_kv_list(f"{context.get_job_id()}:", namespace=NAMESPACE)
    total: dict[str, Counts] = {}
    for key in keys:
        value = store._internal_kv_get(key, namespace=NAMESPACE)
        for name, one in json.loads(value or "{}").items():
            add_calls(total, name, Counts(**one))
    return len(keys), total


def add_calls(total: dict[str, Counts], name: str, more: Counts) -> None:
    counts = total.setdefault(name, Counts())
    counts.calls += more.calls
    counts.handed_back += more.handed_back
    counts.last_reason = more.last_reason or counts.last_reason


def _ray() -> tuple[Any, Any]:
    """Return Ray's runtime context and key-value store, (None, None) where Ray does not run."""
    try:
        import ray
        from ray.experimental import internal_kv
    except ImportError:
        return None, None
    if not ray.is_initialized() or not internal_kv._internal_kv_initialized():
        return None, None
    return ray.get_runtime_context(), internal_kv
