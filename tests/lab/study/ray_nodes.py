"""Real Ray nodes on this machine, for the tests of studies on a cluster."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SMALL = {"num_cpus": 1, "object_store_memory": 100_000_000, "include_dashboard": False}


@contextmanager
def nodes(count: int = 2) -> Iterator[Any]:
    """A cluster of so many nodes with a core each; the first is the head."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args=SMALL)
    try:
        for _ in range(count - 1):
            cluster.add_node(**SMALL)
        yield cluster
    finally:
        cluster.shutdown()


def kill_node(node: Any) -> None:
    """As if its machine lost power: all its processes die at once."""
    for processes in node.all_processes.values():
        for each in processes:
            os.kill(each.process.pid, signal.SIGKILL)


def folders_left() -> list[Path]:
    """What studies have left in the folder for temporary files."""
    return [path for path in Path(tempfile.gettempdir()).glob("multitudes-nodes-*/*") if path.exists()]
