"""Nodes leave and join in mid-run, workers come and go by order and by rule. Several local Ray nodes, no machine but this one."""

import contextlib
import json
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pyarrow as pa
import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group, remove_placement_group

from cluster.contracts.errors import LostError, WorkerError
from cluster.contracts.schema import to_batch
from cluster.remote import ActorSpec, RemoteActor
from cluster.supervision import ActorKind
from tests.integration.commands import Background, environment, treadwheel
from tests.integration.commands import run as run_command
from tests.integration.faults import Run, until, write_run
from tests.models import make_tiny_model
from tests.unit.cluster.contracts.rows import row

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1800)]
SYSTEM = {
    # Whatever is passed on lies in a node's store, however small: it can be lost with the node.
    "max_direct_call_object_size": 0,
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 1000,
    "health_check_failure_threshold": 3,
}


@pytest.fixture(scope="module")
def nodes():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False, "_system_config": SYSTEM}
        )
        yield cluster
        cluster.shutdown()


@pytest.fixture(scope="module")
def run_file(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("elastic")
    return write_run(
        folder,
        make_tiny_model(folder / "model"),
        num_steps=100_000,
        deterministic=False,
        buffer={"groups_per_step": 4, "trajectories_per_group": 4, "max_off_policy_steps": 1},
        rollout__cpus_per_worker=0.5,
        rollout__num_workers=2,
    )


class Maker:
    """A plain object for an actor: makes something large enough to be lost, and takes it."""

    def make(self) -> pa.RecordBatch:
        return to_batch([row()])

    def take(self, made: pa.RecordBatch) -> int:
        return made.num_rows


def spec(name: str, bundle: int) -> ActorSpec:
    factory = "tests.integration.test_elastic:Maker"
    return ActorSpec(name=name, kind=ActorKind.RECORDER, factory=factory, arguments={}, num_cpus=0.5, bundle=bundle)


async def test_what_a_node_held_is_lost_by_name_and_its_seats_are_found_elsewhere(nodes):
    far = nodes.add_node(num_cpus=1, resources={"far": 1})
    ray.init(nodes.address, log_to_driver=False, logging_level="error")
    group = placement_group([{"CPU": 0.5, "far": 0.1}, {"CPU": 0.5, "node:__internal_head__": 0.1}])
    try:
        ray.get(group.ready(), timeout=60)
        maker = await RemoteActor.start(spec("maker", 0), placement_group=group, deadline_s=60)
        taker = await RemoteActor.start(spec("taker", 1), placement_group=group, deadline_s=60)
        assert maker.node_id == far.node_id != taker.node_id
        _, made = await maker.call_for_batch("make", deadline_s=30)
        nodes.remove_node(far, allow_graceful=False)
        with pytest.raises(WorkerError, match="maker died in 'make'"):
            await maker.call("make", deadline_s=60)
        with pytest.raises(LostError, match="taker, 'take'"):
            await taker.call("take", made, deadline_s=60)
        again = await RemoteActor.start(spec("maker", 0), placement_group=group, deadline_s=60)
        assert again.node_id == taker.node_id
        await maker.kill()
    finally:
        remove_placement_group(group)
        ray.shutdown()


def test_a_run_outlives_a_node_and_follows_those_that_come(nodes, run_file):
    run = Run(run_file.parent / "run")
    doomed = nodes.add_node(num_cpus=2)
    with Background("train", run_file, f"run_dir={run.path}", "--address", nodes.address) as driver:
        until(lambda: run.num_steps() >= 3, process=driver)

        nodes.remove_node(doomed, allow_graceful=False)
        until(lambda: run.events("recovery"), process=driver)
        until(lambda: len(_living(run)) >= 6, process=driver)
        goes_on_from = run.num_steps()
        until(lambda: run.num_steps() >= goes_on_from + 3, process=driver)

        joined = nodes.add_node(num_cpus=2)
        _scale(run, 3)
        until(lambda: "rollout-2" in _samplers(run), process=driver)

        _drain(nodes, joined)
        until(lambda: run.events("drain"), process=driver)
        until(lambda: {event["actor"] for event in run.events("drain")} <= _left(run), process=driver)

        _scale(run, 1)
        until(lambda: run.metrics()[run.num_steps()]["rollout/num_workers"] == 1, process=driver)
        shown = treadwheel("info", run.path).stdout
        assert "learner-0" in shown and "policy version" in shown and " for " in shown
        driver.press_ctrl_c()
        assert driver.exit_code() == 130, driver.output
    assert run.problems() == ()


def test_rays_autoscaler_brings_the_node_that_the_rule_asks_for(run_file, tmp_path):
    run = Run(tmp_path / "run")
    with _autoscaling_head() as address:
        rule = ("elastic.max_workers=2", "elastic.scale_up_wait_share=0.01", "rollout.num_workers=1")
        train = ("train", run_file, f"run_dir={run.path}", "rollout.cpus_per_worker=1", *rule, "--address", address)
        with Background(*train) as driver:
            until(lambda: run.events("scale"), process=driver)
            asked = run.events("scale")[0]
            assert (asked["before"], asked["num_workers"], asked["reason"]) == (1, 2, "elastic")
            until(lambda: "rollout-1" in _samplers(run), process=driver)
            driver.press_ctrl_c()
            assert driver.exit_code() == 130, driver.output
    assert run.problems() == ()


@contextlib.contextmanager
def _autoscaling_head() -> Iterator[str]:
    """A head with two CPUs and a provider that makes nodes of one more CPU out of thin air, when they are asked for.

    What `ray.cluster_utils.AutoscalingCluster` does, without its `ray stop`, which ends everybody's Ray on this machine.
    """
    port = _free_port()
    config = {
        "cluster_name": "fake",
        "max_workers": 1,
        "provider": {"type": "fake_multinode", "gcs_address": f"127.0.0.1:{port}"},
        "head_node_type": "ray.head.default",
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 2}, "node_config": {}, "max_workers": 0},
            "more": {"resources": {"CPU": 1}, "node_config": {}, "min_workers": 0, "max_workers": 1},
        },
        "idle_timeout_minutes": 10,
    }
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    file = Path(folder) / "autoscaling.json"
    file.write_text(json.dumps(config))
    more = {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    command = ["ray", "start", "--head", "--block", f"--port={port}", "--num-cpus=2", "--node-ip-address=127.0.0.1"]
    command += [f"--temp-dir={folder}", f"--autoscaling-config={file}", "--include-dashboard=false"]
    with open(f"{folder}/output", "w") as output:
        process = subprocess.Popen(command, env={**environment(), **more}, stdout=output, stderr=subprocess.STDOUT)
        try:
            until(lambda: "Ray runtime started" in Path(output.name).read_text())
            yield f"127.0.0.1:{port}"
        finally:
            ours = [each for each in psutil.process_iter() if folder in " ".join(_command_of(each))]
            for each in {*ours, psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)}:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
            process.wait()
            shutil.rmtree(folder, ignore_errors=True)


