"""Timelines without gaps, told as often as it takes."""

import itertools

import pytest

from cluster.contracts.phases import Phase, Timeline, coalesced, cut


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


def phase(name: str, start: float, end: float, step: int | None = None) -> Phase:
    return Phase(name=name, start=start, end=end, step=step)


def test_a_timeline_has_no_gaps_and_goes_on_with_the_same(clock):
    timeline = Timeline("idle", now=clock)
    for at, name, step in ((2, "sampling", 1), (3, "sampling", 1), (5, "sampling", 2), (9, "idle", None)):
        clock.now = at
        timeline.enter(name, step=step)
    clock.now = 10
    assert timeline.after(0.0) == (
        phase("idle", 0, 2),
        phase("sampling", 2, 5, 1),
        phase("sampling", 5, 9, 2),
        phase("idle", 9, 10),
    )
    assert timeline.phase == ("idle", 9)


def test_an_answer_that_was_lost_is_in_the_next_one(clock):
    timeline = Timeline("a", now=clock)
    clock.now = 4
    timeline.enter("b")
    clock.now = 6
    assert timeline.after(3.0) == (phase("a", 3, 4), phase("b", 4, 6))
    assert timeline.after(3.0) == (phase("a", 3, 4), phase("b", 4, 6)), "the first answer never came"
    clock.now = 7
    assert timeline.after(6.0) == (phase("b", 6, 7),)
    assert timeline.after(7.0) == ()


def test_a_clock_that_is_set_back_makes_no_phase_end_before_its_start(clock):
    clock.now = 100
    timeline = Timeline("a", now=clock)
    clock.now = 50
    timeline.enter("b")
    clock.now = 101
    assert timeline.after(0.0) == (phase("b", 100, 101),)


def test_an_object_goes_on_where_its_actor_began(clock):
    host = Timeline("starting", now=clock)
    clock.now = 3
    own = Timeline("idle", now=clock)
    clock.now = 5
    own.enter("sampling")
    own.lead_with(host)
    clock.now = 6
    assert own.after(0.0) == (phase("starting", 0, 3), phase("idle", 3, 5), phase("sampling", 5, 6))


def test_too_many_phases_that_nobody_asks_for_stay_the_same_stretch_in_fewer(clock):
    timeline = Timeline("a", now=clock, most=8)
    for at in range(1, 1001):
        clock.now = at
        timeline.enter("ab"[at % 2])
    kept = timeline.after(0.0)
    assert len(kept) <= 10
    assert [each.start for each in kept[-3:]] == [997, 998, 999], "the newest are as they were"
    assert kept[0].start == 0 and kept[-1].end == 1000
    assert all(one.end == other.start for one, other in itertools.pairwise(kept))


def test_the_shortest_phase_goes_to_the_longer_of_its_neighbours():
    phases = [phase("a", 0, 5), phase("b", 5, 6), phase("c", 6, 8), phase("a", 8, 9)]
    assert coalesced(phases, most=3) == [phase("a", 0, 6), phase("c", 6, 8), phase("a", 8, 9)]
    assert coalesced(phases, most=2) == [phase("a", 0, 6), phase("c", 6, 9)]
    assert coalesced([phase("a", 0, 1), phase("a", 1, 2)], most=9) == [phase("a", 0, 2)]


def test_what_lies_outside_is_cut():
    assert cut([phase("a", 0, 2), phase("b", 2, 4)], start=2, end=3) == (phase("b", 2, 3),)


def test_a_cause_is_the_actors_own_work_unless_its_phase_says_otherwise():
    names = ("sampling", "waiting for rewards", "loading weights", "restarting")
    assert [phase(name, 0, 1).cause for name in names] == ["busy", "rewards", "weights", "restart"]
