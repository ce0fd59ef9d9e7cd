"""What a node takes with it is lost by name, and its seats are found elsewhere. Several local Ray nodes, no machine but this one."""

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group, remove_placement_group

from cluster.contracts.errors import LostError, WorkerError
from cluster.remote import ActorSpec, RemoteActor
from cluster.supervision import ActorKind

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
