"""Actors on Ray's own nodes: what they make stays there until it is asked for, and what is lost, unfinished or too much is said by name."""

import asyncio
import collections
import contextlib
import functools
import itertools
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from cluster.contracts.errors import DataError, FailureKind, LostError, UnreachableError, WorkerError
from cluster.contracts.types import ActorKind, Refusal
from cluster.remote import actor as actor_module
from cluster.remote.actor import ActorSpec, RemoteActor
from cluster.remote.nodes import Seat
from cluster.supervision.placement import plan
from deploy.cluster_up.seats import Seats, seats
from deploy.cluster_up.waiting import available
from tests.fakes import ListedEvents, run_config
from tests.integration.ray_nodes import SYSTEM, end, ray_nodes
from tests.integration.waiting import until
from tests.unit.actors.batches import batch_of

pytestmark = [pytest.mark.ray, pytest.mark.own_process(together=True), pytest.mark.timeout(1800)]
PATIENCE_S = 500
_MIB = 1024**2
_STORE = {"object_store_memory": 100 * _MIB}
_FULL_DISK = {"automatic_object_spilling_enabled": False, "local_fs_capacity_threshold": 1e-6}
"""A full store spills to disk, which costs speed and no more: here the disk counts as full too."""


REFUSED = Refusal(group_id="00000001", prompt_id="p1", reason="too long")


class Maker:
    """A plain object for an actor: makes things large enough to stay where they are made."""

    async def batches(self, count: int) -> AsyncIterator[pa.RecordBatch]:
        for _ in range(count):
            yield batch_of(["x" * _MIB])

    async def batch_then_death(self, has_arrived: str) -> AsyncIterator[pa.RecordBatch]:
        yield batch_of(["x" * _MIB])
        yield REFUSED
        while not Path(has_arrived).exists():
            await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    def refuse(self) -> None:
        raise DataError("prompt 'p1' is empty", prompt_id="p1")

    def is_seated(self) -> bool:
        return ray.util.get_current_placement_group() is not None

    def gpus(self) -> list[int]:
        return [int(gpu) for gpu in ray.get_gpu_ids()]

    def batch(self) -> tuple[pa.RecordBatch, str]:
        return batch_of(["x"]), "of one"

    def num_rows(self, batch: pa.RecordBatch) -> int:
        return batch.num_rows

    def buckets(self, count: int, size_bytes: int = _MIB) -> list[np.ndarray]:
        return [np.zeros(size_bytes, dtype=np.uint8) for _ in range(count)]

    def bucket_then_error(self) -> Iterator[np.ndarray]:
        yield np.zeros(_MIB, dtype=np.uint8)
        raise ValueError("no more")


async def start(name: str = "w", **spec: Any) -> RemoteActor:
    group = spec.pop("placement_group", None)
    seats = {index: Seat(group, index) for index in range(2)}
    return await Seats(seats, start_s=PATIENCE_S, events=ListedEvents()).start(a_maker(name, **spec))


def a_maker(name: str, **spec: Any) -> ActorSpec:
    defaults = {"kind": ActorKind.ROLLOUT_WORKER, "arguments": {}, "num_cpus": 0.5}
    return ActorSpec(name=name, factory="tests.integration.test_remote_actor:Maker", **defaults | spec)


@contextlib.contextmanager
def connected(**head: Any) -> Iterator[Cluster]:
    """To the head of a cluster that nodes can join."""
    with ray_nodes(**head) as cluster:
        ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
        try:
            yield cluster
        finally:
            ray.shutdown()


Entered = Callable[[], contextlib.AbstractContextManager[Cluster]]


@pytest.fixture(scope="module")
def head() -> Iterator[Entered]:
    """Of one cluster for all tests: one CPU, no other node. It starts when it is first entered: not in the process that looks on."""
    with contextlib.ExitStack() as stack:
        connect = functools.cache(
            lambda: stack.enter_context(connected(num_cpus=1, _system_config=SYSTEM | _FULL_DISK, **_STORE))
        )

        @contextlib.contextmanager
        def entered() -> Iterator[Cluster]:
            cluster = connect()
            try:
                yield cluster
            finally:
                for name in ray.util.list_named_actors():
                    with contextlib.suppress(ValueError):  # it ended at this moment
                        ray.kill(ray.get_actor(name))
                for node in [*cluster.worker_nodes]:
                    end(cluster, node)
                until(lambda: ray.cluster_resources().get("CPU") == ray.available_resources().get("CPU") == 1)

        yield entered


@contextlib.contextmanager
def reserved(*bundles: dict[str, float]) -> Iterator[PlacementGroup]:
    group = placement_group([*bundles])
    try:
        ray.get(group.ready(), timeout=PATIENCE_S)
        yield group
    finally:
        remove_placement_group(group)


