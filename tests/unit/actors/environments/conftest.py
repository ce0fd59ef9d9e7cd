import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio

from actors.environments.host.hosting import EnvironmentHost
from tests.unit.actors.environments.scripted import hosted


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process counts as blocked because the machine stands still for a while."""
    monkeypatch.setattr("actors.environments.host.process._BLOCKED_S", 120.0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[Callable[..., Awaitable[EnvironmentHost]]]:
    """Hosts as `hosted` starts them, one for all tests of a module that ask for the same: a process takes half a second to start.

    Such a test is marked `asyncio(loop_scope="module")`.
    """
    hosts: dict[str, EnvironmentHost] = {}
    async with contextlib.AsyncExitStack() as stack:

        async def of(environment: str, **episodes: Any) -> EnvironmentHost:
            asked = f"{environment} {episodes}"
            if asked not in hosts:
                hosts[asked] = await stack.enter_async_context(hosted(environment, **episodes))
            return hosts[asked]

        yield of
