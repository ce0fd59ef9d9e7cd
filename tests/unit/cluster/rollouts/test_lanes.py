"""What a worker has under way, how long workers sample, and how long they have nothing to."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.contracts.sampling_config import SamplingConfig
from cluster.contracts.types import Prompt, Ticket
from cluster.rollouts.destinations import HeldOutGroups
from cluster.rollouts.lanes import Job, Lane, SamplingClock, by_free_places
from tests.unit.cluster.simulated_time import simulated


def lane(*, busy: bool, serving: bool = True) -> Lane:
    member: Any = SimpleNamespace(is_serving=serving)
    made = Lane(member, max_sequences=8)
    if busy:
        made.under_way = {0: None}  # pyright: ignore[reportAttributeAccessIssue]
    return made


def job(index: int, *, num_extra: int = 0) -> Job:
    ticket = Ticket(
        index=index,
        prompt=Prompt(prompt_id=str(index), text="1 + 1 ="),
        num_trajectories=2,
        num_extra_trajectories=num_extra,
        seed=0,
        policy_version=0,
        sampling=SamplingConfig(max_tokens=1),
    )
    return Job(ticket=ticket, destination=HeldOutGroups(2))


def test_a_lane_tells_its_worker_how_many_groups_are_under_way():
    made = lane(busy=False)
    made.take([job(0), job(1)])
    assert made.member.num_groups == 2
    made.pop(1)
    made.pop(7)
    assert made.member.num_groups == 1


def test_a_call_that_goes_on_does_not_take_its_former_group_from_the_one_that_samples_it_again():
    """The group was lost after it was taken, and came back to the same worker."""
    made, first, other = lane(busy=False), job(0), job(1)
    made.take([first, other])
    made.pop(0)
    made.take([again := first.again()])
    assert made.pop_all([first, other]) == [other] and made.under_way == {0: again}


def test_a_group_takes_places_for_its_surplus_too():
    made = lane(busy=False)
    made.take([job(0), job(1, num_extra=3)])
    assert made.num_free == 8 - 2 - 5


def test_a_job_goes_to_the_lane_with_the_most_free_places():
    """Of 8 places each, 2 and 8 are free: the second lane takes three jobs of 2, and then both have 2."""
    lanes = [lane(busy=False), lane(busy=False)]
    lanes[0].take([job(index) for index in (7, 8, 9)])
    jobs = [job(index) for index in range(6)]  # the last one waits
    dealt = by_free_places(jobs, lanes)
    assert [[each.ticket.index for each in share] for _, share in dealt] == [[3], [0, 1, 2, 4]]
    assert [each for each, _ in dealt] == lanes


@simulated
async def test_idle_time_is_that_of_workers_that_serve_and_have_no_group():
    """Two workers serve for 10 s, and one of them is idle for 4 s: 4 of 20. One that leaves is not asked."""
    clock = SamplingClock()
    await asyncio.sleep(100)  # before anybody serves
    clock.note([lane(busy=True), lane(busy=True)])
    await asyncio.sleep(6)
    clock.note([lane(busy=True), lane(busy=False), lane(busy=True, serving=False)])
    clock.count(50)
    await asyncio.sleep(4)
    num_tokens, seconds, idle_share = clock.drain()
    assert (num_tokens, seconds, idle_share) == (50, pytest.approx(10), pytest.approx(0.2))
    await asyncio.sleep(2)
    assert clock.drain() == (0, pytest.approx(2), pytest.approx(0.5)), "it goes on as it was"
    clock.note([lane(busy=True, serving=False)])
    await asyncio.sleep(3)
    assert clock.drain() == (0, pytest.approx(3), 0.0), "one that leaves samples all the same"


@simulated
async def test_the_clock_stands_during_an_evaluation():
    clock = SamplingClock()
    clock.note([lane(busy=True)])
    await asyncio.sleep(2)
    with clock.standing():
        await asyncio.sleep(100)
        clock.count(50)
    await asyncio.sleep(3)
    assert clock.drain() == (0, pytest.approx(5), 0.0)


@simulated
async def test_workers_that_all_are_idle_do_not_sample():
    clock = SamplingClock()
    clock.note([lane(busy=False)])
    await asyncio.sleep(5)
    assert clock.drain() == (0, 0.0, 1.0)
    clock.note([])
    await asyncio.sleep(5)
    assert clock.drain() == (0, 0.0, 0.0), "nobody serves"
