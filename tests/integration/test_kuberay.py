"""The committed quickstart manifest under Ray's own KubeRay autoscaler: its run grows and shrinks with its pods, and loses nothing when
spot pods die."""

import copy
import functools
import random
import shlex
import time
from dataclasses import dataclass
from typing import Any

import pytest
import yaml

from tests.integration.commands import ROOT
from tests.integration.faults import Run, slowed, until
from tests.integration.kuberay.cluster import KubeRay, kuberay
from tests.integration.kuberay.operator import Pod
from tests.integration.kuberay.ray_job import RayJob

pytestmark = [
    pytest.mark.ray,
    pytest.mark.engine,
    pytest.mark.acceptance,
    pytest.mark.timeout(1800),
]
NUM_NOTICES = 1
"""Of the deaths of spot pods, which are twice as many."""
MANIFEST = {each["kind"]: each for each in yaml.safe_load_all((ROOT / "deploy/kubernetes/quickstart.yaml").read_text())}
SHORT = (
    "buffer.groups_per_step=8",
    "buffer.max_off_policy_steps=1",
    "evaluation.prompts=null",
    "metrics.sinks=[console, jsonl]",
)
"""Steps of a second. Sampling runs beside learning, so that the run can have more workers than it needs."""


def spec() -> dict[str, Any]:
    """The manifest's cluster, in which idle pods go after seconds instead of minutes."""
    found = copy.deepcopy(MANIFEST["RayJob"]["spec"]["rayClusterSpec"])
    found["autoscalerOptions"]["idleTimeoutSeconds"] = 4
    return found


