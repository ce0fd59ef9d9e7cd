"""What a worker or a reward service beyond the plan asks Ray for."""

import pytest

from cluster.contracts.config import RunConfig
from cluster.record.run_directory import RunDirectory
from cluster.remote.actor import ActorSpec
from cluster.supervision.placement import ClusterResources, Node, plan
from deploy.cluster_up.actor_specs import ActorSpecs
from deploy.config.loading import validated


def joining(tmp_path, *, cpus: float, **settings) -> ActorSpec:
    return specs(tmp_path, cpus=cpus, **settings).joining_worker(7)


def specs(tmp_path, *, cpus: float, gpus: float = 0.0, **settings) -> ActorSpecs:
    """Of a run whose actors ask for 4.25 CPUs, on a machine with `cpus`."""
    config: RunConfig = validated(
        {
            "model": {"path": "some/model"},
            "prompts": "file",
            "learner": {"cpus_per_rank": 2},
            "rollout": {"cpus_per_worker": 2},
            **settings,
        }
    )
    placement = plan(config, ClusterResources(nodes=(Node(cpus=cpus, gpus=gpus),)), needs=())
    return ActorSpecs(config, placement, RunDirectory(str(tmp_path)))


def test_a_worker_that_joins_a_roomy_run_asks_for_cpus_of_its_own(tmp_path):
    spec = joining(tmp_path, cpus=8)
    assert (spec.name, spec.bundle, spec.num_cpus) == ("rollout-7", None, 2.0)


def test_a_worker_that_joins_a_run_whose_actors_share_cpus_shares_them_too(tmp_path):
    """Seen before: it waited for 2 CPUs of a machine whose CPUs the run held."""
    spec = joining(tmp_path, cpus=2)
    assert (spec.num_cpus, spec.arguments["num_threads"], spec.env["OMP_NUM_THREADS"]) == (0.0, 2, "2")


@pytest.mark.parametrize("cpus", [2, 8])
def test_a_worker_that_joins_an_elastic_run_waits_for_a_node(tmp_path, cpus):
    assert joining(tmp_path, cpus=cpus, elastic={"max_workers": 8}).num_cpus == 2.0


@pytest.mark.parametrize(
    ("elastic", "keeps"),
    [({}, False), ({"max_workers": 8}, False), ({"spot": "market=spot"}, True), ({"wait_for_nodes_s": 60}, True)],
)
def test_workers_keep_to_their_seats_where_nodes_come_and_go(tmp_path, elastic, keeps):
    made = specs(tmp_path, cpus=8, elastic=elastic)
    assert [each.keeps_to_seat for each in (*made.rollout_workers(), made.joining_worker(7))] == [keeps, keeps]
    assert not any(each.keeps_to_seat for each in (made.recorder(), *made.reward_services()))


@pytest.mark.parametrize(("cpus", "asked"), [(2, 0.0), (8, 0.25)])
def test_a_service_that_joins_has_a_name_of_its_own_and_shares_cpus_as_workers_do(tmp_path, cpus, asked):
    made = specs(tmp_path, cpus=cpus)
    spec = made.joining_service(1)
    assert [each.name for each in made.reward_services()] == ["reward"]
    assert (spec.name, spec.arguments["name"], spec.bundle, spec.num_cpus) == ("reward-1", "reward-1", None, asked)


def test_the_recorder_sits_beside_the_first_rank_and_takes_nothing_of_its_seat(tmp_path):
    """Seen before: without a seat it could be on a worker's node, which then never went away."""
    made = specs(tmp_path, cpus=8)
    assert (made.recorder().bundle, made.recorder().num_cpus) == (0, 0.0)


def test_the_recorder_moves_with_a_first_rank_that_waits_for_a_gpu(tmp_path):
    """Seen in review: it went elsewhere, and the loss of its node with a step's trajectories restarted all ranks."""
    made = specs(tmp_path, cpus=8, gpus=1, learner={"gpus_per_rank": 1})
    assert made.recorder().keeps_to_seat


def test_workers_alone_may_be_on_spot_nodes(tmp_path):
    made = specs(tmp_path, cpus=8, elastic={"spot": "market=spot"})
    steady = [*made.reward_services(), made.recorder(), made.joining_service(1)]
    assert [spec.node_labels for spec in steady] == [{"market": "!spot"}] * 3
    assert [spec.node_labels for spec in (*made.rollout_workers(), made.joining_worker(7))] == [{}] * 2
    assert {spec.run for spec in steady} == {tmp_path.name}
