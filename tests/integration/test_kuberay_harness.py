"""What tests/integration/kuberay promises the tests that stand on it. Pods are preempted and killed in exhaustive proofs alone, so this is
one too: in CI test_kuberay.py shows that a pod waits for the quota, and goes with its actor."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.integration.commands import environment
from tests.integration.faults import until
from tests.integration.kuberay.cluster import KubeRay, kuberay

pytestmark = [pytest.mark.ray, pytest.mark.acceptance, pytest.mark.exhaustive, pytest.mark.timeout(1800)]

_CONTAINER = {
    "name": "ray",
    "resources": {"limits": {"cpu": "1", "memory": "1Gi"}},
    "env": [{"name": "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "value": "3"}],
}
_POD = {"spec": {"containers": [_CONTAINER], "terminationGracePeriodSeconds": 13}}
SPEC = {
    "enableInTreeAutoscaling": True,
    "autoscalerOptions": {"version": "v2", "idleTimeoutSeconds": 5},
    "headGroupSpec": {"rayStartParams": {"num-cpus": "0"}, "template": _POD},
    "workerGroupSpecs": [
        {
            "groupName": "rollout",
            "replicas": 0,
            "minReplicas": 0,
            "maxReplicas": 2,
            "rayStartParams": {},
            "labels": {"ray.io/market-type": "spot"},
            "template": _POD,
        }
    ],
}
_DRIVER = """
import os, ray, sys
ray.init(sys.argv[1], log_to_driver=False)

@ray.remote(num_cpus=1, max_restarts=-1, label_selector={"ray.io/market-type": "spot"})
class Actor:
    def pod(self):
        return os.environ["RAY_CLOUD_INSTANCE_ID"]

actor = Actor.remote()
print(ray.get(actor.pod.remote()), flush=True)
input()
"""


def test_a_pod_waits_for_the_quota_others_take_the_place_of_those_that_end_and_the_last_goes_with_its_actor():
    with kuberay(SPEC) as cluster:
        operator = cluster.operator
        operator.quota = 0
        with _actor(cluster) as driver:
            until(operator.living)
            (waiting,) = operator.living()
            assert waiting.manifest()["status"] == {"phase": "Pending"}
            operator.quota = None
            # A call that a death cuts off would end the driver, and with it the demand.
            assert _pod_of(driver) == waiting.name
            assert operator.pods == [waiting] and waiting.actors() == ["Actor"]
            until(lambda: cluster.head.num_nodes() == 2)

            operator.preempt(waiting)
            until(lambda: operator.pods[-1] != waiting and operator.pods[-1].actors())
            until(lambda: waiting.ended_at is not None)

            second = operator.pods[-1]
            second.kill()
            until(lambda: operator.pods[-1] != second and operator.pods[-1].actors())
            third = operator.pods[-1]
            assert not any(pod.is_scaled_down for pod in operator.pods)
        until(lambda: third.is_scaled_down)
        until(lambda: cluster.head.num_nodes() == 1)
        assert (cluster.asked_replicas()[0], cluster.asked_replicas()[-1]) == (1, 0)
        assert cluster.asked_deletions() == [third.name]


@contextlib.contextmanager
def _actor(cluster: KubeRay) -> Iterator[subprocess.Popen[str]]:
    """A driver with one actor, whose pod it prints. Both end with this."""
    command = [sys.executable, "-c", _DRIVER, cluster.head.address]
    env = {**environment(), **cluster.head.env}
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as driver:
        yield driver
        driver.communicate("\n")


def _pod_of(driver: subprocess.Popen[str]) -> str:
    """The pod that the driver's actor answered from."""
    assert driver.stdout
    return driver.stdout.readline().strip()
