"""Workers leave nodes that go away, and what waits there is copied off, each group once."""

import asyncio

import pytest

from cluster.contracts.errors import LostError
from cluster.contracts.types import Group
from cluster.remote.actor import RemoteActor
from cluster.rollouts.departures import Departures, hand_over_at
from cluster.supervision.supervisor import Supervisor
from tests.fakes import ListedEvents, actor_spec, group_summary, run_config

NOW = 1000.0


class Fleet:
    def __init__(self, *nodes: str) -> None:
        self._workers = [RemoteActor(actor_spec(f"rollout-{i}"), None, i, node) for i, node in enumerate(nodes)]
        self.is_fixed = False
        self.drained: list[str] = []
        self.num_asked = 0

    def workers(self) -> list[RemoteActor]:
        self.num_asked += 1
        return self._workers

    def drain(self, name: str) -> None:
        self.drained.append(name)


class Groups:
    """One object each; group 7 is taken while it is copied."""

    def __init__(self, **pieces: str) -> None:
        self.held = {
            int(name[1:]): Group(pieces=(piece,), summary=group_summary(int(name[1:])))
            for name, piece in pieces.items()
        }

        self.given_up: list[tuple[str, float]] = []

    async def hand_over(self, actor, *, copy, deadline_s):
        self.given_up.append((actor.name, deadline_s))
        return [8, 9]

    def waiting(self) -> dict[int, Group]:
        return self.held

    def move(self, index, copies) -> bool:
        self.held[index] = self.held[index].moved(copies)
        return index != 7


