"""A seat that a worker leaves is taken by the next one that joins; the placement group holds its resources all the while."""

import asyncio
from dataclasses import replace

import pytest
from ray.exceptions import GetTimeoutError

from cluster.contracts.errors import ConfigError, DeadlineError, WorkerError
from cluster.contracts.types import ActorKind
from cluster.remote.actor import RemoteActor
from cluster.remote.autoscaler import AutoscalerReport
from cluster.remote.nodes import Seat
from cluster.supervision.placement import Bundle, PlacementPlan
from cluster.supervision.tasks import background
from deploy.cluster_up import seats as seats_module
from deploy.cluster_up import waiting
from deploy.cluster_up.seats import Seats
from tests.fakes import ListedEvents, actor_spec
from tests.unit.cluster.simulated_time import simulated


class Ray:
    """Starts an actor in a seat at once, and outside once there is room."""

    def __init__(self) -> None:
        self.asked = []
        """(name, bundle, CPUs) of each actor that was asked for."""
        self.ended = []
        """Names of actors whose process was ended."""
        self.has_room = asyncio.Event()
        self.build_error = None
        self.given_up = []
        """Names of actors that wait for no room any more."""
        self.lost = set()
        """Seats whose node is dead or goes away."""
        self.watched = frozenset()
        """Placement groups whose loss is looked for."""
        self.report = None
        """What the autoscaler says."""
        self.given_back = []
        """Placement groups, each with the number of its seat for a name."""
        self.told = set()
        self.is_away = self.is_deaf = False

    async def autoscaler(self):
        return self.report

    async def is_seat_lost(self, seat):
        if self.is_away:
            raise WorkerError("Ray's head node does not answer")
        return seat.index in self.lost

    def watch(self, groups):
        self.watched = frozenset(groups)
        return self

    async def take(self):
        if self.is_away:
            raise WorkerError("Ray's head node does not answer")
        found = self.lost & self.watched - self.told
        self.told |= found
        return found

    async def give_back(self, group):
        if self.is_deaf:
            self.is_deaf = False
            raise WorkerError("Ray's head node does not answer")
        self.given_back.append(group)

    async def spawn(self, spec, *, seat=None, deadline_s):
        self.asked.append((spec.name, spec.bundle, spec.num_cpus))
        if seat is None and spec.kind is ActorKind.ROLLOUT_WORKER:
            try:
                await self.has_room.wait()
            except asyncio.CancelledError:
                self.given_up.append(spec.name)
                raise
        if seat and seat.index in self.lost:
            await asyncio.sleep(deadline_s)
            raise DeadlineError(f"{spec.name} did not finish 'start'", actor=spec.name, stage="start")
        return Process(spec, self)


class Process(RemoteActor):
    def __init__(self, spec, ray):
        super().__init__(spec, None, 1, "node-1")
        self._ray = ray

    async def build(self, *, deadline_s, **more):
        if self._ray.build_error:
            raise self._ray.build_error

    async def kill(self):
        self._ray.ended.append(self.name)


@pytest.fixture
def ray(monkeypatch):
    made = Ray()
    monkeypatch.setattr(RemoteActor, "spawn", made.spawn)
    monkeypatch.setattr("deploy.cluster_up.seats.is_seat_lost", made.is_seat_lost)
    monkeypatch.setattr("deploy.cluster_up.seats.LostGroups", made.watch)
    monkeypatch.setattr("deploy.cluster_up.seats.give_back", made.give_back)
    monkeypatch.setattr("deploy.cluster_up.waiting.autoscaler_report", made.autoscaler)
    return made


@pytest.fixture
def events() -> ListedEvents:
    return ListedEvents()


@pytest.fixture
def seats(ray, events):
    return Seats({number: Seat(number, number) for number in range(9)}, start_s=10, events=events)


SEATED = replace(actor_spec("rollout-1"), bundle=4, num_cpus=0.4)
EIGHTH, NINTH = (replace(actor_spec(f"rollout-{number}"), num_cpus=1.0) for number in (8, 9))


