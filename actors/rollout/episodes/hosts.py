"""The environments of one worker by name, each with its host processes."""

import asyncio
from collections.abc import Mapping

from actors.environments.host.hosting import EnvironmentHost
from actors.processes.printed import PrintedLines
from cluster.contracts.config import RunConfig
from cluster.contracts.episodes import Converse, EpisodeEnd, EpisodeTask


class Hosts:
    """Of all environments but single turns, which need none."""

    def __init__(self, hosts: Mapping[str, EnvironmentHost]) -> None:
        self._hosts = hosts

    @classmethod
    async def start(cls, config: RunConfig, *, printed: PrintedLines) -> "Hosts":
        """Raises ConfigError if one does not import or its parameters do not fit, WorkerError if no process starts."""
        wanted = {
            name: EnvironmentHost.start(
                environment, config.episodes, setting=config.environment_setting(name), printed=printed
            )
            for name, environment in config.named_environments.items()
            if config.is_played(name)
        }
        outcomes = await asyncio.gather(*wanted.values(), return_exceptions=True)
        started = [each for each in outcomes if isinstance(each, EnvironmentHost)]
        for error in outcomes:
            if isinstance(error, BaseException):
                await asyncio.gather(*(host.close() for host in started))
                raise error
        return cls(dict(zip(wanted, started, strict=True)))

    async def run(self, name: str, task: EpisodeTask, converse: Converse, *, alone: bool) -> EpisodeEnd:
        """As `EnvironmentHost.run`."""
        return await self._hosts[name].run(task, converse, alone=alone)

    def alone(self, name: str) -> asyncio.Semaphore:
        """As `EnvironmentHost.alone`."""
        return self._hosts[name].alone

    def num_places(self, name: str) -> int | None:
        """Of an environment whose episodes wait for a process each; None where all share one."""
        return self._hosts[name].num_places

    @property
    def fewest_places(self) -> int | None:
        """Of all environments, that whose episodes have the fewest; None where each takes any number at once."""
        places = (host.num_places for host in self._hosts.values())
        return min((each for each in places if each is not None), default=None)

    async def close(self) -> None:
        await asyncio.gather(*(host.close() for host in self._hosts.values()))
