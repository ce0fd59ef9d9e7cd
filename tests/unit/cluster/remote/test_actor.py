"""Where an actor starts when the seat that it has in its placement group is lost, what the driver holds of what one makes, and what it
hears of one."""

import asyncio
import itertools
import time
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError

from cluster.contracts.errors import DeadlineError, FailureKind, WorkerError
from cluster.contracts.phases import Phase
from cluster.contracts.types import ActorKind, Progress, Refusal
from cluster.remote import actor as actor_module
from cluster.remote.actor import ActorSpec, RemoteActor, found_no_room
from cluster.remote.nodes import Seat
from tests.fakes import group_summary
from tests.unit.cluster.simulated_time import simulated

SPEC = ActorSpec(name="a", kind=ActorKind.ROLLOUT_WORKER, factory="f:f", arguments={})


class Seats:
    """A group's seats as Ray shows them, and what was asked of Ray; nothing starts in a lost seat."""

    def __init__(self, *, lost_after: int) -> None:
        """Each seat is lost from question number `lost_after` on."""
        self.num_asked = 0
        self.spawned: list[dict[str, Any]] = []
        self.may_start = asyncio.Event()
        self.num_broken_off = 0
        """Starts in a seat that were given up."""
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
            try:
                await self.may_start.wait()
            except asyncio.CancelledError:
                self.num_broken_off += 1
                raise
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
    return asyncio.create_task(RemoteActor.spawn(spec, seat=Seat(object(), 3), deadline_s=10))


@pytest.mark.parametrize("lost_after", [0, 3])
async def test_an_actor_without_a_gpu_leaves_a_lost_seat_and_asks_no_cpus_elsewhere(seats, lost_after):
    found = seats(lost_after=lost_after)
    await asyncio.wait_for(spawning(num_gpus=0), 120)
    *in_seat, elsewhere = found.spawned
    assert elsewhere == {"num_cpus": 0.0}
    assert [asked["num_cpus"] for asked in in_seat] == ([0.5] if lost_after else []), "a seat that is lost is not tried"
    assert found.num_broken_off == len(in_seat), "or it would be there twice"


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
    (asked,) = found.spawned
    assert asked["scheduling_strategy"].placement_group_bundle_index == 3


@pytest.mark.parametrize(("seat", "num_cpus"), [(Seat(object(), 0), 0.0), (None, 0.5)])
async def test_an_actor_without_its_seat_stays_off_the_nodes_that_it_is_kept_from(seats, seat, num_cpus):
    found = seats(lost_after=0)
    labels = {"market": "!spot"}
    spec = ActorSpec(name="a", kind=ActorKind.LEARNER, factory="f:f", arguments={}, num_cpus=0.5, node_labels=labels)
    await RemoteActor.spawn(spec, seat=seat, deadline_s=10)
    assert found.spawned == [{"num_cpus": num_cpus, "label_selector": labels}]


async def test_a_batch_that_was_taken_is_held_no_longer():
    """What is held takes room in the object store. The second of three prompts is refused; the last answer has one batch."""

    class Ref:
        """A batch's."""

    refs = list[weakref.ref[Ref]]()

    def batch() -> Ref:
        refs.append(weakref.ref(made := Ref()))
        return made

    async def told(*found: Any, rest: int | None) -> Any:
        return found, rest

    def method(*answer: Any) -> Any:
        return SimpleNamespace(
            options=lambda **_: SimpleNamespace(
                remote=lambda *_: [batch() for _ in range(3)] + [told(*answer[:-1], rest=answer[-1])]
            )
        )

    handle = SimpleNamespace(
        first_batches=method(
            group_summary(0), Refusal(group_id="1", prompt_id="p1", reason="too long"), group_summary(2), 7
        ),
        next_batches=method(group_summary(3), group_summary(4), group_summary(5), None),
    )
    came: list[bool] = []
    held: list[list[int]] = []
    async for _, ref in RemoteActor(SPEC, handle, 1, "node-1").stream_batches("generate", num_items=6, deadline_s=60):
        came.append(ref is not None)
        del ref
        held.append([number for number, each in enumerate(refs) if each() is not None])
    assert came == [True, False, True, True, True, True]
    assert held == [[2, 3, 4, 5], [2, 3, 4, 5], [3, 4, 5], [4, 5], [5], []]


