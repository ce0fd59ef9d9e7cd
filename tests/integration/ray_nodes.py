"""Ray nodes that tests add and end: `ray.cluster_utils.Cluster` makes them, several on this machine."""

import contextlib
import subprocess
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from ray._private.ray_constants import PROCESS_TYPE_RAYLET
from ray.cluster_utils import Cluster

from tests.integration.commands import environment, run
from tests.integration.waiting import until
from tests.ports import free_ports

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


class SpotNode:
    """A node as a pod has it: `ray start --block`, which announces the node's end when it is told to end, and ends when nothing is
    left to do there, or after `notice_s`."""

    LABEL = "market=spot"

    def __init__(self, cluster: Cluster, *, num_cpus: int, notice_s: float) -> None:
        """Returns when the node is known: nodes that start at the same time take each other's sockets."""
        before = _living_nodes(cluster)
        self._process = subprocess.Popen(
            [
                "ray",
                "start",
                "--block",
                f"--address={cluster.address}",
                f"--num-cpus={num_cpus}",
                f"--labels={self.LABEL}",
            ]
            + [f"--{name}={port}" for name, port in zip(_PORTS, free_ports(len(_PORTS)), strict=True)],
            env={**environment(), "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": str(notice_s)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        until(lambda: _living_nodes(cluster) - before or self.has_ended())
        assert not self.has_ended(), "the node did not come up"
        (self.node_id,) = _living_nodes(cluster) - before

    def terminate(self) -> None:
        """As a cloud does, or Kubernetes: the node is told that it ends."""
        self._process.terminate()

    def kill(self) -> None:
        """The machine fails: all at once, and nobody is told."""
        for each in [*psutil.Process(self._process.pid).children(recursive=True), self._process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        self._process.wait()

    def runs(self, pid: int) -> bool:
        """Whether the process is on this node."""
        return self._process.pid in [each.pid for each in psutil.Process(pid).parents()]

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def __enter__(self) -> "SpotNode":
        return self

    def __exit__(self, *_: object) -> None:
        if not self.has_ended():
            self.kill()


_PORTS = ("dashboard-agent-listen-port", "metrics-export-port", "runtime-env-agent-port")


def _living_nodes(cluster: Cluster) -> set[str]:
    return {node["NodeID"] for node in cluster.global_state.node_table() if node["Alive"]}
