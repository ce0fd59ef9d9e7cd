"""A RayCluster that scales: Ray's head, the API server that holds the resource, the operator and Ray's KubeRay autoscaler."""

import contextlib
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.integration.commands import ROOT, environment
from tests.integration.kuberay.api_server import CLUSTER, HEAD_POD, NAMESPACE, Objects, api_server, ray_cluster
from tests.integration.kuberay.operator import Operator, rays_environment, start_options
from tests.integration.ray_head import RayHead, ray_head
from tests.integration.waiting import until


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeRay:
    head: RayHead
    objects: Objects
    operator: Operator
    autoscaler_log: Path

    def asked_replicas(self, group: int = 0) -> list[int]:
        """Of a worker group, one PATCH after the other."""
        return [patch.of("replicas")[group] for patch in self.objects.patches if group in patch.of("replicas")]

    def asked_deletions(self) -> list[str]:
        """Names of pods, one PATCH after the other."""
        asked = [patch.of("scaleStrategy") for patch in self.objects.patches]
        return [name for patch in asked for strategy in patch.values() for name in strategy["workersToDelete"]]


@contextlib.contextmanager
def kuberay(spec: dict[str, Any]) -> Iterator[KubeRay]:
    """`spec` is a RayCluster's, or a RayJob's `rayClusterSpec`. It has no worker pods yet but for `replicas`."""
    objects = Objects(ray_cluster(spec))
    objects.pods[HEAD_POD] = _head_pod()
    # On the head pod KubeRay sets these for the autoscaler's version 2, and runs it beside Ray.
    head_env = {
        **rays_environment(spec["headGroupSpec"]["template"]),
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "1",  # it ends with the test
        "RAY_enable_autoscaler_v2": "1",
        "RAY_CLOUD_INSTANCE_ID": HEAD_POD,
        "RAY_NODE_TYPE_NAME": "headgroup",
        # Nodes that end without a word are missed within seconds.
        "RAY_health_check_initial_delay_ms": "0",
        "RAY_health_check_period_ms": "1000",
        "RAY_health_check_failure_threshold": "3",
    }
    options = ["--no-monitor", *start_options(objects.ray_cluster, "headgroup")]
    with (
        tempfile.TemporaryDirectory() as name,
        ray_head(options=options, more_env=head_env) as head,
        api_server(objects, folder := Path(name)) as api,
    ):
        env = {**environment(), **head.env}
        operator = Operator(objects, gcs_address=head.address, env=env, folder=folder)
        log = folder / "autoscaler.log"
        with operator.running(), _autoscaler(head, objects, {**env, **api}, log):
            yield KubeRay(head=head, objects=objects, operator=operator, autoscaler_log=log)


@contextlib.contextmanager
def _autoscaler(head: RayHead, objects: Objects, env: dict[str, str], log: Path) -> Iterator[None]:
    """Up when this is entered: what waits for nodes has a deadline."""
    command = ["ray", "kuberay-autoscaler", f"--cluster-name={CLUSTER}", f"--cluster-namespace={NAMESPACE}"]
    command += [f"--gcs-address={head.address}"]
    own = {**env, "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=own, stdout=output, stderr=subprocess.STDOUT)
        try:
            until(lambda: objects.is_read or process.poll() is not None)
            assert process.poll() is None, log.read_text()
            yield
        finally:
            process.kill()
            process.wait()


def _head_pod() -> dict[str, Any]:
    labels = {"ray.io/cluster": CLUSTER, "ray.io/node-type": "head", "ray.io/group": "headgroup"}
    status = {"podIP": "127.0.0.1", "containerStatuses": [{"state": {"running": {}}}]}
    return {"metadata": {"name": HEAD_POD, "resourceVersion": "1", "labels": labels}, "status": status}
