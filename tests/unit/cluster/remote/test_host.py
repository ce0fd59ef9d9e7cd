"""A hosted object is plain: what makes it an actor is around it."""

import os

import pytest

from cluster.remote.host import Host


class Slow:
    """Says what was done to it, in order."""

    def __init__(self, **arguments: str) -> None:
        self.log = [f"built with {arguments} and {os.environ.get('HOST_TEST')}"]

    async def warm_up(self) -> None:
        self.log.append("warm")

    def seen(self) -> list[str]:
        return self.log


@pytest.fixture
def host(monkeypatch) -> Host:
    monkeypatch.setenv("HOST_TEST", "before")
    return Host("slow", {"HOST_TEST": "own"})


async def test_an_object_finds_its_environment_and_is_warm_before_its_first_call(host):
    assert (await host.progress()).phase == "starting"
    await host.build(f"{__name__}:Slow", {"a": "b"})
    assert await host.call("seen") == ["built with {'a': 'b'} and own", "warm"]
    assert (await host.progress()).phase == "serving"