def is_here(object_ref: ray.ObjectRef) -> bool:
    (found,) = ray.experimental.get_object_locations([object_ref]).values()
    assert found["node_ids"], "it is somewhere"
    return ray.get_runtime_context().get_node_id() in found["node_ids"]


async def is_missed(node: Any) -> None:
    """Returns when Ray knows that the node is dead."""
    while any(each["Alive"] and each["NodeID"] == node.node_id for each in ray.nodes()):
        await asyncio.sleep(0.1)


async def test_batches_and_buckets_never_come_to_the_drivers_node_and_a_short_stream_keeps_what_came(
    head: Entered, tmp_path: Path
):
    with head() as cluster, contextlib.ExitStack() as stack:
        cluster.add_node(num_cpus=1, resources={"far": 1}, **_STORE)
        actor = await start(bundle=0, placement_group=stack.enter_context(reserved({"CPU": 0.5, "far": 0.1})))
        found = [
            (summary, object_ref)
            async for summary, object_ref in actor.stream_batches("batches", 2, num_items=2, deadline_s=PATIENCE_S)
        ]
        assert [summary.num_trajectories for summary, _ in found] == [1, 1]
        buckets = await actor.call_for_object_refs("buckets", 3, deadline_s=PATIENCE_S)
        assert len(buckets) == 3
        assert not any(is_here(object_ref) for object_ref in [*(object_ref for _, object_ref in found), *buckets])
        assert (await buckets[0]).nbytes == _MIB and is_here(buckets[0]), "only the one that asks gets it"

        with pytest.raises(WorkerError, match="no more"):
            await actor.call_for_object_refs("bucket_then_error", deadline_s=PATIENCE_S)
        with pytest.raises(DataError, match=r"^prompt 'p1' is empty$") as caught:
            await actor.call("refuse", deadline_s=PATIENCE_S)
        assert vars(caught.value) == {"actor": "w", "prompt_id": "p1", "stage": "refuse"}
        has_arrived, arrived = tmp_path / "arrived", []
        dying = actor.stream_batches("batch_then_death", str(has_arrived), num_items=2, deadline_s=PATIENCE_S)
        with pytest.raises(WorkerError, match="w died in 'batch_then_death'") as caught:
            async for summary, ref in dying:
                arrived.append((summary, ref))
                if summary == REFUSED:
                    has_arrived.touch()
        assert arrived[0][0].num_trajectories == 1 and arrived[1:] == [(REFUSED, None)]
        assert (await arrived[0][1]).num_rows == 1, "the driver owns it: it outlives its maker"
        assert (type(caught.value), caught.value.kind, caught.value.actor) == (WorkerError, FailureKind.DEATH, "w")


async def test_what_a_node_held_is_lost_by_name_and_its_seats_are_found_elsewhere(head: Entered):
    with head() as cluster, contextlib.ExitStack() as stack:
        far = cluster.add_node(num_cpus=1, resources={"far": 1})
        here = {"CPU": 0.5, "node:__internal_head__": 0.1}
        seats = stack.enter_context(reserved({"CPU": 0.5, "far": 0.1}, here))
        maker = await start("maker", bundle=0, placement_group=seats)
        taker = await start("taker", bundle=1, placement_group=seats)
        assert maker.node_id == far.node_id != taker.node_id
        (made,), told = await maker.call_for_batches("batch", num_batches=1, deadline_s=PATIENCE_S)
        assert told == "of one"
        end(cluster, far)
        for _ in ("Ray misses it", "Ray knows that the node is dead"):
            with pytest.raises(UnreachableError, match="maker died in 'batch'"):
                await maker.call("batch", deadline_s=PATIENCE_S)
            await is_missed(far)
        with pytest.raises(LostError, match="taker, 'num_rows'"):
            await taker.call("num_rows", made, deadline_s=PATIENCE_S)
        again = await start("maker", bundle=0, placement_group=seats)
        assert again.node_id == taker.node_id


async def test_an_actor_is_the_next_generation_that_no_living_one_is(head: Entered, monkeypatch: pytest.MonkeyPatch):
    with head():
        first = await start(run="tuesday", num_cpus=0.1)
        await first.kill()
        second = await start(run="tuesday", num_cpus=0.1)
        assert ray.util.list_named_actors() == ["tuesday/w#2"]
        # A driver of another run of this name, or of this one after a driver that is lost and lives, counts from the first.
        monkeypatch.setattr(actor_module, "_GENERATIONS", collections.defaultdict(lambda: itertools.count(1)))
        others = [await start(run="tuesday", num_cpus=0.1) for _ in range(2)]
        assert sorted(ray.util.list_named_actors()) == ["tuesday/w#1", "tuesday/w#2", "tuesday/w#3"]
        assert len({each.pid for each in (second, *others)}) == 3