async def test_an_actor_is_never_restarted_by_ray_and_one_whose_start_is_broken_off_is_ended(monkeypatch):
    """Its process is there and has not said yet where."""
    is_asked, asked, ended = asyncio.Event(), list[Any](), list[Any]()

    async def never() -> Any:
        is_asked.set()
        await asyncio.Event().wait()

    def created(spec: ActorSpec, options: Any) -> Any:
        asked.append(options)
        return handle

    handle = SimpleNamespace(identify=SimpleNamespace(remote=never))
    monkeypatch.setattr(actor_module, "_created", created)
    monkeypatch.setattr(ray, "kill", ended.append)
    starting = asyncio.create_task(RemoteActor.spawn(replace(SPEC, num_cpus=0.5, num_gpus=2.0), deadline_s=None))
    await asyncio.wait_for(is_asked.wait(), 120)
    starting.cancel()
    await asyncio.wait({starting})
    assert asked == [{"num_cpus": 0.5, "num_gpus": 2.0, "max_restarts": 0, "max_task_retries": 0}]
    assert starting.cancelled() and ended == [handle]


@pytest.mark.parametrize(
    ("num_items", "answers", "wanted"),
    [
        (10, [(8, 0), (2, 0), (0, None)], [(9, 8, ("generate",)), (3, 2, (0,)), (2, 1, (0,))]),
        (2, [(2, None)], [(3, 2, ("generate",))]),
    ],
)
async def test_an_answer_has_room_for_the_batches_that_are_still_to_come_and_they_keep_their_order(
    num_items, answers, wanted
):
    """Room for eight at most, and for one at least: the stream's end is an answer of its own. The object after them has the summaries."""
    asked: list[tuple[int, int, tuple[Any, ...]]] = []
    given, numbers = iter(answers), itertools.count()

    async def told(count: int, rest: int | None) -> Any:
        return [group_summary(next(numbers)) for _ in range(count)], rest

    def answer(num_returns: int, most: int, *more: Any) -> Any:
        asked.append((num_returns, most, more))
        return [*["batch"] * most, told(*next(given))]

    method = SimpleNamespace(
        options=lambda *, num_returns: SimpleNamespace(remote=lambda *args: answer(num_returns, *args))
    )
    handle = SimpleNamespace(first_batches=method, next_batches=method)
    stream = RemoteActor(SPEC, handle, 1, "node-1").stream_batches("generate", num_items=num_items, deadline_s=60)
    assert [int(summary.group_id) async for summary, _ in stream] == [*range(num_items)]
    assert asked == wanted


@simulated
@pytest.mark.parametrize(("comes_at", "ended_at"), [(170, 170), (200, 180)])
async def test_a_stream_may_wait_while_its_actor_serves_others(comes_at, ended_at):
    """Seen before: groups that waited for a place of their environment met the deadline of one group, and a healthy worker was replaced.

    Another stream's batches come after 40, 80 and 120 s. The deadline is 60 s."""
    now = asyncio.get_running_loop().time

    async def told(at: float, rest: int | None) -> Any:
        await asyncio.sleep(at - now())
        return [group_summary(int(at))], rest

    async def dead(since: float) -> Any:
        raise ActorDiedError

    given = iter([(40, 0), (comes_at, None), (80, 0), (120, None)])
    method = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *_: ["batch", told(*next(given))]))
    handle = SimpleNamespace(first_batches=method, next_batches=method, tell=SimpleNamespace(remote=dead))
    actor = RemoteActor(SPEC, handle, 1, "node-1")

    async def came(num_items: int) -> list[float]:
        return [now() async for _ in actor.stream_batches("generate", num_items=num_items, deadline_s=60)]

    served, waiting = await asyncio.gather(came(3), came(1), return_exceptions=True)
    assert served == [40, 80, 120] and now() == ended_at
    assert waiting == [170] if ended_at == comes_at else isinstance(waiting, DeadlineError)


