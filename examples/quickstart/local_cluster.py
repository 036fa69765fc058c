"""The quickstart on a Ray cluster of three nodes, all of them on this machine.

    python examples/quickstart/local_cluster.py [--base DIR] [key=value ...]

Two nodes have room for a rank each, the third for two engines (`cluster.yaml`). On machines of
their own, `ray start` on each replaces the first half of this file.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
CPUS = (1, 1, 2)


def main(arguments: Sequence[str]) -> int:
    """Start the nodes, run the quickstart on them, and stop them."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        for number in CPUS:
            cluster.add_node(num_cpus=number)
        config = str(HERE / "cluster.yaml")
        command = [sys.executable, str(HERE / "run.py"), config, *arguments]
        return subprocess.call(command, env={**os.environ, "RAY_ADDRESS": cluster.address})
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
