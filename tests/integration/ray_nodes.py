"""Ray nodes that tests add and end: `ray.cluster_utils.Cluster` makes them, several on this machine."""

import contextlib
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from ray._private.ray_constants import PROCESS_TYPE_RAYLET
from ray.cluster_utils import Cluster

from tests.integration.commands import run

SYSTEM = {
    # Whatever is passed on lies in a node's store, however small: it can be lost with the node.
    "max_direct_call_object_size": 0,
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 1000,
    "health_check_failure_threshold": 3,
}
"""Settings of a head whose nodes are missed within seconds."""


@contextlib.contextmanager
def ray_nodes(**head: Any) -> Iterator[Cluster]:
    """A head that other nodes can join."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        cluster = Cluster(initialize_head=True, head_node_args={"include_dashboard": False, **head})
        try:
            yield cluster
        finally:
            cluster.shutdown()


def end(cluster: Cluster, node: Any) -> None:
    """The node and all processes on it: killed, as when a machine fails."""
    (raylet,) = node.all_processes[PROCESS_TYPE_RAYLET]
    workers = psutil.Process(raylet.process.pid).children(recursive=True)
    cluster.remove_node(node, allow_graceful=False)
    for worker in workers:
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.kill()


def announce_end(cluster: Cluster, node: Any) -> None:
    """What a cloud does before it takes a machine away."""
    why = ("--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=going", "--deadline-remaining-seconds=600")
    ended = run("ray", "drain-node", f"--address={cluster.address}", f"--node-id={node.node_id}", *why)
    assert ended.returncode == 0, ended.stderr