def telling(*answers: Any, asked: list[float] | None = None) -> RemoteActor:
    """An actor that gives these answers when it is `asked` for its progress since a time, and none to a call."""
    given = iter(answers)

    async def tell(since: float) -> Any:
        if asked is not None:
            asked.append(since)
        await asyncio.sleep(0)
        if isinstance(answer := next(given), Exception):
            raise answer
        return answer

    async def never(*args: Any) -> Any:
        await asyncio.Event().wait()

    handle = SimpleNamespace(tell=SimpleNamespace(remote=tell), call=SimpleNamespace(remote=never))
    return RemoteActor(SPEC, handle, 1, "node-1")


def phase(name: str, start: float, end: float) -> Phase:
    return Phase(name=name, start=start, end=end)


async def test_phases_that_two_answers_have_in_common_count_once_and_are_drained_once():
    """Both were asked for before the first one came."""
    first = ("busy", (phase("load", 0, 5), phase("sample", 5, 7)))
    second, third = ("idle", (phase("load", 0, 5), phase("sample", 5, 8))), ("busy", (phase("load", 8, 9),))
    asked: list[float] = []
    actor = telling(first, second, third, asked=asked)
    await asyncio.gather(*(actor.progress(deadline_s=60) for _ in range(2)))
    assert actor.last_progress == "idle"
    assert actor.drain_phases() == [phase("load", 0, 5), phase("sample", 5, 7), phase("sample", 7, 8)]
    await actor.progress(deadline_s=60)
    assert actor.drain_phases() == [phase("load", 8, 9)] and asked == [0, 0, 8]


@pytest.mark.parametrize(
    ("answer", "state"),
    [
        (
            (Progress(actor="a", phase="load", policy_version=3, since=0.0, last_progress=40.0, pid=7), ()),
            "it is in phase 'load' at policy version 3, pid 7, last progress 60 s ago",
        ),
        (ActorDiedError(), "it never reported progress"),
    ],
)
@simulated
async def test_a_call_that_is_late_says_what_its_actor_does(answer, state, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 100.0)
    with pytest.raises(DeadlineError, match=f"^a did not finish 'load' within 0 s; {state}$") as caught:
        await telling(answer).call("load", deadline_s=0.0)
    assert (caught.value.actor, caught.value.stage) == ("a", "load")


async def test_a_process_is_killed_on_its_node_though_ray_does_not_end_it_and_its_node_does_not_answer(monkeypatch):
    """Its node kills it only if it is as old as the actor."""
    told, killed = list[Any](), list[tuple[int, str, float]]()

    async def kill_on_node(pid: int, node_id: str, *, known_for_s: float) -> None:
        killed.append((pid, node_id, known_for_s))
        raise DeadlineError("node does not answer")

    def unknown(handle: Any) -> None:
        told.append(handle)
        raise ValueError("no such actor")

    monkeypatch.setattr(ray, "kill", unknown)
    monkeypatch.setattr(actor_module, "kill_on_node", kill_on_node)
    actor = RemoteActor(SPEC, "handle", 7, "node-1")
    began = actor.last_seen
    monkeypatch.setattr(time, "monotonic", lambda: began + 30.0)
    await actor.kill()
    assert told == ["handle"] and killed == [(7, "node-1", pytest.approx(30.0))]


@pytest.mark.parametrize("asks", [False, True])
async def test_each_answer_is_a_sign_of_life(asks, monkeypatch):
    """Else an actor that did not answer once, long ago, would count as silent since then."""

    async def answer(*args: Any) -> Any:
        return "busy", ()

    method = SimpleNamespace(remote=answer)
    actor, now = RemoteActor(SPEC, SimpleNamespace(tell=method, call=method), 7, "node-1"), time.monotonic
    began = actor.last_seen
    monkeypatch.setattr(time, "monotonic", lambda: now() + 30.0)
    await (actor.progress(deadline_s=60) if asks else actor.call("load", deadline_s=60))
    assert actor.last_seen >= began + 30.0


def test_only_a_start_that_is_late_found_no_room():
    assert found_no_room(DeadlineError("late", stage="start"))
    assert not found_no_room(DeadlineError("late", stage="build"))
    assert not found_no_room(WorkerError("died", kind=FailureKind.DEATH, stage="start"))
