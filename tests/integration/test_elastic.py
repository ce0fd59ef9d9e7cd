"""Nodes leave and join in mid-run, workers come and go by order and by rule. Several local Ray nodes, no machine but this one."""

import json
from pathlib import Path

import pyarrow as pa
import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group, remove_placement_group

from cluster.contracts.errors import LostError, WorkerError
from cluster.contracts.schema import to_batch
from cluster.remote import ActorSpec, RemoteActor
from cluster.supervision import ActorKind
from tests.integration.commands import Background, treadwheel
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
