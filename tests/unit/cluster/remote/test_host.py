"""A hosted object is plain: what makes it an actor is around it."""

import asyncio
import os
import socket
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from cluster.contracts.phases import Timeline
from cluster.contracts.schema import to_batch
from cluster.contracts.types import Refusal
from cluster.remote.host import SEARCH_PATH, Host, PackedArguments
from tests.unit.cluster.contracts.rows import row


class Slow:
    """Says what was done to it, in order."""

    def __init__(self, **arguments: str) -> None:
        self.log = [f"built with {arguments} and {os.environ.get('HOST_TEST')}"]

    async def warm_up(self) -> None:
        self.log.append("warm")

    def seen(self) -> list[str]:
        return self.log


class Choosy:
    """Refuses one of two groups."""

    async def generate(self) -> AsyncIterator[Any]:
        yield REFUSED
        yield to_batch([row()])

    async def nothing(self) -> AsyncIterator[Any]:
        for each in ():
            yield each

    async def then_fail(self) -> AsyncIterator[Any]:
        yield REFUSED
        raise ValueError("computed badly")

    async def lingering(self) -> AsyncIterator[Any]:
        self.end, self.went_on = asyncio.Event(), False
        yield REFUSED
        self.went_on = True
        await self.end.wait()


REFUSED = Refusal(group_id="00000001", prompt_id="p1", reason="too long")


@pytest.fixture
def host(monkeypatch) -> Host:
    monkeypatch.setenv("HOST_TEST", "before")
    return Host("slow", {"HOST_TEST": "own"})


async def test_an_object_finds_its_environment_and_is_warm_before_its_first_call(host):
    assert (await host.progress()).phase == "starting"
    await host.build(f"{__name__}:Slow", {"a": "b"})
    assert (await host.progress()).phase == "serving"
    assert await host.call("seen", PackedArguments([], [])) == ["built with {'a': 'b'} and own", "warm"]
    await host.call("warm_up", PackedArguments([], []))
    assert await host.call("seen", PackedArguments([], [])) == ["built with {'a': 'b'} and own", "warm", "warm"]


def test_rays_dashboard_calls_an_actor_by_its_run_and_its_name():
    assert repr(Host("learner-0", title="tuesday/learner-0#2")) == "tuesday/learner-0#2"
    assert repr(Host("learner-0")) == "learner-0"


def test_an_actor_finds_the_drivers_modules_after_its_own(monkeypatch):
    monkeypatch.setattr(sys, "path", ["/own", "/both"])
    monkeypatch.setenv(SEARCH_PATH, "/drivers:/both::/more")  # an empty one would be the working directory
    Host("a")
    assert sys.path == ["/own", "/both", "/drivers", "/more"]


@pytest.mark.parametrize(("env", "told"), [({"OMP_NUM_THREADS": "3"}, [3]), ({"OTHER": "3"}, [])])
def test_a_torch_that_the_fork_server_has_imported_is_told_its_number_of_threads(env, told, monkeypatch):
    numbers: list[int] = []
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(set_num_threads=numbers.append))
    for name in ("OMP_NUM_THREADS", "OTHER"):
        monkeypatch.setenv(name, "1")
    Host("a", env)
    assert numbers == told


class Timed:
    def __init__(self) -> None:
        self.timeline = Timeline("assembling")


async def test_an_object_with_phases_of_its_own_tells_those_after_its_start(host):
    await host.build(f"{__name__}:Timed", {})
    _, phases = await host.tell(0.0)
    assert [phase.name for phase in phases] == ["starting", "assembling"]
    assert phases[1].start == phases[0].end
    _, later = await host.tell(phases[-1].end)
    assert later == () or later[0].start == phases[-1].end


class Listing:
    """Computes each item when it is asked for it."""

    def threads(self) -> Iterator[str]:
        for _ in range(2):
            yield threading.current_thread().name

    def nothing(self) -> None: ...


