"""The episodes of a rollout worker: its environments, the model's chat format, and the pace of turns."""

import asyncio
from collections.abc import Sequence
from itertools import count, repeat

from actors.chat.calls import NamedParser
from actors.chat.formatter import ChatFormatter
from actors.environments.host.hosting import EnvironmentHost, close_all, started_hosts
from actors.processes.printed import PrintedLines
from actors.rollout.engine_thread import EngineThread
from actors.rollout.episodes.group import EpisodeGroup
from actors.rollout.episodes.lockstep import AtOnce, Lockstep
from actors.rollout.episodes.speech import Speech
from actors.rollout.episodes.turns import TurnSampler
from actors.rollout.inbox import Inbox
from cluster.contracts.config import RunConfig
from cluster.contracts.types import Ticket


class Episodes:
    """For a run in which some prompts may have several turns."""

    def __init__(self, config: RunConfig, formatter: ChatFormatter) -> None:
        """Raises ConfigError for a model whose conversations are not exact, and for a parser that does not exist."""
        self._config = config
        parser = config.episodes.parser
        self.is_played = config.is_played
        self._speech = Speech(formatter, parser=parser and NamedParser(parser))
        self._hosts: dict[str, EnvironmentHost] | None = None
        self._starting = asyncio.Lock()
        self._num_calls = 0
        self._pace: AtOnce | Lockstep = AtOnce(num_places=config.max_concurrent_trajectories)
        self.printed = PrintedLines()

    async def start(self) -> None:
        """Starts the environments once. Errors of `started_hosts` pass through."""
        async with self._starting:
            if self._hosts is None:
                self._hosts = await started_hosts(self._config, printed=self.printed)
                if self._config.deterministic:
                    places = [host.num_places for host in self._hosts.values() if host.num_places is not None]
                    self._pace = Lockstep(num_places=min([self._config.max_concurrent_trajectories, *places]))

    def group(self, ticket: Ticket, *, environment: str, key: str) -> EpisodeGroup:
        """Raises DataError as `EpisodeGroup` does."""
        assert self._hosts is not None, "hosts start before the first group"
        return EpisodeGroup(
            ticket=ticket,
            environment=environment,
            key=key,
            speech=self._speech,
            host=self._hosts[environment],
            config=self._config.episodes,
        )

    def begin(self, groups: Sequence[EpisodeGroup], engine: EngineThread, inbox: Inbox) -> None:
        """Starts the groups of one call. `inbox` gets their events."""
        sampler = TurnSampler(engine, inbox, pace=self._pace)
        self._num_calls += 1
        places = zip(repeat(self._num_calls), count())
        for group in groups:
            group.start(sampler, inbox, places)

    async def close(self) -> None:
        """Ends the processes of the environments."""
        if self._hosts is not None:
            await close_all(self._hosts.values())
