"""Runs on a cluster that has no node to begin with but a head without CPUs. Ray's own KubeRay autoscaler brings the nodes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.commands import Background, treadwheel
from tests.integration.faults import Run, until, write_run
from tests.integration.kuberay.cluster import KubeRay, kuberay
from tests.integration.kuberay.operator import Pod
from tests.models import make_tiny_model

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.timeout(1800)]

NUM_STEPS = 3
_ACTORS = ("learner-0", "recorder", "reward", "rollout-0", "rollout-1")
_CONTAINER = {"name": "ray", "resources": {"limits": {"cpu": "1", "memory": "1Gi"}}}
_POD = {"spec": {"containers": [_CONTAINER], "terminationGracePeriodSeconds": 2}}


def _group(name: str, market: str, most: int) -> dict[str, Any]:
    sizes = {"replicas": 0, "minReplicas": 0, "maxReplicas": most}
    labels = {"ray.io/market-type": market}
    return {"groupName": name, **sizes, "rayStartParams": {}, "labels": labels, "template": _POD}


SPEC = {
    "enableInTreeAutoscaling": True,
    "autoscalerOptions": {"version": "v2", "idleTimeoutSeconds": 1800},
    "headGroupSpec": {"rayStartParams": {"num-cpus": "0"}, "template": _POD},
    "workerGroupSpecs": [_group("steady", "on-demand", 1), _group("rollout", "spot", 2)],
}
"""Nodes of one CPU: one that stays, and two that may be taken away."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[KubeRay]:
    with kuberay(SPEC) as running:
        yield running


@pytest.fixture
def file(tmp_path) -> Path:
    """A learner of half a CPU, a reward service of a quarter, two workers of one each: three nodes."""
    return write_run(
        tmp_path,
        make_tiny_model(tmp_path / "model"),
        num_steps=NUM_STEPS,
        deterministic=False,
        algorithm={},
        learner__cpus_per_rank=0.5,
        rollout__num_workers=2,
        rollout__cpus_per_worker=1,
        elastic={"spot": "ray.io/market-type=spot"},
        reward={
            "judge": {"name": "tests.integration.judges:held_by", "file": str(tmp_path / "gate")},
            "timeout_s": 600,
        },
        metrics={"sinks": ["console", "jsonl"]},
    )


def test_a_wait_that_is_too_short_ends_with_what_is_missing(cluster, file, tmp_path):
    """Here a learner that no node can ever have."""
    cluster.operator.quota = 0
    where = (f"run_dir={tmp_path / 'run'}", "learner.cpus_per_rank=64", "--address", cluster.head.address)
    ended = treadwheel("train", file, *where, "--wait-for-nodes", "15s", env=cluster.head.env)
    assert ended.returncode == 1 and "waiting_for_nodes: " in ended.stdout, ended.stdout + ended.stderr
    told = ended.stderr
    assert "elastic.wait_for_nodes_s=15 is over: 1 node is there, no room for 4 of 4 seats: " in told
    assert "2 rollout workers with 1 CPUs" in told and "it has no nodes for these seats" in told


def test_a_run_waits_for_its_nodes_one_after_the_other_and_comes_to_its_end(cluster, file, tmp_path):
    """In one placement group with the workers such a learner was never placed: Ray gave the only steady node to a worker."""
    run, operator = Run(tmp_path / "run"), cluster.operator
    operator.quota = 0
    arguments = ("train", file, f"run_dir={run.path}", "--address", cluster.head.address, "--wait-for-nodes", "20m")
    with Background(*arguments, env=cluster.head.env) as driver:
        until(
            lambda: _said(run, "no room for 4 of 4 seats: ", "the autoscaler brings 1 of 'steady' for "), process=driver
        )
        (tmp_path / "gate").touch()  # the run is not to end before its actors are looked for
        operator.quota = 1
        until(lambda: _said(run, "no room for 2 of 4 seats: 2 rollout workers", "2 of 'rollout'"), process=driver)
        operator.quota = 2
        until(lambda: _said(run, "3 nodes are there, no room for 1 of 4 seats"), process=driver)
        operator.quota = 3
        until(lambda: run.events("started") and run.pid("rollout-0") and run.pid("rollout-1"), process=driver)
        on_nodes = {pod.name: _actors_in(pod, run) for pod in operator.living()}
        (tmp_path / "gate").unlink()
        assert driver.exit_code() == 0, driver.output
    steady = {"learner-0", "recorder", "reward"}
    assert sorted(map(sorted, on_nodes.values())) == [sorted(steady), ["rollout-0"], ["rollout-1"]]
    assert on_nodes[next(name for name in on_nodes if "-steady-" in name)] == steady
    assert run.num_steps() == NUM_STEPS and run.problems() == ()


def _said(run: Run, *words: str) -> bool:
    """In one line."""
    return any(all(each in event["message"] for each in words) for event in run.events("waiting_for_nodes"))


def _actors_in(pod: Pod, run: Run) -> set[str]:
    processes = {process.pid for process in pod.processes()}
    return {name for name in _ACTORS if run.pid(name) in processes}
