"""Nodes of a Ray cluster on this machine."""

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray
from _cluster_run import TAG
from ray.cluster_utils import Cluster

HELPERS = Path(__file__).resolve().parent


@contextmanager
def cluster_of(
    cpus: Sequence[int], monkeypatch: pytest.MonkeyPatch, *, num_gpus: int = 0
) -> Iterator[Cluster]:
    """A head without CPUs, as where training is started from, and nodes with so many each.

    Args:
        num_gpus: that Ray takes each node to have.
    """
    paths = [str(HELPERS), str(HELPERS.parents[1]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv(TAG, secrets.token_hex(8))
    # A lost node is noticed within seconds; one that only has to wait for a processor is not lost.
    monkeypatch.setenv("RAY_health_check_period_ms", "1000")
    monkeypatch.setenv("RAY_health_check_failure_threshold", "5")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    for number in cpus:
        cluster.add_node(num_cpus=number, num_gpus=num_gpus)
    ray.init(address=cluster.address, logging_level="error")
    try:
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
