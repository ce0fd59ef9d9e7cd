"""A hosted object is plain: what makes it an actor is around it."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from cluster.contracts.schema import to_batch
from cluster.contracts.types import Refusal
from cluster.remote.host import Host
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


REFUSED = Refusal(group_id="00000001", prompt_id="p1", reason="too long")


@pytest.fixture
def host(monkeypatch) -> Host:
    monkeypatch.setenv("HOST_TEST", "before")
    return Host("slow", {"HOST_TEST": "own"})


async def test_an_object_finds_its_environment_and_is_warm_before_its_first_call(host):
    assert (await host.progress()).phase == "starting"
    await host.build(f"{__name__}:Slow", {"a": "b"})
    assert await host.call("seen") == ["built with {'a': 'b'} and own", "warm"]
    assert (await host.progress()).phase == "serving"


def test_rays_dashboard_calls_an_actor_by_its_run_and_its_name():
    assert repr(Host("learner-0", title="tuesday/learner-0#2")) == "tuesday/learner-0#2"


async def test_a_refusal_goes_between_the_batches_of_a_stream(host):
    await host.build(f"{__name__}:Choosy", {})
    items = [item async for item in host.stream_batches("generate")]
    assert items[:2] == [REFUSED, None] and items[3].group_id == "00000007"


class Computing:
    def __init__(self) -> None:
        self.began, self.may_end = threading.Event(), threading.Event()

    def compute(self) -> None:
        self.began.set()
        self.may_end.wait()
        raise ValueError("computed badly")


async def test_the_method_that_computes_is_the_phase_until_it_returns_or_raises(host):
    await host.build(f"{__name__}:Computing", {})
    computing = asyncio.create_task(host.call("compute"))
    await asyncio.to_thread(host._object.began.wait)
    assert (await host.progress()).phase == "compute"
    host._object.may_end.set()
    with pytest.raises(ValueError, match="badly"):
        await computing
    assert (await host.progress()).phase == "serving"
