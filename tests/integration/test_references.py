"""What actors make stays on their node until somebody needs it: the driver passes references on and never fetches."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator

import numpy as np
import pyarrow as pa
import pytest
import ray
from ray.cluster_utils import Cluster

from cluster.contracts.errors import WorkerError
from cluster.contracts.types import ActorKind
from cluster.remote.actor import ActorSpec, RemoteActor
from tests.unit.actors.batches import batch_of

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]
_MIB = 1024**2


class Maker:
    """Takes a moment for each thing it makes, as sampling and publishing do."""

    async def batches(self, count: int) -> AsyncIterator[pa.RecordBatch]:
        for _ in range(count):
            await asyncio.sleep(0.2)
            yield batch_of(["x" * _MIB])

    async def batch_then_death(self) -> AsyncIterator[pa.RecordBatch]:
        yield batch_of(["x" * _MIB])
        await asyncio.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)

    def buckets(self, count: int) -> list[np.ndarray]:
        return [np.zeros(_MIB, dtype=np.uint8) for _ in range(count)]

    def bucket_then_error(self) -> Iterator[np.ndarray]:
        yield np.zeros(_MIB, dtype=np.uint8)
        raise ValueError("no more")


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    """The driver's node, and another one for actors."""
    memory = {"object_store_memory": 100 * _MIB}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **memory})
    cluster.add_node(num_cpus=2, **memory)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    yield cluster
    ray.shutdown()
    cluster.shutdown()


async def maker() -> RemoteActor:
    factory = "tests.integration.test_references:Maker"
    spec = ActorSpec(name="w", kind=ActorKind.ROLLOUT_WORKER, factory=factory, arguments={}, num_cpus=1)
    return await RemoteActor.start(spec, deadline_s=120)


def is_here(reference: ray.ObjectRef) -> bool:
    (found,) = ray.experimental.get_object_locations([reference]).values()
    assert found["node_ids"], "it is somewhere"
    return ray.get_runtime_context().get_node_id() in found["node_ids"]


async def test_batches_and_buckets_never_come_to_the_drivers_node(nodes):
    actor = await maker()
    found = [(summary, reference) async for summary, reference in actor.stream_batches("batches", 2, deadline_s=60)]
    assert [summary.num_trajectories for summary, _ in found] == [1, 1]
    buckets = await actor.call_for_references("buckets", 3, deadline_s=60)
    assert len(buckets) == 3
    assert not any(is_here(reference) for reference in [*(reference for _, reference in found), *buckets])
    assert (await buckets[0]).nbytes == _MIB and is_here(buckets[0]), "only who asks gets it"
    await actor.kill()


async def test_a_stream_that_is_cut_short_says_so_and_keeps_what_came_before(nodes):
    actor = await maker()
    with pytest.raises(WorkerError, match="no more"):
        await actor.call_for_references("bucket_then_error", deadline_s=60)
    found = []
    with pytest.raises(WorkerError, match="w died in 'batch_then_death'"):
        async for summary, _ in actor.stream_batches("batch_then_death", deadline_s=60):
            found.append(summary)
    assert len(found) == 1
