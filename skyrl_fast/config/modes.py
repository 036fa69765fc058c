"""Modes of a run that many parts meet; `Config` decides each once."""

from __future__ import annotations

from enum import Enum


class EnginePlace(Enum):
    """Where a run's engines compute.

    HERE_AWAKE: on the machines of the ranks, on GPUs of its own or next to the trainer.
    HERE_ASLEEP: there, on GPUs of the trainer, whose memory it frees during updates.
    SERVERS: on servers that were there before the run.
    CLUSTER: on nodes of a Ray cluster, started by the run.
    """

    HERE_AWAKE = "here, awake"
    HERE_ASLEEP = "here, asleep during updates"
    SERVERS = "on servers"
    CLUSTER = "on a cluster"

    @property
    def is_here(self) -> bool:
        return self in (EnginePlace.HERE_AWAKE, EnginePlace.HERE_ASLEEP)


class EngineWeights(Enum):
    """What a run's engines get after an update.

    ALL: the weights of a policy without an adapter.
    MERGED: all weights, with the adapter merged in.
    ADAPTER: the adapter alone; they have its base.
    """

    ALL = "all weights"
    MERGED = "all weights, with the adapter merged in"
    ADAPTER = "the adapter"