async def test_items_are_computed_in_the_objects_thread_and_a_mark_proves_that_all_came(host):
    await host.build(f"{__name__}:Listing", {})
    assert [item async for item in host.stream("threads")] == ["slow_0", "slow_0", None]
    assert [item async for item in host.stream("nothing")] == [None]


def test_arguments_that_are_no_object_refs_travel_as_one_and_all_arrive_in_their_order():
    first, second = (ray.ObjectRef(bytes([number] * 28)) for number in (1, 2))
    given, *refs = PackedArguments.packed(["a", first, second, None, ["b"]])
    assert refs == [first, second] and first not in given.values
    assert given.with_resolved(["one", "two"]) == ["a", "one", "two", None, ["b"]]


async def test_all_items_that_are_ready_come_with_one_answer_and_the_last_one_says_so(host):
    await host.build(f"{__name__}:Choosy", {})
    none, batch, absent, ((refused, summary), rest) = await host.first_batches(3, "generate")
    assert (none, refused) == (None, REFUSED)
    assert (batch.num_rows, summary.group_id) == (1, "00000007")
    assert (absent, rest) == (None, None)


async def test_no_more_items_come_with_an_answer_than_were_asked_for(host):
    await host.build(f"{__name__}:Choosy", {})
    assert await host.first_batches(1, "generate") == (None, ([REFUSED], 0))
    batch, ((summary,), rest) = await host.next_batches(1, 0)
    assert (batch.num_rows, summary.group_id, rest) == (1, "00000007", None)
    with pytest.raises(KeyError):  # a stream that is over is forgotten
        await host.next_batches(1, 0)


async def test_a_stream_without_items_is_over_with_its_first_answer(host):
    await host.build(f"{__name__}:Choosy", {})
    assert await host.first_batches(1, "nothing") == (None, ([], None))


async def test_what_fails_after_an_item_is_raised_by_the_next_call(host):
    await host.build(f"{__name__}:Choosy", {})
    *_, (told, rest) = await host.first_batches(2, "then_fail")
    assert told == [REFUSED]
    with pytest.raises(ValueError, match="badly"):
        await host.next_batches(2, rest)


async def test_a_stream_goes_on_while_nobody_asks_and_its_end_is_an_answer_of_its_own_when_it_comes_later(host):
    await host.build(f"{__name__}:Choosy", {})
    *_, (told, rest) = await host.first_batches(1, "lingering")
    assert told == [REFUSED] and host._object.went_on
    host._object.end.set()
    assert await host.next_batches(1, rest) == (None, ([], None))


class Computing:
    def __init__(self) -> None:
        self.began, self.may_end = threading.Event(), threading.Event()

    def compute(self) -> None:
        self.began.set()
        self.may_end.wait()
        raise ValueError("computed badly")


async def test_the_method_that_computes_is_the_phase_until_it_returns_or_raises(host):
    await host.build(f"{__name__}:Computing", {})
    computing = asyncio.create_task(host.call("compute", PackedArguments([], [])))
    await asyncio.to_thread(host._object.began.wait)
    assert (await host.progress()).phase == "compute"
    waiting = asyncio.create_task(host.call("__repr__", PackedArguments([], [])))
    await asyncio.sleep(0)
    assert "slow_1" not in {thread.name for thread in threading.enumerate()}, "one method runs at a time"
    host._object.may_end.set()
    with pytest.raises(ValueError, match="badly"):
        await computing
    await waiting
    assert (await host.progress()).phase == "serving"


class Listening:
    def __init__(self, *, listener: socket.socket | None = None) -> None:
        self.port = listener.getsockname()[1] if listener else None

    def where(self) -> int | None:
        return self.port


async def test_the_object_that_is_built_next_has_the_socket_of_the_address_and_no_other_one_gets_the_port(
    host, monkeypatch
):
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    address = await host.reserve_address()
    port = int(address.rpartition(":")[2])
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", port))
    for expected in (port, None):
        await host.build(f"{__name__}:Listening", {})
        assert await host.call("where", PackedArguments([], [])) == expected
