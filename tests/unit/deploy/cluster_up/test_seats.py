"""A seat that a worker leaves is taken by the next one that joins; the placement group holds its resources all the while."""

from dataclasses import replace

import pytest

from cluster.contracts.types import ActorKind
from cluster.remote.actor import RemoteActor
from deploy.cluster_up.seats import Seats
from tests.fakes import actor_spec


@pytest.fixture
def started(monkeypatch):
    """(name, bundle, CPUs) of each actor that was started."""
    asked = []

    async def start(spec, *, placement_group, deadline_s):
        asked.append((spec.name, spec.bundle, spec.num_cpus))

    monkeypatch.setattr(RemoteActor, "start", start)
    return asked


async def test_the_next_worker_that_joins_takes_the_seat_of_one_that_left_and_keeps_it(started):
    seats = Seats(None, start_s=10)
    seats.vacate(replace(actor_spec("rollout-1"), bundle=4, num_cpus=0.4))
    joining = [replace(actor_spec(f"rollout-{number}"), num_cpus=1.0) for number in (8, 9)]
    for spec in (*joining, joining[0]):
        await seats.start(spec)
    assert started == [("rollout-8", 4, 0.4), ("rollout-9", None, 1.0), ("rollout-8", 4, 0.4)]
    seats.vacate(joining[0])
    await seats.start(joining[1])
    assert started[-1] == ("rollout-9", 4, 0.4), "it waited outside, and its next try is inside"


async def test_other_actors_leave_vacant_seats_alone(started):
    seats = Seats(None, start_s=10)
    seats.vacate(replace(actor_spec("rollout-1"), bundle=4))
    await seats.start(actor_spec("recorder", ActorKind.RECORDER))
    assert started == [("recorder", None, 0.0)]
