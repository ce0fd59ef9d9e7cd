"""What Ray's head node is asked about nodes and seats, and how often."""

import asyncio
import signal
import subprocess
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
from ray._private.state import state

from cluster.contracts.errors import DeadlineError, WorkerError
from cluster.contracts.types import ActorKind
from cluster.remote import actor, nodes
from cluster.remote.actor import ActorSpec, RemoteActor


class HeadNode:
    """Seat 0 is on a node that stays, seat 1 on one that goes away, seat 2 on a dead one; seat 3 waits for a node."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.seats = {0: "stays", 1: "leaves", 2: "dead"}
        self.names = ["stays", "leaves", "dead"]

    def table(self, group: object) -> dict[str, object]:
        self.asked.append("seats")
        return {"bundles_to_node_id": self.seats}

    def nodes(self) -> list[dict[str, object]]:
        self.asked.append("nodes")
        return [{"NodeID": name, "Alive": name != "dead"} for name in self.names]

    def draining(self) -> dict[str, int]:
        self.asked.append("draining")
        return {"leaves": 0}


@pytest.fixture
def head(monkeypatch) -> HeadNode:
    """Its answers are good for as long as a test may take."""
    head = HeadNode()
    monkeypatch.setattr(nodes, "_MAX_AGE_S", 3600.0)
    monkeypatch.setattr(nodes, "placement_group_table", head.table)
    monkeypatch.setattr(ray, "nodes", head.nodes)
    monkeypatch.setattr(state, "get_draining_nodes", head.draining)
    return head


async def test_a_seat_is_lost_when_its_node_is_dead_or_goes_away_or_is_not_found_yet(head):
    group = object()
    assert [await nodes.is_seat_lost(nodes.Seat(group, seat)) for seat in range(4)] == [False, True, True, True]
    assert head.asked == ["seats", "nodes", "draining"], "a seat without a node asks for no newer nodes"


async def test_a_node_that_goes_away_says_until_when_or_not(monkeypatch):
    monkeypatch.setattr(state, "get_draining_nodes", lambda: {"spot": 1_030_500, "idle": 0})
    assert await nodes.draining_nodes() == {"spot": 1030.5, "idle": None}


async def test_fifty_actors_that_start_at_the_same_time_ask_each_question_once(head, monkeypatch):
    """Seen before: each one asked all three questions, and again every two seconds."""

    async def spawn(spec: ActorSpec, *, deadline_s: float, **options: object) -> RemoteActor:
        return RemoteActor(spec, None, 1, "stays")

    monkeypatch.setattr(RemoteActor, "_spawn", spawn)
    group = object()
    specs = [
        ActorSpec(name=f"a{number}", kind=ActorKind.LEARNER, factory="f:f", arguments={}, bundle=0)
        for number in range(50)
    ]
    await asyncio.gather(*(RemoteActor.spawn(spec, seat=nodes.Seat(group, 0), deadline_s=10) for spec in specs))
    assert head.asked == ["seats", "nodes", "draining"]


async def test_seats_of_fifty_groups_ask_for_the_nodes_once(head):
    """Seen in review: workers on spot nodes, which are in a group each, asked for all nodes each: hundreds of times hundreds of nodes."""
    looks = (nodes.is_seat_lost(nodes.Seat(object(), number % 3)) for number in range(50))
    assert await asyncio.gather(*looks) == [number % 3 > 0 for number in range(50)]
    assert Counter(head.asked) == {"seats": 50, "nodes": 1, "draining": 1}


async def test_a_seat_on_a_node_that_came_after_the_nodes_were_asked_for_is_not_lost(head):
    assert not await nodes.is_seat_lost(nodes.Seat(object(), 0))
    head.names.append("new")
    head.seats = {0: "new", 1: "stays"}
    looks = (nodes.is_seat_lost(nodes.Seat(object(), number % 2)) for number in range(4))
    assert await asyncio.gather(*looks) == [False] * 4
    assert head.asked.count("nodes") == 2, "once for all that missed it"


async def test_all_that_waited_for_the_nodes_without_theirs_ask_once_more_together(head, monkeypatch):
    def and_then_comes_one() -> list[dict[str, object]]:
        found = head.nodes()
        head.names.append("new")
        return found

    monkeypatch.setattr(ray, "nodes", and_then_comes_one)
    head.seats, group = {0: "new"}, object()
    assert await asyncio.gather(*(nodes.is_seat_lost(nodes.Seat(group, 0)) for _ in range(4))) == [False] * 4
    assert head.asked.count("nodes") == 2


async def test_an_answer_that_is_too_old_is_asked_for_again(head, monkeypatch):
    group = object()
    await nodes.is_seat_lost(nodes.Seat(group, 0))
    monkeypatch.setattr(nodes, "_MAX_AGE_S", -1.0)
    await nodes.is_seat_lost(nodes.Seat(group, 0))
    assert head.asked == ["seats", "nodes", "draining"] * 2


async def test_one_that_gives_up_waiting_does_not_take_the_answer_from_the_others(head):
    group = object()
    first, second = (asyncio.create_task(nodes.is_seat_lost(nodes.Seat(group, 0))) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert await second is False and first.cancelled()
    assert head.asked.count("seats") == 1


async def test_a_head_node_that_does_not_answer_is_an_error_for_each_that_asked(head, monkeypatch):
    def gone(group: object) -> dict[str, object]:
        head.asked.append("seats")
        raise ray.exceptions.RpcError("unavailable")

    monkeypatch.setattr(nodes, "placement_group_table", gone)
    group = object()
    errors = await asyncio.gather(*(nodes.is_seat_lost(nodes.Seat(group, 0)) for _ in range(2)), return_exceptions=True)
    assert [type(error) for error in errors] == [WorkerError] * 2 and head.asked == ["seats"]


async def test_other_work_goes_on_while_rays_head_is_asked_and_no_longer_than_its_deadline(monkeypatch):
    answers = threading.Event()
    asked = nodes.SharedAnswer(lambda: answers.wait(60))
    asyncio.get_running_loop().call_soon(answers.set)
    assert await asked.get()
    answers.clear()
    monkeypatch.setattr(nodes, "_ANSWER_S", 0.0)
    with pytest.raises(DeadlineError, match=r"^Ray's head node did not finish 'describe nodes'"):
        await asked.newer()
    answers.set()


async def test_the_loops_own_threads_are_free_while_rays_head_answers_nobody(monkeypatch):
    """Seen in review: all threads of the loop waited for the head after three minutes, and no record and no checkpoint was written."""
    answers, loop = threading.Event(), asyncio.get_running_loop()

    def created(spec: ActorSpec, options: object) -> object:
        assert answers.wait(60)
        return SimpleNamespace(identify=SimpleNamespace(remote=identity))

    async def identity() -> tuple[int, str]:
        return 7, "stays"

    monkeypatch.setattr(actor, "_created", created)
    spec = ActorSpec(name="a", kind=ActorKind.LEARNER, factory="f:f", arguments={})
    with ThreadPoolExecutor(1) as threads:
        loop.set_default_executor(threads)
        asked = asyncio.create_task(nodes.SharedAnswer(lambda: answers.wait(60)).get())
        spawned = asyncio.create_task(RemoteActor.spawn(spec, deadline_s=None))
        await asyncio.sleep(0)
        await asyncio.to_thread(answers.set)
        assert await asked and (await spawned).pid == 7


async def test_a_question_without_an_answer_is_not_asked_again_and_later_callers_wait_for_its_answer(monkeypatch):
    """Seen in review: each caller that came 3 s later asked again, in one more thread."""
    answers, asked = threading.Event(), list[str]()

    def question() -> int:
        asked.append("nodes")
        assert answers.wait(60)
        return len(asked)

    shared = nodes.SharedAnswer(question)
    monkeypatch.setattr(nodes, "_MAX_AGE_S", -1.0)
    with monkeypatch.context() as patched:
        patched.setattr(nodes, "_ANSWER_S", 0.0)
        for ask in (shared.get, shared.newer, shared.get):
            with pytest.raises(DeadlineError):
                await ask()
    last = asyncio.create_task(shared.get())
    await asyncio.sleep(0)
    answers.set()
    assert await last == 1
    assert await shared.get() == 2, "an answered question is asked again"


async def test_a_question_that_nobody_waits_for_is_not_begun(monkeypatch):
    """After the end of a run Ray would start a cluster of its own to answer it."""
    answers, asked = threading.Event(), list[str]()
    left, asked_again = (nodes.SharedAnswer(partial(asked.append, name)) for name in ("left", "asked again"))
    with ThreadPoolExecutor(1) as threads:
        monkeypatch.setattr(nodes, "_THREADS", threads)
        before = asyncio.create_task(nodes.SharedAnswer(lambda: answers.wait(60)).get())
        leaving = [asyncio.create_task(each.get()) for each in (left, asked_again)]
        await asyncio.sleep(0)
        for each in leaving:
            each.cancel()
        await asyncio.wait(leaving)
        last = asyncio.create_task(asked_again.get())
        await asyncio.sleep(0)
        answers.set()
        assert await before
        await last
    assert asked == ["asked again"]


@pytest.mark.parametrize("kind", ["draining nodes", "lost groups", "a group to remove"])
async def test_no_kind_of_question_is_asked_twice_while_rays_head_does_not_answer(kind, head, monkeypatch):
    answers = threading.Event()

    def late(*args: object) -> Any:
        head.asked.append(kind)
        assert answers.wait(60)
        return {}

    monkeypatch.setattr(state, "get_draining_nodes", late)
    monkeypatch.setattr(nodes, "placement_group_table", lambda group: late() or {"state": "RESCHEDULING"})
    monkeypatch.setattr(nodes, "remove_placement_group", late)
    group = object()
    watched = nodes.LostGroups([group])
    ask, answer = {
        "draining nodes": (nodes.draining_nodes, {}),
        "lost groups": (watched.take, {group}),
        "a group to remove": (lambda: nodes.give_back(group), {}),
    }[kind]
    with monkeypatch.context() as patched:
        patched.setattr(nodes, "_ANSWER_S", 0.0)
        for _ in range(3):
            with pytest.raises(DeadlineError):
                await ask()
    last = asyncio.create_task(ask())
    await asyncio.sleep(0)
    answers.set()
    assert (await last or {}) == answer and head.asked.count(kind) == 1


async def test_a_group_is_lost_once_its_node_is_dead_and_ray_has_not_found_another_one(monkeypatch):
    living, asked = {"a", "b"}, []
    groups = {"moved": ("CREATED", "a"), "lost": ("CREATED", "a"), "stays": ("CREATED", "b")}

    def table(group: str) -> dict[str, object]:
        asked.append(group)
        state, node_id = groups[group]
        return {"state": state, "bundles_to_node_id": {0: node_id}}

    monkeypatch.setattr(nodes, "placement_group_table", table)
    monkeypatch.setattr(ray, "nodes", lambda: [{"NodeID": name, "Alive": name in living} for name in ("a", "b")])
    watched = nodes.LostGroups(groups)
    assert await watched.take() == set() and len(asked) == 3
    living.remove("a")
    groups |= {"moved": ("PREPARED", "b"), "lost": ("RESCHEDULING", "")}
    assert await watched.take() == {"lost"}
    assert asked[3:] == ["moved", "lost"], "the node of the third is there"
    assert await watched.take() == set() and len(asked) == 5


async def test_a_look_whose_answer_came_after_its_deadline_takes_no_group_away(monkeypatch):
    """A deadline ends the wait for the thread, and not the thread."""
    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def table(group: str) -> dict[str, object]:
        begun.set()
        assert may_end.wait(60)
        return {"state": "RESCHEDULING"}

    whole = nodes._looked_up

    def looked_up(node_of: dict[Any, str]) -> tuple[dict[Any, str], set[Any]]:
        found = whole(node_of)
        ended.set()
        return found

    monkeypatch.setattr(nodes, "_looked_up", looked_up)
    monkeypatch.setattr(nodes, "placement_group_table", table)
    monkeypatch.setattr(ray, "nodes", list)
    watched = nodes.LostGroups(["group"])
    late = asyncio.create_task(watched.take())
    assert await asyncio.to_thread(begun.wait, 60)
    late.cancel()
    may_end.set()
    assert await asyncio.to_thread(ended.wait, 60)
    assert [await watched.take(), await watched.take()] == [{"group"}, set()]


async def test_all_kills_are_of_one_function_of_rays(monkeypatch):
    """Seen in review: each was one of its own, which Ray's head keeps as long as the job lives. Spot nodes take workers every minute."""
    made, places = list[object](), list[object]()

    class Task:
        def __init__(self, function: object) -> None:
            made.append(function)

        def options(self, *, scheduling_strategy: Any, **options: object) -> "Task":
            places.append((scheduling_strategy.node_id, scheduling_strategy.soft))
            return self

        async def remote(self, *args: object) -> None: ...

    monkeypatch.setattr(ray, "remote", Task)
    monkeypatch.setattr(nodes, "drivers_node", lambda: "head")
    monkeypatch.setattr(nodes, "_killing", cache(nodes._killing.__wrapped__))
    here: list[tuple[int, float]] = []
    monkeypatch.setattr(nodes, "_kill_process", lambda pid, known_for_s: here.append((pid, known_for_s)))
    for pid in (1, 2):
        await nodes.kill_on_node(pid, "0" * 56, known_for_s=0.0)
    assert made == [nodes._kill_process] and not here
    assert places == [("0" * 56, False)] * 2, "on another node the number is another process's"
    await nodes.kill_on_node(3, "head", known_for_s=5.0)
    assert len(made) == 1 and here == [(3, 5.0)], "on its own node the driver needs no task"


