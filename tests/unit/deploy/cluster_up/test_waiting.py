"""A wait for nodes: what is said, how often, and how it ends."""

import asyncio

import pytest

from cluster.contracts.config import RunConfig
from cluster.contracts.errors import DeadlineError, WorkerError
from cluster.remote.autoscaler import AutoscalerReport
from cluster.supervision.asked_nodes import plan_asked
from cluster.supervision.placement import ClusterResources, Node
from deploy.cluster_up import waiting
from deploy.cluster_up.waiting import AwaitedNodes
from tests.fakes import ListedEvents
from tests.unit.cluster.simulated_time import simulated

CONFIG = RunConfig.model_validate(
    {
        "model": {"path": "m"},
        "prompts": "file",
        "learner": {"cpus_per_rank": 2},
        "rollout": {"num_workers": 2},
        "elastic": {"spot": "market=spot"},
    }
)


class Group:
    """A placement group that is reserved when it is told so."""

    class id:
        @staticmethod
        def hex() -> str:
            return "c0ffee"

    def __init__(self) -> None:
        self.is_reserved = asyncio.Event()

    async def ready(self) -> None:
        await self.is_reserved.wait()


class World:
    """The nodes that are there, and what the autoscaler says; each is looked at once a millisecond."""

    def __init__(self) -> None:
        self.nodes = [Node(cpus=0)]
        self.report: AutoscalerReport | None = None
        self.error: WorkerError | DeadlineError | None = None
        self.num_looks = 0

    async def newer(self):
        self.num_looks += 1
        if self.error:
            raise self.error
        return ClusterResources(nodes=tuple(self.nodes))

    async def autoscaler(self):
        return self.report


@pytest.fixture
def world(monkeypatch):
    made = World()
    monkeypatch.setattr(waiting, "SharedAnswer", lambda question: made)
    monkeypatch.setattr(waiting, "autoscaler_report", made.autoscaler)
    monkeypatch.setattr(waiting, "_LOOK_S", 0.001)
    return made


def awaited(*, wait_s: float) -> tuple[AwaitedNodes, ListedEvents]:
    events = ListedEvents()
    placement = plan_asked(CONFIG, needs=())
    return AwaitedNodes(placement, elastic=CONFIG.elastic, wait_s=wait_s, events=events), events


def coming(**nodes: int) -> AutoscalerReport:
    return AutoscalerReport(coming=nodes, failed={}, impossible=frozenset(), impossible_sizes=frozenset())


async def looks(world: World, number: int = 3) -> None:
    seen = world.num_looks
    async with asyncio.timeout(120):  # a wait that ended looks no more
        while world.num_looks < seen + number:
            await asyncio.sleep(0.001)


def messages(events: ListedEvents) -> list[str]:
    """Without the seconds in front."""
    assert {event["kind"] for event in events.events} <= {"waiting_for_nodes"}
    return [event["message"].split(": ", 1)[1] for event in events.events]


async def test_what_is_missing_is_said_once_until_it_changes(world):
    nodes, events = awaited(wait_s=600)
    staying, *workers = nodes._placement.groups()
    first, second, third = Group(), Group(), Group()
    world.report = coming(steady=1)
    waits = asyncio.create_task(nodes.reserved(first, staying))
    await looks(world)
    world.nodes.append(Node(cpus=2.25))
    world.report = coming()
    await looks(world)
    first.is_reserved.set()
    await waits
    waits = asyncio.create_task(nodes.reserved(second, workers[0]))
    world.nodes.append(Node(cpus=1, is_spot=True))
    world.report = coming(spot=1)
    await looks(world)
    for group in (second, third):
        group.is_reserved.set()
    await waits
    await nodes.reserved(third, workers[1])
    assert messages(events) == [
        "1 node is there, no room for 4 of 4 seats: 1 learner with 2 CPUs, 1 reward service with 0.25 CPUs, "
        "2 rollout workers with 1 CPUs; the autoscaler brings 1 of 'steady' for 0 s",
        "2 nodes are there, no room for 2 of 4 seats: 2 rollout workers with 1 CPUs; the autoscaler brings none",
        "2 of 4 seats are reserved",
        "3 nodes are there, no room for 1 of 4 seats: 1 rollout worker with 1 CPUs; the autoscaler brings 1 of 'spot' for 0 s",
        "3 of 4 seats are reserved",
        "4 of 4 seats are reserved",
    ]