async def until_it_waits(ray):
    while not ray.asked or ray.asked[-1][1] is not None:
        await asyncio.sleep(0)


async def test_the_next_worker_that_joins_takes_the_seat_of_one_that_left_and_keeps_it(ray, seats):
    ray.has_room.set()
    seats.vacate(SEATED)
    for spec in (EIGHTH, NINTH, EIGHTH):
        await seats.start(spec)
    assert ray.asked == [("rollout-8", 4, 0.4), ("rollout-9", None, 1.0), ("rollout-8", 4, 0.4)]


@simulated
async def test_a_worker_that_waits_for_a_node_takes_the_seat_that_is_vacated_meanwhile(ray, seats):
    """Seen before: it waited the rest of its deadline for a GPU that the group held."""
    waiting = asyncio.create_task(seats.start(EIGHTH))
    await until_it_waits(ray)
    seats.vacate(SEATED)
    actor = await waiting
    assert ray.asked == [("rollout-8", None, 1.0), ("rollout-8", 4, 0.4)]
    assert actor.spec.bundle == 4 and ray.given_up == ["rollout-8"], "it would get a second process"
    seats.vacate(EIGHTH)
    await seats.start(NINTH)
    assert ray.asked[-1] == ("rollout-9", 4, 0.4), "it is one seat, handed on"


@simulated
async def test_a_seat_on_a_node_that_goes_away_is_taken_once_it_is_found_elsewhere(ray, seats):
    """Seen before: the waiting worker was given it at once, and started on the head."""
    ray.lost = {4}
    seats.vacate(SEATED)
    waiting = [asyncio.create_task(seats.start(spec)) for spec in (EIGHTH, NINTH)]
    await asyncio.sleep(60)
    assert ray.asked == [("rollout-8", None, 1.0), ("rollout-9", None, 1.0)]
    ray.lost.clear()
    await asyncio.sleep(60)
    assert ray.asked[2:] in ([("rollout-8", 4, 0.4)], [("rollout-9", 4, 0.4)]), "it is one seat, for one of them"
    assert sum(each.done() for each in waiting) == 1
    ray.has_room.set()
    assert {actor.spec.bundle for actor in await asyncio.gather(*waiting)} == {4, None}


@simulated
async def test_a_head_that_does_not_say_whether_a_vacant_seat_is_there_is_asked_again(ray, seats):
    ray.is_away = True
    seats.vacate(SEATED)
    waiting = asyncio.create_task(seats.start(EIGHTH))
    await asyncio.sleep(60)
    assert ray.asked == [("rollout-8", None, 1.0)] and not waiting.done()
    ray.is_away = False
    assert (await waiting).spec.bundle == 4


@simulated
async def test_a_worker_that_finds_a_node_while_it_looks_at_a_seat_leaves_the_seat(ray, seats, monkeypatch):
    async def slow_answer(seat):
        ray.has_room.set()
        await asyncio.sleep(1)
        return False

    waiting = asyncio.create_task(seats.start(EIGHTH))
    await asyncio.sleep(1)
    monkeypatch.setattr("deploy.cluster_up.seats.is_seat_lost", slow_answer)
    seats.vacate(SEATED)
    assert (await waiting).spec.bundle is None
    await seats.start(NINTH)
    assert ray.asked[-1] == ("rollout-9", 4, 0.4)


async def test_a_worker_that_found_a_node_outside_stays_there(ray, seats):
    ray.has_room.set()
    assert (await seats.start(EIGHTH)).spec.bundle is None
    seats.vacate(SEATED)
    await seats.start(NINTH)
    assert ray.asked[-1] == ("rollout-9", 4, 0.4)


async def test_a_worker_that_is_wanted_no_more_takes_no_seat(ray, seats):
    waiting = asyncio.create_task(seats.start(EIGHTH))
    await until_it_waits(ray)
    waiting.cancel()
    await asyncio.wait({waiting})
    seats.vacate(EIGHTH)
    seats.vacate(SEATED)
    await seats.start(NINTH)
    assert waiting.cancelled() and ray.asked[-1] == ("rollout-9", 4, 0.4)


