"""Where an actor starts when the seat that it has in its placement group is lost, and what the driver holds of what one makes."""

import asyncio
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.contracts.errors import DeadlineError
from cluster.contracts.types import ActorKind, Refusal
from cluster.remote import actor as actor_module
from cluster.remote.actor import ActorSpec, RemoteActor
from cluster.remote.nodes import Seat
from tests.fakes import group_summary


class Seats:
    """A group's seats as Ray shows them, and what was asked of Ray; nothing starts in a lost seat."""

    def __init__(self, *, lost_after: int) -> None:
        """Each seat is lost from question number `lost_after` on."""
        self.num_asked = 0
        self.spawned: list[dict[str, Any]] = []
        self.may_start = asyncio.Event()
        self.error: Exception | None = None
        """In place of every answer."""
        self._lost_after = lost_after

    async def is_lost(self, seat: Seat) -> bool:
        self.num_asked += 1
        if self.error:
            raise self.error
        return self.num_asked > self._lost_after

    async def spawn(self, spec: ActorSpec, *, deadline_s: float, **options: Any) -> RemoteActor:
        self.spawned.append(options)
        if "scheduling_strategy" in options:
            await self.may_start.wait()
        return RemoteActor(spec, None, 1, "node-1")


@pytest.fixture
def seats(monkeypatch):
    def make(*, lost_after: int) -> Seats:
        made = Seats(lost_after=lost_after)
        monkeypatch.setattr(actor_module, "is_seat_lost", made.is_lost)
        monkeypatch.setattr(actor_module, "_SEAT_CHECK_S", 0.001)
        monkeypatch.setattr(RemoteActor, "_spawn", made.spawn)
        return made

    return make


def spawning(**options: Any) -> asyncio.Task[RemoteActor]:
    spec = ActorSpec(name="a", kind=ActorKind.LEARNER, factory="f:f", arguments={}, num_cpus=0.5, bundle=0, **options)
    return asyncio.create_task(RemoteActor.spawn(spec, seat=Seat(object(), 0), deadline_s=10))


@pytest.mark.parametrize("lost_after", [0, 3])
async def test_an_actor_without_a_gpu_leaves_a_lost_seat_and_asks_no_cpus_elsewhere(seats, lost_after):
    found = seats(lost_after=lost_after)
    await asyncio.wait_for(spawning(num_gpus=0), 120)
    *in_seat, elsewhere = found.spawned
    assert elsewhere == {"num_cpus": 0.0}
    assert [asked["num_cpus"] for asked in in_seat] == ([0.5] if lost_after else []), "a seat that is lost is not tried"


@pytest.mark.parametrize("options", [{"num_gpus": 1}, {"keeps_to_seat": True}])
async def test_an_actor_that_keeps_to_its_lost_seat_waits_there_for_the_replacement(seats, options):
    """Seen before: it left, to wait for a GPU that the group held; or it started on the head, of which it asked nothing."""
    found = seats(lost_after=0)
    waiting = spawning(**options)
    for _ in range(10):
        await asyncio.sleep(0)
    assert not waiting.done()
    found.may_start.set()
    await asyncio.wait_for(waiting, 120)
    assert len(found.spawned) == 1 and "scheduling_strategy" in found.spawned[0]


async def test_an_actor_starts_though_rays_head_node_does_not_say_whether_its_seat_is_lost(seats):
    """Seen in review: its silence was no failure of the actor's, and ended the run."""
    found = seats(lost_after=1000)
    found.error = DeadlineError("Ray's head node did not finish 'describe nodes' within 30 s", actor="Ray's head node")
    starting = spawning(num_gpus=0)
    while found.num_asked < 3 and not starting.done():
        await asyncio.sleep(0.001)
    found.may_start.set()
    await asyncio.wait_for(starting, 120)
    assert len(found.spawned) == 1 and "scheduling_strategy" in found.spawned[0]


async def test_an_actor_starts_in_a_seat_that_is_there(seats):
    found = seats(lost_after=1000)
    found.may_start.set()
    await asyncio.wait_for(spawning(num_gpus=0), 120)
    assert len(found.spawned) == 1 and "scheduling_strategy" in found.spawned[0]


@pytest.mark.parametrize("is_seated", [True, False])
async def test_an_actor_without_its_seat_stays_off_the_nodes_that_it_is_kept_from(seats, is_seated):
    found = seats(lost_after=0)
    spec = ActorSpec(name="a", kind=ActorKind.LEARNER, factory="f:f", arguments={}, node_labels={"market": "!spot"})
    await RemoteActor.spawn(spec, seat=Seat(object(), 0) if is_seated else None, deadline_s=10)
    assert found.spawned == [{"num_cpus": 0.0, "label_selector": {"market": "!spot"}}]


async def test_a_batch_that_was_taken_is_held_no_longer_while_the_next_one_is_waited_for():
    """What is held takes room in the object store."""

    class Ref:
        """A batch's."""

    refs, is_asked = list[weakref.ref[Ref]](), asyncio.Event()

    def batch() -> Ref:
        refs.append(weakref.ref(made := Ref()))
        return made

    async def told() -> Any:
        return [group_summary(0), refusal, group_summary(2)], 7

    async def never() -> Any:
        is_asked.set()
        await asyncio.Event().wait()

    def method(*answers: Any) -> Any:
        calls = iter(answers)
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *_: next(calls)()))

    refusal = Refusal(group_id="1", prompt_id="p1", reason="too long")
    handle = SimpleNamespace(
        first_batches=method(lambda: [batch(), batch(), batch(), told()]),
        next_batches=method(lambda: [batch(), never()]),
    )
    spec = ActorSpec(name="a", kind=ActorKind.ROLLOUT_WORKER, factory="f:f", arguments={})
    came: list[bool] = []

    async def take() -> None:
        stream = RemoteActor(spec, handle, 1, "node-1").stream_batches("generate", num_items=4, deadline_s=60)
        async for _, ref in stream:
            came.append(ref is not None)
            del ref

    taking = asyncio.create_task(take())
    await asyncio.wait_for(is_asked.wait(), 120)
    taking.cancel()
    assert came == [True, False, True] and [ref() for ref in refs[:3]] == [None] * 3