def _free_port() -> int:
    """Below those that Ray gives to its workers (10002 to 19999) and that the kernel gives to anybody."""
    while True:
        port = 20000 + secrets.randbelow(10000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _command_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return []


def _living(run: Run) -> list[str]:
    """Actors that serve now, by the run's own status."""
    actors = json.loads((run.path / "status.json").read_text())["actors"]
    return [each["actor"] for each in actors if each["phase"] != "starting"]


def _samplers(run: Run) -> set[str]:
    """Workers whose groups the last steps consumed."""
    workers: set[str] = set()
    for file in sorted((run.path / "trajectories").glob("*.arrow"))[-4:-1]:
        with pa.OSFile(str(file)) as source, pa.ipc.open_file(source) as reader:
            workers |= set(reader.read_all()["worker"].to_pylist())
    return workers


def _left(run: Run) -> set[str]:
    return {event["actor"] for event in run.events("worker_left")}


def _scale(run: Run, num_workers: int) -> None:
    ended = treadwheel("scale", run.path, f"rollout_workers={num_workers}")
    assert ended.returncode == 0, ended.stderr


def _drain(nodes: Cluster, node) -> None:
    """What a cloud does before it takes a machine away."""
    why = (
        "--reason",
        "DRAIN_NODE_REASON_PREEMPTION",
        "--reason-message",
        "going",
        "--deadline-remaining-seconds",
        "600",
    )
    ended = run_command("ray", "drain-node", "--address", nodes.address, "--node-id", node.node_id, *why)
    assert ended.returncode == 0, ended.stderr