async def test_an_actor_whose_object_cannot_be_built_is_ended(ray, seats):
    ray.build_error = ConfigError("model.path='org/typo' does not load")
    with pytest.raises(ConfigError, match="typo"):
        await seats.start(SEATED)
    assert ray.ended == ["rollout-1"]


@simulated
async def test_a_seat_whose_node_died_is_given_back_and_its_worker_looks_for_a_node(ray, seats):
    """Seen before: Ray's head took a core, answered late, and a run of minutes took an hour."""
    async with background() as tasks:
        tasks.create_task(seats.give_back_lost([3, 4]))
        ray.lost = {4, 5}
        await asyncio.sleep(5)
        assert ray.given_back == [4], "seat 5 is of a group with others"
        starting = asyncio.create_task(seats.start(SEATED))
        await asyncio.sleep(60)
        assert not starting.done()
        ray.has_room.set()
        assert (await starting).name == "rollout-1"
        seats.vacate(SEATED)
        await seats.start(NINTH)
        assert ray.asked[-1] == ("rollout-9", None, 1.0), "nobody is given what is not there any more"


@simulated
async def test_a_worker_that_waits_for_its_seat_when_it_is_given_back_goes_on_without(ray, events):
    """Ray would leave it waiting. `start_s` is an hour."""
    seats = Seats({4: Seat(4, 4)}, start_s=3600, events=events)
    async with background() as tasks:
        tasks.create_task(seats.give_back_lost([4]))
        ray.is_away, ray.lost = True, {4}
        starting = asyncio.create_task(seats.start(SEATED))
        await asyncio.sleep(5)
        assert not ray.given_back
        ray.is_away, ray.is_deaf = False, True
        ray.has_room.set()
        assert (await starting).name == "rollout-1"
        await asyncio.sleep(5)
        assert ray.given_back == [4], "the head did not answer at first"


@simulated
@pytest.mark.parametrize("is_vacant", [True, False])
async def test_a_seat_that_another_worker_took_is_given_back_too(ray, seats, is_vacant):
    seats.vacate(SEATED)
    if not is_vacant:
        await seats.start(EIGHTH)
    async with background() as tasks:
        tasks.create_task(seats.give_back_lost([3, 4]))
        ray.lost = {4}
        await asyncio.sleep(5)
    ray.has_room.set()
    await seats.start(EIGHTH)
    assert ray.asked[-1] == ("rollout-8", None, 1.0) and ray.given_back == [4]


async def test_other_actors_leave_vacant_seats_alone(ray, seats):
    seats.vacate(SEATED)
    await seats.start(actor_spec("recorder", ActorKind.RECORDER))
    assert ray.asked == [("recorder", None, 0.0)]


@simulated
async def test_a_seat_of_a_reward_service_is_for_the_next_service_and_for_no_worker(ray, seats):
    service = actor_spec("reward-1", ActorKind.REWARD_SERVICE)
    waiting = asyncio.create_task(seats.start(EIGHTH))
    await until_it_waits(ray)
    seats.vacate(replace(service, bundle=6, num_cpus=0.25))
    await seats.start(replace(service, name="reward-2", num_cpus=1.0))
    assert ray.asked == [("rollout-8", None, 1.0), ("reward-2", 6, 0.25)]
    seats.vacate(SEATED)
    assert (await waiting).spec.bundle == 4


@simulated
async def test_a_worker_waits_for_its_node_for_hours_asks_once_and_says_so(ray, seats, events):
    """`start_s` is 10 s."""
    joining = asyncio.create_task(seats.start(EIGHTH))
    await asyncio.sleep(7205)
    assert ray.asked == [("rollout-8", None, 1.0)]
    assert events.kinds() == ["worker_waits"] * 720
    message = "rollout-8 waits for a node with 1 CPUs and 0 GPUs free: none was found in 7200 s; no autoscaler reports"
    assert events.events[-1]["message"].startswith(message)
    ray.has_room.set()
    assert (await joining).name == "rollout-8"