async def test_an_actor_with_a_gpu_waits_for_the_replacement_of_its_seat_inside_its_placement_group(head: Entered):
    """Seen before: it waited outside, where it took a GPU from the group or lost it to the group. Ray takes our word for GPUs."""
    with head() as cluster, contextlib.ExitStack() as stack:
        first = cluster.add_node(num_cpus=1, num_gpus=2)
        seats = stack.enter_context(reserved(*[{"CPU": 0.5, "GPU": 1}] * 2))
        learner, worker = [await start(f"a{seat}", num_gpus=1, bundle=seat, placement_group=seats) for seat in (0, 1)]
        assert learner.node_id == worker.node_id == first.node_id
        end(cluster, first)
        while ray.cluster_resources().get("GPU"):  # the head does not know yet that the node is gone
            await asyncio.sleep(0.1)
        starting = [
            asyncio.create_task(start(f"a{seat}", num_gpus=1, bundle=seat, placement_group=seats)) for seat in (0, 1)
        ]
        second = cluster.add_node(num_cpus=1, num_gpus=2)
        again = await asyncio.wait_for(asyncio.gather(*starting), PATIENCE_S)
        assert [actor.node_id for actor in again] == [second.node_id] * 2
        assert [await actor.call("is_seated", deadline_s=PATIENCE_S) for actor in again] == [True, True]


async def test_an_actor_waits_for_a_node_beyond_the_deadline_of_its_start_and_knows_the_labels_of_the_one_that_comes(
    head: Entered,
):
    events = ListedEvents()
    with head() as cluster:
        starting = asyncio.create_task(Seats({}, start_s=3, events=events).spawn(a_maker("far", num_cpus=2)))
        async with asyncio.timeout(PATIENCE_S):
            while not events.events:
                await asyncio.sleep(0.1)
        assert not starting.done() and "waits for a node with 2 CPUs and 0 GPUs free" in events.events[0]["message"]
        node = cluster.add_node(num_cpus=2, labels={"ray.io/market-type": "spot"})
        actor = await asyncio.wait_for(starting, PATIENCE_S)
        assert (actor.node_id, actor.node_labels["ray.io/market-type"]) == (node.node_id, "spot")


async def _fits(actor: RemoteActor, num_bytes: int) -> bool:
    try:
        return bool(await actor.call_for_object_refs("buckets", 1, num_bytes, deadline_s=PATIENCE_S))
    except WorkerError:
        return False


async def test_a_full_object_store_is_a_clear_error_and_no_hang(head: Entered):
    with head():
        actor = await start("rollout-0")
        kept = await actor.call_for_object_refs("buckets", 1, 60 * _MIB, deadline_s=PATIENCE_S)
        with pytest.raises(WorkerError, match=r"ObjectStoreFullError|OutOfDiskError"):
            await actor.call_for_object_refs("buckets", 1, 60 * _MIB, deadline_s=PATIENCE_S)
        del kept  # the next one fits again, once Ray has heard of it
        async with asyncio.timeout(PATIENCE_S):
            while not await _fits(actor, 60 * _MIB):
                await asyncio.sleep(0.1)


async def test_a_rank_and_the_worker_beside_it_have_the_same_gpu(head: Entered):
    """GPUs that Ray believes in: it gives a bundle certain ones, and the bundle's actors no others."""
    beside = {"gpus_per_worker": 0.5, "num_workers": 3, "colocated": True, "cpus_per_worker": 0.1}
    config = run_config(learner={"num_ranks": 3, "gpus_per_rank": 0.5, "cpus_per_rank": 0.1}, rollout=beside)
    with head() as cluster:
        cluster.add_node(num_cpus=4, num_gpus=3, **_STORE)
        placement = plan(config, available(config.elastic), needs=())
        async with seats(placement, start_s=PATIENCE_S, events=ListedEvents()) as taken:
            gpus: dict[str, list[list[int]]] = {}
            for number, bundle in enumerate(placement.bundles):
                needs = {"num_cpus": bundle.cpus, "num_gpus": bundle.gpus}
                actor = await taken.start(a_maker(bundle.name, kind=bundle.kind, bundle=number, **needs))
                gpus.setdefault(bundle.kind, []).append(await actor.call("gpus", deadline_s=PATIENCE_S))
    assert gpus[ActorKind.LEARNER] == gpus[ActorKind.ROLLOUT_WORKER]
    assert sorted(gpus[ActorKind.LEARNER]) == [[0], [1], [2]]
