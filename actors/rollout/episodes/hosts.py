"""Starts the environments of one worker, each with its host processes."""

import asyncio
from collections.abc import Iterable

from actors.environments.host.hosting import EnvironmentHost
from actors.processes.printed import PrintedLines
from cluster.contracts.config import RunConfig
from cluster.supervision.tasks import all_or_none


async def started_hosts(config: RunConfig, *, printed: PrintedLines) -> dict[str, EnvironmentHost]:
    """Hosts by environment's name; single turns need none. Raises ConfigError if an environment does not import or its parameters do not
    fit, and WorkerError if no process starts."""
    wanted = {
        name: EnvironmentHost.start(
            environment, config.episodes, setting=config.environment_setting(name), printed=printed
        )
        for name, environment in config.named_environments.items()
        if config.is_played(name)
    }
    started = await all_or_none(wanted.values(), end=lambda host: host.close())
    return dict(zip(wanted, started, strict=True))


async def close_all(hosts: Iterable[EnvironmentHost]) -> None:
    await asyncio.gather(*(host.close() for host in hosts))