class ScriptedCopier:
    """An object is named for its node; those at `torn` cannot be copied."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, float]] = []
        self.may_copy = asyncio.Event()
        self.may_copy.set()

    async def copy(self, ref, *, deadline_s): ...

    async def copies_of(self, pieces, *, leaving, deadline_s):
        (piece,) = pieces
        self.asked.append((piece, deadline_s))
        await self.may_copy.wait()
        if piece == "torn":
            raise LostError("it went")
        return {piece: f"{piece} at home"} if piece in leaving else {}


@pytest.fixture
async def scene():
    """Two workers, one of them on the node that goes away."""

    class Scene:
        events = ListedEvents()
        fleet = Fleet("stays", "leaves")
        groups = Groups()
        copier = ScriptedCopier()
        now = NOW
        num_looks_at_the_clock = 0

        def clock(self) -> float:
            self.num_looks_at_the_clock += 1
            return self.now

        def departures(self) -> Departures:
            return Departures(
                fleet=self.fleet,
                groups=self.groups,
                supervisor=Supervisor(run_config().supervision, self.events),
                copier=self.copier,
                now=self.clock,
            )

    return Scene()


async def test_a_worker_leaves_its_node_once_and_the_event_says_how_long_the_node_has(scene):
    departures = scene.departures()
    for _ in range(3):
        await departures.leave({"leaves": NOW + 28})
    assert scene.fleet.drained == ["rollout-1"]
    told, failure = scene.events.events
    assert (told["kind"], told["node_id"], told["seconds_left"]) == ("node_leaves", "leaves", 28.0)
    assert told["message"] == "node leaves goes away in 28 s; rollout-1 leaves it"
    assert (failure["actor"], failure["failure"], failure["decision"]) == ("rollout-1", "termination", "drain")
    assert departures.drain_stats() == {
        "rollout/spot_evictions": 1.0,
        "rollout/groups_saved": 0.0,
        "rollout/groups_handed_over": 0.0,
    }
    assert departures.drain_stats()["rollout/spot_evictions"] == 0.0


@pytest.mark.parametrize(("is_fixed", "drained"), [(False, ["rollout-0", "rollout-1"] * 2), (True, [])])
async def test_a_node_that_stays_after_all_is_forgotten_and_may_announce_its_end_again(scene, is_fixed, drained):
    scene.fleet = Fleet("leaves", "leaves")
    scene.fleet.is_fixed = is_fixed
    departures = scene.departures()
    for draining in ({"leaves": None}, {}, {"leaves": None}):
        await departures.leave(draining)
    assert scene.fleet.drained == drained
    assert departures.drain_stats()["rollout/spot_evictions"] == len(drained)
    left_s = [event["seconds_left"] for event in scene.events.events if event["kind"] == "node_leaves"]
    assert left_s == [None, None]


async def test_a_fixed_fleet_keeps_its_workers_and_its_groups_are_saved_all_the_same(scene):
    scene.fleet.is_fixed = True
    scene.groups = Groups(g3="leaves")
    await scene.departures().leave({"leaves": NOW + 28})
    assert scene.fleet.drained == [] and scene.groups.held[3].pieces == ("leaves at home",)


async def test_groups_on_the_node_are_copied_off_once_and_counted(scene):
    scene.groups = Groups(g0="leaves", g1="stays", g2="leaves", g4="torn", g7="leaves")
    departures = scene.departures()
    await departures.leave({"leaves": NOW + 28})
    await departures.leave({"leaves": NOW + 28})
    held = {index: group.pieces[0] for index, group in scene.groups.held.items()}
    assert held == {0: "leaves at home", 1: "stays", 2: "leaves at home", 4: "torn", 7: "leaves at home"}
    (saved,) = [event for event in scene.events.events if event["kind"] == "groups_saved"]
    assert saved["groups"] == [0, 2] and saved["nodes"] == {"leaves": NOW + 28}
    assert departures.drain_stats()["rollout/groups_saved"] == 2.0, "what was taken meanwhile needed no saving"


async def test_a_copy_has_until_the_first_node_ends_and_a_minute_at_most(scene):
    scene.groups = Groups(g0="stays")
    departures = scene.departures()
    for draining in (
        {"leaves": NOW + 28, "idle": None},
        {"leaves": NOW + 600},
        {"idle": None},
        {"leaves": NOW - 5},
        {"leaves": NOW - 5, "later": NOW + 28},
    ):
        await departures.leave(draining)
    assert [seconds for _, seconds in scene.copier.asked] == [28.0, 60.0, 60.0, 1.0, 28.0]


async def test_a_look_costs_no_product_of_nodes_and_groups_or_workers(scene):
    """Seen in review: where the cloud took hundreds of nodes at a time, each look worked out the same seconds for each group anew."""
    scene.groups = Groups(**{f"g{number}": "stays" for number in range(40)})
    await scene.departures().leave({f"node-{number}": NOW + 28 for number in range(30)})
    assert scene.fleet.num_asked == 2
    assert scene.num_looks_at_the_clock <= 2 * 30


async def test_the_next_look_hands_over_what_falls_due_while_a_copy_takes_its_time(scene):
    scene.groups = Groups(g0="leaves")
    scene.copier.may_copy.clear()
    departures = scene.departures()
    first = asyncio.create_task(departures.leave({"leaves": NOW + 30}))
    await asyncio.sleep(0.0)
    scene.now = NOW + 20.5
    await asyncio.wait_for(departures.leave({"leaves": NOW + 30}), timeout=120.0)
    assert scene.groups.given_up == [("rollout-1", 9.5)]
    scene.copier.may_copy.set()
    await first
    assert [piece for piece, _ in scene.copier.asked] == ["leaves"], "one copy of a group at a time"
    assert departures.drain_stats()["rollout/groups_saved"] == 1.0


@pytest.mark.parametrize(("seconds_left", "handed_over_after"), [(120, 110), (30, 20), (20, 10), (8, 4)])
def test_a_worker_goes_on_until_ten_seconds_before_the_end_or_the_middle_of_a_short_notice(
    seconds_left, handed_over_after
):
    assert hand_over_at(NOW + seconds_left, now=NOW) == NOW + handed_over_after


async def test_what_a_worker_cannot_finish_in_time_is_handed_over_once(scene):
    departures = scene.departures()
    for scene.now in (NOW, NOW + 19.9, NOW + 20.5, NOW + 21.5):
        await departures.leave({"leaves": NOW + 30, "another": NOW + 25})
    assert scene.groups.given_up == [("rollout-1", 9.5)]
    (told,) = [event for event in scene.events.events if event["kind"] == "groups_handed_over"]
    assert (told["actor"], told["groups"]) == ("rollout-1", [8, 9])
    assert departures.drain_stats()["rollout/groups_handed_over"] == 2.0


@pytest.mark.parametrize("first", [None, NOW + 3600])
async def test_the_deadline_that_was_announced_last_counts(scene, first):
    """Ray keeps the last announcement of a node: it may be drained, and get the cloud's notice later."""
    departures = scene.departures()
    await departures.leave({"leaves": first})
    for scene.now in (NOW + 10, NOW + 29, NOW + 30, NOW + 31):
        await departures.leave({"leaves": NOW + 40})
    assert scene.groups.given_up == [("rollout-1", 10.0)]
    assert scene.fleet.drained == ["rollout-1"]
    assert [event["deadline"] for event in scene.events.events if event["kind"] == "node_leaves"] == [first, NOW + 40]


@pytest.mark.parametrize(("is_fixed", "deadline"), [(True, NOW + 30), (False, None)])
async def test_a_fixed_fleet_and_one_whose_node_gives_it_time_hand_nothing_over(scene, is_fixed, deadline):
    scene.fleet.is_fixed = is_fixed
    departures = scene.departures()
    for scene.now in (NOW, NOW + 29):
        await departures.leave({"leaves": deadline})
    assert scene.groups.given_up == []
