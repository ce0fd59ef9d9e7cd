"""A seat that a worker leaves is taken by the next one that joins; the placement group holds its resources all the while."""

import asyncio
from dataclasses import replace

import pytest

from cluster.contracts.errors import ConfigError
from cluster.contracts.types import ActorKind
from cluster.remote.actor import RemoteActor
from deploy.cluster_up.seats import Seats
from tests.fakes import actor_spec


class Ray:
    """Starts an actor in a seat at once, and outside once there is room."""

    def __init__(self) -> None:
        self.asked = []
        """(name, bundle, CPUs) of each actor that was asked for."""
        self.ended = []
        """Names of actors whose process was ended."""
        self.has_room = asyncio.Event()
        self.build_error = None

    async def spawn(self, spec, *, placement_group, deadline_s):
        self.asked.append((spec.name, spec.bundle, spec.num_cpus))
        if spec.bundle is None and spec.kind is ActorKind.ROLLOUT_WORKER:
            await self.has_room.wait()
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
    return made


@pytest.fixture
def seats(ray):
    return Seats(None, start_s=10)


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


async def test_a_worker_that_waits_for_a_node_takes_the_seat_that_is_vacated_meanwhile(ray, seats):
    """Seen before: it waited the rest of its deadline for a GPU that the group held."""
    waiting = asyncio.create_task(seats.start(EIGHTH))
    await until_it_waits(ray)
    seats.vacate(SEATED)
    actor = await waiting
    assert ray.asked == [("rollout-8", None, 1.0), ("rollout-8", 4, 0.4)]
    assert actor.spec.bundle == 4
    seats.vacate(EIGHTH)
    await seats.start(NINTH)
    assert ray.asked[-1] == ("rollout-9", 4, 0.4), "it is one seat, handed on"


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


async def test_other_actors_leave_vacant_seats_alone(ray, seats):
    seats.vacate(SEATED)
    await seats.start(actor_spec("recorder", ActorKind.RECORDER))
    assert ray.asked == [("recorder", None, 0.0)]


async def test_a_seat_of_a_reward_service_is_for_the_next_service_and_for_no_worker(ray, seats):
    service = actor_spec("reward-1", ActorKind.REWARD_SERVICE)
    waiting = asyncio.create_task(seats.start(EIGHTH))
    await until_it_waits(ray)
    seats.vacate(replace(service, bundle=6, num_cpus=0.25))
    await seats.start(replace(service, name="reward-2", num_cpus=1.0))
    assert ray.asked == [("rollout-8", None, 1.0), ("reward-2", 6, 0.25)]
    seats.vacate(SEATED)
    assert (await waiting).spec.bundle == 4