def submit(cluster: KubeRay, run: Run, *overrides: str, name: str = "quickstart") -> RayJob:
    """The manifest's entrypoint, with this machine's paths in the place of the image's."""
    job = MANIFEST["RayJob"]["spec"]
    file = run.path.with_suffix(".yaml")
    file.write_text(MANIFEST["ConfigMap"]["data"]["run.yaml"])
    ours = {"run.yaml": str(file), f"run_dir={job['metadata']['run_dir']}": f"run_dir={run.path}"}
    words = [ours.get(word.removeprefix("/etc/treadwheel/"), word) for word in shlex.split(job["entrypoint"])]
    assert {*ours.values()} <= {*words}
    entrypoint = shlex.join([*words, *SHORT, *overrides])
    return RayJob(cluster.head, name=name, entrypoint=entrypoint, metadata=job["metadata"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Grown:
    """What is left of a run that grew by a pod, which first had to wait for a quota, shrank, was stopped, and went on to its end."""

    run: Run
    cluster: KubeRay
    pods_at_the_start: int
    steps_while_pending: int
    waits: dict[str, Any]
    """The event of the worker whose pod was pending."""
    joined: Pod
    logs: str
    stopped: dict[str, Any]
    retried: dict[str, Any]


@pytest.fixture(scope="module")
def grown(tmp_path_factory) -> Grown:
    run = Run(tmp_path_factory.mktemp("grown") / "run")
    with kuberay(spec()) as cluster:
        operator = cluster.operator
        assert operator.pods == []
        operator.quota = pods_at_the_start = 1
        job = submit(cluster, run, "num_steps=100000", "elastic.scale_down_full_steps=3")
        until(lambda: run.num_steps() >= 2, process=job)
        with slowed(run, "rollout-0"):
            until(lambda: len(operator.living()) > pods_at_the_start, process=job)
            since = run.num_steps()
            until(lambda: run.num_steps() >= since + 2, process=job)
            steps_while_pending = run.num_steps() - since
            joined = operator.living()[-1]
            until(lambda: _brings("rollout-spot", run), process=job)
            assert joined.process is None
            operator.quota = None
            until(lambda: run.pid("rollout-1"), process=job)
            assert len(joined.actors()) == 1
        with slowed(run, "learner-0"):  # workers finish all that they may before it is through with a step
            until(lambda: joined.is_scaled_down, process=job)
        job.stop()
        until(job.is_over)
        logs = job.output
        until(lambda: operator.living() == [])
        retry = submit(cluster, run, f"num_steps={run.num_steps() + 3}", name="quickstart-retry")
        until(retry.is_over)
        until(lambda: operator.living() == [] and cluster.head.num_nodes() == 1)
        return Grown(
            run=run,
            cluster=cluster,
            pods_at_the_start=pods_at_the_start,
            steps_while_pending=steps_while_pending,
            waits=_brings("rollout-spot", run)[0],
            joined=joined,
            logs=logs,
            stopped=job.info(),
            retried=retry.info(),
        )


def test_the_learners_wait_brings_a_pod_and_workers_without_work_take_it_away(grown):
    changes = [event for event in grown.run.events("scale") if event["reason"] == "elastic"]
    assert [(event["before"], event["num_workers"]) for event in changes[:2]] == [(1, 2), (2, 1)]
    start = [*range(1, grown.pods_at_the_start + 1)]
    assert grown.cluster.asked_replicas()[: len(start) + 2] == [*start, len(start) + 1, len(start)]
    assert grown.cluster.asked_replicas()[-1] == 0


def test_every_pod_that_was_deleted_had_been_left_by_its_worker(grown):
    (left,) = grown.run.events("worker_left")
    deleted = {
        name: patch.time
        for patch in grown.cluster.objects.patches
        for strategy in patch.of("scaleStrategy").values()
        for name in strategy["workersToDelete"]
    }
    assert deleted[grown.joined.name] > left["time"]
    assert deleted.keys() == {pod.name for pod in grown.cluster.operator.pods}
    assert grown.run.events("failure") == []


def test_a_run_goes_on_with_what_it_has_while_a_pod_is_pending(grown):
    assert grown.steps_while_pending >= 2


def test_a_worker_whose_pod_is_pending_names_the_worker_group_that_the_autoscaler_cannot_fill(grown):
    assert grown.waits["actor"] == "rollout-1"
    words = "rollout-1 waits for a node with 2 CPUs and 0 GPUs free: the autoscaler brings 1 of 'rollout-spot' for "
    assert grown.waits["message"].startswith(words)
    assert f"worker_waits: {grown.waits['message']}" in grown.logs


def test_a_job_that_is_stopped_saves_and_its_retry_goes_on_to_the_end(grown):
    assert grown.stopped["status"] == "STOPPED"
    assert grown.stopped["metadata"] == MANIFEST["RayJob"]["spec"]["metadata"]
    (resumed,) = grown.run.events("resumed")
    before = [event for event in grown.run.events() if event["time"] < resumed["time"]]
    saved = [event["policy_version"] for event in before if event["kind"] == "checkpoint"][-1]
    assert "stopped" in {event["kind"] for event in before} and saved == resumed["recorded_steps"]
    assert grown.retried["status"] == "SUCCEEDED"
    assert grown.run.problems() == ()


@pytest.mark.exhaustive
def test_deaths_of_spot_pods_cost_no_group_and_double_none(tmp_path):
    """Half of them with a notice; all of the run's workers are on spot pods."""
    run = Run(tmp_path / "run")
    chance = random.Random(6)
    deaths = chance.sample(["notice", "no notice"] * NUM_NOTICES, 2 * NUM_NOTICES)
    workers = ("rollout.num_workers=2", "elastic.max_workers=2", "elastic.scale_down_full_steps=1000000")
    patience = ("supervision.max_restarts=100", "supervision.backoff_s=0.1")
    victims: list[Pod] = []
    with kuberay(spec()) as cluster:
        job = submit(cluster, run, "num_steps=100000", *workers, *patience)
        for death in deaths:
            found: list[Pod] = []
            until(functools.partial(_found, found, run, cluster, victims), process=job)
            victim = chance.choice(found)
            victims.append(victim)
            time.sleep(chance.random())  # the moment is random, and seeded
            if death == "notice":
                cluster.operator.preempt(victim)
            else:
                victim.kill()
        # A worker with a notice ends without a failure.
        until(lambda: len(run.events("worker_left")) == NUM_NOTICES and _serving(run, cluster), process=job)
        goes_on_from = run.num_steps()
        until(lambda: run.num_steps() >= goes_on_from + 3, process=job)
        job.stop()
        until(job.is_over)
        assert job.status() == "STOPPED", job.output
    consumed = [index for groups in run.groups() for index in groups]
    assert consumed == [*range(len(consumed))]
    assert run.problems() == ()


def _brings(group: str, run: Run) -> list[dict[str, Any]]:
    """Events of workers that wait for a pod of the group."""
    return [
        event for event in run.events("worker_waits") if f"the autoscaler brings 1 of '{group}'" in event["message"]
    ]


def _found(found: list[Pod], run: Run, cluster: KubeRay, victims: list[Pod]) -> bool:
    """Gathers pods whose worker has served, but for those that are dying: any may be gone a moment later."""
    found += [pod for pod in _serving(run, cluster) if pod not in victims]
    return bool(found)


def _serving(run: Run, cluster: KubeRay) -> list[Pod]:
    """Pods whose worker has served."""
    pids = {event["actor_pid"] for event in run.events("worker_joined", "recovery")}
    return [pod for pod in cluster.operator.living() if pids & {process.pid for process in pod.processes()}]