def brings(*sizes, **coming) -> AutoscalerReport:
    """`sizes` are those that it has no nodes for."""
    return AutoscalerReport(coming=coming, failed={}, impossible=frozenset(), impossible_sizes=frozenset(sizes))


def reasons(events) -> list[str]:
    assert {*events.kinds()} == {"worker_waits"}
    return [event["message"].split(" free: ", 1)[1] for event in events.events]


@simulated
async def test_a_worker_that_waits_says_what_the_autoscaler_brings_whenever_that_changes(ray, events):
    seats = Seats({}, start_s=300, events=events)
    ray.report = brings(spot=1)
    joining = asyncio.create_task(seats.start(EIGHTH))
    await asyncio.sleep(45)
    ray.report = brings(spot=2)  # another worker's too
    await asyncio.sleep(60)
    ray.report = brings((1.0, 0.0))
    await asyncio.sleep(200)
    ray.has_room.set()
    await joining
    await asyncio.sleep(60)
    assert reasons(events) == [
        "the autoscaler brings 1 of 'spot' for 0 s",
        "the autoscaler brings none; it has no nodes for rollout-8, by size, by labels or by its limits",
        "none was found in 300 s; the autoscaler brings none; it has no nodes for rollout-8, by size, by labels or by its limits",
    ]


@simulated
async def test_a_worker_whose_node_is_there_says_nothing_of_the_autoscaler(ray, seats, events, monkeypatch):
    """Its process takes long to come up."""

    async def slowly(spec, *, seat=None, deadline_s):
        await asyncio.sleep(100)
        return Process(spec, ray)

    monkeypatch.setattr(RemoteActor, "spawn", slowly)
    ray.report = brings(spot=1)
    await seats.start(SEATED)
    assert events.events == []


@simulated
async def test_the_error_of_a_lost_seat_that_finds_no_node_in_time_has_what_the_autoscaler_says(ray, events):
    """The second attempt is of the same wait."""
    ray.lost, ray.report = {4}, brings(spot=1)
    seats = Seats({4: Seat(None, 4)}, start_s=15, events=events)
    for waited_s in (0, 15):
        with pytest.raises(DeadlineError) as caught:
            await seats.start(SEATED)
        assert caught.value.stage == "start" and caught.value.actor == "rollout-1"
        assert (
            str(caught.value) == f"rollout-1 did not finish 'start'; the autoscaler brings 1 of 'spot' for {waited_s} s"
        )
    assert reasons(events) == ["the autoscaler brings 1 of 'spot' for 0 s"]


@simulated
async def test_the_error_of_an_actor_that_had_a_node_is_its_own(ray, seats, events, monkeypatch):
    """Its process did not come up in time. What the autoscaler says is of nodes."""

    async def slowly(spec, *, seat=None, deadline_s):
        await asyncio.sleep(deadline_s)
        raise DeadlineError("rollout-1 did not finish 'connect'", actor="rollout-1", stage="connect")

    monkeypatch.setattr(RemoteActor, "spawn", slowly)
    ray.lost, ray.report = {4}, brings(spot=1)
    seats = Seats({4: Seat(None, 4)}, start_s=15, events=events)
    with pytest.raises(DeadlineError, match=r"^rollout-1 did not finish 'connect'$"):
        await seats.start(SEATED)


class Group:
    """A placement group, named by the CPUs of its bundles."""

    def __init__(self, resources, *, strategy, bundle_label_selector):
        self.cpus = [bundle["CPU"] for bundle in resources]
        assert len(bundle_label_selector) == len(resources)


async def test_a_head_that_is_away_at_the_end_leaves_the_runs_own_error(monkeypatch, events):
    bundle = Bundle(kind=ActorKind.LEARNER, index=0, cpus=1.0, gpus=0, num_threads=1)
    placement = PlacementPlan(bundles=(bundle,), is_time_shared=False, num_missing_workers=0)

    async def reserved(group, asked): ...

    def away(group):
        raise GetTimeoutError("the head does not answer")

    monkeypatch.setattr(seats_module, "placement_group", Group)
    monkeypatch.setattr(seats_module, "remove_placement_group", away)
    with pytest.raises(WorkerError, match="rollout-1 died"):
        async with seats_module.seats(placement, start_s=1, events=events, reserved=reserved):
            raise WorkerError("rollout-1 died")