async def test_a_seat_that_is_reserved_is_not_missing_even_if_its_node_is_not_seen(world):
    nodes, events = awaited(wait_s=600)
    staying, worker, _ = nodes._placement.groups()
    (first := Group()).is_reserved.set()
    await nodes.reserved(first, staying)
    waits = asyncio.create_task(nodes.reserved(Group(), worker))
    await looks(world)
    waits.cancel()
    assert messages(events)[0].startswith("1 node is there, no room for 2 of 4 seats: 2 rollout workers with 1 CPUs")


@simulated
async def test_what_does_not_change_is_said_again_each_minute(world, monkeypatch):
    """However long the nodes have been coming."""
    monkeypatch.setattr(waiting, "_LOOK_S", 1.0)
    world.report = coming(steady=1)
    nodes, events = awaited(wait_s=150)
    with pytest.raises(WorkerError):
        await nodes.reserved(Group(), nodes._placement.groups()[0])
    assert [event["waited_s"] for event in events.events] == [1.0, 61.0, 121.0]
    assert [message.rpartition(" for ")[2] for message in messages(events)] == ["0 s", "60 s", "120 s"]


def test_the_nodes_that_are_there_are_those_that_live_and_those_that_announced_their_end_do_not_stay(monkeypatch):
    living = {"NodeID": "a", "Alive": True, "Resources": {"CPU": 2.0, "GPU": 1.0}, "Labels": {"market": "spot"}}
    nodes = [living, living | {"NodeID": "b", "Alive": False}, living | {"NodeID": "c"}]
    monkeypatch.setattr(waiting.ray, "nodes", lambda: nodes)
    monkeypatch.setattr(waiting, "announced_ends", lambda: {"c": 0})
    there = waiting.available(CONFIG.elastic)
    staying = Node(cpus=2.0, gpus=1.0, is_spot=True)
    assert there.nodes == (staying, Node(cpus=2.0, gpus=1.0, is_spot=True, is_leaving=True))
    assert there.staying.nodes == (staying,)


async def test_a_node_that_goes_away_has_no_room_and_is_named(world, monkeypatch):
    async def draining():
        return {"1a2b3c4d5e6f": None}

    monkeypatch.setattr(waiting, "draining_nodes", draining)
    world.nodes.append(Node(cpus=100, is_leaving=True))
    nodes, _ = awaited(wait_s=0.05)
    with pytest.raises(
        WorkerError, match=r"1 node is there, no room for 4 of 4 seats: .*; node 1a2b3c4d goes away; start"
    ):
        await nodes.reserved(Group(), nodes._placement.groups()[0])


async def test_a_run_whose_nodes_are_there_says_nothing(world):
    nodes, events = awaited(wait_s=600)
    group = Group()
    group.is_reserved.set()
    await nodes.reserved(group, nodes._placement.groups()[0])
    assert events.events == [] and world.num_looks == 0


async def test_the_end_of_the_time_says_what_is_missing_and_the_way_out(world):
    nodes, _ = awaited(wait_s=0.05)
    world.report = AutoscalerReport(
        coming={}, failed={}, impossible=frozenset({"c0ffee"}), impossible_sizes=frozenset()
    )
    with pytest.raises(WorkerError) as caught:
        await nodes.reserved(Group(), nodes._placement.groups()[0])
    told = str(caught.value)
    assert told.startswith("elastic.wait_for_nodes_s=0.05 is over: 1 node is there, no room for 4 of 4 seats")
    assert "it has no nodes for these seats" in told and told.endswith("wait longer, or ask for less")


async def test_a_head_node_that_does_not_answer_is_said_and_asked_again(world):
    nodes, events = awaited(wait_s=600)
    group = Group()
    world.error = DeadlineError("Ray's head node did not finish 'describe nodes' within 30 s")
    waits = asyncio.create_task(nodes.reserved(group, nodes._placement.groups()[0]))
    await looks(world)
    group.is_reserved.set()
    await waits
    assert messages(events)[0].startswith("Ray's head node does not say what is missing: Ray's head node did not")


async def test_a_wait_that_is_given_up_leaves_no_task_behind(world):
    nodes, _ = awaited(wait_s=600)
    waits = asyncio.create_task(nodes.reserved(Group(), nodes._placement.groups()[0]))
    await looks(world, 1)
    waits.cancel()
    await asyncio.wait({waits})
    assert waits.cancelled()
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}
