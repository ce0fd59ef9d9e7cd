"""Host processes of the variants that ship, by their names, as a run file gives them."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from actors.environments.host.hosting import EnvironmentHost
from actors.processes.printed import PrintedLines
from cluster.contracts.environment_config import EpisodesConfig
from cluster.contracts.plugins import Plugin


@contextlib.asynccontextmanager
async def hosted_variant(name: str, *, sees: tuple[str, ...] = (), **params: Any) -> AsyncIterator[EnvironmentHost]:
    """`sees` names environment variables."""
    config = EpisodesConfig(env=sees)
    host = await EnvironmentHost.start(Plugin(name=name, params=params), config, printed=PrintedLines())
    try:
        yield host
    finally:
        await host.close()
