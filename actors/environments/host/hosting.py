"""Runs episodes of one environment in host processes, which start on demand next to the sampling process."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable

from actors.environments.host.process import CLOSED, HostProcess
from actors.processes.printed import PrintedLines
from cluster.contracts.config import RunConfig
from cluster.contracts.environment_config import EpisodesConfig
from cluster.contracts.episodes import Converse, EpisodeEnd, EpisodeTask
from cluster.contracts.errors import ConfigError, failure_of_its_actor
from cluster.contracts.plugins import Plugin
from cluster.supervision.tasks import all_or_none


class EnvironmentHost:
    """All episodes of an asynchronous environment share one process. Each running episode of a synchronous one has its own process."""

    def __init__(
        self,
        environment: Plugin,
        config: EpisodesConfig,
        first: HostProcess,
        *,
        setting: str,
        printed: PrintedLines,
    ) -> None:
        """As `start`. `first` is a running process of this environment."""
        self._environment = environment
        self._config = config
        self._setting = setting
        self._printed = printed
        self._processes = [first]
        self.num_places = None if first.is_async else config.max_processes
        """Episodes that run at once. None: any number."""
        self._places = contextlib.nullcontext() if first.is_async else asyncio.Semaphore(config.max_processes)
        self.alone = asyncio.Semaphore(config.max_processes)
        """Callers acquire it before they run an episode alone, because each such episode starts another process."""
        self._is_choosing = asyncio.Lock()

    @classmethod
    async def start(
        cls, environment: Plugin, config: EpisodesConfig, *, setting: str = "environment", printed: PrintedLines
    ) -> "EnvironmentHost":
        """`printed` gets the environment's output. Raises ConfigError, naming `setting`, if the environment does not import or its
        parameters do not fit, and WorkerError if no process starts."""
        first = await HostProcess.start(environment, config, setting=setting, printed=printed)
        return cls(environment, config, first, setting=setting, printed=printed)

    async def run(self, task: EpisodeTask, converse: Converse, *, alone: bool = False) -> EpisodeEnd:
        """Runs an episode from start to end. `converse` answers for the model. An episode of a synchronous environment first waits for a
        free process; that wait does not count in `timeout_s`. `alone`: the episode gets a process that runs no other episode, ever.

        EpisodeOver and DataError of `converse` go to the environment, its other errors pass through. Raises WorkerError if a new process is
        needed and does not start. If cancelled, it lets the environment clean up for `cleanup_s`.
        """
        async with contextlib.nullcontext() if alone else self._places, self._place(alone=alone) as process:
            return await process.run(task, converse)

    async def close(self) -> None:
        """Kills all processes. Running episodes fail."""
        await asyncio.gather(*(process.kill(because=CLOSED) for process in self._processes))

    @contextlib.asynccontextmanager
    async def _place(self, *, alone: bool) -> AsyncIterator[HostProcess]:
        if alone:
            process = await self._started()
            process.is_spent = True
            process.num_episodes += 1
        else:
            async with self._is_choosing:
                process = next(filter(_has_room, self._processes), None) or await self._started()
                process.num_episodes += 1
        try:
            yield process
        finally:
            process.num_episodes -= 1
            if process.is_spent and not process.num_episodes:
                await process.kill(because="it was given up")

    async def _started(self) -> HostProcess:
        """Starts another process, and drops those that died."""
        try:
            process = await HostProcess.start(
                self._environment, self._config, setting=self._setting, printed=self._printed
            )
        except ConfigError as error:  # it started before, so an import has disappeared and no setting is wrong
            raise failure_of_its_actor(error) from error
        self._processes = [*(each for each in self._processes if each.is_alive), process]
        return process


async def started_hosts(config: RunConfig, *, printed: PrintedLines) -> dict[str, EnvironmentHost]:
    """The run's hosts by environment's name; single turns need none. Raises ConfigError if an environment does not import or its parameters
    do not fit, and WorkerError if no process starts."""
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


def _has_room(process: HostProcess) -> bool:
    return process.is_alive and not process.is_spent and (process.is_async or not process.num_episodes)