@simulated
@pytest.mark.parametrize(
    ("draining", "also"), [({}, ""), ({"1a2b3c4d5e6f": None}, "; node 1a2b3c4d goes away"), (None, "")]
)
async def test_resources_that_do_not_come_free_name_the_nodes_that_go_away(monkeypatch, events, draining, also):
    """None: Ray's head does not answer."""
    bundle = Bundle(kind=ActorKind.LEARNER, index=0, cpus=1.0, gpus=0, num_threads=1)
    placement = PlacementPlan(bundles=(bundle,), is_time_shared=False, num_missing_workers=0)

    class Taken(Group):
        async def ready(self):
            await asyncio.Event().wait()

    async def draining_nodes():
        if draining is None:
            raise DeadlineError("Ray's head node did not finish 'describe nodes' within 30 s")
        return draining

    monkeypatch.setattr(seats_module, "placement_group", Taken)
    monkeypatch.setattr(seats_module, "remove_placement_group", lambda group: None)
    monkeypatch.setattr(waiting, "draining_nodes", draining_nodes)
    told = f"within 60 s; other programs hold its resources{also}: wait longer .supervision.start_s, or --wait-for-nodes 2h., or ask"
    with pytest.raises(WorkerError, match=told):
        async with seats_module.seats(placement, start_s=60, events=events):
            pass
    assert [(event["kind"], event["message"]) for event in events.events] == [
        ("waiting_for_nodes", "waits up to 60 s for the cluster to free [{'CPU': 1.0}]")
    ]


@pytest.mark.parametrize(
    ("spreads", "spot", "groups", "indices", "alone"),
    [
        (False, {}, [[2.0, 1.0, 1.0]], [0, 1, 2], []),
        (True, {}, [[2.0], [1.0, 1.0]], [0, 0, 1], []),
        (False, {"market": "!spot"}, [[2.0], [1.0], [1.0]], [0, 0, 0], [1, 2]),
    ],
)
async def test_groups_are_asked_for_in_two_rounds_and_all_are_given_back_at_the_end(
    monkeypatch, events, spreads, spot, groups, indices, alone
):
    """Those of the workers at once: an autoscaler brings all of their nodes together. A seat that is a group of its own, and not the
    learner's, is given back when its node is lost."""
    log = []
    bundles = [(ActorKind.LEARNER, 2.0), (ActorKind.ROLLOUT_WORKER, 1.0), (ActorKind.ROLLOUT_WORKER, 1.0)]
    placement = PlacementPlan(
        bundles=tuple(Bundle(kind=kind, index=0, cpus=cpus, gpus=0, num_threads=1) for kind, cpus in bundles),
        spreads_workers=spreads,
        is_time_shared=False,
        num_missing_workers=0,
        off_spot=spot,
    )

    def made(*args, **options):
        log.append(("asked", (group := Group(*args, **options)).cpus))
        return group

    async def reserved(group, asked):
        log.append(("reserved", group.cpus))

    async def give_back_lost(self, alone):
        watched.extend(alone)

    watched: list[int] = []
    monkeypatch.setattr(Seats, "give_back_lost", give_back_lost)
    monkeypatch.setattr(seats_module, "placement_group", made)
    monkeypatch.setattr(seats_module, "remove_placement_group", lambda group: log.append(("removed", group.cpus)))
    async with seats_module.seats(placement, start_s=1, events=events, reserved=reserved) as taken:
        assert [taken._seats[seat].index for seat in range(3)] == indices
        await asyncio.sleep(0)  # the task begins
    first, *others = groups
    rounds = [[first], others]
    asked = [(said, group) for each in rounds for said in ("asked", "reserved") for group in each]
    assert log == asked + [("removed", group) for group in groups]
    assert watched == alone