async def test_the_loop_goes_on_while_rays_head_stores_the_function_of_the_first_kill(monkeypatch):
    """Ray stores a function as soon as it is called for the first time, in the calling thread."""
    is_stored = threading.Event()

    async def killed() -> None: ...

    class Task:
        def options(self, **options: object) -> "Task":
            return self

        def remote(self, *args: object) -> Any:
            assert is_stored.wait(60)
            return killed()

    monkeypatch.setattr(nodes, "_killing", Task)
    monkeypatch.setattr(nodes, "drivers_node", lambda: "head")
    asyncio.get_running_loop().call_soon(is_stored.set)
    await nodes.kill_on_node(1, "0" * 56, known_for_s=0.0)


@pytest.mark.parametrize("is_over", [True, False])
def test_a_process_that_was_told_to_end_has_a_moment_for_it(is_over, monkeypatch):
    """Ray counts the end of a process that was killed at once as a crash."""
    log: list[str] = []

    class Told(SimpleNamespace):
        def wait(self, timeout: float) -> None:
            log.append(f"waited {timeout:g} s")
            if not is_over:
                raise psutil.TimeoutExpired(timeout)

        def kill(self) -> None:
            if is_over:
                raise psutil.NoSuchProcess(7)
            log.append("killed")

    monkeypatch.setattr(psutil, "Process", lambda pid: Told(create_time=lambda: 0.0))
    nodes._kill_process(7, 60.0)
    assert log == ["waited 1 s", *(() if is_over else ["killed"])]


@pytest.mark.parametrize(("known_for_s", "is_killed"), [(0.0, True), (4.0, True), (3600.0, False)])
def test_a_process_that_is_younger_than_the_actor_whose_number_it_has_is_not_killed(
    known_for_s, is_killed, monkeypatch
):
    """A clock may be set by 5 s meanwhile. Numbers come again, after 32,768 processes on many machines: a learner that died at rest is
    ended when it is needed next."""
    monkeypatch.setattr(nodes, "_EXIT_S", 0.01)
    with subprocess.Popen(["sleep", "1000"]) as process:
        nodes._kill_process(process.pid, known_for_s)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == (-signal.SIGKILL if is_killed else -signal.SIGTERM)
